"""The log-prob core inside a compiled graph: one operator a pass, whatever the number of tokens that count.

How many targets count depends on data, and a graph cannot look at data; an operator can. Its results have the sizes of
its inputs, and inside it `log_prob_chunked` or `triton_log_prob` do what they do elsewhere. A scalar loss comes with
its gradients, as outside of graphs, in at least fp32: scaled by the upstream gradient they are rounded once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bestiary.kernels.dispatch import forced
from bestiary.kernels.flops import counted, head
from bestiary.kernels.log_prob_autograd import Passes, Problem, full_precision
from bestiary.kernels.log_prob_gradients import Known, Upstream
from bestiary.kernels.log_prob_terms import LogitMap, LogProb, ScalarLoss, Setting, Wanted, check_labels
from bestiary.kernels.precision import at_least_fp32


def traceable(hidden: Tensor, weight: Tensor, group: ProcessGroup | None) -> bool:
    """Whether a call that is being traced becomes an operator. Elsewhere the graph breaks: in front of collectives,
    sharded tensors and the reference, which torch would have to see through."""
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (hidden, weight))
    return plain and group is None and forced("log_prob") != "reference"


def per_token(
    implementation: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting
) -> LogProb:
    """`log_prob_reference.log_prob` as an operator; `setting` has no shard."""
    wanted, inputs = setting.wanted, (hidden, weight, bias, target)
    columns = _rows(*inputs, wanted.mean_weights, *_options(setting), wanted.logit_mean, implementation)
    return LogProb(
        columns[0],
        columns[1],
        columns[2] if wanted.entropy else None,
        columns[3] if wanted.top1 else None,
        columns[4] if wanted.logit_mean else None,
    )


def scalar_loss(
    implementation: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: ScalarLoss,
    setting: Setting,
) -> tuple[Tensor, LogProb]:
    """`log_prob_reference.scalar_loss` as an operator, without the mean of the logits; `setting` has no shard."""
    wanted, grad = setting.wanted, torch.is_grad_enabled()
    needs = [grad and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    value, log_prob, lse, entropy, top1, *_ = _loss(
        hidden,
        weight,
        bias,
        target,
        wanted.mean_weights,
        loss.label,
        loss.token,
        torch.as_tensor(loss.mean_mass, dtype=setting.dtype, device=hidden.device),
        loss.smoothing,
        loss.z_loss,
        *_options(setting),
        *needs,
        implementation,
    )
    return value, LogProb(log_prob, lse, entropy if wanted.entropy else None, top1 if wanted.top1 else None)


def _options(setting: Setting) -> tuple[float, float | None, float, int, bool, bool]:
    logit_map, wanted = setting.logit_map, setting.wanted
    return (
        logit_map.divisor,
        logit_map.softcap,
        logit_map.temperature,
        setting.ignore_index,
        wanted.entropy,
        wanted.top1,
    )


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return at_least_fp32(torch.promote_types(hidden.dtype, weight.dtype))


def _passes(implementation: str) -> Passes:
    if implementation == "triton":
        from bestiary.kernels.triton_log_prob import PASSES as fused  # needs the optional triton

        return fused
    from bestiary.kernels.log_prob_chunked import PASSES

    return PASSES


def _problem(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    logit_map: LogitMap,
    wanted: Wanted,
    ignore: int,
) -> Problem:
    setting = Setting(logit_map, wanted, ignore, _dtype(hidden, weight), weight.shape[0], None)
    return Problem(hidden, weight, bias, target, setting)


def _columns(out: LogProb) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every column; (0,) where it was not asked for."""
    none = out.lse.new_empty(0)
    ids = none.to(torch.int64)
    return (
        out.log_prob,
        out.lse,
        none if out.entropy is None else out.entropy,
        ids if out.top1 is None else out.top1,
        none.clone() if out.logit_mean is None else out.logit_mean,
    )


