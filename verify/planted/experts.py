"""Bugs in mixtures of experts: router, expert order, activation, biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.models.config import DecoderConfig, MoE, Router, RouterKind, SwiGLUClamp
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant
from bestiary.verify.planted.patching import adapted, patch

_LAYER = "bestiary.models.layers.moe"
_KERNEL = "bestiary.kernels.experts"
Experts = Callable[..., Tensor]


def _moe(config: DecoderConfig) -> bool:
    return config.moe is not None


def _where(holds: Callable[[MoE], bool]) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.moe is not None and holds(config.moe)


def _clamped(moe: MoE) -> bool:
    return moe.clamp is not None


def _moe_changed(change: Callable[[MoE], MoE]) -> Plant:
    return adapted(lambda config: config if config.moe is None else config.with_(moe=change(config.moe)))


def _router_changed(change: Callable[[Router], Router]) -> Plant:
    return _moe_changed(lambda moe: replace(moe, router=change(moe.router)))


def _clamp_changed(change: Callable[[SwiGLUClamp], SwiGLUClamp]) -> Plant:
    return _moe_changed(lambda moe: moe if moe.clamp is None else replace(moe, clamp=change(moe.clamp)))


# ------------------------------------------------------------------ routing


def _around_experts(change: Callable[[Experts, Any, Tensor, Tensor, Tensor], Tensor]) -> tuple[Plant, ReferencePlant]:
    """The experts called through `change(call, E, x, indices, weights)` on both sides."""

    def ours(mlp: Experts) -> Experts:
        def experts_mlp(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, **options: Any) -> Tensor:
            def call(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
                return mlp(x, indices, weights, gate_up, down, **options)

            return change(call, gate_up.weight.shape[0], x, indices, weights)

        return experts_mlp

    def theirs(module: Any, forward: Experts) -> Experts:
        return lambda x, indices, weights: change(forward, module.num_experts, x, indices, weights)

    return patch(f"{_LAYER}:experts_mlp", ours), replay.forwards(replay.experts, theirs)


def _neighbour(call: Experts, count: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return call(x, (indices + 1) % count, weights)


def _weighted_input(call: Experts, _count: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Σ_k expert_k(w_k x) instead of Σ_k w_k expert_k(x)."""
    ones = torch.ones_like(weights[:, :1])
    outputs = [call(x * weights[:, k, None], indices[:, k, None], ones) for k in range(indices.shape[1])]
    return torch.stack(outputs).sum(0)


