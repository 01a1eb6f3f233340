"""Bugs in losses and gradients, some of which leave every logit right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.models.config import DecoderConfig
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug, ReferencePlant, projects_keys
from bestiary.verify.planted.dense import without_cap
from bestiary.verify.planted.patching import adapted, built, override, patch, together

_DECODER = "bestiary.models.decoder"
_HEAD = "bestiary.models.layers.head"
_IGNORED = -100


def _routed(config: DecoderConfig) -> bool:
    return config.moe is not None


def _reports_router_loss(config: DecoderConfig) -> bool:
    return config.moe is not None and config.output_router_logits


def _model(model: Any) -> list[Any]:
    return [model]


def _arguments(change: Callable[[dict[str, Any]], dict[str, Any]]) -> ReferencePlant:
    """Calls with labels get `change(arguments)`."""

    def wrap(_module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **(change(kwargs) if kwargs.get("labels") is not None else kwargs))

        return run

    return replay.forwards(_model, wrap)


# ------------------------------------------------------------------ targets and means


def _next(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=_IGNORED)


def _twice_shifted(shift: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    return lambda labels, documents: shift(shift(labels, documents), documents)


def _unshifted(_shift: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    return lambda labels, _documents: labels


def _all_positions(labels: Tensor) -> int:
    return labels[:, 1:].numel()


def _mean_over_all(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is not None and kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = _all_positions(labels)
        return forward(self, *args, **kwargs)

    return run


def _core(wrap: Callable[[Any], Any]) -> Plant:
    """Both ways into the log-prob core: the scalar loss, and log-probabilities per token."""
    return together(patch(f"{_HEAD}:linear_cross_entropy", wrap), patch(f"{_HEAD}:linear_log_prob", wrap))


def _uncapped(core: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: core(*args, **{**options, "softcap": None})


# ------------------------------------------------------------------ the router's loss


def _twice_normalised(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def balance(router_logits: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return loss(tuple(logits.softmax(-1) for logits in router_logits), *args, **kwargs)

    return balance


def _per_layer(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def balance(router_logits: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([loss((logits,), *args, **kwargs) for logits in router_logits]).mean()

    return balance


def _coefficient(value: float) -> tuple[Plant, ReferencePlant]:
    ours = adapted(lambda config: config.with_(router_aux_loss_coef=value))
    return ours, replay.attributes(_model, lambda _: value, "router_aux_loss_coef")


# ------------------------------------------------------------------ gradients that get lost


def _half(tensor: Tensor) -> Tensor:
    """The same values with half of the gradient."""
    return 0.5 * tensor + 0.5 * tensor.detach()


def _half_embedding(embed: Any) -> None:
    forward = embed.forward
    override(embed, lambda ids: _half(forward(ids)))


def _frozen_head(core: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hidden, weight, *args, **options: core(hidden, _half(weight), *args, **options)


def _half_weight_there(head: Any, _forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda hidden: F.linear(hidden, _half(head.weight))


def _deaf_router(route: Callable[..., Any]) -> Callable[..., Any]:
    def routed(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = route(self, x)
        return logits, weights.detach(), indices

    return routed


def _deaf_router_there(_module: Any, route: Callable[..., Any]) -> Callable[..., Any]:
    def routed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = route(x)
        return logits, weights.detach(), indices

    return routed


def _deaf_sinks(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, sinks, **options: attend(*args, sinks=sinks.detach(), **options)


def _deaf_sinks_there(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        sinks = module._parameters["sinks"]
        module._parameters["sinks"] = torch.nn.Parameter(sinks.detach(), requires_grad=False)
        try:
            return attend(module, *args, **kwargs)
        finally:
            module._parameters["sinks"] = sinks

    return attention


def _deaf_values(attention: Any) -> None:
    forward = attention.v_proj.forward
    override(attention.v_proj, lambda x: forward(x.detach()))


def _deaf_values_there(_module: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: forward(x.detach())


_DEFAULT_COEFFICIENT = _coefficient(0.001)


def _cut(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks are recomputed from inputs that have forgotten where they come from."""

    def run(block: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return checkpoint(block, x.detach(), *rest, **options)

    return run


def _cut_there(_module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: forward(x.detach(), *args, **kwargs)


BUGS = (
    PlantedBug(
        id="T46a_labels_shifted_twice",
        cause="labels are shifted twice",
        level="V4",
        ours=patch(f"{_DECODER}:shifted", _twice_shifted),
        reference=_arguments(lambda kwargs: {**kwargs, "labels": _next(kwargs["labels"])}),
    ),
    PlantedBug(
        id="T46b_labels_not_shifted",
        cause="labels are not shifted",
        level="V4",
        ours=patch(f"{_DECODER}:shifted", _unshifted),
        reference=_arguments(lambda kwargs: {**kwargs, "shift_labels": kwargs["labels"]}),
    ),
    PlantedBug(
        id="T46c_ignored_tokens_in_the_mean",
        cause="the mean loss divides by all positions, ignored ones included",
        level="V4",
        ours=patch(f"{_DECODER}:Decoder.forward", _mean_over_all),
        reference=_arguments(lambda kwargs: {**kwargs, "num_items_in_batch": _all_positions(kwargs["labels"])}),
    ),
    PlantedBug(
        id="T46d_router_loss_double_softmax",
        cause="the load-balancing loss applies the softmax twice",
        level="V4",
        applies=_reports_router_loss,
        ours=patch(f"{_DECODER}:load_balancing_loss", _twice_normalised),
        reference=replay.library("load_balancing_loss_func", _twice_normalised),
    ),
    PlantedBug(
        id="T46e_router_loss_per_layer",
        cause="the load-balancing loss is averaged over layers instead of computed over all of them",
        level="V4",
        applies=_reports_router_loss,
        ours=patch(f"{_DECODER}:load_balancing_loss", _per_layer),
        reference=replay.library("load_balancing_loss_func", _per_layer),
    ),
    PlantedBug(
        id="T46f_router_loss_coefficient_default",
        cause="the load-balancing loss counts 0.001 whatever the config says",
        level="V4",
        applies=_reports_router_loss,
        ours=_DEFAULT_COEFFICIENT[0],
        reference=_DEFAULT_COEFFICIENT[1],
        config_fields=("router_aux_loss_coef",),
    ),
    PlantedBug(
        id="T46g_soft_cap_missing_in_the_loss",
        cause="the loss is computed from logits without the soft cap",
        level="V4",
        applies=lambda config: config.final_logit_softcap is not None,
        ours=_core(_uncapped),
        reference=replay.configured(without_cap),
        config_fields=("final_logit_softcapping",),
    ),
    PlantedBug(
        id="T47a_embedding_gradient_lost",
        cause="half of the embedding's gradient is lost",
        level="V4",
        ours=built("bestiary.models.layers.embedding:Embedding", _half_embedding),
        reference=replay.forwards(replay.embedding, lambda _module, forward: lambda ids: _half(forward(ids))),
    ),
    PlantedBug(
        id="T47b_head_gradient_lost",
        cause="half of the head's gradient is lost in the chunked loss",
        level="V4",
        ours=_core(_frozen_head),
        reference=replay.forwards(replay.head, _half_weight_there),
    ),
    PlantedBug(
        id="T47c_router_gradient_lost",
        cause="no gradient flows through the routing weights",
        level="V4",
        applies=_routed,
        ours=patch("bestiary.models.layers.moe:Router.forward", _deaf_router),
        reference=replay.forwards(replay.routers, _deaf_router_there),
    ),
    PlantedBug(
        id="T47d_sink_gradient_lost",
        cause="no gradient flows into the attention sinks",
        level="V4",
        applies=lambda config: config.attention.sinks,
        ours=patch("bestiary.models.layers.attention:attention", _deaf_sinks),
        reference=replay.library("eager_attention_forward", _deaf_sinks_there),
    ),
    PlantedBug(
        id="T47e_value_gradient_lost",
        cause="no gradient flows through the value projection to its input",
        level="V4",
        applies=projects_keys,
        ours=built("bestiary.models.layers.attention:SelfAttention", _deaf_values),
        reference=replay.forwards(replay.ending("v_proj"), _deaf_values_there),
    ),
    PlantedBug(
        id="T47f_checkpointing_cuts_the_graph",
        cause="activation checkpointing lets no gradient through between blocks",
        level="V4",
        ours=together(
            adapted(lambda config: config.with_(activation_checkpointing=True)),
            patch(f"{_DECODER}:again", _cut),
        ),
        reference=replay.forwards(replay.layers, _cut_there),
    ),
)
