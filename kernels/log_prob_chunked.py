"""The log-prob core by chunks of tokens and tiles of the vocabulary, with a backward pass written by hand.

Two modes. Per-token outputs: one tile of logits lives at a time; the backward pass computes it again (8·N·H·V FLOPs in
all). A scalar loss: the exponentials of a chunk stay until its gradients are done, still in the forward pass (6·N·H·V).

Saved for backward: hidden, weight, bias, target, and per token three or four numbers; a scalar loss holds its gradients
too (in the dtype they were summed in, so that they are rounded once). Second-order gradients: the reference has them.
"""

from typing import Any

import torch
from torch import Tensor

from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.log_prob_gradients import Gradients, Known, Needs, Slope, Upstream
from bestiary.kernels.log_prob_statistics import Parts, Rows, Scan, finished, gathered
from bestiary.kernels.log_prob_terms import LogProb, ScalarLoss, Setting
from bestiary.kernels.vocab_tiles import Blocks, Vocabulary, row_chunks


class Problem:
    """One call of the core: the tokens that count and the vocabulary of this rank."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> None:
        index = (target != setting.ignore_index).nonzero().squeeze(-1)
        self.tokens, self.setting = len(index), setting
        self._index = None if len(index) == len(target) else index
        self._hidden, self._target = hidden, target
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
        x = self.take(self._hidden, rows).to(self.vocabulary.dtype)
        return (x if self.vocabulary.map.inner == 1.0 else x * self.vocabulary.map.inner), self.take(self._target, rows)

    def spread(self, column: Tensor, fill: float = 0) -> Tensor:
        """(n, …) of the tokens that count → (N, …), `fill` elsewhere."""
        if self._index is None:
            return column
        whole = column.new_full((len(self._target), *column.shape[1:]), fill)
        return whole.index_copy_(0, self._index, column)

    def output(self, chunks: list[Rows]) -> LogProb:
        """Per-token results of all chunks, at their places."""
        wanted, dtype = self.setting.wanted, self.vocabulary.dtype
        mean_share = 1.0 / self.setting.vocab_size if wanted.mean_weights is None else 1.0

        def column(parts: list[Tensor | None], fill: int = 0) -> Tensor:
            empty = self._target.new_empty(0, dtype=torch.int64 if fill else dtype)
            return self.spread(torch.cat([empty, *(part for part in parts if part is not None)]), fill)

        return LogProb(
            column([chunk.log_prob for chunk in chunks]),
            column([chunk.lse for chunk in chunks]),
            column([chunk.entropy for chunk in chunks]) if wanted.entropy else None,
            column([chunk.best for chunk in chunks], -1) if wanted.top1 else None,
            column([chunk.mean for chunk in chunks]) * mean_share if wanted.logit_mean else None,
        )


def _statistics(problem: Problem, scan: Scan, x: Tensor, target: Tensor) -> tuple[Rows, Parts]:
    parts = scan(x, target - problem.offset)
    shard = problem.setting.shard
    return finished(parts if shard is None else gathered(parts, shard), target), parts


def _without_gradients(problem: Problem) -> list[Rows]:
    """Statistics of all chunks, one tile of logits in memory."""
    chunks = problem.chunks(held=False)
    scan = Scan(problem.vocabulary, problem.setting.wanted, _largest(chunks), keep=False)
    return [_statistics(problem, scan, *problem.inputs(rows))[0] for rows in chunks]


def _largest(chunks: list[slice]) -> int:
    return max((chunk.stop - chunk.start for chunk in chunks), default=0)


def _with_gradients(problem: Problem, loss: ScalarLoss, needs: Needs) -> tuple[list[Rows], Gradients]:
    """Statistics of all chunks and the gradients of a scalar loss, all tiles of one chunk in memory."""
    chunks, vocabulary = problem.chunks(held=True), problem.vocabulary
    gradients, found, largest = Gradients(vocabulary, problem.tokens, needs), [], _largest(chunks)
    scan = Scan(vocabulary, problem.setting.wanted, largest, keep=True)
    spare = [Blocks(vocabulary, largest)] if scan.keeps_logits else []
    for rows in chunks:
        x, target = problem.inputs(rows)
        out, parts = _statistics(problem, scan, x, target)
        token = problem.take(loss.token, rows)
        pull = (loss.smoothing * loss.mean_mass + 2.0 * loss.z_loss * out.lse) * token
        mean = -loss.smoothing * token if loss.smoothing else None
        upstream = Upstream(problem.take(loss.label, rows), pull, None, mean)
        known = Known(out.peak, out.log_sum, out.log_prob, None)
        slope = Slope(problem.setting, known, upstream, target - problem.offset, spare)
        for tile in vocabulary:
            block = scan.kept.block(tile, len(x))
            if scan.keeps_logits:
                slope.from_logits(block, tile, out.chosen)
            else:
                slope.from_exps(block, tile, parts.top[tile.index])
            gradients.add(block, tile, vocabulary.weight(tile), x, rows)
        found.append(out)
    gradients.finish()
    return found, gradients


def _recomputed(problem: Problem, known: Known, upstream: Upstream, needs: Needs) -> Gradients:
    """Gradients of per-token outputs, one tile of logits in memory; `known` (n,), `upstream` (N,)."""
    chunks, vocabulary = problem.chunks(held=False), problem.vocabulary
    gradients = Gradients(vocabulary, problem.tokens, needs)
    count = 1 + (vocabulary.map.outer is not None) + (upstream.entropy is not None)
    blocks, *spare = [Blocks(vocabulary, _largest(chunks)) for _ in range(count)]
    for rows in chunks:
        x, target = problem.inputs(rows)
        slope = Slope(
            problem.setting,
            Known._make(None if column is None else column[rows] for column in known),
            Upstream._make(None if column is None else problem.take(column, rows) for column in upstream),
            target - problem.offset,
            spare,
        )
        for tile in vocabulary:
            weight = vocabulary.weight(tile)
            logits = vocabulary.logits(x, weight, tile, blocks.block(tile, len(x)))
            slope.from_logits(logits, tile)
            gradients.add(logits, tile, weight, x, rows)
    gradients.finish()
    return gradients


# ------------------------------------------------------------------ autograd


class _PerToken(torch.autograd.Function):
    """Outputs of `LogProb`; logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting
    ) -> tuple[Tensor | None, ...]:
        with _full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            found = _without_gradients(problem)
            out = problem.output(found)
        empty = [out.lse.new_empty(0)]
        peak = torch.cat(empty + [rows.peak for rows in found])
        log_sum = torch.cat(empty + [rows.log_sum for rows in found])
        log_prob = torch.cat(empty + [rows.log_prob for rows in found])
        entropy = torch.cat(empty + [rows.entropy for rows in found if rows.entropy is not None])
        ctx.save_for_backward(hidden, weight, bias, target, peak, log_sum, log_prob, entropy)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        if out.top1 is not None:
            ctx.mark_non_differentiable(out.top1)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, target, peak, log_sum, log_prob, entropy = ctx.saved_tensors
        of_log_prob, of_lse, of_entropy, _, of_mean = upstream
        with _full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            zeros = torch.zeros(target.shape, dtype=problem.vocabulary.dtype, device=target.device)
            gradients = _recomputed(
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
            return *_delivered(problem, gradients, hidden, weight, bias), None, None


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
        differentiate: bool,
    ) -> tuple[Tensor | None, ...]:
        with _full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            if differentiate and any(ctx.needs_input_grad):
                found, ctx.held = _with_gradients(problem, loss, ctx.needs_input_grad[:3])
            else:
                found, ctx.held = _without_gradients(problem), None
            out = problem.output(found)
            value = loss.terms(out).sum()
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.setting = loss, setting
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(column for column in out if column is not None))
        return value, *out

    @staticmethod
    def backward(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, target = ctx.saved_tensors
        if scale is None:
            return (None,) * 7
        held, ctx.held = ctx.held, None
        with _full_precision(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            if held is None:
                held = _with_gradients(problem, ctx.loss, ctx.needs_input_grad[:3])[1]
            if scale.device.type != "cpu" or scale != 1.0:
                for gradient in (held.hidden, held.weight, held.bias):
                    if gradient is not None:
                        gradient.mul_(scale)
            return *_delivered(problem, held, hidden, weight, bias), None, None, None, None


def _delivered(
    problem: Problem, gradients: Gradients, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the dtypes and at the places of the inputs, that of `hidden` summed over the ranks."""
    of_hidden = gradients.hidden
    if of_hidden is not None:
        if problem.setting.shard is not None:
            problem.setting.shard.sum_(of_hidden)
        of_hidden = problem.spread(of_hidden.to(hidden.dtype))
    of_weight = None if gradients.weight is None else gradients.weight.to(weight.dtype)
    return of_hidden, of_weight, None if gradients.bias is None or bias is None else gradients.bias.to(bias.dtype)


def _full_precision(hidden: Tensor) -> torch.autocast:
    """Sums run in at least fp32 under autocast too."""
    return torch.autocast(hidden.device.type, enabled=False)


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedDispatch(
            "log_prob = 'chunked' has no second-order gradients (create_graph=True).",
            remedy="compute the loss inside `with bestiary.kernels.dispatch.force(log_prob='reference')`",
        )


# ------------------------------------------------------------------ entry


@torch.compiler.disable(reason="chunks and dropped tokens depend on data; the head is the last node of a step")
def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> LogProb:
    """Per-token log-probabilities, differentiable once; arguments as checked by `linear_log_prob`."""
    return LogProb(*_PerToken.apply(hidden, weight, bias, target, setting))


@torch.compiler.disable(reason="chunks and dropped tokens depend on data; the head is the last node of a step")
def scalar_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: ScalarLoss, setting: Setting
) -> tuple[Tensor, LogProb]:
    """() loss with its gradients computed at once, and log-probabilities without a graph."""
    value, *out = _Scalar.apply(hidden, weight, bias, target, loss, setting, torch.is_grad_enabled())
    return value, LogProb(*out)
