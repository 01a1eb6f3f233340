"""V7, bf16: our error in bfloat16 is no larger than the one that Hugging Face's own code makes.

The truth is the float64 reference with the same weights, all of them bfloat16 numbers. Near a tie an expert may flip by
rounding, which is no error of either side, so routers first take the experts that the truth took; free routing is then
reported. One row of tokens jumps to position 4096: angles that are too coarse show at such a distance, not at 40.

A whole model hides a coarse norm among its other roundings (a factor of 1.1), so norms, RoPE tables and the embedding
also answer for themselves, on Hugging Face's inputs in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bestiary.models import Decoder, DecoderConfig
from bestiary.models.layers.rotary import RotaryTable
from bestiary.verify.checks import Check, Outcome, failed, holds, judged, passed
from bestiary.verify.foreign import OWN
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.lab import Lab
from bestiary.verify.localise import ModuleMap
from bestiary.verify.placing import moved
from bestiary.verify.profiles import position_errors, record
from bestiary.verify.reference import Reference
from bestiary.verify.verdict import Exit

SEEDS = 3
LENGTH = 48
FAR = 4096
INPUTS = ("attention_mask", "position_ids")
_TOPK = frozenset({torch.topk, torch.Tensor.topk})


@dataclass
class Errors:
    """Differences from the truth over all seeds, in float64.

    Attributes:
        ours, theirs: of the logits (B, T, V).   truth: the logits.
        norms: rms over all norms, each on the same inputs: ours, Hugging Face's.
        tables: rms over all RoPE tables: ours, of the nearest bfloat16 numbers.
        embedded: whether both embedded tokens to the same bits.
        flips: share of free choices of experts that differ from the truth's: ours, Hugging Face's; None without any.
    """

    ours: list[Tensor] = field(default_factory=list)
    theirs: list[Tensor] = field(default_factory=list)
    truth: list[Tensor] = field(default_factory=list)
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    embedded: bool = True
    finite: bool = True
    flips: tuple[float, float] | None = None


class Routing(TorchFunctionMode):
    """Sees every choice of experts of a forward pass over `count` tokens; with `given` choices it answers those."""

    def __init__(self, count: int, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self._count, self._given = count, given
        self.chosen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].ndim != 2 or args[0].shape[0] != self._count:
            return result
        if result.indices.shape == args[0].shape:  # all there is, one group of experts say, is no choice
            return result
        position = len(self.chosen)
        self.chosen.append(result.indices)
        if self._given is None:
            return result
        make: Any = type(result)
        indices = self._given[position]
        return make((args[0].gather(-1, indices), indices))


@contextmanager
def _listening(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of every norm, by module name, as the model runs."""
    heard: dict[str, tuple[Tensor, Tensor]] = {}

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            heard[name] = (args[0], output)

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Norm"):
                stack.callback(module.register_forward_hook(listen(name)).remove)
        yield heard


