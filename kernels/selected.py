"""Log-probabilities of several words per token (a teacher's top k, candidates), and of all the others together."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from bestiary.kernels.dispatch import choose
from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.log_prob import uncompiled
from bestiary.kernels.log_prob_autograd import refuse_second_order
from bestiary.kernels.log_prob_gradients import Gradients, bend
from bestiary.kernels.log_prob_reference import LOGITS_PER_CHUNK, logits_of
from bestiary.kernels.log_prob_terms import LogitMap, check_labels
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.vocab_parallel import Local, VocabShard, localised
from bestiary.kernels.vocab_tiles import Blocks, Tile, Vocabulary, row_chunks

NO_WORD = -1


class Selected(NamedTuple):
    """In at least fp32. log_prob: (N, k).   log_rest: (N,), log of the probability of all words not selected."""

    log_prob: Tensor
    log_rest: Tensor


@uncompiled
def linear_selected_log_prob(
    hidden: Tensor,
    weight: Tensor,
    words: Tensor,
    *,
    bias: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
) -> Selected:
    """log p(word | h) of k words a token under a linear head, whose logits are those of `linear_log_prob`.

    Args:
        hidden: (N, H).   weight: (V, H).   bias: (V,).
        words: (N, k) integers in [0, V), none twice in a row; −1 stands for no word and gets −∞.
        group: ranks that share the vocabulary, as in `linear_log_prob`, with the same words.
    Returns:
        `Selected`, differentiable with respect to hidden, weight and bias.
    Raises:
        LabelOutOfRange: a word outside the vocabulary.   InvalidArgument: shapes that do not fit, a word named twice.
    Cost:
        2·N·H·V FLOPs forward, 6·N·H·V backward; scratch: one or two tiles of logits, dX and dW in at least fp32.
    """
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or words.shape[:-1] != hidden.shape[:1]
    ):
        raise InvalidArgument(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}, words {tuple(words.shape)}.",
            remedy="pass (N, H), (V, H) and (N, k)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidArgument(
            f"bias is {tuple(bias.shape)} and weight {tuple(weight.shape)}.", remedy="pass a bias of (V,)"
        )
    local = localised(hidden, weight, bias, words, group)
    return selected_log_prob(local, LogitMap(divisor, softcap, temperature))


def selected_log_prob(local: Local, logit_map: LogitMap) -> Selected:
    """`linear_selected_log_prob` of tensors of this rank; `local.target` are the words."""
    hidden, weight, bias, words = local.hidden, local.weight, local.bias, local.target.long()
    if local.target.is_floating_point():
        raise InvalidArgument(f"words are {local.target.dtype}.", remedy="pass integers")
    check_labels(words.flatten(), NO_WORD, local.vocab_size)
    ordered = words.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_WORD)
    if twice.any():
        row, column = (int(i) for i in twice.nonzero()[0])
        raise InvalidArgument(
            f"row {row} of words names {int(ordered[row, column])} twice.", remedy="name each word once, pad with -1"
        )
    dtype = at_least_fp32(torch.promote_types(hidden.dtype, weight.dtype))
    sharded = "its vocabulary is not split over ranks" if local.shard is not None else None
    if choose("selected_log_prob", {"chunked": None, "reference": sharded}) == "reference":
        return _reference(hidden.to(dtype), weight.to(dtype), bias, words, logit_map)
    return Selected(*_Chunked.apply(hidden, weight, bias, words, logit_map, dtype, local.shard))


def _reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: Tensor, logit_map: LogitMap) -> Selected:
    """Plain torch, by checkpointed chunks of tokens, differentiable as often as wanted."""

    def chunk(h: Tensor, weight: Tensor, bias: Tensor | None, w: Tensor) -> tuple[Tensor, Tensor]:
        log_p = logits_of(h, weight, bias, logit_map).log_softmax(-1)
        chosen = log_p.gather(-1, w.clamp(min=0)).masked_fill(w == NO_WORD, -torch.inf)
        named = torch.zeros_like(log_p, dtype=torch.int8).scatter_add(-1, w.clamp(min=0), (w != NO_WORD).to(torch.int8))
        return chosen, log_p.masked_fill(named > 0, -torch.inf).logsumexp(-1)

    rows = max(1, LOGITS_PER_CHUNK // weight.shape[0])
    parts = [
        checkpoint(chunk, h, weight, bias, w, use_reentrant=False)
        for h, w in zip(hidden.split(rows), words.split(rows), strict=True)
    ]
    log_prob, log_rest = zip(*parts, strict=True)
    return Selected(torch.cat(log_prob), torch.cat(log_rest))


class _Known(NamedTuple):
    """Of each token: log p of its words (R, k) and of the rest (R,); log-sum-exp of the rest is top + log_mass."""

    log_prob: Tensor
    log_rest: Tensor
    top: Tensor
    log_mass: Tensor


def _place(tile: Tile, words: Tensor) -> tuple[Tensor, Tensor]:
    column = words - tile.start
    at = column.clamp(0, tile.real - 1)
    return at, at == column


def _without(values: Tensor, at: Tensor, here: Tensor) -> None:
    """−∞ at the words that lie here; several may share a column that stands for elsewhere."""
    values.scatter_reduce_(1, at, torch.where(here, -torch.inf, torch.inf).to(values.dtype), "amin")


def _statistics(vocabulary: Vocabulary, x: Tensor, words: Tensor, memory: Blocks, shard: VocabShard | None) -> _Known:
    """Of a chunk; `words` are counted from the first column here."""
    tops, masses = [], []
    chosen = x.new_full(words.shape, -torch.inf)
    for tile in vocabulary:
        block = memory.block(tile, len(x))
        values = vocabulary.logits(x, vocabulary.weight(tile), tile, block)[:, : tile.real]
        at, here = _place(tile, words)
        chosen = values.gather(1, at).where(here, chosen)
        _without(values, at, here)
        top = values.amax(1).clamp_(min=torch.finfo(x.dtype).min)
        tops.append(top)
        masses.append(values.sub_(top[:, None]).exp_().sum(1))
    if not tops:  # a rank without any vocabulary
        tops, masses = [x.new_full((len(x),), torch.finfo(x.dtype).min)], [x.new_zeros(len(x))]
    top, mass = _joined(torch.stack(tops), torch.stack(masses))
    if shard is not None:
        mine = torch.cat((top[:, None], mass[:, None], chosen), 1)
        every = shard.gather(mine[None])
        top, mass = _joined(every[:, :, 0], every[:, :, 1])
        chosen = every[:, :, 2:].amax(0)
    peak = torch.maximum(top, chosen.amax(1)) if words.shape[1] else top
    behind = chosen - peak[:, None]
    log_sum = (mass * (top - peak).exp() + behind.exp().sum(1)).log()
    log_mass = mass.log()
    return _Known(behind - log_sum[:, None], (top - peak) + log_mass - log_sum, top, log_mass)


def _joined(top_of: Tensor, mass_of: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit and mass relative to it, (R,), out of those of parts, (P, R)."""
    top = top_of.amax(0)
    return top, (mass_of * (top_of - top).exp()).sum(0)


