"""Gradients of the log-prob core, tile by tile: of the logits, and from there of hidden states, weight and bias.

For one token with logits z, p = softmax(z), target y and upstream gradients g of its outputs,

    ∂/∂z_c = g_lp (1[c = y] − p_c) + g_lse p_c − g_ent p_c (log p_c + H) + g_mean a_c

with a_c = 1/V or the weights of the mean.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bestiary.kernels.log_prob_statistics import NOTHING, place
from bestiary.kernels.log_prob_terms import Setting
from bestiary.kernels.products import put_product
from bestiary.kernels.vocab_tiles import Blocks, Tile, Vocabulary

Needs = tuple[bool, bool, bool]  # whether hidden, weight, bias need a gradient


class Upstream(NamedTuple):
    """Gradients of a chunk's outputs, (R,); None where nothing depends on that output."""

    log_prob: Tensor
    lse: Tensor
    entropy: Tensor | None
    mean: Tensor | None


class Known(NamedTuple):
    """What the gradient of a chunk needs to know of its statistics, (R,)."""

    peak: Tensor
    log_sum: Tensor
    log_prob: Tensor
    entropy: Tensor | None


class Gradients:
    """Sums of the gradients over chunks and tiles, in at least fp32; what is not needed is never computed.

    hidden: (n, H) of the tokens that count.   weight: (V, H).   bias: (V,).
    """

    def __init__(self, vocabulary: Vocabulary, tokens: int, needs: Needs) -> None:
        shape, make = (vocabulary.size, vocabulary.hidden_size), torch.empty if tokens else torch.zeros
        new: dict[str, Any] = {"dtype": vocabulary.dtype, "device": vocabulary.device}
        of_hidden = torch.empty if vocabulary.tiles else torch.zeros
        self.hidden = of_hidden(tokens, shape[1], **new) if needs[0] else None
        self.weight = make(shape, **new) if needs[1] else None
        self.bias = torch.zeros(shape[0], **new) if needs[2] else None
        self._map = vocabulary.map

    def add(self, dz: Tensor, tile: Tile, weight: Tensor, x: Tensor, rows: slice) -> None:
        """The share of one tile: dz (R, tile.width) before the constants, 0 in padded columns; x scaled."""
        if self.hidden is not None:
            put_product(self.hidden[rows], dz, weight, add=tile.index > 0)
        if self.weight is not None:
            mine = self.weight[tile.columns]
            if tile.real == tile.width:
                put_product(mine, dz.T, x, add=rows.start > 0)
            else:
                product = torch.mm(dz.T, x)[: tile.real]
                mine.copy_(product) if rows.start == 0 else mine.add_(product)
        if self.bias is not None:
            self.bias[tile.columns].add_(dz[:, : tile.real].sum(0), alpha=self._map.bias_factor)

    def finish(self) -> None:
        """Applies the constant that the hidden states were multiplied with."""
        if self.hidden is not None and self._map.inner != 1.0:
            self.hidden.mul_(self._map.inner)


class Shares(NamedTuple):
    """∂loss/∂z_c = e^{z_c − peak} (share + bend (z_c − peak)) + mean · a_c, own + mean · a_y at the target; (R,).

    a_c = 1 where the mean has no weights.
    """

    share: Tensor
    own: Tensor
    bend: Tensor | None
    mean: Tensor | None


def shares(setting: Setting, known: Known, upstream: Upstream) -> Shares:
    """The gradient of a chunk's logits in terms of their exponentials; the target's keeps its digits where p → 1."""
    inverse, p = (-known.log_sum).exp(), known.log_prob.exp()
    share = (upstream.lse - upstream.log_prob) * inverse
    own = upstream.lse * p - upstream.log_prob * known.log_prob.expm1()
    bend = None
    if upstream.entropy is not None and known.entropy is not None:
        own = own - upstream.entropy * p * (known.log_prob.clamp(min=NOTHING) + known.entropy)
        bend = -upstream.entropy * inverse
        share = share + bend * (known.entropy - known.log_sum)
    mean = upstream.mean
    if mean is not None and setting.wanted.mean_weights is None:
        mean = mean / setting.vocab_size
    return Shares(share, own, bend, mean)


def bend(logits: Tensor, outer: float, out: Tensor) -> Tensor:
    """Derivative of capped logits outer · tanh(u) by u, outer · (1 − tanh²), into `out`."""
    return torch.div(logits, outer, out=out).square_().neg_().add_(1.0).mul_(outer)


class Slope:
    """∂loss/∂z of one chunk, tile by tile, in place.

    Args:
        target: (R,) counted from the first column here.
        spare: memory for a tile each, where it starts from logits: one for a soft cap, one for the entropy.
    """

    def __init__(self, setting: Setting, known: Known, upstream: Upstream, target: Tensor, spare: list[Blocks]) -> None:
        self._weights, self._outer = setting.wanted.mean_weights, setting.logit_map.outer
        self._known, self._target, self._spare = known, target, spare
        self._share, self._own, self._bend, self._mean = shares(setting, known, upstream)

    def from_exps(self, exps: Tensor, tile: Tile, top: Tensor) -> None:
        """Of e^{z − top} (R, tile.width) that were held, without a soft cap or gradient of the entropy."""
        values = exps[:, : tile.real]
        values.mul_((self._share * (top - self._known.peak).exp())[:, None])
        self._add_mean(values, tile)
        at, here = place(tile, self._target)
        values.scatter_(1, at, self._own_value(tile, at).where(here, values.gather(1, at)))

    def from_logits(self, logits: Tensor, tile: Tile, chosen: Tensor | None = None) -> None:
        """Of z (R, tile.width); `chosen` puts the target's back."""
        values, rows = logits[:, : tile.real], len(logits)
        at, here = place(tile, self._target)
        if chosen is not None:
            values.scatter_(1, at, chosen[:, None].where(here, values.gather(1, at)))
        bent = None
        if self._outer is not None:
            bent = bend(values, self._outer, self._spare[0].block(tile, rows)[:, : tile.real])
        values.sub_(self._known.peak[:, None])
        if self._bend is None:
            values.exp_().mul_(self._share[:, None])
        else:
            values.clamp_(min=NOTHING)
            exps = torch.exp(values, out=self._spare[-1].block(tile, rows)[:, : tile.real])
            values.mul_(self._bend[:, None]).add_(self._share[:, None]).mul_(exps)
        self._add_mean(values, tile)
        values.scatter_(1, at, self._own_value(tile, at).where(here, values.gather(1, at)))
        if bent is not None:
            values.mul_(bent)

    def _own_value(self, tile: Tile, at: Tensor) -> Tensor:
        """(R, 1) the whole of it at the target, `at` being its column."""
        if self._mean is None:
            return self._own[:, None]
        mean = self._mean[:, None]
        return self._own[:, None] + (mean if self._weights is None else mean * self._weights[tile.columns][at])

    def _add_mean(self, values: Tensor, tile: Tile) -> None:
        if self._mean is None:
            return
        if self._weights is None:
            values.add_(self._mean[:, None])
        else:
            values.addr_(self._mean, self._weights[tile.columns])
