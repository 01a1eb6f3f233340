"""Softmax attention with grouped key/value heads under one description of what may be seen.

`MaskSpec` says it in ints and tensors; implementations turn it into what they need:
    eager       explicit scores and softmax: the reference, any device, float64, sinks and soft caps
    sdpa        torch's scaled_dot_product_attention with no mask, causal, or a boolean mask
    documents   CPU, training: blocks of queries against the keys they can see, no dense mask, sinks
    flex        CUDA, training: torch's FlexAttention with a block mask, sinks and soft caps
Dropout is in the first two alone, and blocks look back alone.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.attention_documents import BLOCK, document_attention, ranges_of, scattered
from bestiary.kernels.attention_flex import BUCKET, block_mask, flex, flex_obstacle
from bestiary.kernels.dispatch import apart_from_training, choose
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.precision import at_least_fp32

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def operators() -> list[Any]:
    """What runs behind `attention` as one operator; who keeps the outputs of these computes no score twice."""
    from torch.nn.attention import flex_attention  # noqa: F401  which names its operator

    aten = torch.ops.aten
    return [
        torch.ops.bestiary.document_attention.default,
        torch.ops.higher_order.flex_attention,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]


@dataclass
class MaskSpec:
    """Which keys each query sees: those before or at it, inside its window, in its document, and not padding.

    Not `causal`: those behind it too, with a window of W the W − 1 tokens to either side.

    Built once a forward pass for each layer type; what implementations derive from it is kept in it.

    Args:
        q_len, kv_len: number of queries T and keys S.
        q_offset, kv_offset: index in the sequence of the first query and of the first key (they differ with a cache).
        window: tokens a query sees, itself included; None: all before it.
        documents: (B, S) integers, equal for tokens of one document; the queries are tokens of them too.
        key_valid: (B, S) booleans, False for padding keys.
    """

    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_offset: int = 0
    window: int | None = None
    documents: Tensor | None = None
    key_valid: Tensor | None = None
    causal: bool = True
    _dense: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _blocks: dict[torch.device, "BlockMask"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ranges: tuple[Tensor | None, str | None] | None = field(default=None, init=False, repr=False, compare=False)
    _ranges_suffice: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def is_causal_square(self) -> bool:
        """Plain causal attention over equal queries and keys, nothing else masked."""
        return (
            self.causal
            and self.documents is None
            and self.key_valid is None
            and self.q_len == self.kv_len
            and self.q_offset == self.kv_offset
            and (self.window is None or self.window >= self.kv_len)
        )

    @property
    def sees_everything(self) -> bool:
        """A single query at the end that sees every key (cached decoding), or queries that look both ways."""
        reach = self.q_offset - self.kv_offset + 1
        last = self.q_len == 1 and reach == self.kv_len
        both_ways = not self.causal and self.q_len == self.kv_len and self.q_offset == self.kv_offset
        return (
            self.documents is None
            and self.key_valid is None
            and (last or both_ways)
            and (self.window is None or self.window >= self.kv_len)
        )

    @property
    def is_shape_alone(self) -> bool:
        """Whether torch's own call says it without a mask."""
        return self.is_causal_square or self.sees_everything

    def dense(self, device: torch.device) -> Tensor:
        """(B or 1, 1, T, S) booleans, True where the query sees the key; built once a device."""
        if device not in self._dense:
            q = torch.arange(self.q_len, device=device)[:, None] + self.q_offset
            k = torch.arange(self.kv_len, device=device)[None, :] + self.kv_offset
            visible = k <= q if self.causal else torch.ones_like(k <= q)
            if self.window is not None:
                visible = visible & (k > q - self.window)
                if not self.causal:
                    visible = visible & (k < q + self.window)
            visible = visible[None, None]
            if self.documents is not None:
                first = self.q_offset - self.kv_offset
                own = self.documents[:, first : first + self.q_len]
                visible = visible & (own[:, None, :, None] == self.documents[:, None, None, :])
            if self.key_valid is not None:
                visible = visible & self.key_valid[:, None, None, :]
            self._dense[device] = visible
        return self._dense[device]

    def ranges(self) -> tuple[Tensor | None, str | None]:
        """(n, 5) ranges of tokens for `document_attention`, or None and why the mask is none; built once.

        None without a reason: while a graph is traced, which cannot look at documents and padding.
        """
        if self._ranges is None:
            given = [x for x in (self.documents, self.key_valid) if x is not None]
            if not self.causal:
                self._ranges = None, "its blocks look back only, and the mask looks both ways"
            elif any(x.device.type != "cpu" for x in given):
                self._ranges = None, f"borders are read on the CPU, and documents or padding are on {given[0].device}"
            elif self.q_offset - self.kv_offset != self.kv_len - self.q_len:
                self._ranges = None, "the queries are not the last of the tokens"
            elif given and torch.compiler.is_compiling():
                self._ranges = None, None
            else:
                self._ranges = ranges_of(self.documents, self.key_valid, self.q_len, self.kv_len)
            ranges, why = self._ranges
            self._ranges_suffice = not given or why is not None or (ranges is not None and not scattered(ranges))
        return self._ranges

    def beside_ranges(self) -> tuple[Tensor | None, Tensor | None]:
        """documents and key_valid where the ranges do not say it all, for `document_attention`."""
        return (None, None) if self._ranges_suffice else (self.documents, self.key_valid)

    def blocks(self, device: torch.device) -> "BlockMask":
        """FlexAttention's block mask, of lengths rounded up to whole blocks; built once a device."""
        if device not in self._blocks:
            shift = self.q_offset - self.kv_offset
            self._blocks[device] = block_mask(
                self.q_len,
                self.kv_len,
                shift,
                self.window,
                self.documents,
                self.key_valid,
                device,
                causal=self.causal,
            )
        return self._blocks[device]

    def prepare(self, device: torch.device, *, plain: bool) -> None:
        """Derive what training on `device` needs now: it depends on data, which compiled blocks cannot look at.

        Args:
            plain: neither sinks nor a soft cap join the scores.
        """
        if device.type == "cpu" and self.q_len > 1:
            self.ranges()
        elif device.type == "cuda" and self.q_len >= BUCKET and not (plain and self.is_shape_alone):
            self.blocks(device)


