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

from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.head import TILE
from bestiary.kernels.log_prob_chunked import Problem
from bestiary.kernels.log_prob_gradients import Known, Needs, Upstream
from bestiary.kernels.log_prob_statistics import NOTHING, Parts, Rows, finished, gathered
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
        rows: of the largest chunk.   needs: whether hidden, weight, bias need a gradient.
    """

    def __init__(self, problem: Problem, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, held: bool) -> None:
        setting = problem.setting
        self.problem, self.hidden, self.weight, self.bias, self.setting = problem, hidden, weight, bias, setting
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

    def inputs(self, rows: slice, target: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of a chunk, and targets counted from the first column here."""
        return self.problem.take(self.hidden, rows), self.problem.take(target, rows) - self.problem.offset

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
        return TileInput(block, tile, target, self.bias, self.setting.logit_map, self.setting.wanted)

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
    """The gradient of the logits in the terms of the kernel; the target's own value keeps its digits where p → 1."""
    inverse, own = (-known.log_sum).exp(), known.log_prob.exp()
    share = (upstream.lse - upstream.log_prob) * inverse
    at_target = upstream.lse * own - upstream.log_prob * known.log_prob.expm1()
    bend = None
    if upstream.entropy is not None and known.entropy is not None:
        at_target = at_target - upstream.entropy * own * (known.log_prob.clamp(min=NOTHING) + known.entropy)
        bend = -upstream.entropy * inverse
        share = share + bend * (known.entropy - known.log_sum)
    mean = upstream.mean
    if mean is not None and setting.wanted.mean_weights is None:
        mean = mean / setting.vocab_size
    return Coefficients(known.peak, *(_dense(column) for column in (share, at_target, bend, mean)))  # type: ignore[arg-type]


def _dense(column: Tensor | None) -> Tensor | None:
    return None if column is None else column.contiguous()


# ------------------------------------------------------------------ passes


def _without_gradients(walk: Pass, target: Tensor) -> list[Rows]:
    """Statistics of all chunks, one tile of logits in memory."""
    return [walk.statistics(*walk.inputs(rows, target))[0] for rows in walk.chunks]


def _with_gradients(walk: Pass, target: Tensor, loss: ScalarLoss, needs: Needs) -> tuple[list[Rows], Sums]:
    """Statistics of all chunks and the gradients of a scalar loss, the exponentials of one chunk in memory."""
    sums, found = Sums(walk, needs), []
    for rows in walk.chunks:
        x, here = walk.inputs(rows, target)
        out, parts = walk.statistics(x, here)
        token = walk.problem.take(loss.token, rows)
        pull = (loss.smoothing * loss.mean_mass + 2.0 * loss.z_loss * out.lse) * token
        upstream = Upstream(
            walk.problem.take(loss.label, rows), pull, None, -loss.smoothing * token if loss.smoothing else None
        )
        by = coefficients(walk.setting, Known(out.peak, out.log_sum, out.log_prob, None), upstream)
        for tile in walk.tiles:
            held = walk.narrow(tile, len(x))
            given = TileInput(held, tile, here, None, walk.setting.logit_map, walk.setting.wanted)
            gradient(given, by._replace(share=by.share * (parts.top[tile.index] - out.peak).exp()), held, held=True)
            sums.add(held, tile, walk.weight_of(tile), x, rows)
        found.append(out)
    return found, sums


def _recomputed(walk: Pass, target: Tensor, known: Known, upstream: Upstream, needs: Needs) -> Sums:
    """Gradients of per-token outputs, one tile of logits in memory; `known` (n,), `upstream` (N,)."""
    sums = Sums(walk, needs)
    for rows in walk.chunks:
        x, here = walk.inputs(rows, target)
        by = coefficients(
            walk.setting,
            Known._make(None if column is None else column[rows] for column in known),
            Upstream._make(None if column is None else walk.problem.take(column, rows) for column in upstream),
        )
        for tile in walk.tiles:
            slope = walk.narrow(tile, len(x))
            gradient(walk.logits(x, here, tile), by, slope, held=False)
            sums.add(slope, tile, walk.weight_of(tile), x, rows)
    return sums


# ------------------------------------------------------------------ autograd


