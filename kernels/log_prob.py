"""The log-prob core: log-probabilities of targets under a linear head, without the (N, V) logits."""

from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bestiary.kernels import deferred, log_prob_chunked, log_prob_ops, log_prob_reference
from bestiary.kernels.dispatch import choose
from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.log_prob_terms import LogitMap, LogProb, ScalarLoss, Setting, Wanted, check_labels
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.triton_runtime import product_obstacle
from bestiary.kernels.vocab_parallel import Local, localised

__all__ = ["LogProb", "linear_log_prob"]

_IMPLEMENTATIONS: dict[str, ModuleType] = {"chunked": log_prob_chunked, "reference": log_prob_reference}

uncompiled = deferred.uncompiled("dropped tokens and chunks of the log-prob core depend on data")


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    top1: bool = False,
    logit_mean: bool = False,
    group: ProcessGroup | None = None,
) -> LogProb:
    """Log-probability of `target` under a linear head.

        log p(y | h) = z_y − logsumexp(z),   z = cap(h Wᵀ / divisor + b) / temperature

    with cap(u) = softcap · tanh(u / softcap), or u without a soft cap.
    Ignored tokens are dropped before the projection. Logits, sums and gradients are computed in at least fp32 from the
    inputs as they are: logits are never rounded to a narrower dtype.

    Args:
        hidden: (N, H), any float dtype and strides.   weight: (V, H).   bias: (V,).
        target: (N,) integers in [0, V) or `ignore_index`.
        entropy, top1, logit_mean: columns to compute beside the two that are always there.
        group: ranks that hold (V_r, H) of the weight each, with the same hidden states and targets (`vocab_parallel`).
            A DTensor weight split on dim 0 brings its own group.
    Returns:
        `LogProb`; all columns but top1 are differentiable with respect to hidden, weight and bias, and a gradient that
        nobody needs is not computed. All-ignored input gives exact zeros that still have a graph.
    Raises:
        LabelOutOfRange: names the first offending index and value.
        InvalidArgument: shapes or placements that do not fit.   UnsupportedDispatch: see `dispatch.force`.
    Cost:
        2·N·H·V FLOPs forward and 6·N·H·V backward, N being the tokens that count; scratch: 512 · 2048 logits (twice or
        three times that with entropy and soft cap) and, in the backward pass, dX and dW in at least fp32. Where one
        scalar loss is wanted, `linear_cross_entropy` saves a quarter of it.
    """
    if torch.compiler.is_compiling() and not log_prob_ops.traceable(hidden, weight, group):
        return _untraced(
            hidden,
            weight,
            target,
            bias=bias,
            divisor=divisor,
            softcap=softcap,
            temperature=temperature,
            ignore_index=ignore_index,
            entropy=entropy,
            top1=top1,
            logit_mean=logit_mean,
            group=group,
        )
    wanted = Wanted(entropy=entropy, top1=top1, logit_mean=logit_mean)
    local = checked(hidden, weight, target, bias, ignore_index, group)
    setting = local_setting(local, LogitMap(divisor, softcap, temperature), wanted, ignore_index)
    return per_token(local, setting)


_untraced = uncompiled(linear_log_prob)


def local_setting(local: Local, logit_map: LogitMap, wanted: Wanted, ignore_index: int) -> Setting:
    """What implementations need to know besides tensors."""
    dtype = at_least_fp32(torch.promote_types(local.hidden.dtype, local.weight.dtype))
    return Setting(logit_map, wanted, ignore_index, dtype, local.vocab_size, local.shard)


def per_token(local: Local, setting: Setting) -> LogProb:
    """Runs the chosen implementation on checked inputs; for the functions built on the core."""
    name, inputs = _chosen(local), (local.hidden, local.weight, local.bias, local.target)
    if torch.compiler.is_compiling():
        return log_prob_ops.per_token(name, *inputs, setting)
    out: LogProb = _module(name).log_prob(*inputs, setting)
    return out


def scalar_loss(local: Local, loss: ScalarLoss, setting: Setting) -> tuple[Tensor, LogProb]:
    """() loss, and log-probabilities without a graph; for the functions built on the core."""
    name, inputs = _chosen(local), (local.hidden, local.weight, local.bias, local.target)
    if torch.compiler.is_compiling():
        return log_prob_ops.scalar_loss(name, *inputs, loss, setting)
    out: tuple[Tensor, LogProb] = _module(name).scalar_loss(*inputs, loss, setting)
    return out


def _chosen(local: Local) -> str:
    sharded = "its vocabulary is not split over ranks" if local.shard is not None else None
    triton = product_obstacle(local.hidden, local.weight, local.bias)
    return choose("log_prob", {"triton": triton, "chunked": None, "reference": sharded})


def _module(name: str) -> ModuleType:
    """It has `log_prob` and `scalar_loss` with the signatures of `log_prob_reference`."""
    if name == "triton":
        from bestiary.kernels import triton_log_prob  # needs the optional triton

        return triton_log_prob
    return _IMPLEMENTATIONS[name]


def checked(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    group: ProcessGroup | None,
) -> Local:
    """Plain tensors of this rank whose shapes fit and whose labels are in range."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise InvalidArgument(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}.", remedy="pass (N, H) and (V, H)"
        )
    if target.shape != hidden.shape[:1] or target.is_floating_point():
        raise InvalidArgument(
            f"target is {tuple(target.shape)} {target.dtype} for hidden of {tuple(hidden.shape)}.",
            remedy="pass one integer label a row of hidden: (N,)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidArgument(
            f"bias is {tuple(bias.shape)} and weight {tuple(weight.shape)}.", remedy="pass a bias of (V,)"
        )
    local = localised(hidden, weight, bias, target.long(), group)
    if not torch.compiler.is_compiling():  # there the operator looks
        check_labels(local.target, ignore_index, local.vocab_size)
    return local