@torch.no_grad()
def _rounded(model: nn.Module) -> None:
    """Every parameter and stored buffer to the nearest bfloat16 number."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(torch.bfloat16))


def _inputs(lab: Lab, case: str, seed: int) -> Inputs:
    """A row of tokens in a row, and one whose second half is far from its first; a mask keeps it one document."""
    ids = tokens(lab.cases[case]["vocab_size"], 2, LENGTH, seed)
    near = torch.arange(LENGTH)
    positions = torch.stack((near, near + FAR * (near >= LENGTH // 2)))
    return Inputs(ids, attention_mask=torch.ones_like(ids), position_ids=positions)


@dataclass
class _Case:
    """The reference in float64 and in bfloat16 for one seed: its weights and its answers.

    Attributes:
        chosen: experts of the truth, by router.   free: those of the free run in bfloat16.
        norms: input, output and true output of each norm, by module name.
    """

    state: dict[str, Tensor]
    truth: Tensor
    logits: Tensor
    embedded: Tensor
    chosen: list[Tensor]
    free: list[Tensor]
    norms: dict[str, tuple[Tensor, Tensor, Tensor]]


def _reference(lab: Lab, case: str, seed: int, inputs: Inputs) -> _Case:
    """What the reference answers; shared by runs that leave the reference alone."""

    def finish(model: nn.Module) -> None:
        _rounded(model)
        lab.theirs.finish(model)

    def ask() -> _Case:
        raw, count = lab.theirs.changed(lab.cases[case]), inputs.input_ids.numel()
        wide = Reference(lab.reference, raw, seed, mutate=finish, device=lab.device)
        with Routing(count) as seen:
            truth = wide.call(inputs, use_cache=False)["logits"]
        narrow = Reference(lab.reference, raw, seed, dtype=torch.bfloat16, mutate=finish, device=lab.device)
        with Routing(count, seen.chosen), _listening(narrow.model) as heard:
            logits = narrow.call(inputs, use_cache=False)["logits"]
        with wide.running() as model, torch.no_grad():
            norms = {name: (x, out, model.get_submodule(name)(x.double())) for name, (x, out) in heard.items()}
        free = Routing(count)
        if seen.chosen:
            with free:
                narrow.call(inputs, use_cache=False)
        with narrow.running() as model, torch.no_grad():
            embedded = model.get_submodule("model.embed_tokens")(inputs.input_ids)
        return _Case(wide.state(), truth, logits, embedded, seen.chosen, free.chosen, norms)

    if lab.theirs.mutated:
        return ask()
    return lab.pool.remember(("v7", lab.reference, str(sorted(lab.cases[case].items())), seed), ask)


def _errors(lab: Lab, case: str) -> Errors:
    def run() -> Errors:
        found = Errors()
        flipped = [0.0, 0.0]
        for step in range(SEEDS):
            seed = lab.seed + 100 * step
            inputs = _inputs(lab, case, seed)
            reference = _reference(lab, case, seed, inputs)
            model = lab.ours.build(lab.cases[case], reference.state, torch.bfloat16)
            count = inputs.input_ids.numel()
            with torch.no_grad():
                with Routing(count, reference.chosen or None):
                    ours = model(**inputs.kwargs(), return_logits=True)["logits"]
                embedded = model.get_submodule("model.embed_tokens")(inputs.input_ids)
                found.norms += _norm_errors(model, ModuleMap(lab.ours.current.module_map), reference)
                found.tables += _table_errors(lab.decoder_config(case), moved(inputs.position_ids, lab.device))
                if reference.chosen:
                    with Routing(count) as free:
                        loose = model(**inputs.kwargs(), return_logits=True)["logits"]
                    found.finite &= bool(torch.isfinite(loose).all())
                    for side, chosen in enumerate((free.chosen, reference.free)):
                        flipped[side] += _flips(chosen, reference.chosen) / SEEDS
            found.embedded &= embedded.dtype == reference.embedded.dtype and torch.equal(embedded, reference.embedded)
            found.finite &= bool(torch.isfinite(ours).all()) and ours.dtype is torch.bfloat16
            found.truth.append(reference.truth)
            found.ours.append(ours.double() - reference.truth)
            found.theirs.append(reference.logits.double() - reference.truth)
            if reference.chosen:
                found.flips = (flipped[0], flipped[1])
        limit = lab.gates["V7.max"].limit * float(max(error.abs().max() for error in found.theirs))
        first = found.truth[0]
        scale = float(first.std(correction=0))
        errors = position_errors(found.ours[0] + first, first, scale=scale)
        record(lab.profiles, "V7", case, limit / scale, positions=errors)
        return found

    return lab.once(("bf16", case), run)


def _norm_errors(model: Decoder, names: ModuleMap, reference: _Case) -> list[tuple[Tensor, Tensor]]:
    """Ours and Hugging Face's difference from the truth at each norm that both have."""
    found = []
    for name, module in model.named_modules():
        if (theirs := names.theirs(name)) in reference.norms:
            x, output, truth = reference.norms[theirs]
            found.append(((module(x).double() - truth).flatten(), (output.double() - truth).flatten()))
    return found


