"""Divergence of two heads over the whole vocabulary, by chunks of tokens through which all tiles of both live.

A scalar loss takes its gradients in the forward pass (6·N·H·V FLOPs for the student and 2 for the teacher); per-token
values compute the chunk again in the backward pass. Nothing but inputs and, for a scalar, gradients is kept in between.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bestiary.kernels.divergence_terms import Measure
from bestiary.kernels.log_prob_autograd import refuse_second_order
from bestiary.kernels.log_prob_gradients import Gradients, Needs, bend
from bestiary.kernels.log_prob_terms import LogitMap
from bestiary.kernels.vocab_parallel import VocabShard
from bestiary.kernels.vocab_tiles import Blocks, Tile, Vocabulary, row_chunks


class Teacher:
    """The teacher's side: nothing of it has a gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap) -> None:
        self.hidden, self.weight = hidden.detach(), weight.detach()
        self.bias, self.map = None if bias is None else bias.detach(), logit_map


class Settings(NamedTuple):
    """What a call is besides the student's tensors.

    counted: (n,) positions of the tokens that count, None: all.   dtype: of logits, sums and results.
    vocab_size: of the whole vocabulary.   shard: this rank's part of both heads; None: it all.
    """

    map: LogitMap
    teacher: Teacher
    measure: Measure
    counted: Tensor | None
    dtype: torch.dtype
    vocab_size: int
    shard: VocabShard | None


class _Held:
    """Logits of one head for a chunk, all tiles in memory, and their normalisation."""

    def __init__(self, vocabulary: Vocabulary, rows: int, shard: VocabShard | None) -> None:
        self.vocabulary, self._blocks, self._shard = vocabulary, Blocks(vocabulary, rows, held=True), shard
        self._top = self._log_sum = torch.empty(0)

    def fill(self, x: Tensor) -> None:
        """Logits of hidden states (R, H), not yet scaled."""
        self.x = x.to(self.vocabulary.dtype) * self.vocabulary.map.inner
        tops, masses = [], []
        for tile in self.vocabulary:
            block = self.block(tile)
            values = self.vocabulary.logits(self.x, self.vocabulary.weight(tile), tile, block)[:, : tile.real]
            top = values.amax(1).clamp_(min=torch.finfo(block.dtype).min)
            tops.append(top)
            masses.append((values - top[:, None]).exp_().sum(1))
        if not tops:  # a rank without any vocabulary
            tops, masses = [self.x.new_full((len(x),), torch.finfo(self.x.dtype).min)], [self.x.new_zeros(len(x))]
        self._top, mass = _joined(torch.stack((torch.stack(tops), torch.stack(masses)), 1))
        if self._shard is not None:
            self._top, mass = _joined(self._shard.gather(torch.stack((self._top, mass))[None]))
        self._log_sum = mass.log()

    def block(self, tile: Tile) -> Tensor:
        """(R, tile.width) of the chunk, 0 in the padded columns."""
        return self._blocks.block(tile, len(self.x))

    def log_probs(self, tile: Tile) -> Tensor:
        """(R, tile.real), a copy."""
        return (self.block(tile)[:, : tile.real] - self._top[:, None]).sub_(self._log_sum[:, None])


