"""Causal attention over ranges of tokens (documents, unpadded rows), with windows and sinks and no dense mask.

A mask is a short list of ranges: queries q0..q1 of a row see keys k0..k1 of it, causally and inside the window. Each
range is computed in blocks of `BLOCK` queries against only the keys they can see, so time and memory grow with
T · window, not with T². Blocks run in torch's fused CPU kernel, which returns the log-sum-exp as well: that is enough
to let a sink join the softmax afterwards, and to run the fused backward on the result.

The whole is one custom operator with a backward of its own: a compiled graph holds it as one node, whatever the
number of ranges and tokens. It reads the ranges from documents and padding itself where a graph, which cannot look at
data, hands it no list. A row in which a document comes in more than one piece (interleaved documents, padding between
tokens) is one range, whose blocks get a mask that says who sees whom.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.flops import counted, has_data
from bestiary.kernels.precision import at_least_fp32

# Queries of one fused call. Small blocks waste little on keys above the diagonal or left of the window: with 64 rows
# plain causal attention is a fifth faster than in torch's own causal call forward, and a third backward.
BLOCK = 64
# Keys of one fused backward call: its gradients of keys and values are temporaries, of this many rows at most.
KEYS = 256
ALL_ROWS = -1
SCATTERED_ROWS = -2  # all rows, alike and scattered; below it −3 − row: one scattered row

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def ranges_of(
    documents: Tensor | None, key_valid: Tensor | None, q_len: int, kv_len: int
) -> tuple[Tensor | None, str | None]:
    """A causal mask as ranges, or the reason why it is none.

    Queries are the last `q_len` of the `kv_len` tokens. Padding is in no range, neither as query nor as key.

    Args:
        documents: (B, S) integers on the CPU, equal for tokens of one document.
        key_valid: (B, S) booleans on the CPU, False for padding.
    Returns:
        (n, 5) int64 on the CPU: row (`ALL_ROWS` for every row), first query, end of queries, first key, end of keys;
        or None and why. A negative row below `ALL_ROWS` is a whole one in which documents and padding decide further.
    """
    given = documents if documents is not None else key_valid
    if given is None:
        return _as_tensor([[ALL_ROWS, 0, q_len, 0, kv_len]]), None
    before = kv_len - q_len
    # Rows that are one row in memory (positions that restart in a whole batch) are computed together.
    shared = key_valid is None and (given.shape[0] == 1 or given.stride(0) == 0)
    found = []
    for row in range(1 if shared else given.shape[0]):
        runs = _runs(None if documents is None else documents[row], None if key_valid is None else key_valid[row])
        if len({name for name, _, _ in runs}) != len(runs):
            found.append([SCATTERED_ROWS if shared else SCATTERED_ROWS - 1 - row, 0, q_len, 0, kv_len])
            continue
        for _, start, end in runs:
            if end > before:
                found.append([ALL_ROWS if shared else row, max(start - before, 0), end - before, start, end])
    return _as_tensor(found), None


def scattered(ranges: Tensor) -> bool:
    """Whether the mask is more than its ranges, so that documents and padding are needed beside them."""
    return bool((ranges[:, 0] <= SCATTERED_ROWS).any())


def _as_tensor(found: list[list[int]]) -> Tensor:
    """At least two rows, empty ones where there are fewer: torch.compile sets lengths 0 and 1 apart from all others."""
    return torch.tensor(found + [[ALL_ROWS, 0, 0, 0, 0]] * (2 - len(found)))


def _runs(document: Tensor | None, valid: Tensor | None) -> list[tuple[int, int, int]]:
    """(document, start, end) of neighbouring tokens of one document that are no padding, from (S,) and (S,)."""
    columns = [column for column in (document, valid) if column is not None]
    length = len(columns[0])
    if length == 0:
        return []
    changes = torch.stack([column[1:] != column[:-1] for column in columns]).any(0)
    starts = torch.nn.functional.pad(changes.nonzero().view(-1) + 1, (1, 0))
    names = [0] * len(starts) if document is None else document[starts].tolist()
    kept = [True] * len(starts) if valid is None else valid[starts].tolist()
    places = [*starts.tolist(), length]
    return [(name, places[i], places[i + 1]) for i, (name, real) in enumerate(zip(names, kept, strict=True)) if real]


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    key_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over `ranges`, differentiable in q, k, v and sinks; CPU only.

        lse' = logaddexp(lse, sink)     out' = out · exp(lse − lse')     dsink = −Σ exp(sink − lse') · (dO · out')

    Costs 4·d multiply-adds a head for each (query, key) pair seen, plus at most `BLOCK` pairs a query; nothing of
    size T × S is allocated: the largest scratch is `BLOCK` rows of a mask.

    Args:
        q: (B, h, T, d).   k, v: (B, h_kv, S, d), h a multiple of h_kv; the last T of the S tokens are the queries.
        ranges: from `ranges_of`; None: read here from documents and key_valid, forward and backward.
        window: tokens a query sees, itself included.
        sinks: (h,) logit that joins the softmax and gives no value.
        documents, key_valid: what `ranges_of` was given, for `scattered` ranges alone.
    Returns:
        out (B, h, T, d) in q's dtype, laid out as (B, T, h, d), and lse' (B, h, T) in at least fp32, which is not
        differentiable. A query in no range (padding) gets zeros and lse' = sink or −inf; in a scattered row
        padding sees itself.
    """
    out, lse = _attend(q, k, v, sinks, ranges, documents, key_valid, window, scale)
    return out, lse


