"""The log-prob core on a GPU: products by cuBLAS, what lies between them by the kernels of `triton_log_prob_tiles`.

bfloat16 inputs stay so in the products, whose sums are fp32: logits are never rounded, dX and dW accumulate in fp32.
Chunks of at least 1024 tokens keep the read-modify-write of dW below the time of its product.

Two modes, as in `log_prob_chunked`. Per-token outputs compute the logits twice (8·N·H·V FLOPs) and round their gradient
once, to the dtype of the products. A scalar loss without a soft cap holds e^{z − top} of a chunk in that dtype and
finishes its gradients in the forward pass (6·N·H·V): they are rounded twice, but for the target's, which is exact.
"""

from typing import Any

import torch
from torch import Tensor

from bestiary.kernels.head import TILE
from bestiary.kernels.log_prob_autograd import Passes, Problem, per_token, scalar
from bestiary.kernels.log_prob_gradients import Known, Needs, Upstream, shares
from bestiary.kernels.log_prob_statistics import Parts, Rows, finished, gathered
from bestiary.kernels.log_prob_terms import LogProb, ScalarLoss, Setting
from bestiary.kernels.triton_log_prob_tiles import Coefficients, TileInput, gradient, statistics
from bestiary.kernels.vocab_tiles import Tile

ROWS = 2048  # tokens of a chunk when one tile of logits lives at a time
COLUMNS = 16384  # of a tile: 128 MiB of fp32 logits
HELD_BYTES = 420_000_000  # exponentials of a chunk that are held: 1280 tokens at V = 151936, 1024 at V = 201088
HELD_ROWS = (256, 4096)


def tiles_of(vocab_size: int) -> list[Tile]:
    """Tiles of `COLUMNS` columns over the whole multiples of 64, then one of 64 for the rest."""
    whole = vocab_size - vocab_size % TILE
    tiles = [Tile(i, start, min(COLUMNS, whole - start)) for i, start in enumerate(range(0, whole, COLUMNS))]
    if whole < vocab_size:
        tiles.append(Tile(len(tiles), whole, vocab_size - whole))
    return tiles


