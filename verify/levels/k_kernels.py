"""K, kernels: every optimised implementation against our own reference, on aligned configs, forward and backward.

Each operation runs its reference but one, and that one runs an optimised implementation. Its error against float64 may
be twice the reference's own in the same low precision, three times for gradients (FlashAttention's rule); where it runs
in float64 it agrees to rounding. Then everything together, as dispatch chooses it. The dispatch log has to show that
each implementation ran that this device and this architecture can run; those for other devices are listed in the
verdict by name and count as nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bestiary.kernels.dispatch import OPERATIONS, Log
from bestiary.models.config import DecoderConfig
from bestiary.verify.aligned import VARIANTS, aligned_configs
from bestiary.verify.checks import Check, Outcome, failed, holds, judged, passed
from bestiary.verify.kernel_runs import REFERENCES, Answer, Bench
from bestiary.verify.lab import Lab
from bestiary.verify.verdict import Exit, KernelPath

DEVICE = "cpu"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MAIN_VARIANT = next(iter(VARIANTS))
"""The variant on which everything runs in every dtype; on the others, below float64, what the vocabulary touches."""
VOCABULARY_KINDS = ("loss", "per token")

REACHED = 5.0
"""Clamps below this are reached by activations whose spread is about one."""

ROUNDING = 0.25
"""Share of eps that every figure is allowed beside the reference's error: the rms of rounding a result once is eps/√12,
and a reference can be exact by luck."""

FEW = 64
"""Numbers below which a tensor's error has no statistics: two sound roundings of eight numbers differ by 2.4 at times.
There the reference is taken to be as wrong as elsewhere at least, and twice that is granted."""


def _because_of_nothing(_config: DecoderConfig) -> str | None:
    return None


def _any_machine() -> str | None:
    return None


def _no_onednn() -> str | None:
    capable = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
    return None if capable else "oneDNN is for x86 with AVX2"


def _because_of_sinks(config: DecoderConfig) -> str | None:
    heads = config.attention
    return "it has neither sinks nor soft caps" if heads.sinks or heads.logit_softcap is not None else None


def _because_of_a_score_cap(config: DecoderConfig) -> str | None:
    return "its fused kernel has no soft cap" if config.attention.logit_softcap is not None else None


def _because_norms_centre(config: DecoderConfig) -> str | None:
    return "it does not subtract the mean" if config.norm.subtract_mean else None


def _because_of_its_activation(config: DecoderConfig) -> str | None:
    if config.moe is not None and config.moe.clamp is not None:
        return "the clamped activation has no recomputing form"
    return None if config.mlp_gated else "an activation without a gate has no recomputing form"


def _because_dense(config: DecoderConfig) -> str | None:
    return "the model has no experts" if config.moe is None else None


def _because_all_routed(config: DecoderConfig) -> str | None:
    dense = config.moe is None or config.moe.shared is not None
    dense = dense or not all(config.is_moe_layer(index) for index in range(config.num_hidden_layers))
    return None if dense and config.mlp_gated else "the model has no gated dense MLP"


@dataclass(frozen=True)
class Path:
    """How level K reaches one optimised implementation.

    Attributes:
        kinds: inputs it runs on, of `kernel_runs.KINDS`.
        trains: whether it has a backward pass on this device.
        precision: what it computes in.
        lacks: why an architecture cannot use it; None: it can.
        machine: why this machine cannot run it, whatever the architecture; None: it can.
        note: what the verdict says beside the count.
        behind: why dispatch ranks it behind the reference; "": it does not.
    """

    operation: str
    implementation: str
    kinds: tuple[str, ...]
    trains: bool = True
    precision: tuple[torch.dtype, ...] = DTYPES
    lacks: Callable[[DecoderConfig], str | None] = _because_of_nothing
    machine: Callable[[], str | None] = _any_machine
    note: str = ""
    behind: str = ""

    @property
    def name(self) -> str:
        """As `force` takes it."""
        return f"{self.operation}={self.implementation}" if self.implementation else self.operation

    @property
    def forced(self) -> dict[str, str]:
        """The reference everywhere but here."""
        return {**REFERENCES, self.operation: self.implementation}

    def dtypes(self, variant: str, config: DecoderConfig, kind: str) -> list[torch.dtype]:
        """What it runs in on a variant and a kind of input; float64 alone where a clamp is within reach.

        At a clamp's kink a rounding error in a value becomes any error in its gradient, in the reference too.
        """
        kinked = config.moe is not None and config.moe.clamp is not None and config.moe.clamp.limit < REACHED
        wanted = DTYPES if variant == MAIN_VARIANT else DTYPES[: 1 + (kind in VOCABULARY_KINDS)]
        wanted = DTYPES[:1] if kinked else wanted
        return [dtype for dtype in self.precision if dtype in wanted]


_ATTENDED = ("loss", "packed", "padded", "decode")
_FORWARD_ONLY = "forward only: FlexAttention has no backward on the CPU"
_LAST_ON_CPUS = "dispatch ranks it last on CPUs, and behind plain products for short queries elsewhere"

PATHS: tuple[Path, ...] = (
    Path("attention", "documents", _ATTENDED, lacks=_because_of_a_score_cap),
    Path("attention", "sdpa", _ATTENDED, lacks=_because_of_sinks),
    Path("attention", "flex", _ATTENDED, trains=False, note=_FORWARD_ONLY, behind=_LAST_ON_CPUS),
    Path("norm", "lean", ("loss",), lacks=_because_norms_centre),
    Path("activation", "lean", ("loss",), lacks=_because_of_its_activation),
    Path("experts", "sorted", ("loss", "lora"), lacks=_because_dense),
    Path("experts", "grouped", ("loss", "lora"), precision=DTYPES[1:], lacks=_because_dense),
    Path("linear", "onednn", ("decode",), trains=False, precision=(torch.float32,), machine=_no_onednn),
    Path("gated_linear", "lean", ("loss",), lacks=_because_all_routed),
    Path("lora_linear", "fused", ("lora",)),
    Path("log_prob", "chunked", ("loss", "per token", "lora")),
    Path("selected_log_prob", "chunked", ("distilled",)),
    Path("divergence", "chunked", ("distilled",)),
)

TOGETHER = Path("together", "", ("loss", "per token", "packed", "padded", "decode", "lora", "distilled"))


# ------------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Compared:
    """One run against its references: the worst forward and backward figures with their tensor, and its log."""

    forward: tuple[float, str]
    backward: tuple[float, str] | None
    log: Log


def _bench(lab: Lab, variant: str) -> Bench:
    def make() -> Bench:
        config = lab.ours.decoder_config(aligned_configs(lab.reference)[variant])
        return Bench(lambda c: lab.ours.current.decoder(c, dtype=torch.float64), config, lab.seed)

    return lab.once(("kernels", variant), make)


def _compared(lab: Lab, variant: str, path: Path, kind: str, dtype: torch.dtype) -> Compared:
    """Computed once; an error of the implementation is raised at every use."""

    def compare() -> Compared:
        bench = _bench(lab, variant)
        truth, yardstick = bench.truth(kind), bench.reference(kind, dtype)
        forced = {} if path is TOGETHER else path.forced
        answer = bench.run(kind, dtype, forced, trains=path.trains)
        spread = lab.once(("kernels", variant, "yardstick", kind, dtype), lambda: Yardstick.of(yardstick, truth))
        return compared(answer, spread, truth, dtype)

    return lab.once(("kernels", variant, path.name, kind, dtype), compare)


Named = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Measured:
    """One tensor of the reference: the rms of the truth, and of the reference's error."""

    scale: float
    error: float

    @classmethod
    def of(cls, theirs: Tensor, exact: Tensor) -> Measured:
        """Of a reference's answer in low precision, and that in float64."""
        return cls(_rms(exact), 0.0 if theirs is exact else _rms(theirs.double() - exact))


