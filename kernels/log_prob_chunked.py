"""The log-prob core by chunks of tokens and tiles of the vocabulary, with a backward pass written by hand.

Two modes. Per-token outputs: one tile of logits lives at a time; the backward pass computes it again (8·N·H·V FLOPs in
all). A scalar loss: the exponentials of a chunk stay until its gradients are done, still in the forward pass (6·N·H·V).
`log_prob_autograd` says what is saved.
"""

from torch import Tensor

from bestiary.kernels.log_prob_autograd import Passes, Problem, per_token, scalar
from bestiary.kernels.log_prob_gradients import Gradients, Known, Needs, Slope, Upstream
from bestiary.kernels.log_prob_statistics import Parts, Rows, Scan, finished, gathered
from bestiary.kernels.log_prob_terms import LogProb, ScalarLoss, Setting
from bestiary.kernels.vocab_tiles import Blocks


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
            logits = vocabulary.logits(x, weight, tile, blocks.block(tile, len(x)), stay=False)
            slope.from_logits(logits, tile)
            gradients.add(logits, tile, weight, x, rows)
    gradients.finish()
    return gradients


PASSES = Passes("chunked", _without_gradients, _with_gradients, _recomputed)


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> LogProb:
    """Per-token log-probabilities, differentiable once; arguments as checked by `linear_log_prob`."""
    return per_token(hidden, weight, bias, target, setting, PASSES)


def scalar_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: ScalarLoss, setting: Setting
) -> tuple[Tensor, LogProb]:
    """() loss with its gradients computed at once, and log-probabilities without a graph."""
    return scalar(hidden, weight, bias, target, loss, setting, PASSES)