def _empty_columns(like: Tensor, dtype: torch.dtype, *asked: bool) -> tuple[Tensor, ...]:
    """As `_columns`, of entropy, top1 and mean those that are `asked`."""
    tokens = like.shape[0]
    always = (like.new_empty(tokens, dtype=dtype), like.new_empty(tokens, dtype=dtype))
    kinds = (dtype, torch.int64, dtype)
    return *always, *(like.new_empty(tokens if on else 0, dtype=kind) for on, kind in zip(asked, kinds, strict=True))


# ------------------------------------------------------------------------------------------------ a scalar loss


@torch.library.custom_op("bestiary::log_prob_loss", mutates_args=())
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mean_weights: Tensor | None,
    label: Tensor,
    token: Tensor,
    mean_mass: Tensor,
    smoothing: float,
    z_loss: float,
    divisor: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    entropy: bool,
    top1: bool,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """() loss, log_prob, lse, entropy, top1; gradients of hidden (N, H), weight and bias, (0,) where unneeded."""
    check_labels(target, ignore_index, weight.shape[0])
    wanted = Wanted(entropy, top1, smoothing > 0, mean_weights)
    logit_map = LogitMap(divisor, softcap, temperature)
    loss = ScalarLoss(label, token, smoothing, mean_mass, z_loss)
    passes, needs = _passes(implementation), (for_hidden, for_weight, for_bias)
    with full_precision(hidden):
        problem = _problem(hidden, weight, bias, target, logit_map, wanted, ignore_index)
        if any(needs):
            found, sums = passes.with_gradients(problem, loss, needs)
            held = (None if sums.hidden is None else problem.spread(sums.hidden), sums.weight, sums.bias)
        else:
            found, held = passes.without_gradients(problem), (None, None, None)
        out = problem.output(found)
        value = loss.terms(out).sum()
    gradients = [value.new_empty(0) if tensor is None else tensor for tensor in held]
    return value, *_columns(out)[:4], gradients[0], gradients[1], gradients[2]


@_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    entropy, top1, for_hidden, for_weight, for_bias, _ = rest[-6:]
    dtype, none = _dtype(hidden, weight), (0,)
    shapes = ((for_hidden, hidden.shape), (for_weight, weight.shape), (for_bias, weight.shape[:1]))
    columns = _empty_columns(hidden, dtype, entropy, top1, False)[:4]
    gradients = [hidden.new_empty(shape if needed else none, dtype=dtype) for needed, shape in shapes]
    return hidden.new_empty((), dtype=dtype), *columns, *gradients


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:3]]
    ctx.needs = inputs[-4:-1]
    ctx.count = len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * ctx.count
    if scale is not None:
        for index, held in enumerate(ctx.saved_tensors):
            if ctx.needs[index]:
                gradients[index] = (held * scale).to(ctx.dtypes[index])
    return tuple(gradients)


_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@counted(_loss)
def _loss_flops(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any, **_: Any) -> int:
    """The logits, and the gradients of hidden and weight, which are computed at once."""
    ignore_index, _, _, for_hidden, for_weight, _, _ = rest[-7:]
    return head(hidden, weight, target, ignore_index, 1 + for_hidden + for_weight)


# ------------------------------------------------------------------------------------------------ per-token outputs


