"""Losses that are sums over the log-prob core: cross entropy of a linear head with all that trainers add to it."""

from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bestiary.kernels import log_prob_ops
from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.log_prob import checked, local_setting, per_token, scalar_loss, uncompiled
from bestiary.kernels.log_prob_terms import LogitMap, LogProb, ScalarLoss, Wanted
from bestiary.kernels.precision import at_least_fp32

Reduction = Literal["mean", "sum", "none"]


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    divisor: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    entropy: bool = ...,
    top1: bool = ...,
    group: ProcessGroup | None = ...,
    reduction: Reduction = ...,
    token_weights: Tensor | None = ...,
    class_weights: Tensor | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    num_items: Tensor | float | None = ...,
    return_log_prob: Literal[False] = ...,
) -> Tensor:
    """The loss alone."""


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    divisor: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    entropy: bool = ...,
    top1: bool = ...,
    group: ProcessGroup | None = ...,
    reduction: Reduction = ...,
    token_weights: Tensor | None = ...,
    class_weights: Tensor | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    num_items: Tensor | float | None = ...,
    return_log_prob: Literal[True],
) -> tuple[Tensor, LogProb]:
    """The loss, and log-probabilities without a graph."""


def linear_cross_entropy(
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
    group: ProcessGroup | None = None,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    return_log_prob: bool = False,
) -> Tensor | tuple[Tensor, LogProb]:
    """Cross entropy of a linear head, (N, V) logits never existing.

        loss_i = t_i · [ −(1 − ε) w_y log p_y − ε/V Σ_c w_c log p_c + ζ · lse² ]

    With ε = ζ = 0 and no weights it is −log p. The definition is that of `torch.nn.functional.cross_entropy` on these
    logits, with token weights t and the z-loss ζ (PaLM, section 5) beside it.

    Args:
        hidden … ignore_index, entropy, top1, group: as `linear_log_prob`.
        reduction: "none" (N,), 0 where ignored; "sum"; "mean": Σ loss_i / Σ t_i w_{y_i}, or / num_items if given.
        token_weights: t, (N,).   class_weights: w, (V,), of the whole vocabulary also where it is split over ranks.
        label_smoothing: ε in [0, 1].   z_loss: ζ.
        num_items: what "mean" divides by, e.g. the targets of all micro-batches of a step.
        return_log_prob: also `LogProb` of the same pass, without a graph.
    Returns:
        loss in at least fp32. Nothing to divide by (all ignored, or all weights 0) gives exactly 0, with a graph.
    Raises:
        LabelOutOfRange, InvalidArgument, UnsupportedDispatch.
    Cost:
        Scalar reductions: 6·N·H·V FLOPs, gradients computed in the forward pass; scratch: R·V logits, R from
        `vocab_tiles.row_chunks`; between forward and backward dX and dW in at least fp32. "none", or a `token_weights`
        that needs a gradient: as `linear_log_prob`.
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
            group=group,
            reduction=reduction,
            token_weights=token_weights,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            num_items=num_items,
            return_log_prob=return_log_prob,
        )
    local = checked(hidden, weight, target, bias, ignore_index, group)
    dtype, vocab_size = at_least_fp32(torch.promote_types(hidden.dtype, weight.dtype)), local.vocab_size
    _check_options(reduction, token_weights, class_weights, label_smoothing, num_items, local.target, vocab_size)
    valid = local.target != ignore_index
    token = valid.to(dtype) if token_weights is None else token_weights.to(dtype).where(valid, 0.0)
    label, mean_weights, mean_mass = token, None, torch.ones((), dtype=dtype, device=token.device)
    if class_weights is not None:
        classes = class_weights.detach().to(dtype)
        label = token * classes[local.target.where(valid, 0)]
        start = 0 if local.shard is None else local.shard.start
        mean_weights = (classes / vocab_size)[start : start + local.weight.shape[0]]
        mean_mass = classes.mean()
    items: Tensor | float = 1.0
    if reduction == "mean":
        items = label.sum() if num_items is None else num_items
        items = torch.as_tensor(items, dtype=dtype, device=token.device)
        items = items.where(items != 0, 1.0)
    loss = ScalarLoss(label * (label_smoothing - 1.0) / items, token / items, label_smoothing, mean_mass, z_loss)
    wanted = Wanted(entropy=entropy, top1=top1, logit_mean=label_smoothing > 0, mean_weights=mean_weights)
    setting = local_setting(local, LogitMap(divisor, softcap, temperature), wanted, ignore_index)
    if reduction == "none" or (token.requires_grad and torch.is_grad_enabled()):
        out = per_token(local, setting)
        terms = loss.terms(out)
        value = terms if reduction == "none" else terms.sum()
    else:
        value, out = scalar_loss(local, loss, setting)
    return (value, out.detached()._replace(logit_mean=None)) if return_log_prob else value


_untraced: Any = uncompiled(linear_cross_entropy)


def _check_options(
    reduction: str,
    token_weights: Tensor | None,
    class_weights: Tensor | None,
    label_smoothing: float,
    num_items: Tensor | float | None,
    target: Tensor,
    vocab_size: int,
) -> None:
    if reduction not in get_args(Reduction):
        raise InvalidArgument(f"reduction = {reduction!r}.", remedy='one of "mean", "sum", "none"')
    if num_items is not None and reduction != "mean":
        raise InvalidArgument(
            f"num_items = {num_items} with reduction = {reduction!r}, which divides by nothing.",
            remedy='pass reduction = "mean", or drop num_items',
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidArgument(f"label_smoothing = {label_smoothing} is outside [0, 1].", remedy="pass a share")
    for name, weights, size in (
        ("token_weights", token_weights, len(target)),
        ("class_weights", class_weights, vocab_size),
    ):
        if weights is not None and weights.shape != (size,):
            raise InvalidArgument(f"{name} is {tuple(weights.shape)}.", remedy=f"pass ({size},)")
