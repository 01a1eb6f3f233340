"""V0, keys: Hugging Face's tensors and our parameters correspond one to one, and the loader does what the plan says."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from bestiary.bridges.errors import KeyMismatch, UnsupportedConfig
from bestiary.kernels.errors import BestiaryError
from bestiary.models.config import HeadKind
from bestiary.models.layers.rotary import rope_frequencies
from bestiary.verify.checks import Check, Outcome, failed, holds, passed, unless_mismatched
from bestiary.verify.foreign import OWN
from bestiary.verify.lab import Lab
from bestiary.verify.localise import layer_of
from bestiary.verify.measure import bit_equal
from bestiary.verify.reference import build, is_kept_in_fp32, quiet
from bestiary.verify.verdict import Exit

Counts = dict[str, Tensor]


def _coverage(lab: Lab, case: str) -> tuple[Counts, Counts]:
    """How often the plan reads each element of each hub tensor, and writes each element of each parameter."""

    def count() -> tuple[Counts, Counts]:
        raw, hub = lab.cases[case], lab.hf(case).state()
        try:
            plan = lab.ours.plan(raw, hub)
        except KeyMismatch as error:
            lab.keys.missing += [name for name in error.missing if name not in lab.keys.missing]
            lab.keys.unexpected += [name for name in error.extra if name not in lab.keys.unexpected]
            lab.keys.shape_mismatch += [name for name in error.mismatched if name not in lab.keys.shape_mismatch]
            raise
        lab.keys.ignored_with_reason.update(plan.ignored)
        reads = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in hub.items()}
        shapes = lab.ours.current.parameters(lab.decoder_config(case))
        writes = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in shapes.items()}
        for transfer in plan.transfers:
            for name, piece in transfer.pieces:
                reads[transfer.hub.name][piece.source] += 1
                writes[name][piece.dest] += 1
        for name in plan.ignored:
            reads[name] += 1
        if plan.duplicate_head is not None:
            reads[plan.duplicate_head[0]] += 1
        return reads, writes

    return lab.once(("coverage", case), count)


def _read_once(lab: Lab, case: str, key: str) -> Outcome:
    reads = _coverage(lab, case)[0][key]
    low, high = (int(bound) for bound in reads.aminmax())
    return holds(low == high == 1, Exit.KEYS, f"elements of {key} are read between {low} and {high} times")


def _written_once(lab: Lab, case: str) -> Outcome:
    for name, writes in _coverage(lab, case)[1].items():
        low, high = (int(bound) for bound in writes.aminmax())
        if low != 1 or high != 1:
            return failed(Exit.KEYS, f"elements of {name} are written between {low} and {high} times")
    return passed()


def _poison(lab: Lab, case: str) -> Outcome:
    model = lab.model(case)
    bad = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    return holds(not bad, Exit.KEYS, f"{len(bad)} parameters keep NaN after loading, first {bad[:1]}")


def _tie(lab: Lab, case: str) -> Outcome:
    theirs, ours = lab.hf(case).model, lab.model(case)

    def tied(model: torch.nn.Module) -> bool:
        weights = [model.get_submodule(name).get_parameter("weight") for name in ("model.embed_tokens", "lm_head")]
        return weights[0].data_ptr() == weights[1].data_ptr()

    said = lab.decoder_config(case).tie_word_embeddings
    if tied(theirs) != tied(ours) or said != tied(ours):
        return failed(
            Exit.KEYS,
            f"head and embedding share storage: Hugging Face {tied(theirs)}, ours {tied(ours)}, our config {said}",
        )
    return passed()


def _parameter_count(lab: Lab, case: str) -> Outcome:
    stored = {tensor.data_ptr(): tensor.numel() for tensor in lab.hf(case).state().values()}
    theirs = sum(stored.values())  # a buffer that is stored is a parameter of ours that nothing trains
    ours = sum(parameter.numel() for parameter in lab.model(case).parameters())
    return holds(theirs == ours, Exit.KEYS, f"Hugging Face has {theirs} distinct parameters, ours {ours}")


def _dtype(lab: Lab, case: str, stored: torch.dtype, wanted: torch.dtype) -> Outcome:
    hub = {name: tensor.to(stored) for name, tensor in lab.hf(case).state().items()}
    model = lab.ours.build(lab.cases[case], hub, wanted)
    expected = {
        name: torch.promote_types(wanted, torch.float32) if is_kept_in_fp32(lab.hf_class, name) else wanted
        for name, _ in model.named_parameters()
    }
    wrong = [name for name, parameter in model.named_parameters() if parameter.dtype is not expected[name]]
    return holds(not wrong, Exit.KEYS, f"{wrong[:1]} is not {wanted} when loaded from {stored}")


def _buffers(lab: Lab, case: str) -> Outcome:
    """Hugging Face's computed buffers (inverse frequencies, embedding scale) equal, bit for bit in fp32, ours."""
    config = lab.decoder_config(case)
    with quiet():
        theirs = build(lab.reference, lab.theirs.changed(lab.cases[case]), torch.float32)
    ropes = {rope for index in range(config.num_hidden_layers) if (rope := config.rope_of(index)) is not None}
    ours = [rope_frequencies(rope, torch.float32)[0] for rope in ropes]
    for name, buffer in theirs.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf.endswith("inv_freq") and not any(bit_equal(frequencies, buffer) for frequencies in ours):
            return failed(Exit.NUMERIC, f"{name} equals none of our frequency tables")
        if leaf == "embed_scale" and float(buffer) != float(torch.tensor(config.embedding_multiplier)):
            return failed(Exit.NUMERIC, f"{name} is {float(buffer)}, ours multiplies by {config.embedding_multiplier}")
    left = [name for name, _ in lab.model(case).named_buffers()]
    return holds(not left, Exit.KEYS, f"our model has buffers that no checkpoint fills: {left[:2]}")


