"""Every operation of kernels/ with each of its torch implementations, as functions of float tensors alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels.activation import clamped_swiglu, gated
from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.balance import load_balancing_loss
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force
from bestiary.kernels.divergence import TeacherHead, TopK, linear_divergence
from bestiary.kernels.experts import ExpertLinear, experts_mlp
from bestiary.kernels.gated_linear import gated_linear
from bestiary.kernels.head import head_logits
from bestiary.kernels.linear import linear
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.lora_linear import lora_linear
from bestiary.kernels.norm import rms_norm
from bestiary.kernels.rope import apply_rope
from bestiary.kernels.selected import linear_selected_log_prob

Outputs = tuple[Tensor, ...]

TOKENS, HIDDEN, VOCAB = 6, 8, 67
CAPPED = {"divisor": 1.9, "softcap": 1.3, "temperature": 0.7}


@dataclass(frozen=True)
class Operation:
    """A call: `run` on leaves drawn from `shapes`, with `forced` implementations.

    dtype: float64 where it exists.   trains: whether it has a backward pass here.
    any_strides: False where torch's own product refuses rows that are not adjacent.
    """

    run: Callable[..., Outputs]
    shapes: tuple[tuple[int, ...], ...]
    forced: dict[str, str]
    dtype: torch.dtype = torch.float64
    trains: bool = True
    any_strides: bool = True

    def inputs(self) -> list[Tensor]:
        """Leaves with gradients on, the same at every call."""
        return [normal(*shape, seed=i, dtype=self.dtype).requires_grad_() for i, shape in enumerate(self.shapes)]

    def __call__(self, *inputs: Tensor) -> Outputs:
        with force(**self.forced):
            return self.run(*inputs)

    @property
    def tolerance(self) -> dict[str, float]:
        """Of two ways to the same numbers."""
        return {"rtol": 1e-10, "atol": 1e-12} if self.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(below: int, *shape: int, seed: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


HEAD = ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
TARGET = integers(VOCAB, TOKENS).index_fill(0, torch.tensor([1, 4]), -100)
MASK = TARGET != -100
WEIGHTS = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)
CLASSES = torch.linspace(0.2, 1.7, VOCAB, dtype=torch.float64)
TEACHER = TeacherHead(normal(TOKENS, 5, seed=20), normal(VOCAB, 5, seed=21), normal(VOCAB, seed=22), softcap=4.0)
WORDS = torch.stack([integers(VOCAB, VOCAB, seed=i).argsort()[:3] for i in range(TOKENS)])
TOP = TopK(WORDS, normal(TOKENS, VOCAB, seed=23).log_softmax(-1).gather(1, WORDS))


def _log_prob(hidden: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    out = linear_log_prob(hidden, weight, TARGET, bias=bias, entropy=True, logit_mean=True, **CAPPED)
    return tuple(column for column in (out.log_prob, out.lse, out.entropy, out.logit_mean) if column is not None)


def _cross_entropy(**options: Any) -> Callable[..., Outputs]:
    return lambda hidden, weight, bias: (
        linear_cross_entropy(
            hidden,
            weight,
            TARGET,
            bias=bias,
            label_smoothing=0.1,
            z_loss=0.01,
            token_weights=WEIGHTS,
            class_weights=CLASSES,
            **options,
        ),
    )


def _divergence(teacher: TeacherHead | TopK, **options: Any) -> Callable[..., Outputs]:
    return lambda hidden, weight, bias: (
        linear_divergence(hidden, weight, teacher, bias=bias, mask=MASK, token_weights=WEIGHTS, **options),
    )


def _heads() -> Iterator[tuple[str, Operation]]:
    for name in ("chunked", "reference"):
        forced = {"log_prob": name}
        yield f"log-probs, {name}", Operation(_log_prob, HEAD, forced)
        for reduction in ("mean", "none"):
            for way, options in (("", {}), (" capped", CAPPED)):
                run = _cross_entropy(reduction=reduction, **options)
                yield f"cross entropy, {reduction}{way}, {name}", Operation(run, HEAD, forced)
        forced = {"selected_log_prob": name, "divergence": name}
        yield (
            f"selected, {name}",
            Operation(lambda h, w, b: tuple(linear_selected_log_prob(h, w, WORDS, bias=b, **CAPPED)), HEAD, forced),
        )
        for kind in ("forward_kl", "reverse_kl", "jsd"):
            for reduction in ("mean", "none"):
                run = _divergence(TEACHER, kind=kind, reduction=reduction, **CAPPED)
                yield f"{kind}, {reduction}, {name}", Operation(run, HEAD, forced)
            for tail in ("bucket", "renormalise"):
                run = _divergence(TOP._replace(tail=tail), kind=kind, **CAPPED)
                yield f"{kind} of top-k, {tail}, {name}", Operation(run, HEAD, forced)
    for name in ("onednn", "torch"):  # oneDNN: few rows without gradients, if the processor has AVX2
        yield (
            f"linear, {name}",
            Operation(lambda *given: (linear(*given),), HEAD, {"linear": name}, torch.float32, trains=name == "torch"),
        )
    yield "head", Operation(lambda h, w: (head_logits(h, w, divisor=1.7, softcap=2.0),), HEAD[:2], {})


PACKED = MaskSpec(9, 9, window=4, documents=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]]))
QKV = ((2, 4, 9, 6), (2, 2, 9, 6), (2, 2, 9, 6))


def _attention() -> Iterator[tuple[str, Operation]]:
    for name in ("eager", "sdpa", "documents", "flex"):
        forced, trains = {"attention": name}, name != "flex"
        yield (
            f"attention, {name}",
            Operation(lambda q, k, v: (attention(q, k, v, PACKED, scale=0.4),), QKV, forced, trains=trains),
        )
        if name != "sdpa":
            cap = 2.0 if name != "documents" else None
            yield (
                f"attention with sinks, {name}",
                Operation(
                    lambda q, k, v, s, cap=cap: (attention(q, k, v, PACKED, scale=0.4, sinks=s, softcap=cap),),
                    (*QKV, (4,)),
                    forced,
                    trains=trains,
                ),
            )


ANGLE = normal(2, 5, 3, seed=30)
INDICES = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(11)])
EXPERTS = ((11, 8), (11, 2), (4, 32, 8), (4, 32), (4, 4, 8), (4, 32, 4), (4, 8, 16), (4, 8), (4, 4, 16), (4, 8, 4))


def _experts(clamp: tuple[float, float] | None) -> Callable[..., Outputs]:
    return lambda x, weights, *leaves: (
        experts_mlp(x, INDICES, weights, ExpertLinear(*leaves[:4], 0.7), ExpertLinear(*leaves[4:], 0.7), clamp=clamp),
    )


def _blocks() -> Iterator[tuple[str, Operation]]:
    for name in ("lean", "torch"):
        for plus_one, late in ((False, False), (False, True), (True, True)):
            options: dict[str, Any] = {"plus_one": plus_one, "scale_then_cast": late}
            yield (
                f"norm, {plus_one=}, {late=}, {name}",
                Operation(
                    lambda x, w, options=options: (rms_norm(x, w, 1e-3, **options),),
                    ((3, 5, 8), (8,)),
                    {"norm": name},
                ),
            )
        for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
            yield (
                f"{activation}, {name}",
                Operation(
                    lambda g, u, activation=activation: (gated(g, u, activation),),
                    ((3, 5, 8), (3, 5, 8)),
                    {"activation": name},
                ),
            )
    yield (
        "clamped SwiGLU",
        Operation(lambda g, u: (clamped_swiglu(g, u, 1.7, 1.1),), ((3, 5, 8),) * 2, {"activation": "torch"}),
    )
    for interleaved in (False, True):
        yield (
            f"rope, {interleaved=}",
            Operation(
                lambda x, interleaved=interleaved: (apply_rope(x, ANGLE.cos(), ANGLE.sin(), interleaved=interleaved),),
                ((2, 3, 5, 8),),
                {"rope": "torch"},
            ),
        )
    for name, dtype in (("loop", torch.float64), ("sorted", torch.float64), ("grouped", torch.float32)):
        for clamp in (None, (1.7, 1.1)):
            yield (
                f"experts, {clamp=}, {name}",
                Operation(_experts(clamp), EXPERTS, {"experts": name}, dtype, any_strides=name != "grouped"),
            )
    yield "linear", Operation(lambda x, w, b: (linear(x, w, b),), ((3, 5, 8), (6, 8), (6,)), {"linear": "torch"})
    for name in ("lean", "reference"):
        for activation in ("silu", "gelu_pytorch_tanh", "relu2"):
            yield (
                f"gated linear, {activation}, {name}",
                Operation(
                    lambda g, u, w, b, activation=activation: (gated_linear(g, u, w, b, activation),),
                    ((3, 5, 8), (3, 5, 8), (6, 8), (6,)),
                    {"gated_linear": name},
                ),
            )
    for name in ("fused", "reference"):
        yield (
            f"LoRA linear, {name}",
            Operation(
                lambda x, w, b, low, high: (lora_linear(x, w, b, low, high, 0.7),),
                ((2, 5, 8), (6, 8), (6,), (3, 8), (6, 3)),
                {"lora_linear": name},
            ),
        )
    yield (
        "load balance",
        Operation(lambda a, b: (load_balancing_loss((a, b), 2, MASK.repeat(2)),), ((12, 5), (12, 5)), {}),
    )


OPERATIONS: dict[str, Operation] = {
    **dict(_heads()),
    **dict(_attention()),
    **dict(_blocks()),
}
TRAINING = {name: operation for name, operation in OPERATIONS.items() if operation.trains}