class _PerToken(torch.autograd.Function):
    """Outputs of `LogProb`; logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting
    ) -> tuple[Tensor | None, ...]:
        with _no_autocast(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            found = _without_gradients(Pass(problem, hidden, weight, bias, held=False), target)
        out = problem.output(found)
        empty = out.lse.new_empty(0)
        peak = torch.cat([empty, *(rows.peak for rows in found)])
        log_sum = torch.cat([empty, *(rows.log_sum for rows in found)])
        log_p = torch.cat([empty, *(rows.log_prob for rows in found)])
        entropy = torch.cat([empty, *(rows.entropy for rows in found if rows.entropy is not None)])
        ctx.save_for_backward(hidden, weight, bias, target, peak, log_sum, log_p, entropy)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        if out.top1 is not None:
            ctx.mark_non_differentiable(out.top1)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, target, peak, log_sum, log_p, entropy = ctx.saved_tensors
        of_log_prob, of_lse, of_entropy, _, of_mean = upstream
        zeros = torch.zeros(target.shape, dtype=ctx.setting.dtype, device=target.device)
        pull = Upstream(
            zeros if of_log_prob is None else of_log_prob, zeros if of_lse is None else of_lse, of_entropy, of_mean
        )
        with _no_autocast(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            walk = Pass(problem, hidden, weight, bias, held=False)
            of = Known(peak, log_sum, log_p, entropy if of_entropy is not None else None)
            sums = _recomputed(walk, target, of, pull, ctx.needs_input_grad[:3])
        return *_delivered(problem, sums, hidden, weight, bias), None, None


class _Scalar(torch.autograd.Function):
    """A scalar loss whose gradients are there when the forward pass ends; another backward call computes them again."""

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
        wanted = differentiate and any(ctx.needs_input_grad)
        with _no_autocast(hidden):
            problem = Problem(hidden, weight, bias, target, setting)
            walk = Pass(problem, hidden, weight, bias, held=wanted)
            if wanted:
                found, ctx.sums = _with_gradients(walk, target, loss, ctx.needs_input_grad[:3])
            else:
                found, ctx.sums = _without_gradients(walk, target), None
        out = problem.output(found)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.setting = loss, setting
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(column for column in out if column is not None))
        return loss.terms(out).sum(), *out

    @staticmethod
    def backward(ctx: Any, scale: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, target = ctx.saved_tensors
        if scale is None:
            return (None,) * 7
        sums, ctx.sums = ctx.sums, None
        with _no_autocast(hidden):
            problem = Problem(hidden, weight, bias, target, ctx.setting)
            if sums is None:
                walk = Pass(problem, hidden, weight, bias, held=True)
                sums = _with_gradients(walk, target, ctx.loss, ctx.needs_input_grad[:3])[1]
        for gradient_ in (sums.hidden, sums.weight, sums.bias):
            if gradient_ is not None:
                gradient_.mul_(scale)
        return *_delivered(problem, sums, hidden, weight, bias), None, None, None, None


def _delivered(
    problem: Problem, sums: Sums, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the dtypes and at the places of the inputs, that of `hidden` summed over the ranks."""
    of_hidden, shard = sums.hidden, problem.setting.shard
    if of_hidden is not None:
        if shard is not None:
            shard.sum_(of_hidden)
        of_hidden = problem.spread(of_hidden.to(hidden.dtype))
    of_weight = None if sums.weight is None else sums.weight.to(weight.dtype)
    return of_hidden, of_weight, None if sums.bias is None or bias is None else sums.bias.to(bias.dtype)


def _no_autocast(hidden: Tensor) -> torch.autocast:
    return torch.autocast(hidden.device.type, enabled=False)


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedDispatch(
            "log_prob = 'triton' has no second-order gradients (create_graph=True).",
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
    """() loss and log-probabilities without a graph; with a soft cap its gradients come from per-token outputs.

    The slope of a cap needs the logits, and held in bfloat16 these would be off by 2^-9 of their size.
    """
    if setting.logit_map.softcap is not None:
        out = log_prob(hidden, weight, bias, target, setting)
        return loss.terms(out).sum(), out.detached()
    value, *out = _Scalar.apply(hidden, weight, bias, target, loss, setting, torch.is_grad_enabled())
    return value, LogProb(*out)
