"""The log-prob core under autograd, for implementations that compute gradients by hand: what is saved, when, for whom.

An implementation brings three passes over a `Problem`. Saved for backward: hidden, weight, bias, target, and per token
three or four numbers; a scalar loss holds its gradients too (in the dtype they were summed in, so that they are rounded
once). Second-order gradients: `log_prob_reference` has them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.log_prob_gradients import Known, Needs, Upstream
from bestiary.kernels.log_prob_statistics import Rows
from bestiary.kernels.log_prob_terms import LogProb, ScalarLoss, Setting
from bestiary.kernels.lookup import remember_dense
from bestiary.kernels.vocab_tiles import Vocabulary, row_chunks


class Problem:
    """One call of the core: the tokens that count and the vocabulary of this rank."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> None:
        index = (target != setting.ignore_index).nonzero().squeeze(-1)
        self.tokens, self.setting = len(index), setting
        self._index = None if len(index) == len(target) else index
        self.hidden, self.weight, self.bias, self.target = hidden, weight, bias, target
        self.vocabulary = Vocabulary(weight, bias, setting.logit_map, setting.dtype)
        self.offset = 0 if setting.shard is None else setting.shard.start

    def chunks(self, *, held: bool) -> list[slice]:
        """The same on every rank of a sharded vocabulary: each chunk is one collective."""
        shard, vocabulary = self.setting.shard, self.vocabulary
        size = vocabulary.size if shard is None else -(-self.setting.vocab_size // shard.ranks)
        return row_chunks(self.tokens, vocabulary.hidden_size, size, vocabulary.dtype, held=1 if held else 0)

    def take(self, column: Tensor, rows: slice) -> Tensor:
        """A chunk of an (N, …) tensor."""
        return column[rows] if self._index is None else column[self._index[rows]]

    def inputs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Of a chunk: hidden states times the constants in front of the product, and targets."""
        x = self.take(self.hidden, rows).to(self.vocabulary.dtype)
        return (x if self.vocabulary.map.inner == 1.0 else x * self.vocabulary.map.inner), self.take(self.target, rows)

    def spread(self, column: Tensor, fill: float = 0) -> Tensor:
        """(n, …) of the tokens that count → (N, …), `fill` elsewhere."""
        if self._index is None:
            return column
        whole = column.new_full((len(self.target), *column.shape[1:]), fill)
        return whole.index_copy_(0, self._index, column)

    def output(self, chunks: list[Rows]) -> LogProb:
        """Per-token results of all chunks, at their places."""
        wanted, dtype = self.setting.wanted, self.vocabulary.dtype
        mean_share = 1.0 / self.setting.vocab_size if wanted.mean_weights is None else 1.0

        def column(parts: list[Tensor | None], fill: int = 0) -> Tensor:
            empty = self.target.new_empty(0, dtype=torch.int64 if fill else dtype)
            return self.spread(torch.cat([empty, *(part for part in parts if part is not None)]), fill)

        return LogProb(
            column([chunk.log_prob for chunk in chunks]),
            column([chunk.lse for chunk in chunks]),
            column([chunk.entropy for chunk in chunks]) if wanted.entropy else None,
            column([chunk.best for chunk in chunks], -1) if wanted.top1 else None,
            column([chunk.mean for chunk in chunks]) * mean_share if wanted.logit_mean else None,
        )


class Sums(Protocol):
    """Gradients in at least fp32: hidden (n, H) of the tokens that count, weight (V, H), bias (V,); None: unneeded."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Passes(NamedTuple):
    """An implementation: its name in `dispatch`, and how it walks over chunks of tokens and tiles of the vocabulary.

    without_gradients: statistics of every chunk.   with_gradients: these and the gradients of a scalar loss.
    recomputed: gradients of per-token outputs, from `Known` (n,) and `Upstream` (N,).
    """

    name: str
    without_gradients: Callable[[Problem], list[Rows]]
    with_gradients: Callable[[Problem, ScalarLoss, Needs], tuple[list[Rows], Sums]]
    recomputed: Callable[[Problem, Known, Upstream, Needs], Sums]


class _PerToken(torch.autograd.Function):
    """Outputs of `LogProb`; logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        setting: Setting,
        passes: Passes,
    ) -> tuple[Tensor | None, ...]:
        with full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            found = passes.without_gradients(problem)
            out = problem.output(found)
        empty = [out.lse.new_empty(0)]
        peak = torch.cat(empty + [rows.peak for rows in found])
        log_sum = torch.cat(empty + [rows.log_sum for rows in found])
        log_prob = torch.cat(empty + [rows.log_prob for rows in found])
        entropy = torch.cat(empty + [rows.entropy for rows in found if rows.entropy is not None])
        ctx.save_for_backward(hidden, weight, bias, target, peak, log_sum, log_prob, entropy)
        ctx.setting, ctx.passes = setting, passes
        ctx.set_materialize_grads(False)
        if out.top1 is not None:
            ctx.mark_non_differentiable(out.top1)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("log_prob", ctx.passes.name)
        hidden, weight, bias, target, peak, log_sum, log_prob, entropy = ctx.saved_tensors
        of_log_prob, of_lse, of_entropy, _, of_mean = upstream
        with full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            zeros = torch.zeros(target.shape, dtype=problem.vocabulary.dtype, device=target.device)
            gradients = ctx.passes.recomputed(
                problem,
                Known(peak, log_sum, log_prob, entropy if of_entropy is not None else None),
                Upstream(
                    zeros if of_log_prob is None else of_log_prob,
                    zeros if of_lse is None else of_lse,
                    of_entropy,
                    of_mean,
                ),
                ctx.needs_input_grad[:3],
            )
            return *_delivered(ctx, problem, gradients), None, None, None


class _Scalar(torch.autograd.Function):
    """A scalar loss whose gradients are there when the forward pass ends.

    The first backward call hands them out, scaled in place; another one on a retained graph computes them again, so no
    call needs a second buffer as large as the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        loss: ScalarLoss,
        setting: Setting,
        passes: Passes,
        differentiate: bool,
    ) -> tuple[Tensor | None, ...]:
        with full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            if differentiate and any(ctx.needs_input_grad):
                found, ctx.held = passes.with_gradients(problem, loss, ctx.needs_input_grad[:3])
            else:
                found, ctx.held = passes.without_gradients(problem), None
            out = problem.output(found)
            value = loss.terms(out).sum()
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.setting, ctx.passes = loss, setting, passes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(column for column in out if column is not None))
        return value, *out

    @staticmethod
    def backward(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("log_prob", ctx.passes.name)
        hidden, weight, bias, target = ctx.saved_tensors
        if scale is None:
            return (None,) * 8
        held, ctx.held = ctx.held, None
        with full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            if held is None:
                held = ctx.passes.with_gradients(problem, ctx.loss, ctx.needs_input_grad[:3])[1]
            if scale.device.type != "cpu" or scale != 1.0:
                for gradient in (held.hidden, held.weight, held.bias):
                    if gradient is not None:
                        gradient.mul_(scale)
            return *_delivered(ctx, problem, held), None, None, None, None, None


def _delivered(ctx: Any, problem: Problem, gradients: Sums) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the dtypes and at the places of the inputs, that of `hidden` summed over the ranks."""
    of_hidden, shard, bias = gradients.hidden, problem.setting.shard, problem.bias
    if of_hidden is not None:
        if shard is not None:
            shard.sum_(of_hidden)
        of_hidden = problem.spread(of_hidden.to(problem.hidden.dtype))
    of_weight = None if gradients.weight is None else gradients.weight.to(problem.weight.dtype)
    if of_weight is not None:
        remember_dense(ctx, 1, of_weight)
    return of_hidden, of_weight, None if gradients.bias is None or bias is None else gradients.bias.to(bias.dtype)


def full_precision(hidden: Tensor) -> torch.autocast:
    """Sums run in at least fp32 under autocast too."""
    return torch.autocast(hidden.device.type, enabled=False)


def refuse_second_order(operation: str, implementation: str) -> None:
    """For backward passes written by hand: `create_graph=True` is an error that names what can do it."""
    if torch.is_grad_enabled():
        raise UnsupportedDispatch(
            f"{operation} = {implementation!r} has no second-order gradients (create_graph=True).",
            remedy=f"compute the loss inside `with bestiary.kernels.dispatch.force({operation}='reference')`",
        )


def per_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting, passes: Passes
) -> LogProb:
    """Per-token log-probabilities, differentiable once."""
    return LogProb(*_PerToken.apply(hidden, weight, bias, target, setting, passes))


def scalar(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    loss: ScalarLoss,
    setting: Setting,
    passes: Passes,
) -> tuple[Tensor, LogProb]:
    """() loss with its gradients computed at once, and log-probabilities without a graph."""
    value, *out = _Scalar.apply(hidden, weight, bias, target, loss, setting, passes, torch.is_grad_enabled())
    return value, LogProb(*out)
