"""The Triton compilations that count: every kernel at the launch models' shapes, as the wrappers would launch it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bestiary.kernels import triton_activation as activation
from bestiary.kernels import triton_experts as experts
from bestiary.kernels import triton_log_prob_tiles as log_prob
from bestiary.kernels import triton_lora_linear as lora_linear
from bestiary.kernels import triton_mxfp4 as mxfp4
from bestiary.kernels import triton_norm as norm
from bestiary.kernels import triton_rope as rope
from bestiary.kernels.triton_runtime import power_of_two, warps

TARGETS = (80, 90, 100)  # A100, H100 and H200, B200
MMA = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # a family each, `aot.FAMILIES`
MOST = 150  # compilations in all: the matrix stays within minutes


@dataclass(frozen=True)
class Compilation:
    """One kernel with the types, constants and warps of one kind of launch.

    types: argument → Triton's name of its type, of the arguments that are not constants.
    aligned: numbers among them that 16 divides (pointers always do); the compiler then reads 16 bytes at a time.
    tensor_cores: whether its code must use the target's matrix instructions, or none: most products are cuBLAS's.
    """

    kernel: Any
    label: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    aligned: frozenset[str] = field(default_factory=frozenset)
    tensor_cores: bool = False

    @property
    def name(self) -> str:
        """Kernel and label."""
        return f"{self.kernel.__name__} {self.label}"

    def mma(self, target: int) -> str:
        """The family of matrix instructions expected on a target."""
        return MMA[target] if self.tensor_cores else "none"


# (name of the compilation, target) → why its spill or shared memory is accepted. An entry that nothing needs fails.
EXCEPTIONS: dict[tuple[str, int], str] = {}


def compilations() -> list[Compilation]:
    """All of them, for one target."""
    return [
        *_norms(),
        *_ropes(),
        *_activations(),
        *_mxfp4(),
        *_experts(),
        *_statistics(),
        *_gradients(),
        *_lora_linears(),
    ]


def _types(kernel: Any, constants: Mapping[str, Any], pointers: Mapping[str, str], **others: str) -> dict[str, str]:
    """Pointers by name, other arguments 32-bit numbers unless `others` says otherwise."""
    return {name: pointers.get(name, others.get(name, "i32")) for name in kernel.arg_names if name not in constants}


def _norms() -> Iterator[Compilation]:
    # q and k norms of 128 and 256; hidden sizes of Gemma 3 270M, Qwen3-4B and GPT-OSS, and the widest block.
    for d, plus_one, scale_first in (
        (128, False, False), (256, True, True), (640, True, True), (2560, False, False), (2880, False, True),
        (5376, True, True),
    ):  # fmt: skip
        shape = norm.launch(d)
        for kernel in (norm.rms_norm_forward, norm.rms_norm_backward):
            constants: dict[str, Any] = {
                "PLUS_ONE": plus_one, "SCALE_FIRST": scale_first, "ROWS": shape.rows, "BLOCK": shape.block
            }  # fmt: skip
            back = kernel is norm.rms_norm_backward
            if back:
                constants["NEED_WEIGHT"] = True
            pointers = dict.fromkeys(("x", "weight", "out", "upstream", "of_x"), "*bf16") | {"of_weight": "*fp32"}
            strides = frozenset({"d", "x_stride", "out_stride", "upstream_stride", "of_x_stride"})
            types = _types(kernel, constants, pointers, eps="fp32")
            number = shape.back_warps if back else shape.warps
            yield Compilation(kernel, f"d={d}", types, constants, number, strides & types.keys())


def _ropes() -> Iterator[Compilation]:
    kernel = rope.rope_turn
    for head_dim, turning, interleaved in ((64, 64, False), (128, 128, False), (256, 256, False), (128, 64, True)):
        heads, rest = rope.heads_of(turning), head_dim - turning
        constants = {
            "BACK": interleaved, "INTERLEAVED": interleaved, "HEADS": heads, "HALF": power_of_two(turning // 2),
            "REST": power_of_two(rest) if rest else 0,
        }  # fmt: skip
        types = _types(kernel, constants, {"x": "*bf16", "out": "*bf16", "cos": "*fp32", "sin": "*fp32"})
        aligned = frozenset(types) - {"x", "out", "cos", "sin", "heads", "tokens"}
        label = f"{turning} of {head_dim}" + (" interleaved, back" if interleaved else "")
        yield Compilation(kernel, label, types, constants, min(warps(heads * head_dim), 4), aligned)


def _activations() -> Iterator[Compilation]:
    for kernel in (activation.gated_forward, activation.gated_backward):
        for name, kind in activation.KINDS.items():
            constants = {"KIND": kind, "BLOCK": activation.BLOCK}
            pointers = dict.fromkeys(("gate", "up", "out", "upstream", "of_gate", "of_up"), "*bf16")
            types = _types(kernel, constants, pointers, alpha="fp32", limit="fp32")
            strides = frozenset({"width", "gate_stride", "up_stride", "upstream_stride"})
            yield Compilation(kernel, name, types, constants, 4, strides & types.keys())


def _mxfp4() -> Iterator[Compilation]:
    kernel, constants = mxfp4.mxfp4_expand, {"BLOCK": mxfp4.BLOCK}
    types = _types(kernel, constants, {"blocks": "*u8", "scales": "*u8", "out": "*bf16"}, count="i64")
    yield Compilation(kernel, "to bf16", types, constants, 4, frozenset({"count"}))


def _experts() -> Iterator[Compilation]:
    # Qwen3-30B-A3B chooses 8 experts a token, GPT-OSS 4.
    rows = {"order": "*i64", "inverse": "*i64", "last": "*i32"}
    rows |= dict.fromkeys(("x", "y", "weights", "out", "gate_up", "pull", "inner", "of_both"), "*bf16")
    gather, combine, back = experts.expert_rows_gather, experts.expert_rows_combine, experts.expert_gated_backward
    for kernel, label, constants in (
        (gather, "top 8", {"TOP_K": 8}),
        (combine, "top 4", {"TOP_K": 4, "WEIGHTED": True}),
        (combine, "top 8", {"TOP_K": 8, "WEIGHTED": True}),
        (combine, "top 8, gradient", {"TOP_K": 8, "WEIGHTED": False, "weights": None}),
        (back, "silu", {"KIND": activation.KINDS["silu"]}),
        (back, "clamped_swiglu", {"KIND": activation.KINDS["clamped_swiglu"]}),
    ):
        chosen: dict[str, Any] = {**constants, "BLOCK": experts.BLOCK}
        types = _types(kernel, chosen, rows | {"of_weights": "*fp32"}, alpha="fp32", limit="fp32")
        yield Compilation(kernel, label, types, chosen, experts.WARPS, frozenset({"width", "x_stride"}) & types.keys())


_STATISTICS = ("top_out", "mass_out", "chosen_out", "moment_out", "mean_out")
_PER_TOKEN = ("base", "share", "bend", "own", "mean")
_SCALARS = {"inner": "fp32", "bias_factor": "fp32", "outer": "fp32"}
_TILE = frozenset({"real", "width", "start", "logits_stride", "held_stride", "out_stride"})


def _statistics() -> Iterator[Compilation]:
    kernel = log_prob.tile_statistics
    for label, chosen in (
        ("scalar loss", {"HOLD": True}),
        ("scalar loss, smoothing, bias", {"HOLD": True, "MEAN": True, "WEIGHTED": True, "HAS_BIAS": True}),
        ("log-probabilities", {}),
        ("entropy, top-1", {"ENTROPY": True, "TOP1": True}),
        ("soft cap, all columns", {"CAP": True, "ENTROPY": True, "TOP1": True, "MEAN": True}),
    ):
        flags = dict.fromkeys(("HAS_BIAS", "CAP", "ENTROPY", "TOP1", "MEAN", "WEIGHTED", "HOLD"), False) | chosen
        absent = {
            name: None
            for name, flag in (("bias", "HAS_BIAS"), ("weights", "WEIGHTED"), ("held", "HOLD"))
            if not flags[flag]
        }
        constants = flags | absent | {"BLOCK": log_prob.BLOCK}
        pointers = dict.fromkeys(_STATISTICS, "*fp32") | {
            "logits": "*fp32", "bias": "*bf16", "target": "*i64", "weights": "*fp32", "best_out": "*i64",
            "held": "*bf16",
        }  # fmt: skip
        types = _types(kernel, constants, pointers, **_SCALARS)
        yield Compilation(kernel, label, types, constants, log_prob.WARPS, _TILE & types.keys())


def _gradients() -> Iterator[Compilation]:
    kernel = log_prob.tile_gradient
    for label, chosen in (
        ("held", {"HELD": True}),
        ("held, smoothing", {"HELD": True, "MEAN": True, "WEIGHTED": True}),
        ("from logits", {}),
        ("entropy", {"BEND": True}),
        ("soft cap, entropy, mean, bias", {"CAP": True, "BEND": True, "MEAN": True, "HAS_BIAS": True}),
    ):
        flags = dict.fromkeys(("HELD", "HAS_BIAS", "CAP", "BEND", "MEAN", "WEIGHTED"), False) | chosen
        absent = {
            name: None
            for name, flag in (("bias", "HAS_BIAS"), ("weights", "WEIGHTED"), ("bend", "BEND"), ("mean", "MEAN"))
            if not flags[flag]
        }
        constants = flags | absent | {"BLOCK": log_prob.BLOCK}
        pointers = dict.fromkeys(_PER_TOKEN, "*fp32") | {
            "logits": "*bf16" if flags["HELD"] else "*fp32", "bias": "*bf16", "target": "*i64", "weights": "*fp32",
            "out": "*bf16",
        }  # fmt: skip
        types = _types(kernel, constants, pointers, **_SCALARS)
        yield Compilation(kernel, label, types, constants, log_prob.WARPS, _TILE & types.keys())


def _lora_linears() -> Iterator[Compilation]:
    # Qwen3-4B's MLP with r = 16, forward; GPT-OSS's biased q with r = 64; backward, where both weights lie transposed.
    kernel, shape = lora_linear.low_rank_linear, lora_linear.LAUNCH
    pointers = dict.fromkeys(("x", "weight", "bias", "low", "high", "out"), "*bf16")
    for label, rank, has_bias, transposed in (
        ("r=16", 16, False, False),
        ("r=64, bias", 64, True, False),
        ("r=16, back", 16, False, True),
    ):
        constants: dict[str, Any] = {
            "HAS_BIAS": has_bias, "RANK": lora_linear.rank_block(rank), "ROWS": shape.rows, "COLUMNS": shape.columns,
            "DEPTH": shape.depth, "GROUP": shape.group,
        }  # fmt: skip
        units = ("weight_stride", "high_stride") if transposed else ("weight_step", "high_step")
        constants |= dict.fromkeys(units, 1) | ({} if has_bias else {"bias": None})
        types = _types(kernel, constants, pointers, scaling="fp32")
        aligned = frozenset(types.keys() - pointers.keys() - {"rows", "scaling"})
        yield Compilation(kernel, label, types, constants, shape.warps, aligned, tensor_cores=True)
