"""V2 of a reward model: the same scores, and the same backbone module by module, in true float64."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bestiary.verify.checks import Check, Outcome, Replay, holds, judged
from bestiary.verify.delegation import delegates
from bestiary.verify.lab import Lab, count_layers
from bestiary.verify.levels.v2_semantics import CONTROL, SECOND_SEED, aligned, compare_modules, isolated
from bestiary.verify.measure import max_over_std
from bestiary.verify.scoring import probe, scores
from bestiary.verify.verdict import Exit

HEAD = "score"
"""Ours reads last tokens alone, Hugging Face's every token: compared by the scores of the whole model."""


def _ours(lab: Lab, case: str) -> Tensor:
    return lab.once(("scores", case), lambda: scores(lab, case, probe(lab, case)))


def _compare_scores(lab: Lab, case: str) -> Outcome:
    inputs = probe(lab, case)
    return judged(
        max_over_std(_ours(lab, case), lab.hf(case).logits(inputs)), lab.gates["V2"], replay=Replay(case, inputs)
    )


def _second_seed(lab: Lab, case: str) -> Outcome:
    raw, inputs = lab.cases[case], probe(lab, case)
    reference = lab.reference_of(raw, seed=lab.seed + SECOND_SEED)
    model = lab.ours.build(raw, reference.state(), torch.float64)
    with torch.no_grad():
        ours = model(**inputs.kwargs())["scores"]
    return judged(max_over_std(ours, reference.logits(inputs)), lab.gates["V2"], replay=Replay(case, inputs))


def _control(lab: Lab, case: str, name: str) -> Outcome:
    """One changed weight must show."""
    model = lab.ours.build(lab.cases[case], lab.hf(case).state(), torch.float64)
    with torch.no_grad():
        model.get_parameter(name)[0, 0] += 0.1
        changed = model(**probe(lab, case).kwargs())["scores"]
    moved = max_over_std(changed, _ours(lab, case))
    return holds(moved > CONTROL, Exit.INCONCLUSIVE, f"a changed {name} moves our scores by {moved:.1e} only")


def _spread(lab: Lab, case: str) -> Outcome:
    """Hugging Face's scores of documents differ, else any document's would do."""
    found = lab.hf(case).logits(probe(lab, case))
    least = float((found[1:] - found[:1]).abs().min())
    return holds(least > CONTROL, Exit.INCONCLUSIVE, f"two documents have scores within {least:.1e}")


def _no_delegation(lab: Lab, case: str) -> Outcome:
    with torch.no_grad():
        found = delegates(lab.model(case), probe(lab, case))
    return holds(not found, Exit.TAMPERING, f"our forward runs {found[:2]} of transformers")


def _finite(lab: Lab, case: str) -> Outcome:
    return holds(bool(torch.isfinite(_ours(lab, case)).all()), Exit.NUMERIC, "our scores are not finite")


def plan(lab: Lab) -> list[Check]:
    """For each config: scores, the modules of each layer, and that the comparison can fail at all."""
    checks = []
    for case in lab.cases:
        checks += [
            Check(f"{case}/finite", partial(_finite, lab, case)),
            Check(f"{case}/spread", partial(_spread, lab, case)),
            Check(f"{case}/aligned", partial(aligned, lab, case, aside=(HEAD,))),
            Check(f"{case}/embedding and norm", partial(compare_modules, lab, case, None)),
            *(
                Check(f"{case}/layer{index}", partial(compare_modules, lab, case, index), index)
                for index in range(count_layers(lab, case))
            ),
            Check(f"{case}/scores", partial(_compare_scores, lab, case)),
            Check(f"{case}/second seed", partial(_second_seed, lab, case)),
        ]
        if lab.isolate:
            checks.append(Check(f"{case}/isolated", partial(isolated, lab, case, ask=probe)))
    first = lab.main_case
    checks += [
        Check(f"{first}/control/{name}", partial(_control, lab, first, name))
        for name in ("model.layers.0.self_attn.o_proj.weight", "score.weight")
    ]
    return [*checks, Check(f"{first}/no delegation", partial(_no_delegation, lab, first))]