def _joined(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit and mass relative to it, (R,), out of those of parts, (P, 2, R)."""
    tops, masses = parts.unbind(1)
    top = tops.amax(0)
    return top, (masses * (tops - top).exp()).sum(0)


class Problem:
    """One call: two heads, and the tokens that count."""

    def __init__(self, student: tuple[Tensor, Tensor, Tensor | None], settings: Settings) -> None:
        self._hidden, weight, bias = student
        self._settings, self._index, self.dtype = settings, settings.counted, settings.dtype
        self._student = Vocabulary(weight, bias, settings.map, settings.dtype)
        self._tokens = len(self._hidden) if self._index is None else len(self._index)

    def run(self, share: Tensor | None, needs: Needs) -> tuple[Tensor, Gradients | None]:
        """(n,) divergences; with `share` (n,), the gradients of Σ share · divergence."""
        teacher, measure, shard = self._settings.teacher, self._settings.measure, self._settings.shard
        reference = Vocabulary(teacher.weight, teacher.bias, teacher.map, self.dtype)
        # The same chunks on every rank of a split vocabulary: each is a few collectives.
        size = self._student.size if shard is None else -(-self._settings.vocab_size // shard.ranks)
        chunks = row_chunks(self._tokens, self._student.hidden_size, size, self.dtype, held=2)
        largest = max((rows.stop - rows.start for rows in chunks), default=0)
        ours, theirs = _Held(self._student, largest, shard), _Held(reference, largest, shard)
        gradients = None if share is None else Gradients(self._student, self._tokens, needs)
        found = [self._hidden.new_empty(0, dtype=self.dtype)]
        for rows in chunks:
            ours.fill(self._take(self._hidden, rows))
            theirs.fill(self._take(teacher.hidden, rows))
            terms = [measure.terms(ours.log_probs(tile), theirs.log_probs(tile)).sum(1) for tile in self._student]
            found.append(self._total(terms, ours.x))
            if gradients is not None and share is not None:
                self._differentiate(ours, theirs, share[rows], gradients, rows)
        if gradients is not None:
            gradients.finish()
            if shard is not None and gradients.hidden is not None:
                shard.sum_(gradients.hidden)
        return torch.cat(found), gradients

    def _total(self, terms: list[Tensor], x: Tensor) -> Tensor:
        """(R,) sum over the tiles of every rank."""
        mine, shard = torch.stack([x.new_zeros(len(x)), *terms]).sum(0), self._settings.shard
        return mine if shard is None else shard.gather(mine[None]).sum(0)

    def _differentiate(self, ours: _Held, theirs: _Held, share: Tensor, gradients: Gradients, rows: slice) -> None:
        vocabulary, measure, pull = self._student, self._settings.measure, torch.zeros_like(share)
        if measure.kind != "forward_kl":
            terms = [measure.pull(ours.log_probs(tile), theirs.log_probs(tile)).sum(1) for tile in vocabulary]
            pull = self._total(terms, ours.x)
        for tile in vocabulary:
            block = ours.block(tile)
            values = block[:, : tile.real]
            slope = measure.slope(ours.log_probs(tile), theirs.log_probs(tile), pull).mul_(share[:, None])
            if vocabulary.map.outer is not None:
                slope.mul_(bend(values, vocabulary.map.outer, values))
            values.copy_(slope)
            gradients.add(block, tile, vocabulary.weight(tile), ours.x, rows)

    def _take(self, column: Tensor, rows: slice) -> Tensor:
        return column[rows] if self._index is None else column[self._index[rows]]

    def spread(self, column: Tensor) -> Tensor:
        """(n, …) → (N, …), 0 elsewhere."""
        if self._index is None:
            return column
        return column.new_zeros(len(self._hidden), *column.shape[1:]).index_copy_(0, self._index, column)

    def take_all(self, column: Tensor) -> Tensor:
        """(N,) → (n,)."""
        return self._take(column, slice(None))


class _Divergence(torch.autograd.Function):
    """(N,) divergences, or with `share` (N,) the scalar Σ share · divergence, its gradients computed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        share: Tensor | None,
        settings: Settings,
        differentiate: bool,
    ) -> Tensor:
        ctx.settings, ctx.share, ctx.held = settings, share, None
        ctx.save_for_backward(hidden, weight, bias)
        with torch.autocast(hidden.device.type, enabled=False):
            problem = Problem((hidden, weight, bias), settings)
            part = None if share is None else problem.take_all(share)
            wanted = differentiate and any(ctx.needs_input_grad)
            values, ctx.held = problem.run(part if wanted else None, ctx.needs_input_grad[:3])
            return problem.spread(values) if part is None else (part * values).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("divergence", "chunked")
        hidden, weight, bias = ctx.saved_tensors
        held, ctx.held = ctx.held, None
        with torch.autocast(hidden.device.type, enabled=False):
            problem = Problem((hidden, weight, bias), ctx.settings)
            if held is None:
                share = upstream if ctx.share is None else upstream * ctx.share
                held = problem.run(problem.take_all(share), ctx.needs_input_grad[:3])[1]
            elif upstream.device.type != "cpu" or upstream != 1.0:
                for gradient in (held.hidden, held.weight, held.bias):
                    if gradient is not None:
                        gradient.mul_(upstream)
            of_hidden = None if held.hidden is None else problem.spread(held.hidden.to(hidden.dtype))
            of_weight = None if held.weight is None else held.weight.to(weight.dtype)
            of_bias = None if held.bias is None or bias is None else held.bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None, None


def divergence(student: tuple[Tensor, Tensor, Tensor | None], share: Tensor | None, settings: Settings) -> Tensor:
    """(N,) divergences, 0 where a token does not count; with `share` (N,) the sum of share · divergence."""
    out: Tensor = _Divergence.apply(*student, share, settings, torch.is_grad_enabled())
    return out