@dataclass(frozen=True)
class PieceMasks:
    """What queries see that are pieces of a row while the keys are all of it.

    Args:
        masks: of the pieces, in the order of their queries; `kv_offset` counts from the first key of the row, and of
            the keys a piece is given those `kv_offset` .. `kv_offset + kv_len` alone.
    """

    masks: tuple[MaskSpec, ...]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec | PieceMasks,
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(q kᵀ · scale) + mask) v, one learned logit per head joining the softmax where `sinks` is given.

    Args:
        q: (B, h, T, d).   k: (B, h_kv, S, d); h is a multiple of h_kv, query head i reads head i // (h / h_kv).
        v: (B, h_kv, S, d_v), d_v mostly d.
        mask: what each query sees; a query that is padding or sees nothing gets a finite output without meaning.
        sinks: (h,), the logit that takes probability and gives no value (arXiv:2309.17453, as in GPT-OSS).
        softcap: cap · tanh(score / cap) before the mask (Gemma 2).
        dropout: probability with which a weight of the softmax is dropped, the others growing by 1 / (1 − dropout);
            drawn from torch's generator. On the CPU as transformers' eager attention draws it.
    Returns:
        (B, h, T, d_v) in q's dtype; the softmax runs in at least fp32.
    Raises:
        UnsupportedDispatch: a forced implementation cannot run.
    """
    if isinstance(mask, PieceMasks):
        options: dict[str, Any] = {"scale": scale, "sinks": sinks, "softcap": softcap, "dropout": dropout}
        return _of_pieces(q, k, v, mask, options)
    implementation = choose("attention", _obstacles(q, k, v, mask, sinks, softcap, dropout))
    if implementation == "eager":
        return _eager(q, k, v, mask, scale, sinks, softcap, dropout)
    if implementation == "sdpa":
        return _sdpa(q, k, v, mask, scale, dropout)
    if torch.is_autocast_enabled(q.device.type):
        narrow = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
    if implementation == "flex":
        return flex(q, k, v, mask.blocks(q.device), scale=scale, sinks=sinks, softcap=softcap)
    ranges, obstacle = mask.ranges()
    if obstacle is not None:
        raise UnsupportedDispatch(f"attention = 'documents' cannot run: {obstacle}.")
    size, (documents, key_valid) = v.shape[-1], mask.beside_ranges()
    q, k, v = _of_one_size(q, k, v)
    out, _ = document_attention(
        q, k, v, ranges, window=mask.window, scale=scale, sinks=sinks, documents=documents, key_valid=key_valid
    )
    return out if out.shape[-1] == size else out[..., :size]


def _of_pieces(q: Tensor, k: Tensor, v: Tensor, mask: PieceMasks, options: dict[str, Any]) -> Tensor:
    outs = []
    for own, piece in zip(q.split([piece.q_len for piece in mask.masks], 2), mask.masks, strict=True):
        keys = slice(piece.kv_offset, piece.kv_offset + piece.kv_len)
        outs.append(attention(own, k[:, :, keys], v[:, :, keys], piece, **options).transpose(1, 2))
    return torch.cat(outs, 1).transpose(1, 2)  # tokens first, as the projection behind reads them


def _of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads padded with zeros up to the larger size: scores stay, and values get columns that are cut off again."""
    missing = q.shape[-1] - v.shape[-1]
    if missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    return q, k, F.pad(v, (0, missing)) if missing > 0 else v


