"""Routed experts over tokens sorted by expert: one operator, its backward written by hand.

Which experts run, and on how many tokens, is data. All of it stays inside the operator, so that a compiled graph holds
one node for the experts, whatever the routing. Two ways to multiply:

one expert after the other   plain products over blocks of rows in scratch that all experts share, so that rows stay in
                             the processor's cache and nothing of size (N·K, H) exists; any dtype and device
grouped                      all rows at once, one grouped matmul a projection, rows moved by Triton where it runs

Kept for the backward pass: the inputs, the order of the rows, and the output of the gate-and-up projection; activation
and gathered rows are computed again. The output of the down projection y is not needed either: with g = dO W_down, the
gradient of a routing weight is dO · y = g · act(h) + dO · b.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bestiary.kernels.dispatch import choose
from bestiary.kernels.expert_linear import ExpertGradients, ExpertLinear
from bestiary.kernels.experts_activation import CLAMPED, activate, activate_back
from bestiary.kernels.flops import counted, has_data, projection, projection_back
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.triton_runtime import obstacle

# Rows of one product on the CPU: from 512 on products run at full speed, and the scratch of a block stays in the cache.
BLOCK = 1024
_RARE = {"relu", "relu2"}  # not in Triton


class Routing(NamedTuple):
    """Where the rows are, sorted by expert.

    order: (N·K,) position of each sorted row among the flat (N, K) choices.
    ends: (E,) int32, where the rows of each expert end. Rows behind the last end belong to no expert here.
    """

    order: Tensor
    ends: Tensor

    @classmethod
    def of(cls, indices: Tensor, experts: int) -> "Routing":
        """From (N, K) choices, without a synchronisation; E or more stands for an expert of another rank."""
        chosen, order = indices.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True)
        return cls(order, ends.to(torch.int32))


class Act(NamedTuple):
    """Activation of the experts: one of `kernels.activation.gated`, or `CLAMPED`, for which alpha and limit count."""

    activation: str
    alpha: float
    limit: float

    @classmethod
    def of(cls, activation: str, clamp: tuple[float, float] | None) -> "Act":
        """From the options of `experts_mlp`."""
        return cls(activation, 0.0, 0.0) if clamp is None else cls(CLAMPED, *clamp)


def sorted_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: str,
    clamp: tuple[float, float] | None,
    *,
    grouped: bool,
) -> Tensor:
    """`kernels.experts.experts_mlp` by the operator of this module.

    Deterministic: each token's outputs are summed in a fixed order, in at least fp32, and rounded once.

    Args:
        grouped: all experts in one product; see `kernels.experts` for what it needs.
    Returns:
        (N, H) in x's dtype, differentiable once in x, weights and all tensors of both projections; of a frozen one
        no gradient is computed or allocated.
    Cost:
        3 · 2 · N·K · H · I FLOPs forward and twice as many backward, no token padded to the largest expert. Kept: h
        (N·K, 2I). Scratch one after the other: `BLOCK` rows of x, h and y (narrow dtypes: the rows of one expert).
    """
    tensors = (*gate_up.tensors, *down.tensors)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weights, *tensors))
    act = Act.of(activation, clamp)
    out, _, _, _ = _run(x, indices, weights, *tensors, gate_up.scaling, down.scaling, *act, grouped, keep)
    return out


@torch.library.custom_op("bestiary::experts", mutates_args=())
def _run(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    up_A: Tensor | None,
    up_B: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    down_A: Tensor | None,
    down_B: Tensor | None,
    up_scaling: float,
    down_scaling: float,
    activation: str,
    alpha: float,
    limit: float,
    grouped: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (N, H); h (N·K, 2I), empty unless `keep`; order and ends of `Routing`."""
    gate_up = ExpertLinear(up_weight, up_bias, up_A, up_B, up_scaling)
    down = ExpertLinear(down_weight, down_bias, down_A, down_B, down_scaling)
    act, routing = Act(activation, alpha, limit), Routing.of(indices, len(up_weight))
    with _as_they_are(x):
        forward = _all_at_once if grouped else _one_by_one
        out, h = forward(x, weights, routing, gate_up, down, act, keep)
    return out, h, *routing


