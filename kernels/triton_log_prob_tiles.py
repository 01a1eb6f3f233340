"""Triton kernels of the log-prob core: what a tile of logits says about its tokens, and the tile's gradient.

A tile holds products u = h Wᵀ as the GEMM left them. Its logits z = outer · tanh(u·inner + b·bias_factor), or without
the cap z = u·inner + b·bias_factor (`LogitMap`), exist in registers only. Row offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bestiary.kernels.log_prob_statistics import Parts
from bestiary.kernels.log_prob_terms import LogitMap, Wanted
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.vocab_tiles import Tile

BLOCK = 1024  # columns at a time: 8 numbers a thread for each running figure
WARPS = 4


@triton.jit
def _tanh(u):
    """1 − 2e/(1 + e) with e = exp(−2|u|); near 0, where that cancels, the series to u¹¹."""
    e = tl.exp(-2.0 * tl.abs(u))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(u < 0, -far, far)
    s = u * u
    near = 0.021869488536155203 - s * 0.008863235529902197
    near = -0.05396825396825397 + s * near
    near = 0.13333333333333333 + s * near
    near = -0.3333333333333333 + s * near
    return tl.where(s < 0.09, u + u * s * near, far)


@triton.jit
def _logits(row, bias, column, real, inner, bias_factor, outer, HAS_BIAS: tl.constexpr, CAP: tl.constexpr):
    """z of some columns, −∞ beyond the real ones; and 1 − tanh², 1 without a cap."""
    inside = column < real
    z = tl.load(row + column, mask=inside, other=0.0).to(tl.float32) * inner
    if HAS_BIAS:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) * bias_factor
    bent = tl.full(z.shape, 1.0, tl.float32)
    if CAP:
        t = _tanh(z)
        z = t * outer
        bent = (1.0 - t) * (1.0 + t)
    return tl.where(inside, z, float("-inf")), bent


@triton.jit
def tile_statistics(
    logits, bias, target, weights, top_out, mass_out, chosen_out, moment_out, mean_out, best_out, held,
    real, width, start, logits_stride, held_stride, inner, bias_factor, outer,
    HAS_BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, TOP1: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, HOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Parts` of one tile, a program for each row; HOLD leaves e^{z − top}, 0 at the target and beyond `real`.

    Every lane keeps figures of its own columns; they meet once at the end.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * logits_stride
    lane = tl.arange(0, BLOCK)
    wanted = tl.load(target + token) - start
    lowest = -3.4028234663852886e38
    top = tl.full((BLOCK,), lowest, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    best = lane
    for first in range(0, real, BLOCK):
        column = first + lane
        z, _ = _logits(row, bias, column, real, inner, bias_factor, outer, HAS_BIAS, CAP)
        if MEAN:
            share = tl.where(column < real, z, 0.0)
            if WEIGHTED:
                share *= tl.load(weights + column, mask=column < real, other=0.0)
            mean += share
        own = column == wanted
        chosen = tl.where(own, z, chosen)
        z = tl.where(own, float("-inf"), z)
        higher = tl.maximum(top, z)
        shift = top - higher
        scale = tl.exp(shift)
        behind = z - higher
        e = tl.exp(behind)
        if ENTROPY:
            moment = scale * (moment + shift * mass) + e * tl.maximum(behind, -1e4)
        mass = scale * mass + e
        if TOP1:
            best = tl.where(z > top, column, best)
        top = higher
    peak = tl.max(top, 0)
    shift = top - peak
    scale = tl.exp(shift)
    tl.store(top_out + token, peak)
    tl.store(mass_out + token, tl.sum(scale * mass, 0))
    here = (wanted >= 0) & (wanted < real)
    tl.store(chosen_out + token, tl.where(here, tl.sum(chosen, 0), float("-inf")))
    if ENTROPY:
        tl.store(moment_out + token, tl.sum(scale * (moment + shift * mass), 0))
    if MEAN:
        tl.store(mean_out + token, tl.sum(mean, 0))
    if TOP1:
        tl.store(best_out + token, tl.min(tl.where(top == peak, best, real), 0).to(tl.int64) + start)
    if HOLD:
        for first in range(0, width, BLOCK):
            column = first + lane
            z, _ = _logits(row, bias, column, real, inner, bias_factor, outer, HAS_BIAS, CAP)
            e = tl.where(column == wanted, 0.0, tl.exp(z - peak)).to(held.dtype.element_ty)
            tl.store(held + token * held_stride + column, e, mask=column < width)


@triton.jit
def tile_gradient(
    logits, bias, target, weights, base, share, bend, own, mean, out,
    real, width, start, logits_stride, out_stride, inner, bias_factor, outer,
    HELD: tl.constexpr, HAS_BIAS: tl.constexpr, CAP: tl.constexpr, BEND: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂/∂u of BLOCK columns of a row into `out`, from u, or (HELD) in place from the e^{z − top} of `tile_statistics`.

    base, share, bend, own, mean: `Coefficients`.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < real
    factor = tl.load(share + token)
    bent = tl.full((BLOCK,), 1.0, tl.float32)
    if HELD:
        e = tl.load(logits + token * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
        slope = factor * e
    else:
        z, bent = _logits(
            logits + token * logits_stride, bias, column, real, inner, bias_factor, outer, HAS_BIAS, CAP
        )  # fmt: skip
        behind = z - tl.load(base + token)
        if BEND:
            behind = tl.maximum(behind, -1e4)
            factor += tl.load(bend + token) * behind
        slope = factor * tl.exp(behind)
    slope = tl.where(column == tl.load(target + token) - start, tl.load(own + token), slope)
    if MEAN:
        pull = tl.load(mean + token)
        if WEIGHTED:
            pull *= tl.load(weights + column, mask=inside, other=0.0)
        slope += pull
    if CAP:
        slope *= bent * outer
    slope = tl.where(inside, slope * inner, 0.0)
    tl.store(out + token * out_stride + column, slope.to(out.dtype.element_ty), mask=column < width)


class Coefficients(NamedTuple):
    """∂loss/∂z_c = e^{z_c − base} (share + bend (z_c − base)) + mean · a_c, own + mean · a_y at the target; (R,)."""

    base: Tensor
    share: Tensor
    own: Tensor
    bend: Tensor | None
    mean: Tensor | None


class TileInput(NamedTuple):
    """What both kernels read.

    block: (R, tile.width), adjacent columns.   bias: (V,) or None, of the whole vocabulary here.
    target: (R,) counted from the first column here.
    """

    block: Tensor
    tile: Tile
    target: Tensor
    bias: Tensor | None
    logit_map: LogitMap
    wanted: Wanted

    def options(self) -> dict[str, Any]:
        """Arguments of the kernels by name."""
        tile, of, weights = self.tile, self.logit_map, self.wanted.mean_weights
        return {
            "logits": self.block,
            "bias": None if self.bias is None else self.bias[tile.columns],
            "target": self.target,
            "weights": None if weights is None else weights[tile.columns],
            "real": tile.real,
            "width": tile.width,
            "start": tile.start,
            "logits_stride": self.block.stride(0),
            "inner": of.inner,
            "bias_factor": of.bias_factor,
            "outer": 1.0 if of.outer is None else of.outer,
            "HAS_BIAS": self.bias is not None,
            "CAP": of.outer is not None,
            "WEIGHTED": weights is not None,
            "BLOCK": BLOCK,
            "num_warps": WARPS,
        }


def statistics(given: TileInput, held: Tensor | None = None) -> Parts:
    """`Parts` of one tile, (R,) each; `held` (R, tile.width) receives e^{z − top}, 0 at the target."""
    rows, wanted = len(given.block), given.wanted
    dtype = at_least_fp32(given.block.dtype)
    top, mass, chosen, moment, mean = torch.empty(5, rows, dtype=dtype, device=given.block.device).unbind()
    best = torch.empty_like(given.target)
    tile_statistics[(rows,)](
        top_out=top,
        mass_out=mass,
        chosen_out=chosen,
        moment_out=moment,
        mean_out=mean,
        best_out=best,
        held=held,
        held_stride=0 if held is None else held.stride(0),
        ENTROPY=wanted.entropy,
        TOP1=wanted.top1,
        MEAN=wanted.logit_mean,
        HOLD=held is not None,
        **given.options(),
    )
    return Parts(
        top,
        mass,
        chosen,
        moment if wanted.entropy else None,
        mean if wanted.logit_mean else None,
        best if wanted.top1 else None,
    )


def gradient(given: TileInput, by: Coefficients, out: Tensor, *, held: bool) -> None:
    """∂loss/∂u of a tile into `out` (R, tile.width), 0 in its padded columns; `held`: the block holds e^{z − base}."""
    grid = (len(given.block), triton.cdiv(given.tile.width, BLOCK))
    tile_gradient[grid](
        base=by.base,
        share=by.share,
        bend=by.bend,
        own=by.own,
        mean=by.mean,
        out=out,
        out_stride=out.stride(0),
        HELD=held,
        BEND=by.bend is not None,
        MEAN=by.mean is not None,
        **given.options(),
    )
