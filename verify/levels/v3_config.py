"""V3, config: every field of Hugging Face's config moves ours as it moves Hugging Face, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges.errors import UnsupportedConfig
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import BestiaryError
from bestiary.verify import gates
from bestiary.verify.checks import Check, Outcome, Replay, failed, holds, judged, passed
from bestiary.verify.coverage import Answer, finding
from bestiary.verify.foreign import OPTION
from bestiary.verify.inputs import Inputs
from bestiary.verify.lab import Lab
from bestiary.verify.reference import hf_config
from bestiary.verify.sweep import (
    BOTH_WAYS,
    TRAIN_SEED,
    Kind,
    Variant,
    change,
    classify,
    must_refuse,
    variants,
)
from bestiary.verify.tiny import LENGTH, Raw
from bestiary.verify.verdict import Exit

SHORT = 24  # below the original context of every scaled RoPE
SMALLEST_VOCABULARY = 190
PADDED = ("attention_mask", "position_ids")


def probes(lab: Lab, field: str) -> list[Inputs]:
    """Inputs with labels that every variant can take.

    A long one; for RoPE fields a short one as well; for a mask that looks both ways a padded and a packed one.
    """
    raw = lab.cases[lab.main_case]
    raw = {**raw, "vocab_size": min(SMALLEST_VOCABULARY, raw["vocab_size"])}
    inputs = [lab.inputs(raw, batch=2).with_labels()]
    if "rope" in field:
        inputs.append(lab.inputs(raw, batch=1, length=SHORT).with_labels())
    if BOTH_WAYS in field:
        positions = torch.arange(LENGTH)[None].expand(2, -1)
        # Less padding than any window: what a token sees that sees no key at all means nothing.
        ragged = ((positions >= torch.tensor([[0], [5]])) & (positions < torch.tensor([[LENGTH - 5], [LENGTH]]))).long()
        restarted = torch.where(positions < 2 * SHORT, positions, positions - 2 * SHORT)
        inputs.append(replace(inputs[0], attention_mask=ragged).with_labels())
        # Hugging Face's loss asks the end of a document for the start of the next; ours does not, so nobody asks.
        labels = inputs[0].with_labels().kwargs()["labels"].masked_fill(positions == 2 * SHORT, -100)
        inputs.append(replace(inputs[0], position_ids=restarted, labels=labels))
    return inputs


def _ours(lab: Lab, raw: Raw, inputs: Sequence[Inputs], *, train: bool = False) -> list[dict[str, Tensor]]:
    """Our logits and loss on a config, with the weights that Hugging Face has there; in train mode from one seed.

    A config that our bridge reads as one that has been run, with the same weights in memory, is the same model.
    """
    state = lab.state(raw)
    weights = tuple((name, tensor.data_ptr(), tensor.shape) for name, tensor in state.items())
    key = ("V3", repr(lab.ours.decoder_config(raw)), weights, tuple(one.key for one in inputs), train)
    return lab.once(key, lambda: _run(lab, raw, state, inputs, train))


def _run(
    lab: Lab, raw: Raw, state: dict[str, Tensor], inputs: Sequence[Inputs], train: bool
) -> list[dict[str, Tensor]]:
    model = lab.ours.build(raw, state, torch.float64)
    model.train(train)
    outputs = []
    # In train mode attention runs in the form that Hugging Face's eager one has: the numbers drawn are the same then.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), force(attention="eager") if train else nullcontext():
        for one in inputs:
            torch.manual_seed(TRAIN_SEED)
            outputs.append(dict(model(**one.kwargs(), return_logits=True)))
    return outputs


def _note(lab: Lab, variant: Variant, kind: Kind, answer: Answer, note: str = "") -> None:
    lab.config.append(finding(lab, variant, kind, answer, note))


def _names_field(error: UnsupportedConfig, variant: Variant) -> bool:
    """Whether a refusal names the field that differs, or the object it lies in; fields that contradict it all names."""
    parts = {part for name in variant.field.replace("[", ".").replace("]", "").split(".") for part in name.split("+")}
    named = {*error.field.split("."), *re.findall(r"\w+", error.what)}
    return bool(parts & named) or error.field.startswith("rope")


def _compare(lab: Lab, variant: Variant) -> Outcome:
    inputs = probes(lab, variant.field)
    kind, remark = Kind.REJECTED, ""
    for one in inputs:
        kind, remark = classify(lab.reference_of, variant, one)
        if kind is not Kind.DEAD:
            break
    try:
        config = lab.ours.decoder_config(variant.raw)
        if lab.ours.foreign is not None:
            lab.ours.foreign(config)
    except UnsupportedConfig as error:
        named = error.field == OPTION or _names_field(error, variant)
        _note(lab, variant, kind, "refused", error.what)
        if not named:
            return failed(Exit.CONFIG, f"{variant.field} is refused under another name: {error.what}")
        if kind in (Kind.REJECTED, Kind.DEAD):  # nothing is lost: Hugging Face computes nothing with it either
            return passed()
        return Outcome("refused", Exit.REFUSED, error.what)
    except BestiaryError as error:
        if kind is not Kind.REJECTED:
            raise
        _note(lab, variant, kind, "refused", error.what)
        return passed()
    if kind is Kind.REJECTED:
        _note(lab, variant, kind, "not compared", remark)
        return failed(Exit.CONFIG, f"{variant.id} is accepted, and Hugging Face cannot run it ({remark})")
    if kind is Kind.TRAIN:
        return _compare_in_train_mode(lab, variant, inputs)
    ours = _ours(lab, variant.raw, inputs)
    theirs = [lab.reference_of(variant.raw).output(one) for one in inputs]
    worst = max(change(a, b) for a, b in zip(ours, theirs, strict=True))
    if lab.gates["V3"].holds(worst):
        _note(lab, variant, kind, "equal", remark)
        return judged(worst, lab.gates["V3"])
    lab.varied[variant.id] = variant.raw
    replay = Replay(variant.id, inputs[0])
    ignored = kind is Kind.LIVE and _unmoved(lab, variant, inputs, ours)
    _note(lab, variant, kind, "ignored" if ignored else "different", f"{worst:.1e} from Hugging Face")
    if ignored:
        text = f"{variant.id} moves Hugging Face and not ours: the bridge ignores it"
        return Outcome("failed", Exit.CONFIG, text, worst, lab.gates["V3"], replay)
    return judged(worst, lab.gates["V3"], detail=f"{variant.id} is {kind.value}", replay=replay)


def _unmoved(lab: Lab, variant: Variant, inputs: Sequence[Inputs], ours: Sequence[dict[str, Tensor]]) -> bool:
    """Whether our outputs on a variant are those on the config it varies."""
    before = _ours(lab, variant.against, inputs)
    return max(change(a, b) for a, b in zip(ours, before, strict=True)) <= gates.MOVED


def _compare_in_train_mode(lab: Lab, variant: Variant, inputs: Sequence[Inputs]) -> Outcome:
    """Both sides draw from one seed, so that what is drawn, its size and its place all show; and eval mode is equal."""
    reference = lab.reference_of(variant.raw)
    quiet, ours = _ours(lab, variant.raw, inputs), _ours(lab, variant.raw, inputs, train=True)
    in_eval = max(change(a, reference.output(one)) for a, one in zip(quiet, inputs, strict=True))
    in_train = max(change(a, reference.train_output(one, TRAIN_SEED)) for a, one in zip(ours, inputs, strict=True))
    worst = max(in_eval, in_train)
    if lab.gates["V3"].holds(worst):
        _note(lab, variant, Kind.TRAIN, "equal")
        return judged(worst, lab.gates["V3"])
    before = _ours(lab, variant.against, inputs, train=True)
    if max(change(a, b) for a, b in zip(ours, before, strict=True)) <= gates.MOVED:
        _note(lab, variant, Kind.TRAIN, "ignored")
        text = f"{variant.id} acts in Hugging Face's train mode and not in ours"
        return Outcome("failed", Exit.CONFIG, text, worst, lab.gates["V3"])
    mode = "eval" if in_eval > in_train else "train"
    _note(lab, variant, Kind.TRAIN, "different", f"{worst:.1e} from Hugging Face in {mode} mode")
    return judged(worst, lab.gates["V3"], detail=f"{variant.id} acts otherwise in {mode} mode")


def _refused(lab: Lab, variant: Variant) -> Outcome:
    try:
        lab.ours.decoder_config(variant.raw)
    except BestiaryError as error:
        name = variant.field.rpartition(".")[2]
        ok = error.exit_code == Exit.REFUSED and (name in str(error) or str(variant.value) in str(error))
        return holds(ok, Exit.CONFIG, f"{variant.id} raises {type(error).__name__} without naming it: {error.what}")
    return failed(Exit.CONFIG, f"{variant.id} is accepted; nobody implements it")


def _spelled_out(lab: Lab, case: str) -> Outcome:
    """Every default written into the file: the same architecture, so our defaults are Hugging Face's."""
    raw = lab.cases[case]
    full: dict[str, Any] = hf_config(lab.reference, raw).to_diff_dict() | hf_config(lab.reference, raw).to_dict()
    full.pop("dtype", None)
    theirs, ours = lab.ours.decoder_config(full), lab.ours.decoder_config(raw)
    return holds(
        theirs == ours, Exit.CONFIG, "the config with every default written out is read as another architecture"
    )


def plan(lab: Lab) -> list[Check]:
    """One check for each field and value, then configs that must be refused and ones that must be accepted."""
    raw = lab.cases[lab.main_case]
    checks = [
        Check(variant.id, partial(_compare, lab, variant), needs=PADDED if BOTH_WAYS in variant.field else ())
        for variant in variants(lab.reference, raw)
    ]
    checks += [
        Check(f"must refuse/{variant.id}", partial(_refused, lab, variant))
        for variant in must_refuse(lab.reference, raw)
    ]
    checks += [Check(f"spelled out/{case}", partial(_spelled_out, lab, case)) for case in lab.cases]
    return checks
