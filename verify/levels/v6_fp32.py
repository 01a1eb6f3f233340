"""V6, fp32: plain float32 on both sides agrees up to rounding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bestiary.verify import gates
from bestiary.verify.activity import router_margin
from bestiary.verify.checks import Check, Outcome, Question, Replay, holds, judged
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.measure import max_over_std, relative_rms
from bestiary.verify.profiles import position_errors, record
from bestiary.verify.reference import Reference
from bestiary.verify.verdict import Exit

ATTEMPTS = 8


def _seed(lab: Lab, case: str) -> int:
    """A seed whose routing no rounding can turn over: every margin above `ROUTER_MARGIN`."""

    def search() -> int:
        raw = {**lab.cases[case], "output_router_logits": True} if _routed(lab, case) else lab.cases[case]
        for attempt in range(ATTEMPTS):
            seed = lab.seed + 100 * attempt
            margin = router_margin(lab.reference_of(raw, seed=seed), _inputs(lab, case))
            if margin is None or margin > gates.ROUTER_MARGIN:
                return seed
        raise RuntimeError(f"no seed of {ATTEMPTS} keeps the router of {case} away from ties")

    return lab.once(("v6 seed", case), search)


def _routed(lab: Lab, case: str) -> bool:
    return any(".experts." in name for name in lab.hf(case).state())


def _inputs(lab: Lab, case: str) -> Inputs:
    return lab.probe(case)


def _reference(lab: Lab, case: str) -> Reference:
    return lab.reference_of(lab.cases[case], seed=_seed(lab, case), dtype=torch.float32)


def _replay(lab: Lab, case: str) -> Replay:
    inputs = _inputs(lab, case)
    question = Question(_reference(lab, case), lambda reference: reference.logits(inputs), _logits(lab, case)[0])
    return Replay(case, inputs, question)


def _logits(lab: Lab, case: str) -> tuple[Tensor, Tensor]:
    """Ours and Hugging Face's, both computed in float32."""

    def run() -> tuple[Tensor, Tensor]:
        raw, inputs, reference = lab.cases[case], _inputs(lab, case), _reference(lab, case)
        model = lab.ours.build(raw, reference.state(), torch.float32)
        with torch.no_grad():
            ours: Tensor = model(**inputs.kwargs(), return_logits=True)["logits"]
        theirs = reference.logits(inputs)
        record(lab.profiles, "V6", case, lab.gates["V6.max"].limit, positions=position_errors(ours, theirs))
        return ours, theirs

    return lab.once(("fp32", case), run)


def _rms(lab: Lab, case: str) -> Outcome:
    return judged(relative_rms(*_logits(lab, case)), lab.gates["V6.rms"], replay=_replay(lab, case))


def _max(lab: Lab, case: str) -> Outcome:
    return judged(max_over_std(*_logits(lab, case)), lab.gates["V6.max"], replay=_replay(lab, case))


def _dtypes(lab: Lab, case: str) -> Outcome:
    ours, theirs = _logits(lab, case)
    same = ours.dtype == theirs.dtype == torch.float32
    return holds(same, Exit.NUMERIC, f"logits are {ours.dtype}, Hugging Face's {theirs.dtype}")


def plan(lab: Lab) -> list[Check]:
    """Rms, maximum and dtype of the logits of each config."""
    checks = []
    for case in lab.cases:
        checks += [
            Check(f"{case}/rms", partial(_rms, lab, case)),
            Check(f"{case}/max", partial(_max, lab, case)),
            Check(f"{case}/dtype", partial(_dtypes, lab, case)),
        ]
    return checks
