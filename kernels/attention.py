"""Softmax attention with grouped key/value heads under one description of what may be seen.

`MaskSpec` says it in ints and tensors; implementations turn it into what they need:
    eager   explicit scores and softmax: the reference, any device, float64, sinks and soft caps
    sdpa    torch's scaled_dot_product_attention with no mask, causal, or a boolean mask
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.dispatch import choose
from bestiary.kernels.precision import at_least_fp32


@dataclass
class MaskSpec:
    """Which keys each query sees: those before or at it, inside its window, in its document, and not padding.

    Args:
        q_len, kv_len: number of queries T and keys S.
        q_offset, kv_offset: index in the sequence of the first query and of the first key (they differ with a cache).
        window: tokens a query sees, itself included; None: all before it.
        documents: (B, T) integers, equal for tokens of one document; only without a cache.
        key_valid: (B, S) booleans, False for padding keys.
    """

    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_offset: int = 0
    window: int | None = None
    documents: Tensor | None = None
    key_valid: Tensor | None = None
    _dense: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_causal_square(self) -> bool:
        """Plain causal attention over equal queries and keys, nothing else masked."""
        return (
            self.documents is None
            and self.key_valid is None
            and self.q_len == self.kv_len
            and self.q_offset == self.kv_offset
            and (self.window is None or self.window >= self.kv_len)
        )

    @property
    def sees_everything(self) -> bool:
        """A single query at the end that sees every key (cached decoding)."""
        reach = self.q_offset - self.kv_offset + 1
        return (
            self.documents is None
            and self.key_valid is None
            and self.q_len == 1
            and reach == self.kv_len
            and (self.window is None or self.window >= self.kv_len)
        )

    def dense(self, device: torch.device) -> Tensor:
        """(B or 1, 1, T, S) booleans, True where the query sees the key; built once a device."""
        if device not in self._dense:
            q = torch.arange(self.q_len, device=device)[:, None] + self.q_offset
            k = torch.arange(self.kv_len, device=device)[None, :] + self.kv_offset
            visible = k <= q
            if self.window is not None:
                visible = visible & (k > q - self.window)
            visible = visible[None, None]
            if self.documents is not None:
                visible = visible & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
            if self.key_valid is not None:
                visible = visible & self.key_valid[:, None, None, :]
            self._dense[device] = visible
        return self._dense[device]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(q kᵀ · scale) + mask) v, one learned logit per head joining the softmax where `sinks` is given.

    Args:
        q: (B, h, T, d).   k, v: (B, h_kv, S, d); h is a multiple of h_kv, query head i reads head i // (h / h_kv).
        mask: what each query sees; a query that sees nothing (padding) gets a finite output without meaning.
        sinks: (h,), the logit that takes probability and gives no value (arXiv:2309.17453, as in GPT-OSS).
        softcap: cap · tanh(score / cap) before the mask (Gemma 2).
    Returns:
        (B, h, T, d) in q's dtype; the softmax runs in at least fp32.
    Raises:
        UnsupportedDispatch: a forced implementation cannot run.
    """
    obstacle = "it has neither sinks nor soft caps" if sinks is not None or softcap is not None else None
    implementation = choose("attention", {"sdpa": obstacle, "eager": None})
    if implementation == "sdpa":
        return _sdpa(q, k, v, mask, scale)
    return _eager(q, k, v, mask, scale, sinks, softcap)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    if mask.is_causal_square:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    visible = None if mask.sees_everything else mask.dense(q.device)
    if visible is not None and mask.key_valid is not None:
        # A row of padding sees nothing; softmax over no key is NaN, and NaN gradients reach every weight.
        visible = visible | ~visible.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=gqa)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, sinks: Tensor | None, softcap: float | None
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
    return weights.to(v.dtype) @ v