@torch.library.custom_op("bestiary::document_attention", mutates_args=(), device_types="cpu")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = _rows_dense(q), _rows_dense(k), _rows_dense(v)
    out, lse = _empty_like_tokens_first(q), _empty_lse(q)
    ranges, mask = _read(q, k, ranges, documents, key_valid, window)
    if not _covers(ranges, q):
        out.zero_()
        lse.fill_(-torch.inf)
    for part in mask.parts(q):
        own_q, own_k, own_v, own_out, own_lse = (part.of(x) for x in (q, k, v, out, lse))
        for rows, queries, keys, visible in mask.blocks(part.ranges):
            block = _fused(
                own_q[rows, :, queries],
                own_k[rows, :, keys],
                own_v[rows, :, keys],
                0.0,
                False,
                attn_mask=visible,
                scale=scale,
            )
            own_out[rows, :, queries], own_lse[rows, :, queries] = block
            del block
    if sinks is not None:
        logits = sinks.to(lse.dtype)[:, None]
        out.mul_(torch.sigmoid(lse - logits)[..., None])
        torch.logaddexp(lse, logits, out=lse)
    return out, lse


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _empty_like_tokens_first(q), _empty_lse(q)


@torch.library.custom_op("bestiary::document_attention_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad = _rows_dense(q), _rows_dense(k), _rows_dense(v), _rows_dense(grad)
    dq = _empty_like_tokens_first(q)
    ranges, mask = _read(q, k, ranges, documents, key_valid, window)
    if not _covers(ranges, q):
        dq.zero_()
    # Several blocks add to one key: the sum is kept in at least fp32, whatever the dtype of k.
    wide = at_least_fp32(k.dtype)
    dk, dv = _empty_like_tokens_first(k, wide).zero_(), _empty_like_tokens_first(v, wide).zero_()
    for part in mask.parts(q):
        seen_from = [part.of(x) for x in (grad, q, dq, out, lse)]
        own_k, own_v, own_dk, own_dv = (part.of(x) for x in (k, v, dk, dv))
        for rows, queries, keys, visible in mask.blocks(part.ranges):
            upstream, block_q, sum_dq, block_out, block_lse = (x[rows, :, queries] for x in seen_from)
            for piece in _pieces(keys):
                block_dq, block_dk, block_dv = _fused_backward(
                    upstream,
                    block_q,
                    own_k[rows, :, piece],
                    own_v[rows, :, piece],
                    block_out,
                    block_lse,
                    0.0,
                    False,
                    attn_mask=visible[:, piece.start - keys.start : piece.stop - keys.start],
                    scale=scale,
                )
                if piece.start == keys.start:
                    sum_dq.copy_(block_dq)
                else:
                    sum_dq.add_(block_dq)
                own_dk[rows, :, piece] += block_dk
                own_dv[rows, :, piece] += block_dv
                del block_dq, block_dk, block_dv  # else they stay until the next ones are made
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_attend_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_tokens_first(q), _empty_like_tokens_first(k), _empty_like_tokens_first(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ranges, documents, key_valid, window, scale = inputs
    ctx.save_for_backward(q, k, v, sinks, ranges, documents, key_valid, *output)
    ctx.window, ctx.scale = window, scale


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, ranges, documents, key_valid, out, lse = ctx.saved_tensors
    dq, dk, dv = _attend_backward(grad, q, k, v, out, lse, ranges, documents, key_valid, ctx.window, ctx.scale)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[3]:
        # The part of the softmax that the sink took; where nothing is seen, out is zero and so is the product.
        share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        given = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dsinks = -(share * given).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dsinks, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


@counted(_attend)
def _flops(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *mask: Any, out_val: Any = None) -> int:
    """Scores and values of the pairs that see each other, in every query head."""
    return 2 * _pairs(q, k, *mask[:-1]) * q.shape[1] * (q.shape[-1] + v.shape[-1])


@counted(_attend_backward)
def _flops_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *mask: Any, out_val: Any = None
) -> int:
    """The gradients of scores, values, queries and keys; scores computed again are not counted."""
    return 4 * _pairs(q, k, *mask[:-1]) * q.shape[1] * (q.shape[-1] + v.shape[-1])


def _pairs(
    q: Tensor,
    k: Tensor,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
) -> int:
    """(query, key) pairs of all rows that the mask leaves; without data: of whole rows, causal and windowed."""
    if not has_data(ranges, documents, key_valid):
        ranges, documents, key_valid = None, None, None
    _, mask = _read(q, k, ranges, documents, key_valid, window)
    return sum(len(range(len(q))[rows]) * int((seen == 0).sum()) for rows, _, _, seen in mask.blocks())


def _read(
    q: Tensor,
    k: Tensor,
    ranges: Tensor | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    window: int | None,
) -> tuple[Tensor, "_BandMask"]:
    """The ranges, read here where there are none, and the mask of their blocks."""
    if ranges is None:
        ranges, obstacle = ranges_of(documents, key_valid, q.shape[2], k.shape[2])
        if ranges is None:
            raise UnsupportedDispatch(f"attention = 'documents' cannot run: {obstacle}.")
    return ranges, _BandMask(ranges, documents, key_valid, window, k.shape[2] - q.shape[2], q.dtype)


@dataclass(frozen=True)
class _Part:
    """Ranges that are computed one after the other, and how tensors are looked at for them.

    Attributes:
        ranges: lists of the five numbers of `ranges_of`.
        start, count, length: `count` documents of `length` tokens each, of one row and from token `start` on, stand
            as a batch of rows, and `ranges` is the one of such a row; count 0: tensors stay as they are.
    """

    ranges: list[list[int]]
    start: int = 0
    count: int = 0
    length: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view of (1, heads, tokens, …) as (count, heads, length, …), or the tensor itself."""
        if self.count == 0:
            return x
        tokens = x[0, :, self.start : self.start + self.count * self.length]
        return tokens.unflatten(1, (self.count, self.length)).transpose(0, 1)


class _BandMask:
    """The blocks of all ranges, and the additive mask of each as a slice of one band.

    Args:
        ranges: (n, 5), see `ranges_of`.
        documents, key_valid: who sees whom in scattered rows.
        shift: tokens before the first query, so that query i is token i + shift.
    """

    def __init__(
        self,
        ranges: Tensor,
        documents: Tensor | None,
        key_valid: Tensor | None,
        window: int | None,
        shift: int,
        dtype: torch.dtype,
    ) -> None:
        self._ranges: list[list[int]] = ranges.tolist()
        self._documents, self._key_valid = documents, key_valid
        self._window, self._shift = window, shift
        longest = max((q1 + shift - k0 for _, _, q1, k0, _ in self._ranges), default=1)
        self._before = longest if window is None else min(longest, window - 1)
        # Row r, column c: a query at r after the block's first looks at the key c − before after it.
        distance = torch.arange(BLOCK)[:, None] - torch.arange(-self._before, BLOCK)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        self._band = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def parts(self, q: Tensor) -> Iterator[_Part]:
        """All ranges; neighbours of one length in a single row are computed together, as rows of a batch."""
        if len(q) > 1 or self._shift:
            yield _Part(self._ranges)
            return
        apart: list[list[int]] = []
        for (length, _), group in groupby(self._ranges, lambda one: (one[2] - one[1], one[0] <= SCATTERED_ROWS)):
            run = list(group)
            start, count = run[0][1], len(run)
            joined = all(one[1] == one[3] == start + place * length for place, one in enumerate(run))
            if count > 1 and joined and length > 0:
                yield _Part([[ALL_ROWS, 0, length, 0, length]], start, count, length)
            else:
                apart += run
        if apart:
            yield _Part(apart)

    def blocks(self, ranges: list[list[int]] | None = None) -> Iterator[tuple[slice, slice, slice, Tensor]]:
        """rows, queries, keys and (queries, keys) additive mask of each block of some ranges or all, in their order."""
        for row, q0, q1, k0, k1 in self._ranges if ranges is None else ranges:
            apart = row <= SCATTERED_ROWS
            number = SCATTERED_ROWS - 1 - row if apart else row
            rows = slice(None) if number == ALL_ROWS else slice(number, number + 1)
            for start in range(q0, q1, BLOCK):
                end = min(start + BLOCK, q1)
                own = start + self._shift
                first, last = max(k0, own - self._before), min(k1, end + self._shift)
                columns = slice(first - own + self._before, last - own + self._before)
                visible = self._band[: end - start, columns]
                if apart:
                    hidden = self._hidden(max(number, 0), own, end + self._shift, first)
                    visible = visible.masked_fill(hidden, -torch.inf)
                yield rows, slice(start, end), slice(first, last), visible

    def _hidden(self, row: int, start: int, end: int, first: int) -> Tensor:
        """(end − start, end − first): which of the tokens first..end those of start..end cannot see, never itself."""
        others, own = slice(first, end), slice(start, end)
        hidden = torch.zeros(end - start, end - first, dtype=torch.bool)
        if self._documents is not None:
            names = self._documents[row]
            hidden |= names[own, None] != names[None, others]
        if self._key_valid is not None:
            hidden |= ~self._key_valid[row, None, others] | ~self._key_valid[row, own, None]
        hidden.diagonal(start - first).fill_(False)
        return hidden


def _pieces(keys: slice) -> Iterator[slice]:
    """`keys` in equal parts of at most `KEYS`."""
    count = keys.stop - keys.start
    size = -(-count // max(-(-count // KEYS), 1))
    for start in range(keys.start, keys.stop, size):
        yield slice(start, min(start + size, keys.stop))


def _covers(ranges: Tensor, q: Tensor) -> bool:
    """Whether every query of every row is in a range, so that nothing is left to fill."""
    rows, starts, ends = ranges[:, 0], ranges[:, 1], ranges[:, 2]
    weight = torch.where((rows == ALL_ROWS) | (rows == SCATTERED_ROWS), q.shape[0], 1)
    return int((weight * (ends - starts)).sum()) == q.shape[0] * q.shape[2]


def _rows_dense(x: Tensor) -> Tensor:
    """The fused kernel reads any strides but that of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like_tokens_first(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(B, heads, T, d) stored as (B, T, heads, d): the projections around attention then read it without a copy."""
    batch, heads, tokens, size = x.shape
    return x.new_empty((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=at_least_fp32(q.dtype)).transpose(1, 2)
