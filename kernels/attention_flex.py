"""Attention by torch's FlexAttention (arXiv:2412.05496): any mask as a block mask, fused on CUDA.

On CUDA builder and kernel are compiled. On the CPU the forward pass runs uncompiled (it materialises the scores, and
serves to compare); there is no backward there.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Lengths are rounded up to whole blocks, so that one compiled kernel serves every length of a bucket.
BUCKET = 128
_SMALLEST_HEAD = 16  # of the compiled kernel


def flex_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why FlexAttention cannot run on these heads; None if it can."""
    device = q.device.type
    if device not in {"cuda", "cpu"}:
        return f"FlexAttention runs on cuda, not on {device}"
    if device == "cpu":
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return "FlexAttention has no backward on the CPU" if trains else None
    if q.dtype == torch.float64:
        return "FlexAttention on cuda has no float64"
    if min(q.shape[-1], v.shape[-1]) < _SMALLEST_HEAD:
        return f"FlexAttention on cuda needs a head_dim of at least {_SMALLEST_HEAD}"
    return None


def block_mask(
    q_len: int,
    kv_len: int,
    shift: int,
    window: int | None,
    documents: Tensor | None,
    key_valid: Tensor | None,
    device: torch.device,
    *,
    causal: bool = True,
) -> "BlockMask":
    """The block mask of a `MaskSpec`, of lengths rounded up to `BUCKET`.

    Args:
        shift: tokens between the first key and the first query.
        documents: (B, S) integers.   key_valid: (B, S) booleans.
        causal: False: both ways.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rounded_q, rounded_kv = _rounded(q_len), _rounded(kv_len)
    given = documents if documents is not None else key_valid
    batch = None if given is None else given.shape[0]
    if documents is not None:
        documents = F.pad(documents.to(device), (0, max(shift + rounded_q, rounded_kv) - documents.shape[1]), value=-1)
    if key_valid is not None:
        key_valid = F.pad(key_valid.to(device), (0, rounded_kv - kv_len), value=False)
    build = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    rule = _rule(shift, None if causal else kv_len, window, documents, key_valid)
    built: BlockMask = build(rule, batch, None, rounded_q, rounded_kv, device=device, BLOCK_SIZE=BUCKET)
    return built


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: "BlockMask",
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(q kᵀ · scale) + mask) v; with sinks times sigmoid(lse − sink), in fp32 and differentiable in both.

    Args:
        q: (B, h, T, d).   k, v: (B, h_kv, S, d).   sinks: (h,).
        mask: from `block_mask`.
    Returns:
        (B, h, T, d) in q's dtype.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    tokens = q.shape[2]
    if not torch.is_grad_enabled():
        q, k, v = q.detach(), k.detach(), v.detach()  # the CPU refuses leaves that could require a gradient
    q = F.pad(q, (0, 0, 0, _rounded(tokens) - tokens))
    k, v = (F.pad(x, (0, 0, 0, _rounded(x.shape[2]) - x.shape[2])) for x in (k, v))
    run = cast(Callable[..., Any], flex_attention)
    if q.is_cuda and not torch.compiler.is_compiling():
        run = _compiled(run)
    result = run(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        out: Tensor = result
        return out[:, :, :tokens]
    out, lse = result[0], result[1].lse
    wide = at_least_fp32(out.dtype)
    kept = torch.sigmoid(lse.to(wide) - sinks.to(wide)[:, None])
    return (out.to(wide) * kept[..., None]).to(out.dtype)[:, :, :tokens]


def _rounded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def _rule(
    shift: int, end: int | None, window: int | None, documents: Tensor | None, key_valid: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`end` None: causal; else every key before it, both ways."""

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query + shift if end is None else key < end
        if window is not None:
            seen = seen & (key > query + shift - window)
            if end is not None:
                seen = seen & (key < query + shift + window)
        if documents is not None:
            seen = seen & (documents[row, query + shift] == documents[row, key])
        if key_valid is not None:
            seen = seen & key_valid[row, key]
        return seen

    return visible


@lru_cache
def _capped(cap: float) -> Callable[..., Tensor]:
    def score(value: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return torch.tanh(value / cap) * cap

    return score


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