def _measured(reference: Named, truth: Named) -> dict[str, Measured | None]:
    """By name; None where one of the two is missing."""
    pairs = {name: (reference[name], exact) for name, exact in truth.items()}
    return {name: None if a is None or b is None else Measured.of(a, b) for name, (a, b) in pairs.items()}


@dataclass(frozen=True)
class Yardstick:
    """What a reference's answer in one precision is measured to be, once for all implementations that it judges."""

    values: Mapping[str, Measured | None]
    gradients: Mapping[str, Measured | None]

    @classmethod
    def of(cls, reference: Answer, truth: Answer) -> Yardstick:
        """Of the reference's answer, and the truth."""
        return cls(_measured(reference.values, truth.values), _measured(reference.gradients, truth.gradients))


def compared(answer: Answer, yardstick: Yardstick, truth: Answer, dtype: torch.dtype) -> Compared:
    """The figures of one answer: relative rms in float64, multiples of the yardstick's error below."""
    gradients = None
    if answer.gradients:
        gradients = _worst(answer.gradients, yardstick.gradients, truth.gradients, dtype)
    return Compared(_worst(answer.values, yardstick.values, truth.values, dtype), gradients, answer.log)


def _worst(
    found: Named, yardstick: Mapping[str, Measured | None], truth: Named, dtype: torch.dtype
) -> tuple[float, str]:
    if set(found) != set(truth):
        return math.inf, ", ".join(sorted(set(found) ^ set(truth)))
    usual = _usual(yardstick)
    figures = {}
    for name, exact in truth.items():
        ours, theirs = found[name], yardstick[name]
        if exact is None or ours is None or theirs is None:
            figures[name] = 0.0 if exact is ours else math.inf
        else:
            figures[name] = _multiple(ours, theirs, exact, dtype, usual)
    return max((figure, name) for name, figure in figures.items())