@torch.library.custom_op("bestiary::log_prob_rows", mutates_args=())
def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mean_weights: Tensor | None,
    divisor: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    entropy: bool,
    top1: bool,
    logit_mean: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_prob, lse, entropy, top1 and mean of the logits; peak and log_sum, which the backward pass starts from."""
    check_labels(target, ignore_index, weight.shape[0])
    wanted, logit_map = Wanted(entropy, top1, logit_mean, mean_weights), LogitMap(divisor, softcap, temperature)
    with full_precision(hidden):
        problem = _problem(hidden, weight, bias, target, logit_map, wanted, ignore_index)
        found = _passes(implementation).without_gradients(problem)
        out = problem.output(found)
        empty = out.lse.new_empty(0)
        peak = problem.spread(torch.cat([empty, *(rows.peak for rows in found)]))
        log_sum = problem.spread(torch.cat([empty, *(rows.log_sum for rows in found)]))
    return *_columns(out), peak, log_sum


@_rows.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = _dtype(hidden, weight)
    peak, log_sum, *_ = _empty_columns(hidden, dtype, False, False, False)
    return *_empty_columns(hidden, dtype, *rest[-4:-1]), peak, log_sum


@torch.library.custom_op("bestiary::log_prob_rows_backward", mutates_args=())
def _rows_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mean_weights: Tensor | None,
    peak: Tensor,
    log_sum: Tensor,
    log_prob: Tensor,
    entropy: Tensor,
    of_log_prob: Tensor | None,
    of_lse: Tensor | None,
    of_entropy: Tensor | None,
    of_mean: Tensor | None,
    divisor: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias in their dtypes, (0,) where unneeded."""
    wanted, logit_map = Wanted(mean_weights=mean_weights), LogitMap(divisor, softcap, temperature)
    with full_precision(hidden):
        problem = _problem(hidden, weight, bias, target, logit_map, wanted, ignore_index)
        every = slice(0, problem.tokens)
        known = Known(
            problem.take(peak, every),
            problem.take(log_sum, every),
            problem.take(log_prob, every),
            None if of_entropy is None else problem.take(entropy, every),
        )
        zeros = torch.zeros_like(log_prob)
        upstream = Upstream(
            zeros if of_log_prob is None else of_log_prob, zeros if of_lse is None else of_lse, of_entropy, of_mean
        )
        needs = (for_hidden, for_weight, for_bias)
        sums = _passes(implementation).recomputed(problem, known, upstream, needs)
        of_hidden = None if sums.hidden is None else problem.spread(sums.hidden.to(hidden.dtype))
    return (
        hidden.new_empty(0) if of_hidden is None else of_hidden,
        weight.new_empty(0) if sums.weight is None else sums.weight.to(weight.dtype),
        hidden.new_empty(0) if sums.bias is None or bias is None else sums.bias.to(bias.dtype),
    )


@_rows_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    for_hidden, for_weight, for_bias, _ = rest[-4:]
    return (
        hidden.new_empty(hidden.shape if for_hidden else (0,)),
        weight.new_empty(weight.shape if for_weight else (0,)),
        hidden.new_empty(0) if bias is None or not for_bias else bias.new_empty(bias.shape),
    )


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    log_prob, _, entropy, top1, _, peak, log_sum = output
    ctx.save_for_backward(*inputs[:5], peak, log_sum, log_prob, entropy)
    ctx.options, ctx.implementation, ctx.count = inputs[5:9], inputs[-1], len(inputs)
    ctx.mark_non_differentiable(top1, peak, log_sum)
    ctx.set_materialize_grads(False)


def _recompute_rows(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    of_log_prob, of_lse, of_entropy, _, of_mean, _, _ = upstream
    needs = ctx.needs_input_grad[:3]
    given = (*ctx.saved_tensors, of_log_prob, of_lse, of_entropy, of_mean, *ctx.options, *needs, ctx.implementation)
    gradients = _rows_backward(*given)
    found = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    return *found, *[None] * (ctx.count - 3)


_rows.register_autograd(_recompute_rows, setup_context=_keep_rows)


@counted(_rows)
def _rows_flops(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any, **_: Any) -> int:
    """The logits."""
    return head(hidden, weight, target, rest[-5], 1)


@counted(_rows_backward)
def _rows_flops_back(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any, **_: Any) -> int:
    """The gradients of hidden and weight, without the logits that are computed again."""
    ignore_index, for_hidden, for_weight, _, _ = rest[-5:]
    return head(hidden, weight, target, ignore_index, for_hidden + for_weight)