def _table_errors(config: DecoderConfig, position_ids: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Difference of each RoPE table of a bfloat16 model from the one in float64, and that of the nearest numbers.

    Where RoPE turns in fp32 the angle's own rounding is all there is: nearest are the tables of angles in fp32.
    """
    assert position_ids is not None
    found = []
    for rope in {config.rope_of(index) for index in range(config.num_hidden_layers)} - {None}:
        assert rope is not None
        narrow, wide = (RotaryTable(rope)(position_ids, dtype) for dtype in (torch.bfloat16, torch.float64))
        inv_freq, factor = RotaryTable(rope).frequencies(position_ids, torch.float32)
        angles = (position_ids[..., None].to(torch.float32) * inv_freq).double()
        for ours, truth, rounded in zip(narrow, wide, (angles.cos(), angles.sin()), strict=True):
            exact = rounded * factor if rope.turn_in_fp32 and not rope.round_tables else truth
            nearest = exact.to(torch.bfloat16 if rope.round_tables else ours.dtype)
            found.append(((ours.double() - truth).flatten(), (nearest.double() - truth).flatten()))
    return found


def _flips(chosen: list[Tensor], truth: list[Tensor]) -> float:
    """Share of chosen experts that the truth did not choose."""
    if len(chosen) != len(truth):
        return math.nan
    missed = [(~(a[:, :, None] == b[:, None, :]).any(-1)).double().mean() for a, b in zip(chosen, truth, strict=True)]
    return float(torch.stack(missed).mean())


def _rms(lab: Lab, case: str) -> Outcome:
    found = _errors(lab, case)
    ours, theirs = (torch.cat(errors).square().mean().sqrt() for errors in (found.ours, found.theirs))
    return judged(_ratio(ours, theirs), lab.gates["V7.rms"])


def _max(lab: Lab, case: str) -> Outcome:
    found = _errors(lab, case)
    ours, theirs = (torch.cat(errors).abs().max() for errors in (found.ours, found.theirs))
    return judged(_ratio(ours, theirs), lab.gates["V7.max"])


def _norms(lab: Lab, case: str) -> Outcome:
    found = _errors(lab, case).norms
    if not found:
        return failed(Exit.KEYS, "no norm of ours corresponds to one of Hugging Face's")
    return judged(_pooled(found), lab.gates["V7.rms"])


def _tables(lab: Lab, case: str) -> Outcome:
    return judged(_pooled(_errors(lab, case).tables), lab.gates["V7.rms"])


def _pooled(pairs: list[tuple[Tensor, Tensor]]) -> float:
    ours, theirs = (torch.cat(errors).square().mean().sqrt() for errors in zip(*pairs, strict=True))
    return _ratio(ours, theirs)


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    if not bool(torch.isfinite(ours)) or not float(theirs):
        return math.inf
    return float(ours / theirs)


def _embedding(lab: Lab, case: str) -> Outcome:
    """One rounding only: both sides have no freedom there."""
    return holds(_errors(lab, case).embedded, Exit.NUMERIC, "embedded tokens are not Hugging Face's, bit for bit")


def _free(lab: Lab, case: str) -> Outcome:
    found = _errors(lab, case)
    if not found.finite:
        return failed(Exit.NUMERIC, "our logits are not finite, or not in bfloat16")
    if found.flips is None:
        return passed()
    ours, theirs = found.flips
    return passed(f"experts that rounding flips: ours {ours:.2%}, Hugging Face's {theirs:.2%}")


def _rotates(lab: Lab, case: str) -> bool:
    config = lab.ours.decoder_config(lab.cases[case])
    return any(config.rope_of(index) is not None for index in range(config.num_hidden_layers))


def plan(lab: Lab) -> list[Check]:
    """Rms and largest error of each config, its embedding, RoPE tables and norms, and the run with free routing."""
    checks = []
    for case in lab.cases:
        checks += [
            Check(f"{case}/rms", partial(_rms, lab, case), needs=INPUTS),
            Check(f"{case}/max", partial(_max, lab, case), needs=INPUTS),
            Check(f"{case}/embedding", partial(_embedding, lab, case), needs=INPUTS),
            *([Check(f"{case}/rope tables", partial(_tables, lab, case), needs=(OWN,))] if _rotates(lab, case) else []),
            Check(f"{case}/norms", partial(_norms, lab, case), needs=INPUTS),
            Check(f"{case}/free", partial(_free, lab, case), needs=INPUTS),
        ]
    return checks