def _usual(yardstick: Mapping[str, Measured | None]) -> float:
    """The median over tensors of the reference's relative rms error."""
    found = [one.error / one.scale for one in yardstick.values() if one is not None and one.scale]
    return median(found) if found else 0.0


def multiple(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype, usual: float = 0.0) -> float:
    """rms error of ours over rms error of the reference in `dtype` plus rounding; in float64 the relative rms error.

    usual: relative error of the reference that a tensor of `FEW` numbers is granted at least.
    """
    if ours.shape != exact.shape:
        return math.inf
    return _multiple(ours, Measured.of(theirs, exact), exact, dtype, usual)


def _multiple(ours: Tensor, theirs: Measured, exact: Tensor, dtype: torch.dtype, usual: float) -> float:
    if ours.shape != exact.shape:
        return math.inf
    scale, error = theirs.scale, _rms(ours.double() - exact)
    if not math.isfinite(error):
        return math.inf
    if error == 0.0:
        return 0.0
    if dtype is torch.float64:
        return error / scale if scale else math.inf
    allowed = theirs.error
    if exact.numel() < FEW:
        allowed = 2 * max(allowed, usual * scale)
    budget = allowed + ROUNDING * torch.finfo(dtype).eps * scale
    return error / budget if budget else math.inf


def _rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double())) / math.sqrt(tensor.numel()) if tensor.numel() else 0.0


# ------------------------------------------------------------------------------------------------ checks


def _forward(lab: Lab, variant: str, path: Path, kind: str, dtype: torch.dtype) -> Outcome:
    figure, where = _compared(lab, variant, path, kind, dtype).forward
    return judged(figure, lab.gates["K.exact" if dtype is torch.float64 else "K.forward"], detail=where)


def _backward(lab: Lab, variant: str, path: Path, kind: str, dtype: torch.dtype) -> Outcome:
    worst = _compared(lab, variant, path, kind, dtype).backward
    if worst is None:
        return failed(Exit.NUMERIC, f"{path.name} gave no gradients")
    return judged(worst[0], lab.gates["K.exact" if dtype is torch.float64 else "K.backward"], detail=worst[1])


def _cached(lab: Lab, variant: str) -> Outcome:
    """The cache alone: decoding in chunks against one forward, both in reference implementations and float64."""
    bench = _bench(lab, variant)
    answer = bench.run("decode", torch.float64, REFERENCES, trains=False)
    truth = bench.truth("decode")
    figure, where = _worst(answer.values, _measured(truth.values, truth.values), truth.values, torch.float64)
    return judged(figure, lab.gates["K.exact"], detail=where)


def _runs(lab: Lab, path: Path) -> Iterator[tuple[str, str, torch.dtype]]:
    for variant in VARIANTS:
        config = _bench(lab, variant).config
        for kind in path.kinds if path.lacks(config) is None else ():
            for dtype in path.dtypes(variant, config, kind):
                yield variant, kind, dtype


def _ran(lab: Lab, path: Path) -> Outcome:
    """The log of every run of a path shows it, and nothing else for its operation."""
    total = 0
    for variant, kind, dtype in _runs(lab, path):
        log = _compared(lab, variant, path, kind, dtype).log
        ran = Counter(implementation for operation, implementation in log if operation == path.operation)
        if set(ran) != {path.implementation}:
            shown = ", ".join(f"{name} {count} times" for name, count in ran.items()) or "nothing"
            return failed(Exit.NUMERIC, f"{path.name} never ran on {variant}/{kind}: the log shows {shown}")
        total += ran[path.implementation]
    lab.kernels[path.name] = KernelPath(
        operation=path.operation, implementation=path.implementation, status="ran", calls=total, note=path.note
    )
    return holds(total > 0, Exit.NUMERIC, f"{path.name} never ran")


