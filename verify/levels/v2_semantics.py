"""V2, semantics: the same function, at every position of every aligned module, in true float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from bestiary.models import Decoder
from bestiary.verify.checks import Check, Outcome, Replay, failed, holds, judged
from bestiary.verify.delegation import delegates, isolated_logits
from bestiary.verify.foreign import OWN
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab, count_layers
from bestiary.verify.localise import ModuleMap, Pair, layer_of, pairs, trace_ours
from bestiary.verify.measure import max_over_std
from bestiary.verify.profiles import layer_errors, position_errors, record
from bestiary.verify.reference import quiet
from bestiary.verify.verdict import Exit

SECOND_SEED = 1
CONTROL = 1e-6
"""Change of our logits that a changed weight must cause at least, else the comparison compares nothing."""


def _logits(lab: Lab, case: str) -> Tensor:
    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = lab.model(case)(**lab.probe(case).kwargs(), return_logits=True)["logits"]
        return logits

    return lab.once(("logits", case), run)


def _compare_logits(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    ours, theirs = _logits(lab, case), lab.hf(case).logits(inputs)
    record(lab.profiles, "V2", case, lab.gates["V2"].limit, positions=position_errors(ours, theirs))
    figure = max_over_std(ours, theirs)
    return judged(figure, lab.gates["V2"], replay=Replay(case, inputs))


def _compare_loss(lab: Lab, case: str) -> Outcome:
    inputs = lab.probe(case)
    with torch.no_grad():
        ours = lab.model(case)(**inputs.kwargs())["loss"]
    theirs = lab.hf(case).output(inputs)["loss"]
    return judged(float((ours - theirs).abs() / theirs.abs()), lab.gates["V2"], replay=Replay(case, inputs))


def _second_seed(lab: Lab, case: str) -> Outcome:
    raw = lab.cases[case]
    reference = lab.reference_of(raw, seed=lab.seed + SECOND_SEED)
    inputs = lab.inputs(raw, batch=1, salt=SECOND_SEED)
    model = lab.ours.build(raw, reference.state(), torch.float64)
    with torch.no_grad():
        ours = model(**inputs.kwargs())["logits"]
    return judged(max_over_std(ours, reference.logits(inputs)), lab.gates["V2"], replay=Replay(case, lab.probe(case)))


def _control(lab: Lab, case: str) -> Outcome:
    """One changed weight must show: a comparison of something with itself would not notice."""
    model: Decoder = lab.ours.build(lab.cases[case], lab.hf(case).state(), torch.float64)
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.o_proj").get_parameter("weight")[0, 0] += 0.1
        changed = model(**lab.probe(case).kwargs(), return_logits=True)["logits"]
    moved = max_over_std(changed, _logits(lab, case))
    return holds(moved > CONTROL, Exit.INCONCLUSIVE, f"a changed weight moves our logits by {moved:.1e} only")


def _pairs(lab: Lab, case: str) -> list[Pair]:
    """Every tensor that passes through modules that both sides have."""

    def collect() -> list[Pair]:
        inputs = lab.probe(case)
        batch, length = inputs.input_ids.shape
        names = ModuleMap(lab.ours.current.module_map)
        found = list(pairs(trace_ours(lab.model(case), inputs), lab.trace(case, inputs), names, batch, length))
        layers = layer_errors(found, lab.layer_types(case))
        record(lab.profiles, "V2", case, lab.gates["V2"].limit, layers=layers)
        return found

    return lab.once(("pairs", case), collect)


def compare_modules(lab: Lab, case: str, layer: int | None) -> Outcome:
    """The outputs of a layer's modules; None: of those outside the layers."""
    found = [pair for pair in _pairs(lab, case) if pair.event.side == "out" and layer_of(pair.event.module) == layer]
    if not found:
        return failed(Exit.KEYS, "no module of ours corresponds to one of Hugging Face's")
    worst = max(found, key=lambda pair: pair.figure)
    return judged(worst.figure, lab.gates["V2"], detail=worst.event.module, replay=Replay(case, lab.probe(case)))


def aligned(lab: Lab, case: str, *, aside: tuple[str, ...] = ()) -> Outcome:
    """Every module of ours with parameters has a counterpart whose output was compared, those `aside` excepted."""
    seen = {pair.event.module for pair in _pairs(lab, case) if pair.event.side == "out"}
    own = [
        name
        for name, module in lab.model(case).named_modules()
        if name and not isinstance(module, nn.ModuleList) and list(module.parameters())
    ]
    missing = [name for name in own if name not in seen and name not in aside]
    return holds(not missing, Exit.KEYS, f"{len(missing)} modules have no counterpart, first {missing[:1]}")


def _no_delegation(lab: Lab, case: str) -> Outcome:
    with torch.no_grad():
        found = delegates(lab.model(case), lab.probe(case))
    return holds(not found, Exit.TAMPERING, f"our forward runs {found[:2]} of transformers")


def isolated(lab: Lab, case: str, *, ask: Callable[[Lab, str], Inputs] = Lab.probe) -> Outcome:
    """Our logits from a process that cannot import transformers' modelling files, on the ids that `ask` gives."""

    def answers() -> dict[str, Tensor]:
        folder = lab.folder("isolated")
        questions = {}
        for name in lab.cases:
            with quiet():
                lab.hf(name).model.save_pretrained(folder / name)  # type: ignore[operator]
            questions[name] = {"input_ids": ask(lab, name).input_ids}
        return isolated_logits(folder, questions)

    inputs = ask(lab, case)
    figure = max_over_std(lab.once(("isolated",), answers)[case], lab.hf(case).logits(inputs))
    return judged(figure, lab.gates["V2"])


def _finite(lab: Lab, case: str) -> Outcome:
    return holds(bool(torch.isfinite(_logits(lab, case)).all()), Exit.NUMERIC, "our logits are not finite")


def plan(lab: Lab) -> list[Check]:
    """For each config: logits, loss, the modules of each layer, and that the comparison can fail at all."""
    checks = []
    for case in lab.cases:
        checks += [
            Check(f"{case}/finite", partial(_finite, lab, case)),
            Check(f"{case}/aligned", partial(aligned, lab, case), needs=(OWN,)),
            Check(f"{case}/embedding and norm", partial(compare_modules, lab, case, None)),
            *(
                Check(f"{case}/layer{index}", partial(compare_modules, lab, case, index), index)
                for index in range(count_layers(lab, case))
            ),
            Check(f"{case}/logits", partial(_compare_logits, lab, case)),
            Check(f"{case}/loss", partial(_compare_loss, lab, case)),
            Check(f"{case}/second seed", partial(_second_seed, lab, case)),
        ]
        if lab.isolate:
            checks.append(Check(f"{case}/isolated", partial(isolated, lab, case), needs=(OWN,)))
    first = next(iter(lab.cases))
    checks += [
        Check(f"{first}/control", partial(_control, lab, first)),
        Check(f"{first}/no delegation", partial(_no_delegation, lab, first)),
    ]
    return checks
