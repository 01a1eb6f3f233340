"""Log-sum-exp, entropy and their like over a vocabulary that comes in parts: tiles, and ranks that hold a shard each.

Every sum leaves out the target, which joins at the end: log p = −log1p(Σ_{c≠y} e^{z_c} / e^{z_y}) and 1 − p_y keep all
their digits when the model is sure of the target, where p_y − 1 in fp32 is noise or zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bestiary.kernels.log_prob_terms import Wanted
from bestiary.kernels.vocab_parallel import VocabShard
from bestiary.kernels.vocab_tiles import Blocks, Tile, Vocabulary

NOTHING = -1e4  # stands for −∞ where ∞ · 0 would follow: its exponential is 0 in every dtype


class Parts(NamedTuple):
    """Of each part of the vocabulary and token, (P, R).

    top: largest logit but the target's, finite.   mass: Σ_{c≠y} e^{z_c − top}.   moment: the same of e^{…} (z_c − top).
    chosen: the target's logit, −∞ where it lies elsewhere.   mean: Σ_c a_c z_c.   best: int64, where `top` is.
    """

    top: Tensor
    mass: Tensor
    chosen: Tensor
    moment: Tensor | None
    mean: Tensor | None
    best: Tensor | None


class Rows(NamedTuple):
    """Of each token, (R,), over the whole vocabulary: p_c = exp(z_c − peak − log_sum)."""

    peak: Tensor
    log_sum: Tensor
    chosen: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    mean: Tensor | None
    best: Tensor | None

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp, rounded once."""
        return self.peak + self.log_sum


def place(tile: Tile, target: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 1) the target's column in the tile, some column where it lies elsewhere; (R, 1) whether it lies here."""
    column = (target - tile.start)[:, None]
    at = column.clamp(0, tile.real - 1)
    return at, at == column


def merged(parts: Parts) -> Parts:
    """One part out of all, (1, R)."""
    top = parts.top.amax(0, keepdim=True)
    shift = parts.top - top
    scale = shift.exp()
    best = None
    if parts.best is not None:  # the smallest id among equals
        best = parts.best.where(parts.top == top, torch.iinfo(torch.int64).max).amin(0, keepdim=True)
    return Parts(
        top,
        (scale * parts.mass).sum(0, keepdim=True),
        parts.chosen.amax(0, keepdim=True),
        None if parts.moment is None else (scale * (parts.moment + shift * parts.mass)).sum(0, keepdim=True),
        None if parts.mean is None else parts.mean.sum(0, keepdim=True),
        best,
    )


def gathered(parts: Parts, shard: VocabShard) -> Parts:
    """Parts of every rank, (ranks, R), out of this rank's."""
    mine = merged(parts)
    best = None if mine.best is None else shard.gather(mine.best + shard.start)
    numbers = shard.gather(torch.stack([column for column in mine[:5] if column is not None], dim=1)).unbind(1)
    columns = iter(numbers)
    return Parts._make([*(None if column is None else next(columns) for column in mine[:5]), best])


def finished(parts: Parts, target: Tensor) -> Rows:
    """Merges the parts and lets the target, an id of the whole vocabulary, join the others."""
    others = merged(parts)
    top, mass, chosen = others.top[0], others.mass[0], others.chosen[0]
    peak = torch.maximum(top, chosen)
    behind = chosen - peak
    rest, own = mass * (top - peak).exp(), behind.exp()
    log_sum = (rest + own).log()
    log_prob = -torch.logaddexp(torch.zeros_like(top), rest.log() - behind)
    entropy = best = None
    if others.moment is not None:
        moment = (top - peak).exp() * (others.moment[0] + (top - peak) * mass) + own * behind.clamp(min=NOTHING)
        entropy = log_sum - moment * (-log_sum).exp()
    if others.best is not None:
        second = others.best[0]
        best = target.where((chosen > top) | ((chosen == top) & (target < second)), second)
    return Rows(peak, log_sum, chosen, log_prob, entropy, None if others.mean is None else others.mean[0], best)


class Scan:
    """Statistics of one chunk after another over the tiles of one rank.

    Args:
        rows: size of the largest chunk.
        keep: hold, of every tile, what its gradient starts from: e^{z − top} with 0 at the target, or, where a soft cap
            bends the logits, z with −∞ at the target.
    """

    def __init__(self, vocabulary: Vocabulary, wanted: Wanted, rows: int, *, keep: bool) -> None:
        self._vocabulary, self._wanted = vocabulary, wanted
        self.keeps_logits = keep and vocabulary.map.outer is not None
        scratch = Blocks(vocabulary, rows)
        self.kept = Blocks(vocabulary, rows, held=True) if keep else scratch
        self._logits = self.kept if self.keeps_logits else scratch
        self._shifted = scratch
        self._exps = scratch if self.keeps_logits else self.kept
        if wanted.entropy and self._exps is scratch:  # needs logits and exponentials side by side
            self._exps = Blocks(vocabulary, rows)

    def __call__(self, x: Tensor, target: Tensor) -> Parts:
        """Of scaled hidden states (R, H) and targets counted from the first column here: (tiles, R) each."""
        columns = [self._tile(tile, x, target) for tile in self._vocabulary]
        if not columns:  # a rank without any vocabulary
            columns = [self._empty(x)]
        return Parts._make(None if c[0] is None else torch.stack(c) for c in zip(*columns, strict=True))

    def _tile(self, tile: Tile, x: Tensor, target: Tensor) -> Parts:
        vocabulary, wanted, rows, real = self._vocabulary, self._wanted, len(x), slice(tile.real)
        block, weight = self._logits.block(tile, rows), vocabulary.weight(tile)
        logits = vocabulary.logits(x, weight, tile, block, stay=self.keeps_logits)[:, real]
        mean = self._mean(logits, tile) if wanted.logit_mean else None
        at, here = place(tile, target)
        chosen = logits.gather(1, at)
        logits.scatter_(1, at, chosen.masked_fill(here, -torch.inf))
        top, best = logits.max(1) if wanted.top1 else (logits.amax(1), None)
        top = top.clamp_(min=torch.finfo(top.dtype).min)  # where there is nothing but −∞
        shifted = torch.sub(logits, top[:, None], out=self._shifted.block(tile, rows)[:, real])
        exps = self._exps.block(tile, rows)
        exps[:, tile.real :].zero_()
        exps = torch.exp(shifted, out=exps[:, real])
        return Parts(
            top,
            exps.sum(1),
            chosen.masked_fill(~here, -torch.inf).squeeze(1),
            shifted.clamp_(min=NOTHING).mul_(exps).sum(1) if wanted.entropy else None,
            mean,
            None if best is None else best + tile.start,
        )

    def _mean(self, logits: Tensor, tile: Tile) -> Tensor:
        weights = self._wanted.mean_weights
        return logits.sum(1) if weights is None else logits @ weights[tile.columns]

    def _empty(self, x: Tensor) -> Parts:
        wanted, zero = self._wanted, x.new_zeros(len(x))
        return Parts(
            torch.full_like(zero, torch.finfo(x.dtype).min),
            zero,
            torch.full_like(zero, -torch.inf),
            zero if wanted.entropy else None,
            zero if wanted.logit_mean else None,
            torch.zeros_like(zero, dtype=torch.int64) if wanted.top1 else None,
        )