def _unweighted(call: Experts, _count: int, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return call(x, indices, torch.full_like(weights, 1 / weights.shape[-1]))


def _narrow_input(route: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: route(x.to(torch.bfloat16).to(x.dtype))


def _narrow_router(router: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: router(self, x.to(torch.bfloat16).to(x.dtype))


def _all_then_top_k(module: Any, _forward: Callable[..., Any]) -> Callable[..., Any]:
    def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, module.weight, module.bias)
        weights, indices = logits.softmax(-1).topk(module.top_k, dim=-1)
        return logits, weights, indices

    return route


def _without_bias(router: Callable[..., Any]) -> Callable[..., Any]:
    def logits(self: Any, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    return logits


# ------------------------------------------------------------------ projections


def _up_first(_activate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def activate(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return _activate(torch.cat((gate, up), dim=-1), activation, clamp)

    return activate


def _up_first_there(module: Any, apply_gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def swapped(gate_up: Tensor) -> Tensor:
        if module.is_concatenated:
            return apply_gate(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))
        return apply_gate(gate_up.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))

    return swapped


def _gates(wrap: Callable[[Any, Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> ReferencePlant:
    """`_apply_gate` of each experts module replaced; those that do without one get a forward that uses it."""

    def plant(model: Any) -> Any:
        found = replay.experts(model)
        inline = [module for module in found if "_apply_gate" not in _source(module)]
        return replay.also(
            replay.attributes(lambda _: found, lambda module: wrap(module, module._apply_gate), "_apply_gate"),
            replay.forwards(lambda _: inline, _loop_with_gate),
        )(model)

    return plant


def _source(module: Any) -> set[str]:
    """Names that the module's own forward refers to."""
    forward = type(module).forward
    return set(vars(forward).get("__wrapped__", forward).__code__.co_names)


def _loop_with_gate(module: Any, _forward: Experts) -> Experts:
    def forward(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in indices.unique().tolist():
            token, slot = torch.where(indices == expert)
            y = F.linear(module._apply_gate(F.linear(x[token], module.gate_up_proj[expert])), module.down_proj[expert])
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out

    return forward


def _bare(mlp: Experts) -> Experts:
    """The experts without their biases."""

    def experts_mlp(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, **options: Any) -> Tensor:
        return mlp(x, indices, weights, replace(gate_up, bias=None), replace(down, bias=None), **options)

    return experts_mlp


def _bias_unweighted(mlp: Experts) -> Experts:
    def experts_mlp(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, **options: Any) -> Tensor:
        return mlp(x, indices, weights, gate_up, replace(down, bias=None), **options) + down.bias[indices].sum(1)

    return experts_mlp


def _bias_unweighted_there(module: Any, forward: Experts) -> Experts:
    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        bias = module.down_proj_bias
        silent = replay.tensors(lambda _: [module], torch.zeros_like, "down_proj_bias")
        added = bias.detach().clone()[indices].sum(1)
        with silent(module):
            return forward(x, indices, weights) + added

    return run


# ------------------------------------------------------------------ clamped SwiGLU


def _swiglu(
    *, gate_low: bool = False, up_low: bool = True, plus: float = 1.0
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    def activation(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        gate = gate.clamp(min=-limit if gate_low else None, max=limit)
        up = up.clamp(min=-limit if up_low else None, max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up + plus)

    return activation


def _clamp_bug(id: str, cause: str, **options: Any) -> PlantedBug:
    activation = _swiglu(**options)

    def there(module: Any, _gate: Any) -> Callable[[Tensor], Tensor]:
        return lambda gate_up: activation(gate_up[..., ::2], gate_up[..., 1::2], module.alpha, module.limit)

    return PlantedBug(
        id=id,
        cause=cause,
        level="V2",
        applies=_where(_clamped),
        ours=patch(f"{_KERNEL}:clamped_swiglu", lambda _: activation),
        reference=_gates(there),
    )


def _halves_there(module: Any, apply_gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: apply_gate(torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2))


_NEIGHBOUR, _WEIGHTED_INPUT, _UNWEIGHTED = (
    _around_experts(change) for change in (_neighbour, _weighted_input, _unweighted)
)

BUGS = (
    PlantedBug(
        id="M01_expert_gate_up_swapped",
        cause="inside the experts the activation acts on up instead of gate",
        level="V2",
        applies=_moe,
        ours=patch(f"{_KERNEL}:_activate", _up_first),
        reference=_gates(_up_first_there),
    ),
    PlantedBug(
        id="M31c_expert_index_off_by_one",
        cause="tokens go to the expert after the one that the router chose",
        level="V2",
        applies=_moe,
        ours=_NEIGHBOUR[0],
        reference=_NEIGHBOUR[1],
    ),
    PlantedBug(
        id="M32a_one_expert_too_few",
        cause="the router keeps k − 1 experts",
        level="V2",
        applies=_moe,
        ours=_router_changed(lambda router: replace(router, top_k=router.top_k - 1)),
        reference=replay.attributes(replay.routers, lambda module: module.top_k - 1, "top_k"),
        config_fields=("num_experts_per_tok",),
    ),
    PlantedBug(
        id="M32c_router_in_bf16",
        cause="the router reads its input in bfloat16",
        level="V2",
        applies=_moe,
        ours=patch(f"{_LAYER}:Router.forward", _narrow_router),
        reference=replay.forwards(replay.routers, lambda _module, forward: _narrow_input(forward)),
    ),
    PlantedBug(
        id="M33a_weights_never_normalised",
        cause="the weights of the chosen experts are not normalised although the config asks for it",
        level="V2",
        applies=_where(lambda moe: moe.router.normalize),
        ours=_router_changed(lambda router: replace(router, normalize=False)),
        reference=replay.attributes(replay.routers, lambda _: False, "norm_topk_prob"),
        config_fields=("norm_topk_prob",),
    ),
    PlantedBug(
        id="M33b_weights_always_normalised",
        cause="the weights of the chosen experts are normalised although the config does not ask for it",
        level="V2",
        applies=_where(lambda moe: not moe.router.normalize and moe.router.kind is RouterKind.SOFTMAX_TOPK),
        ours=_router_changed(lambda router: replace(router, normalize=True)),
        reference=replay.attributes(replay.routers, lambda _: True, "norm_topk_prob"),
        config_fields=("norm_topk_prob",),
    ),
    PlantedBug(
        id="M36a_weight_on_the_input",
        cause="the routing weight multiplies the expert's input instead of its output",
        level="V2",
        applies=_moe,
        ours=_WEIGHTED_INPUT[0],
        reference=_WEIGHTED_INPUT[1],
    ),
    PlantedBug(
        id="M36b_experts_averaged",
        cause="the chosen experts are averaged instead of weighted",
        level="V2",
        applies=_moe,
        ours=_UNWEIGHTED[0],
        reference=_UNWEIGHTED[1],
    ),
    PlantedBug(
        id="O33_softmax_over_all_experts",
        cause="the router's softmax runs over all experts instead of the chosen ones",
        level="V2",
        applies=_where(lambda moe: moe.router.kind is RouterKind.TOPK_SOFTMAX),
        ours=_router_changed(lambda router: replace(router, kind=RouterKind.SOFTMAX_TOPK)),
        reference=replay.forwards(replay.routers, _all_then_top_k),
    ),
    PlantedBug(
        id="O34_router_bias_skipped",
        cause="the router leaves out its bias",
        level="V2",
        applies=_where(lambda moe: moe.router.bias),
        ours=patch(f"{_LAYER}:Router._logits", _without_bias),
        reference=replay.tensors(replay.routers, torch.zeros_like, "bias"),
    ),
    PlantedBug(
        id="O36a_expert_biases_skipped",
        cause="the experts leave out their biases",
        level="V2",
        applies=_where(lambda moe: moe.bias),
        ours=patch(f"{_LAYER}:experts_mlp", _bare),
        reference=replay.tensors(replay.experts, torch.zeros_like, "gate_up_proj_bias", "down_proj_bias"),
    ),
    PlantedBug(
        id="O36b_down_bias_unweighted",
        cause="the bias of the down projection is added without the routing weight",
        level="V2",
        applies=_where(lambda moe: moe.bias),
        ours=patch(f"{_LAYER}:experts_mlp", _bias_unweighted),
        reference=replay.forwards(replay.experts, _bias_unweighted_there),
    ),
    _clamp_bug("O38a_up_plus_one_missing", "the experts multiply by up instead of up + 1", plus=0.0),
    PlantedBug(
        id="O38b_alpha_one",
        cause="the experts' sigmoid has alpha 1 whatever the config says",
        level="V2",
        applies=_where(_clamped),
        ours=_clamp_changed(lambda clamp: replace(clamp, alpha=1.0)),
        reference=replay.attributes(replay.experts, lambda _: 1.0, "alpha"),
        config_fields=("swiglu_alpha",),
    ),
    PlantedBug(
        id="O38c_limit_default",
        cause="the experts clamp at 7 whatever the config says",
        level="V2",
        applies=_where(lambda moe: moe.clamp is not None and moe.clamp.limit != 7.0),
        ours=_clamp_changed(lambda clamp: replace(clamp, limit=7.0)),
        reference=replay.attributes(replay.experts, lambda _: 7.0, "limit"),
        config_fields=("swiglu_limit",),
    ),
    _clamp_bug("O38d_gate_clamped_below", "gate is clamped on both sides instead of above only", gate_low=True),
    _clamp_bug("O38e_up_clamped_above_only", "up is clamped above only instead of on both sides", up_low=False),
)
HALVES_THERE = _gates(_halves_there)
"""GPT-OSS's interleaved gate and up columns read as halves; the rules plant it on our side."""