@_run.register_fake
def _(x: Tensor, indices: Tensor, weights: Tensor, up_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows = indices.numel()
    h = x.new_empty((rows if rest[-1] else 0, up_weight.shape[1]))
    order = indices.new_empty(rows, dtype=torch.int64)
    return x.new_empty(x.shape), h, order, indices.new_empty(len(up_weight), dtype=torch.int32)


@torch.library.custom_op("bestiary::experts_backward", mutates_args=())
def _run_back(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    ends: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    up_A: Tensor | None,
    up_B: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    down_A: Tensor | None,
    down_B: Tensor | None,
    up_scaling: float,
    down_scaling: float,
    activation: str,
    alpha: float,
    limit: float,
    grouped: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, weights, and the tensors of both projections, as far as `needed` asks for them."""
    gate_up = ExpertLinear(up_weight, up_bias, up_A, up_B, up_scaling)
    down = ExpertLinear(down_weight, down_bias, down_A, down_B, down_scaling)
    of = _Gradients(needed[0], needed[1], ExpertGradients(gate_up, needed[2:6]), ExpertGradients(down, needed[6:]))
    with _as_they_are(x):
        backward = _all_at_once_back if grouped else _one_by_one_back
        of_x, of_weights = backward(
            grad.contiguous(), x, weights, h, Routing(order, ends), Act(activation, alpha, limit), of
        )
    found = [tensor for tensor, wanted in ((of_x, of.x), (of_weights, of.weights)) if wanted]
    return [*found, *of.gate_up.delivered(), *of.down.delivered()]


@_run_back.register_fake
def _(grad: Tensor, x: Tensor, weights: Tensor, h: Tensor, order: Tensor, ends: Tensor, *rest: Any) -> list[Tensor]:
    wanted = zip((x, weights, *rest[:8]), rest[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in wanted if needed and tensor is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, *rest = inputs
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, *kept, *rest[:8])
    ctx.options = rest[8:14]


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    of_x, _, *of_rest = ctx.needs_input_grad[:11]
    needed = [of_x, *of_rest]
    gradients = iter(_run_back(grad, *ctx.saved_tensors, *ctx.options, needed))
    first, *others = (next(gradients) if wanted else None for wanted in needed)
    return first, None, *others, *(None,) * 7


_run.register_autograd(_backward, setup_context=_save)


@counted(_run)
def _flops(x: Tensor, indices: Tensor, weights: Tensor, *rest: Any, **_: Any) -> int:
    """Both projections of the choices that are experts of this rank."""
    up, _, up_A, up_B, down, _, down_A, down_B = rest[:8]
    rows = int((indices < len(up)).sum()) if has_data(indices) else indices.numel()
    return projection(rows, up, up_A, up_B) + projection(rows, down, down_A, down_B)


@counted(_run_back)
def _flops_back(
    grad: Tensor, x: Tensor, weights: Tensor, h: Tensor, order: Tensor, ends: Tensor, *rest: Any, **_: Any
) -> int:
    """The gradient of what lies between the projections, which routing weights need too, and those asked for."""
    of_x, _, *needed = rest[-1]
    rows = int(ends[-1]) if has_data(ends) else len(order)
    return projection_back(rows, rest[:4], of_x, needed[:4]) + projection_back(rows, rest[4:8], True, needed[4:])


class _Gradients(NamedTuple):
    """What is asked for."""

    x: bool
    weights: bool
    gate_up: ExpertGradients
    down: ExpertGradients


def _as_they_are(x: Tensor) -> torch.autocast:
    """Autocast has chosen the dtypes before; inside, products take tensors as they come."""
    return torch.autocast(x.device.type, enabled=False)


# ------------------------------------------------------------------ one expert after the other


class _Block(NamedTuple):
    """Neighbouring rows of one expert; `first`: there are none of it before."""

    expert: int
    rows: slice
    first: bool

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


class _Blocks:
    """The rows of all experts in blocks, with the token and the routing weight of each row."""

    def __init__(self, x: Tensor, weights: Tensor, routing: Routing) -> None:
        self.wide = at_least_fp32(x.dtype)
        self.tokens = routing.order // weights.shape[1]
        self.weights = weights.flatten()[routing.order][:, None]
        self._ends: list[int] = routing.ends.tolist()
        # In narrow dtypes a gradient is not summed over blocks, which would round it in between.
        self._size = BLOCK if x.dtype == self.wide and x.device.type == "cpu" else max(len(self.tokens), 1)
        self.largest = max(map(len, self), default=0)

    def __iter__(self) -> Iterator[_Block]:
        start = 0
        for expert, end in enumerate(self._ends):
            for row in range(start, end, self._size):
                yield _Block(expert, slice(row, min(row + self._size, end)), row == start)
            start = end

    def empty_experts(self) -> list[int]:
        """Experts that no token chose."""
        return [e for e, (start, end) in enumerate(zip([0, *self._ends], self._ends, strict=False)) if start == end]

    def scratch(self, like: Tensor, width: int) -> Tensor:
        """Room for one block of any expert."""
        return like.new_empty((self.largest, width))


def _one_by_one(
    x: Tensor, weights: Tensor, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, act: Act, keep: bool
) -> tuple[Tensor, Tensor]:
    blocks = _Blocks(x, weights, routing)
    rows, y = blocks.scratch(x, x.shape[1]), blocks.scratch(x, x.shape[1])
    both = gate_up.weight.shape[1]
    # Rows behind the last expert are nobody's, and nobody reads them.
    kept = x.new_empty((len(routing.order) if keep else 0, both))
    h = kept if keep else blocks.scratch(x, both)
    out = torch.zeros_like(x, dtype=blocks.wide, memory_format=torch.contiguous_format)
    for block in blocks:
        size, tokens = len(block), blocks.tokens[block.rows]
        own = h[block.rows] if keep else h[:size]
        gate_up.one_into(torch.index_select(x, 0, tokens, out=rows[:size]), block.expert, own)
        down.one_into(activate(own, *act), block.expert, y[:size])
        out.index_add_(0, tokens, y[:size].to(out.dtype).mul_(blocks.weights[block.rows]))
    return out.to(x.dtype), kept


def _one_by_one_back(
    grad: Tensor, x: Tensor, weights: Tensor, h: Tensor, routing: Routing, act: Act, of: _Gradients
) -> tuple[Tensor, Tensor]:
    blocks, gate_up, down = _Blocks(x, weights, routing), of.gate_up.linear, of.down.linear
    upstream, rows = blocks.scratch(x, x.shape[1]), blocks.scratch(x, x.shape[1])
    pulls = blocks.scratch(x, h.shape[1] // 2)
    of_x = torch.zeros_like(x, dtype=blocks.wide, memory_format=torch.contiguous_format) if of.x else x.new_empty(0)
    of_weights = torch.zeros(weights.numel(), dtype=blocks.wide, device=x.device)
    for gradients in (of.gate_up, of.down):
        gradients.make_room()
        for expert in blocks.empty_experts():
            gradients.forget(expert)
    for block in blocks:
        expert, size, tokens = block.expert, len(block), blocks.tokens[block.rows]
        dy, pull = torch.index_select(grad, 0, tokens, out=upstream[:size]), pulls[:size]
        down.one_back(dy, expert, pull)
        own_weights = blocks.weights[block.rows]
        inner, dh, own = activate_back(h[block.rows], pull, own_weights, *act)
        if down.bias is not None:
            own = own + dy.to(own.dtype) @ down.bias[expert].to(own.dtype)
        of_weights[routing.order[block.rows]] = own
        of.down.add(expert, dy, inner, own_weights, first=block.first)
        of.gate_up.add(expert, dh, torch.index_select(x, 0, tokens, out=rows[:size]), None, first=block.first)
        if of.x:
            gate_up.one_back(dh, expert, rows[:size])
            of_x.index_add_(0, tokens, rows[:size].to(of_x.dtype))
    return of_x.to(x.dtype), of_weights.view_as(weights).to(weights.dtype)


# ------------------------------------------------------------------ all experts at once


def _all_at_once(
    x: Tensor, weights: Tensor, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, act: Act, keep: bool
) -> tuple[Tensor, Tensor]:
    rows = _gathered(x, routing, weights.shape[1])
    expert_of = _expert_of(routing)
    h = gate_up.grouped(rows, routing.ends, expert_of)
    y = down.grouped(_activated(h, act), routing.ends, expert_of)
    return _combined(y, weights, routing, weights.shape), h if keep else h.new_empty((0, h.shape[1]))


def _all_at_once_back(
    grad: Tensor, x: Tensor, weights: Tensor, h: Tensor, routing: Routing, act: Act, of: _Gradients
) -> tuple[Tensor, Tensor]:
    gate_up, down, ends, top_k = of.gate_up.linear, of.down.linear, routing.ends, weights.shape[1]
    dy = _gathered(grad, routing, top_k)
    inner, dh, of_weights = _activated_back(h, down.grouped_back(dy, ends), weights, routing, act)
    sorted_weights = weights.flatten()[routing.order][:, None]
    if down.bias is not None:
        wide = of_weights.dtype
        bias = torch.linalg.vecdot(dy.to(wide), down.bias.to(wide)[_expert_of(routing)])
        of_weights[routing.order] += bias.masked_fill(_beyond(routing), 0)
    of.down.all(dy, inner, sorted_weights, ends)
    of.gate_up.all(dh, _gathered(x, routing, top_k), None, ends)
    of_x = _combined(gate_up.grouped_back(dh, ends), None, routing, weights.shape) if of.x else x
    return of_x, of_weights.view_as(weights).to(weights.dtype)


def _expert_of(routing: Routing) -> Tensor:
    """(N·K,) the expert of each sorted row, the last one for rows of none."""
    places = torch.arange(len(routing.order), device=routing.ends.device, dtype=routing.ends.dtype)
    return torch.searchsorted(routing.ends, places, right=True).clamp(max=len(routing.ends) - 1)


def _beyond(routing: Routing) -> Tensor:
    """(N·K,) which sorted rows belong to no expert here: grouped matmul leaves them as the memory was."""
    return torch.arange(len(routing.order), device=routing.ends.device) >= routing.ends[-1]


def _triton(*tensors: Tensor | None) -> bool:
    return choose("expert_rows", {"triton": obstacle(*tensors), "torch": None}) == "triton"


def _gathered(x: Tensor, routing: Routing, top_k: int) -> Tensor:
    """(N, H) → (N·K, H), the row of each sorted choice."""
    if _triton(x):
        from bestiary.kernels.triton_experts import gather_rows  # needs the optional triton

        return gather_rows(x, routing.order, top_k)
    return x.index_select(0, routing.order // top_k)


def _activated(h: Tensor, act: Act) -> Tensor:
    if act.activation not in _RARE and _triton(h):
        from bestiary.kernels import triton_activation  # needs the optional triton

        gate, up = h.chunk(2, dim=-1)
        if act.activation == CLAMPED:
            return triton_activation.clamped_swiglu(gate, up, act.alpha, act.limit)
        return triton_activation.gated(gate, up, act.activation)
    return activate(h, *act)


def _activated_back(
    h: Tensor, pull: Tensor, weights: Tensor, routing: Routing, act: Act
) -> tuple[Tensor, Tensor, Tensor]:
    """`activate_back` on all rows, the gradient of the weights at the places of the choices (N·K,)."""
    if act.activation not in _RARE and _triton(h, weights):
        from bestiary.kernels.triton_experts import weighted_gated_back  # needs the optional triton

        return weighted_gated_back(h, pull, weights, routing.order, routing.ends, *act)
    inner, dh, sorted_gradient = activate_back(h, pull, weights.flatten()[routing.order][:, None], *act)
    of_weights = torch.empty_like(sorted_gradient)
    of_weights[routing.order] = sorted_gradient.masked_fill(_beyond(routing), 0)
    return inner, dh, of_weights


def _combined(y: Tensor, weights: Tensor | None, routing: Routing, choices: torch.Size) -> Tensor:
    """out[n] = Σ_k weights[n, k] · y[row of choice (n, k)], in this order, in at least fp32; (N, H) in y's dtype."""
    tokens, top_k = choices
    inverse = torch.empty_like(routing.order)
    inverse[routing.order] = torch.arange(len(inverse), device=inverse.device)
    if _triton(y, weights):
        from bestiary.kernels.triton_experts import combine_rows  # needs the optional triton

        return combine_rows(y, weights, inverse, routing.ends, top_k)
    places, wide = inverse.view(tokens, top_k), at_least_fp32(y.dtype)
    nobody = places >= routing.ends[-1]
    out = torch.zeros((tokens, y.shape[1]), dtype=wide, device=y.device)
    for k in range(top_k):
        part = y[places[:, k]].to(wide).masked_fill_(nobody[:, k, None], 0)
        out.add_(part if weights is None else part.mul_(weights[:, k, None]))
    return out.to(y.dtype)