def _unreached(name: str) -> Outcome:
    return failed(Exit.NUMERIC, f"{name} can run on {DEVICE} and no probe of level K reaches it: add one to PATHS")


def _default(lab: Lab) -> Outcome:
    """Left to itself, dispatch prefers an optimised implementation wherever one can run (float64 may stay plain)."""
    behind = {(path.operation, path.implementation) for path in PATHS if path.behind}
    for variant, kind, dtype in _runs(lab, TOGETHER):
        if dtype is torch.float64:
            continue
        log = _compared(lab, variant, TOGETHER, kind, dtype).log
        for (operation, chosen), free in zip(log, log.free, strict=True):
            better = [name for name in free[1:] if (operation, name) not in behind]
            if chosen == REFERENCES.get(operation) and free[0] == chosen and better:
                text = f"{operation} runs {chosen} on {variant}/{kind}, and could run {', '.join(better)}"
                return failed(Exit.NUMERIC, text)
    return passed()


def _table(lab: Lab) -> Outcome:
    """Every implementation that offered itself is in the table that this level is planned from."""
    for variant, kind, dtype in _runs(lab, TOGETHER):
        log = _compared(lab, variant, TOGETHER, kind, dtype).log
        for operation, implementation in log.obstacles:
            known = OPERATIONS.get(operation)
            if known is None or implementation not in (known.reference, *known.optimised):
                return failed(Exit.NUMERIC, f"{operation}={implementation} is not in kernels.dispatch.OPERATIONS")
    return passed()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _comparisons(lab: Lab, variant: str, config: DecoderConfig, path: Path) -> Iterator[Check]:
    for kind in path.kinds:
        for dtype in path.dtypes(variant, config, kind):
            id, arguments = f"{variant}/{path.name}/{kind}/{_named(dtype)}", (lab, variant, path, kind, dtype)
            yield Check(f"{id}/forward", partial(_forward, *arguments))
            if path.trains and kind != "decode":
                yield Check(f"{id}/backward", partial(_backward, *arguments))


def _configs(lab: Lab) -> dict[str, DecoderConfig]:
    return {variant: lab.ours.decoder_config(raw) for variant, raw in aligned_configs(lab.reference).items()}


def _readable(lab: Lab) -> Outcome:
    _configs(lab)
    return passed()


def plan(lab: Lab) -> list[Check]:
    """For each aligned config and implementation its comparisons; then what the dispatch logs have to show.

    A bridge that cannot read the aligned configs gets one check, which says why.
    """
    try:
        configs = _configs(lab)
    except Exception:  # noqa: BLE001 - the one check that is planned meets it again and reports it
        return [Check("aligned configs", partial(_readable, lab), always=True)]
    able = [path for path in PATHS if path.machine() is None]
    usable = {path.name: path for path in able if any(path.lacks(c) is None for c in configs.values())}
    checks: list[Check] = []
    for variant, config in configs.items():
        for path in (*usable.values(), TOGETHER):
            if path.lacks(config) is None:
                checks += _comparisons(lab, variant, config, path)
        checks.append(Check(f"{variant}/cache/decode/float64/forward", partial(_cached, lab, variant)))
    reached = {path.name: path for path in PATHS}
    for operation, listed in OPERATIONS.items():
        for implementation, devices in listed.optimised.items():
            name = f"{operation}={implementation}"
            if DEVICE not in devices:
                _elsewhere(lab, operation, implementation, "another device", f"written for {', '.join(devices)}")
            elif name not in reached:
                checks.append(Check(f"dispatch/{name}", partial(_unreached, name)))
            elif (missing := reached[name].machine()) is not None:
                _elsewhere(lab, operation, implementation, "another device", missing)
            elif name in usable:
                checks.append(Check(f"dispatch/{name}", partial(_ran, lab, usable[name])))
            else:
                why = next(iter(filter(None, (reached[name].lacks(c) for c in configs.values()))))
                _elsewhere(lab, operation, implementation, "another architecture", why)
    checks.append(Check("dispatch/preferred", partial(_default, lab)))
    checks.append(Check("dispatch/listed", partial(_table, lab)))
    return checks


def _elsewhere(lab: Lab, operation: str, implementation: str, status: str, why: str) -> None:
    lab.kernels[f"{operation}={implementation}"] = KernelPath.model_validate(
        {"operation": operation, "implementation": implementation, "status": status, "calls": 0, "note": why}
    )