class _Chunked(torch.autograd.Function):
    """By chunks of tokens and tiles of the vocabulary; logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        words: Tensor,
        logit_map: LogitMap,
        dtype: torch.dtype,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        start = 0 if shard is None else shard.start
        with torch.autocast(hidden.device.type, enabled=False):
            vocabulary = Vocabulary(weight, bias, logit_map, dtype)
            chunks = row_chunks(len(words), hidden.shape[1], weight.shape[0], dtype)
            memory = Blocks(vocabulary, max((rows.stop - rows.start for rows in chunks), default=0))
            found = [
                _statistics(vocabulary, hidden[rows].to(dtype) * logit_map.inner, words[rows] - start, memory, shard)
                for rows in chunks
            ]
        empty = _Known(*(weight.new_empty(shape, dtype=dtype) for shape in ((0, words.shape[1]), (0,), (0,), (0,))))
        known = _Known._make(torch.cat(column) for column in zip(empty, *found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, words, *known)
        ctx.logit_map, ctx.dtype, ctx.shard = logit_map, dtype, shard
        return known.log_prob, known.log_rest

    @staticmethod
    def backward(ctx: Any, of_words: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("selected_log_prob", "chunked")
        hidden, weight, bias, words, *columns = ctx.saved_tensors
        logit_map, dtype, known = ctx.logit_map, ctx.dtype, _Known(*columns)
        start = 0 if ctx.shard is None else ctx.shard.start
        with torch.autocast(hidden.device.type, enabled=False):
            vocabulary = Vocabulary(weight, bias, logit_map, dtype)
            chunks = row_chunks(len(words), hidden.shape[1], weight.shape[0], dtype)
            largest = max((rows.stop - rows.start for rows in chunks), default=0)
            memory = Blocks(vocabulary, largest)
            spare = Blocks(vocabulary, largest) if logit_map.outer is not None else None
            gradients = Gradients(vocabulary, len(words), ctx.needs_input_grad[:3])
            of_words = of_words.masked_fill(words == NO_WORD, 0.0)
            pull = -(of_words.sum(1) + of_rest)  # of every probability
            own = known.log_prob.exp() * pull[:, None] + of_words
            others = pull * known.log_rest.exp() + of_rest
            for rows in chunks:
                x = hidden[rows].to(dtype) * logit_map.inner
                for tile in vocabulary:
                    part = vocabulary.weight(tile)
                    block = vocabulary.logits(x, part, tile, memory.block(tile, len(x)))
                    values = block[:, : tile.real]
                    bent = None
                    if spare is not None and logit_map.outer is not None:
                        bent = bend(values, logit_map.outer, spare.block(tile, len(x))[:, : tile.real])
                    at, here = _place(tile, words[rows] - start)
                    _without(values, at, here)
                    values.sub_(known.top[rows, None]).sub_(known.log_mass[rows, None].clamp(min=-1e4))
                    values.exp_().mul_(others[rows, None])
                    values.scatter_add_(1, at, own[rows].where(here, 0.0))
                    if bent is not None:
                        values.mul_(bent)
                    gradients.add(block, tile, part, x, rows)
            gradients.finish()
            if ctx.shard is not None and gradients.hidden is not None:
                ctx.shard.sum_(gradients.hidden)
        given = zip((gradients.hidden, gradients.weight, gradients.bias), (hidden, weight, bias), strict=True)
        return *(None if g is None or t is None else g.to(t.dtype) for g, t in given), None, None, None, None