def _refuses(lab: Lab, case: str, kind: str) -> Outcome:
    """A damaged set of keys must be refused by name, with the exit code of keys."""
    hub = dict(lab.hf(case).state())
    victim = next(name for name in hub if name.endswith("layers.1.self_attn.o_proj.weight"))
    named = victim
    if kind == "missing key":
        del hub[victim]
    elif kind == "wrong shape":
        hub[victim] = torch.zeros(prod(hub[victim].shape), 1, dtype=torch.float64)
    else:
        named = "model.layers.0.self_attn.frobnicate.weight"
        hub[named] = torch.zeros(3, dtype=torch.float64)
    try:
        lab.ours.plan(lab.cases[case], hub)
    except UnsupportedConfig:
        raise
    except BestiaryError as error:
        ok = error.exit_code == Exit.KEYS and named in str(error)
        return holds(ok, Exit.KEYS, f"a {kind} raises {type(error).__name__} (code {error.exit_code}) without its name")
    return failed(Exit.KEYS, f"a {kind} is accepted")


def plan(lab: Lab) -> list[Check]:
    """One check for each tensor of Hugging Face's, then the whole of each config; one alone where keys do not match."""
    checks = []
    for case in lab.cases:
        checks += unless_mismatched(
            f"{case}/import plan", partial(_coverage, lab, case), partial(_plan_case, lab, case)
        )
    return checks


def _plan_case(lab: Lab, case: str) -> list[Check]:
    checks = [
        Check(f"{case}/{key}", partial(_read_once, lab, case, key), layer_of(key)) for key in lab.hf(case).state()
    ]
    checks += [
        Check(f"{case}/written once", partial(_written_once, lab, case)),
        Check(f"{case}/poison", partial(_poison, lab, case)),
        *([Check(f"{case}/tie", partial(_tie, lab, case))] if lab.head is HeadKind.LM else []),
        Check(f"{case}/parameters", partial(_parameter_count, lab, case)),
        Check(f"{case}/buffers", partial(_buffers, lab, case), needs=(OWN,)),
    ]
    return checks + (_plan_main_case(lab, case) if case == lab.main_case else [])


def _plan_main_case(lab: Lab, first: str) -> list[Check]:
    checks = []
    for stored, wanted in (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ):
        name = f"{first}/dtype/{stored} as {wanted}".replace("torch.", "")
        checks.append(Check(name, partial(_dtype, lab, first, stored, wanted)))
    checks += [
        Check(f"{first}/refuses/{kind}", partial(_refuses, lab, first, kind))
        for kind in ("missing key", "extra key", "wrong shape")
    ]
    return checks