def _obstacles(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, sinks: Tensor | None, softcap: float | None, dropout: float
) -> dict[str, str | None]:
    """Every implementation and why it cannot run here, the fastest first."""
    obstacles = {
        "flex": "FlexAttention has no dropout" if dropout else flex_obstacle(q, k, v),
        "documents": "its fused kernel has no dropout" if dropout else _documents_obstacle(q, mask, softcap),
        "sdpa": "it has neither sinks nor soft caps" if sinks is not None or softcap is not None else None,
        "eager": None,
    }
    return {name: obstacles[name] for name in _fastest_first(q, mask)}


def _fastest_first(q: Tensor, mask: MaskSpec) -> tuple[str, ...]:
    queries = q.shape[2]
    if q.device.type == "cpu":
        # Blocks beat torch's causal call and any dense mask, except where there is one block and calls are what costs.
        # The order matters: if training asked for the length, compilation would split short inputs from long ones.
        # A pack runs as it trains also without gradients, so that a reference policy gives the bits of the policy; rows
        # with padding do inside `as_trained`.
        short = queries == 1 or (apart_from_training() and queries <= BLOCK and mask.documents is None)
        return ("sdpa", "documents", "eager", "flex") if short else ("documents", "sdpa", "eager", "flex")
    if queries < BUCKET:
        return ("sdpa", "eager", "flex", "documents")
    return ("sdpa", "flex", "eager", "documents") if mask.is_shape_alone else ("flex", "sdpa", "eager", "documents")


def _documents_obstacle(q: Tensor, mask: MaskSpec, softcap: float | None) -> str | None:
    if q.device.type != "cpu":
        return f"its fused kernel is for the CPU, not for {q.device.type}"
    if softcap is not None:
        return "its fused kernel has no soft cap"
    return mask.ranges()[1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, dropout: float) -> Tensor:
    gqa, size = q.shape[1] != k.shape[1], v.shape[-1]
    if q.device.type == "cpu" and size != q.shape[-1]:  # its fused kernel wants one size; the fallback keeps T × S
        return _sdpa(*_of_one_size(q, k, v), mask, scale, dropout)[..., :size]
    if mask.is_causal_square:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa)
    visible = None if mask.sees_everything else mask.dense(q.device)
    if visible is not None and mask.key_valid is not None:
        # A row of padding sees nothing; softmax over no key is NaN, and NaN gradients reach every weight.
        visible = visible | ~visible.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale, enable_gqa=gqa)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    # The lowest finite number, not -inf: a row of padding then stays finite, forward and backward.
    scores = scores.masked_fill(~mask.dense(q.device), torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1, dtype=at_least_fp32(scores.dtype))
    else:
        sink_column = sinks.to(scores.dtype)[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        joined = torch.cat((scores, sink_column), dim=-1)
        weights = joined.softmax(-1, dtype=at_least_fp32(scores.dtype))[..., :-1]
    weights = weights.to(v.dtype)
    return (F.dropout(weights, dropout) if dropout else weights) @ v