def chunks_of(tokens: int, vocab_size: int, dtype: torch.dtype, *, held: bool) -> list[slice]:
    """Chunks of tokens, a function of shape and dtype alone; `held`: all exponentials of a chunk live, in `dtype`."""
    size = ROWS
    if held:
        size = HELD_BYTES // (max(vocab_size, 1) * dtype.itemsize)
        size = min(max(size - size % HELD_ROWS[0], HELD_ROWS[0]), HELD_ROWS[1])
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class Pass:
    """One walk over chunks and tiles: memory, products and kernels.

    Args:
        held: the exponentials of a whole chunk live, not those of one tile.
    """

    def __init__(self, problem: Problem, *, held: bool) -> None:
        hidden, weight, setting = problem.hidden, problem.weight, problem.setting
        self.problem, self.weight, self.setting = problem, weight, setting
        shard, vocab_size = setting.shard, len(weight)
        most = vocab_size if shard is None else -(-setting.vocab_size // shard.ranks)  # the same chunks on every rank
        self.chunks = chunks_of(problem.tokens, most, hidden.dtype, held=held)
        self.tiles = tiles_of(vocab_size)
        self.rows = max((chunk.stop - chunk.start for chunk in self.chunks), default=0)
        width = max((tile.width for tile in self.tiles), default=0)
        self._logits = torch.empty(self.rows * width, dtype=setting.dtype, device=weight.device)
        columns = sum(tile.width for tile in self.tiles) if held else width
        self._narrow = self._logits[:0]
        if held or hidden.dtype != setting.dtype:
            self._narrow = torch.empty(self.rows * columns, dtype=hidden.dtype, device=weight.device)
        self._held, self._padded = held, weight.new_zeros(TILE, weight.shape[1])

    def inputs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Hidden states of a chunk, and targets counted from the first column here."""
        take = self.problem.take
        return take(self.problem.hidden, rows), take(self.problem.target, rows) - self.problem.offset

    def weight_of(self, tile: Tile) -> Tensor:
        """(tile.width, H), rows beyond the real ones zero."""
        if tile.real == tile.width:
            return self.weight[tile.columns]
        self._padded[: tile.real].copy_(self.weight[tile.columns])
        return self._padded

    def logits(self, x: Tensor, target: Tensor, tile: Tile) -> TileInput:
        """Products of a chunk with one tile of the vocabulary."""
        block = self._logits[: len(x) * tile.width].view(len(x), tile.width)
        multiply(x, self.weight_of(tile).T, block, add=False)
        return TileInput(block, tile, target, self.problem.bias, self.setting.logit_map, self.setting.wanted)

    def narrow(self, tile: Tile, rows: int) -> Tensor:
        """(rows, tile.width) in the dtype of the products: a tile's own if exponentials are held, else that of all."""
        start = rows * tile.start if self._held else 0
        memory = self._narrow if len(self._narrow) else self._logits
        return memory[start : start + rows * tile.width].view(rows, tile.width)

    def statistics(self, x: Tensor, target: Tensor) -> tuple[Rows, Parts]:
        """Of one chunk, the other ranks' share included."""
        columns = []
        for tile in self.tiles:
            given = self.logits(x, target, tile)
            columns.append(statistics(given, self.narrow(tile, len(x)) if self._held else None))
        if not columns:  # a rank without any vocabulary
            columns = [self._nothing(target)]
        parts = Parts._make(None if column[0] is None else torch.stack(column) for column in zip(*columns, strict=True))
        shard = self.setting.shard
        return finished(parts if shard is None else gathered(parts, shard), target + self.problem.offset), parts

    def _nothing(self, target: Tensor) -> Parts:
        wanted, dtype = self.setting.wanted, self.setting.dtype
        zero = torch.zeros(target.shape, dtype=dtype, device=target.device)
        lowest, nowhere = torch.full_like(zero, torch.finfo(dtype).min), torch.full_like(zero, -torch.inf)
        moment, mean = (zero if wanted.entropy else None), (zero if wanted.logit_mean else None)
        return Parts(lowest, zero, nowhere, moment, mean, torch.zeros_like(target) if wanted.top1 else None)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a b, or out += a b, summed in the dtype of `out`, which may be wider than that of the factors."""
    if a.dtype != out.dtype:
        if add:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


class Sums:
    """Gradients summed over chunks and tiles in at least fp32; what is not needed is never computed."""

    def __init__(self, walk: Pass, needs: Needs) -> None:
        weight, tokens = walk.weight, walk.problem.tokens
        new: dict[str, Any] = {"dtype": walk.setting.dtype, "device": weight.device}
        self.hidden = torch.zeros(tokens, weight.shape[1], **new) if needs[0] else None
        self.weight = torch.zeros(weight.shape, **new) if needs[1] else None
        self.bias = torch.zeros(len(weight), **new) if needs[2] else None
        self._bias_factor = walk.setting.logit_map.divisor  # of the gradient with respect to the product

    def add(self, slope: Tensor, tile: Tile, weight: Tensor, x: Tensor, rows: slice) -> None:
        """The share of one tile: slope (R, tile.width) with respect to the products, 0 in padded columns."""
        if self.hidden is not None:
            multiply(slope, weight, self.hidden[rows], add=True)
        if self.weight is not None:
            multiply(slope[:, : tile.real].T, x, self.weight[tile.columns], add=True)
        if self.bias is not None:
            column_sums = slope[:, : tile.real].sum(0, dtype=self.bias.dtype)
            self.bias[tile.columns].add_(column_sums, alpha=self._bias_factor)


def coefficients(setting: Setting, known: Known, upstream: Upstream) -> Coefficients:
    """The gradient of the logits in the terms of the kernel, which reads adjacent numbers."""
    share, own, bend, mean = shares(setting, known, upstream)
    return Coefficients(
        known.peak.contiguous(),
        share.contiguous(),
        own.contiguous(),
        None if bend is None else bend.contiguous(),
        None if mean is None else mean.contiguous(),
    )


def _without_gradients(problem: Problem) -> list[Rows]:
    """Statistics of all chunks, one tile of logits in memory."""
    walk = Pass(problem, held=False)
    return [walk.statistics(*walk.inputs(rows))[0] for rows in walk.chunks]


def _with_gradients(problem: Problem, loss: ScalarLoss, needs: Needs) -> tuple[list[Rows], Sums]:
    """Statistics of all chunks and the gradients of a scalar loss, the exponentials of one chunk in memory."""
    walk = Pass(problem, held=True)
    sums, found = Sums(walk, needs), []
    for rows in walk.chunks:
        x, here = walk.inputs(rows)
        out, parts = walk.statistics(x, here)
        token = problem.take(loss.token, rows)
        pull = (loss.smoothing * loss.mean_mass + 2.0 * loss.z_loss * out.lse) * token
        upstream = Upstream(
            problem.take(loss.label, rows), pull, None, -loss.smoothing * token if loss.smoothing else None
        )
        by = coefficients(walk.setting, Known(out.peak, out.log_sum, out.log_prob, None), upstream)
        for tile in walk.tiles:
            held = walk.narrow(tile, len(x))
            given = TileInput(held, tile, here, None, walk.setting.logit_map, walk.setting.wanted)
            gradient(given, by._replace(share=by.share * (parts.top[tile.index] - out.peak).exp()), held, held=True)
            sums.add(held, tile, walk.weight_of(tile), x, rows)
        found.append(out)
    return found, sums


def _recomputed(problem: Problem, known: Known, upstream: Upstream, needs: Needs) -> Sums:
    """Gradients of per-token outputs, one tile of logits in memory; `known` (n,), `upstream` (N,)."""
    walk = Pass(problem, held=False)
    sums = Sums(walk, needs)
    for rows in walk.chunks:
        x, here = walk.inputs(rows)
        by = coefficients(
            walk.setting,
            Known._make(None if column is None else column[rows] for column in known),
            Upstream._make(None if column is None else problem.take(column, rows) for column in upstream),
        )
        for tile in walk.tiles:
            slope = walk.narrow(tile, len(x))
            gradient(walk.logits(x, here, tile), by, slope, held=False)
            sums.add(slope, tile, walk.weight_of(tile), x, rows)
    return sums


PASSES = Passes("triton", _without_gradients, _with_gradients, _recomputed)


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> LogProb:
    """Per-token log-probabilities, differentiable once; arguments as checked by `linear_log_prob`."""
    return per_token(hidden, weight, bias, target, setting, PASSES)


def scalar_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: ScalarLoss, setting: Setting
) -> tuple[Tensor, LogProb]:
    """() loss and log-probabilities without a graph; with a soft cap its gradients come from per-token outputs.

    The slope of a cap needs the logits, and held in bfloat16 these would be off by 2^-9 of their size.
    """
    if setting.logit_map.softcap is not None:
        out = log_prob(hidden, weight, bias, target, setting)
        return loss.terms(out).sum(), out.detached()
    return scalar(hidden, weight, bias, target, loss, setting, PASSES)
