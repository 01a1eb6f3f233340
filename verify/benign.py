"""Benign rewrites: the same mathematics in another order, by another kernel, in other pieces.

The verifier must pass every one of them. A gate that a rewrite trips is too tight, and a person who is refused for a
fused projection stops believing the other refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.log_prob import LogProb
from bestiary.models.config import DecoderConfig
from bestiary.verify.benign_norms import divided_norm, residual_last, torch_norm
from bestiary.verify.planted.bug import Plant, everywhere, projects_keys
from bestiary.verify.planted.kernels import smaller_chunks
from bestiary.verify.planted.patching import adapted, built, override, patch, together

_ATTENTION = "bestiary.models.layers.attention"
_NORM = "bestiary.models.layers.norm:rms_norm"
_LEVELS, _WITH_INPUTS = "V2,V4,V6,V7", "V2,V4..V7"


@dataclass(frozen=True, kw_only=True)
class Benign:
    """One rewrite.

    Attributes:
        id: unique, e.g. "fused_qkv".   what: the rewrite in words.
        ours: plants it in our side.
        levels: what must pass with it.
        applies: whether a config has what it rewrites.
    """

    id: str
    what: str
    ours: Plant
    levels: str = _LEVELS
    applies: Callable[[DecoderConfig], bool] = everywhere


def _forced(**implementations: str) -> Plant:
    return patch("bestiary.kernels.dispatch:_forced", lambda forced: {**forced, **implementations})


# ------------------------------------------------------------------ projections


def _fused(*names: str) -> Callable[[Any], None]:
    """The linear layers `names` of a module are slices of one product."""

    def fuse(module: Any) -> None:
        linears = [getattr(module, name) for name in names]
        ends = list(accumulate(linear.out_features for linear in linears))

        def forward(index: int) -> Callable[[Tensor], Tensor]:
            start = ends[index] - linears[index].out_features

            def run(x: Tensor) -> Tensor:
                biases = [linear.bias for linear in linears]
                weight = torch.cat([linear.weight for linear in linears])
                bias = None if biases[0] is None else torch.cat(biases)
                return F.linear(x, weight, bias)[..., start : ends[index]]

            return run

        for index, linear in enumerate(linears):
            override(linear, forward(index))

    return fuse


def _transposed(_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        y = (self.weight @ x.flatten(0, -2).T).T.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias

    return run


def _split(_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The sum over input features in two parts, as two ranks would compute it."""

    def run(self: Any, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        y = F.linear(x[..., half:], self.weight[:, half:]) + F.linear(x[..., :half], self.weight[:, :half])
        return y if self.bias is None else y + self.bias

    return run


# ------------------------------------------------------------------ attention


def _scores(q: Tensor, k: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
    """(B, h_kv, g, T, S), the lowest number where a query does not see a key."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bkgtd,bksd->bkgts", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask.dense(q.device)[:, :, None], torch.finfo(scores.dtype).min)


def _sink_column(sinks: Tensor | None, scores: Tensor) -> Tensor:
    if sinks is None:
        return scores.new_full((1, 1, 1, 1, 1), -torch.inf)
    return sinks.view(1, scores.shape[1], -1, 1, 1)


def _undropped(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """`rewrite` of attention; where weights are dropped, the attention that was there."""

    def wrap(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        rewritten = rewrite(attend)

        def attention(*args: Any, dropout: float = 0.0, **options: Any) -> Tensor:
            out: Tensor = attend(*args, dropout=dropout, **options) if dropout else rewritten(*args, **options)
            return out

        return attention

    return wrap


@_undropped
def _einsum_attention(_attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """No repeated heads: key/value heads stay, query heads are grouped; softmax by exp and log-sum-exp."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, sinks: Any = None, softcap: float | None = None
    ) -> Tensor:
        scores = _scores(q, k, mask, scale, softcap).to(torch.promote_types(q.dtype, torch.float32))
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), _sink_column(sinks, scores))
        return torch.einsum("bkgts,bksd->bkgtd", (scores - total).exp().to(v.dtype), v).flatten(1, 2)

    return attention


@_undropped
def _blocked_attention(_attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keys in blocks of 16 with a running maximum, as flash attention does."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, sinks: Any = None, softcap: float | None = None
    ) -> Tensor:
        scores = _scores(q, k, mask, scale, softcap)
        peak = _sink_column(sinks, scores).expand(*scores.shape[:-1], 1)
        weight = (peak * 0).exp() if sinks is not None else torch.zeros_like(peak)
        out = torch.zeros_like(scores[..., :1])
        for block, values in zip(scores.split(16, dim=-1), v.split(16, dim=2), strict=True):
            higher = torch.maximum(peak, block.amax(-1, keepdim=True)).detach()
            kept, fresh = (peak - higher).exp(), (block - higher).exp()
            weight = weight * kept + fresh.sum(-1, keepdim=True)
            out = out * kept + torch.einsum("bkgts,bksd->bkgtd", fresh, values)
            peak = higher
        return (out / weight).flatten(1, 2)

    return attention


@_undropped
def _sink_as_key(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The sink is one more key, with its logit in the mask and a value of zero, in torch's own kernel."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, sinks: Any = None, softcap: float | None = None
    ) -> Tensor:
        if sinks is None:
            return attend(q, k, v, mask, scale=scale, softcap=softcap)
        visible = mask.dense(q.device).expand(q.shape[0], q.shape[1], -1, -1)
        additive = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
        column = sinks.to(q.dtype).view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        gqa, joined = q.shape[1] != k.shape[1], torch.cat((additive, column), -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=joined, scale=scale, enable_gqa=gqa)

    return attention


def _complex_rope(_rope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pairs as complex numbers, turned by one multiplication, in at least fp32: there are no narrow complex numbers."""

    def apply(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        turning, wide = x[..., : 2 * cos.shape[-1]], torch.promote_types(x.dtype, torch.float32)
        a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
        pairs = torch.complex(a.to(wide).contiguous(), b.to(wide).contiguous())
        turned = pairs * torch.complex(cos.to(wide), sin.to(wide)).unsqueeze(1)
        a, b = turned.real.to(x.dtype), turned.imag.to(x.dtype)
        joined = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
        return torch.cat((joined, x[..., turning.shape[-1] :]), dim=-1)

    return apply


def _gathered_tables(tables: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """cos and sin of every position up to the last one, then a lookup."""

    def gathered(self: Any, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = tables(self, torch.arange(int(position_ids.max()) + 1)[None], dtype)
        return cos[0][position_ids], sin[0][position_ids]

    return gathered


def _from_the_first_token(read: Callable[..., Any]) -> Callable[..., Any]:
    """Positions start at the first real token: each row moves as a whole, and RoPE sees differences only."""

    def inputs(ids: Any, embeds: Any, mask: Any, position_ids: Any, borders: Any, cache: Any) -> Any:
        if mask is not None and position_ids is None:
            length = (ids if embeds is None else embeds).shape[1]
            first = (mask != 0).int().argmax(-1, keepdim=True)
            position_ids = (torch.arange(mask.shape[1])[None] - first).clamp(min=0)[:, -length:]
        return read(ids, embeds, mask, position_ids, borders, cache)

    return inputs


# ------------------------------------------------------------------ activations


def _spelled_out(_gated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Activations by their formulas, up first."""

    def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return up * gate / (1 + torch.exp(-gate))
        if activation == "gelu_pytorch_tanh":
            inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate * gate * gate)
            return up * (0.5 * gate * (1 + torch.tanh(inner)))
        return up * (0.5 * gate * (1 + torch.erf(gate / 2**0.5)))

    return gated


def _spelled_out_in_front(_gated_linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, then a product."""
    spelled = _spelled_out(_gated_linear)
    return lambda gate, up, weight, bias, activation: F.linear(spelled(gate, up, activation), weight, bias)


# ------------------------------------------------------------------ experts


def _last_expert_first(_loop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from bestiary.kernels.experts import _activate

    def loop(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, *options: Any) -> Tensor:
        out = torch.zeros_like(x)
        for expert in reversed(torch.unique(indices).tolist()):
            token, slot = torch.where(indices == expert)
            y = down.one(_activate(gate_up.one(x[token], expert), *options), expert)
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out

    return loop


def _every_expert(_loop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every expert on every token, weighted by zero where it was not chosen."""
    from bestiary.kernels.experts import _activate

    def loop(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Any, down: Any, *options: Any) -> Tensor:
        count = gate_up.weight.shape[0]
        table = torch.zeros(x.shape[0], count, dtype=weights.dtype).scatter(1, indices, weights)
        outputs = torch.stack([down.one(_activate(gate_up.one(x, e), *options), e) for e in range(count)])
        return torch.einsum("ne,enh->nh", table, outputs)

    return loop


# ------------------------------------------------------------------ embedding, head, loss


def _one_hot(_embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product with one-hot rows instead of a lookup."""

    def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        rows = weight
        if padding_idx is not None:
            pad = torch.arange(weight.shape[0], device=weight.device)[:, None] == padding_idx % weight.shape[0]
            rows = torch.where(pad, weight.detach(), weight)
        return F.one_hot(ids, weight.shape[0]).to(weight.dtype) @ rows

    return embedding


def _sliced_head(_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The vocabulary in slices of 50 tokens, without any padding."""

    def head_logits(hidden: Tensor, weight: Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> Tensor:
        logits = torch.cat([F.linear(hidden, part) / divisor for part in weight.split(50)], dim=-1)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return head_logits


def _whole_loss(_core: Callable[..., Any]) -> Callable[..., Any]:
    """Log-probabilities from all logits at once."""
    from bestiary.kernels.head import head_logits

    def core(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        **rest: Any,
    ) -> LogProb:
        for column in ("entropy", "top1"):
            rest.pop(column, None)
        logits = head_logits(hidden, weight, **rest) / temperature
        valid = target != ignore_index
        taken = logits.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
        return LogProb(torch.where(valid, taken, 0.0), logits.logsumexp(-1) * valid, None)

    return core


def _whole_scalar_loss(core: Callable[..., Any]) -> Callable[..., Any]:
    """The mean of log-probabilities from all logits at once."""
    log_prob = _whole_loss(core)

    def loss(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        num_items: Tensor | float | None = None,
        return_log_prob: bool = True,
        **options: Any,
    ) -> tuple[Tensor, LogProb]:
        out = log_prob(hidden, weight, target, **options)
        items = (target != -100).sum().clamp(min=1) if num_items is None else num_items
        return -out.log_prob.sum() / items, out.detached()

    return loss


def _routed(config: DecoderConfig) -> bool:
    return config.moe is not None


def _gated(config: DecoderConfig) -> bool:
    return config.mlp_gated and (config.moe is None or bool(config.dense_layers))


def _relative(config: DecoderConfig) -> bool:
    """Whether scores depend on differences of positions alone."""
    norm = config.attention.qk_norm
    return norm is None or not norm.after_rope


REWRITES: tuple[Benign, ...] = (
    Benign(
        id="fused_qkv",
        what="queries, keys and values from one product",
        ours=built(f"{_ATTENTION}:SelfAttention", _fused("q_proj", "k_proj", "v_proj")),
        applies=projects_keys,
    ),
    Benign(
        id="fused_gate_up",
        what="gate and up from one product",
        ours=built("bestiary.models.layers.mlp:MLP", _fused("gate_proj", "up_proj")),
        applies=_gated,
    ),
    Benign(
        id="transposed_products",
        what="every linear layer as (W xᵀ)ᵀ",
        ours=patch("bestiary.models.layers.linear:Linear.forward", _transposed),
    ),
    Benign(
        id="split_products",
        what="every linear layer as a sum of two halves",
        ours=patch("bestiary.models.layers.linear:Linear.forward", _split),
    ),
    Benign(
        id="eager_attention", what="explicit scores and softmax", ours=_forced(attention="eager"), levels=_WITH_INPUTS
    ),
    Benign(
        id="sdpa_attention",
        what="torch's attention kernel",
        ours=_forced(attention="sdpa"),
        applies=lambda config: not config.attention.sinks and config.attention.logit_softcap is None,
    ),
    Benign(
        id="sink_as_key",
        what="sinks as one more key in torch's attention kernel",
        ours=patch(f"{_ATTENTION}:attention", _sink_as_key),
        applies=lambda config: config.attention.sinks,
    ),
    Benign(
        id="einsum_attention",
        what="grouped heads by einsum, nothing repeated",
        ours=patch(f"{_ATTENTION}:attention", _einsum_attention),
    ),
    Benign(
        id="blocked_attention",
        what="keys in blocks with a running maximum",
        ours=patch(f"{_ATTENTION}:attention", _blocked_attention),
    ),
    Benign(
        id="complex_rope",
        what="RoPE by complex multiplication",
        ours=patch(f"{_ATTENTION}:apply_rope", _complex_rope),
    ),
    Benign(
        id="gathered_rope_tables",
        what="RoPE tables of all positions, then a lookup",
        ours=patch("bestiary.models.layers.rotary:RotaryTable.__call__", _gathered_tables),
    ),
    Benign(
        id="positions_from_the_first_token",
        what="positions that start behind the padding on the left: RoPE sees differences only",
        ours=patch("bestiary.models.decoder:read_inputs", _from_the_first_token),
        levels="V2,V5",
        applies=_relative,
    ),
    Benign(id="torch_rms_norm", what="norms by torch.nn.functional.rms_norm", ours=patch(_NORM, torch_norm)),
    Benign(id="divided_norm", what="norms by division, the weight first", ours=patch(_NORM, divided_norm)),
    Benign(
        id="residual_last",
        what="residuals added the other way round",
        ours=patch("bestiary.models.decoder:Block.forward", residual_last),
    ),
    Benign(
        id="activations_spelled_out",
        what="activations by their formulas, up first",
        ours=together(
            patch("bestiary.models.layers.mlp:gated", _spelled_out),
            patch("bestiary.models.layers.mlp:gated_linear", _spelled_out_in_front),
        ),
        applies=_gated,
    ),
    Benign(id="expert_loop", what="experts one after the other", ours=_forced(experts="loop"), applies=_routed),
    Benign(
        id="last_expert_first",
        what="experts summed in reverse order",
        ours=patch("bestiary.kernels.experts:_loop", _last_expert_first),
        applies=_routed,
    ),
    Benign(
        id="every_expert",
        what="every expert on every token, weighted by zero where it was not chosen",
        ours=patch("bestiary.kernels.experts:_loop", _every_expert),
        applies=_routed,
    ),
    Benign(
        id="one_hot_embedding",
        what="the embedding as a product with one-hot rows",
        ours=patch("bestiary.models.layers.embedding:lookup", _one_hot),
    ),
    Benign(
        id="sliced_head",
        what="the vocabulary in slices",
        ours=patch("bestiary.models.layers.head:head_logits", _sliced_head),
    ),
    Benign(
        id="whole_loss",
        what="the loss from all logits at once",
        ours=together(
            patch("bestiary.models.layers.head:linear_log_prob", _whole_loss),
            patch("bestiary.models.layers.head:linear_cross_entropy", _whole_scalar_loss),
        ),
    ),
    Benign(id="smaller_chunks", what="smaller blocks, tiles and chunks in kernels", ours=smaller_chunks, levels="K"),
    Benign(
        id="activation_checkpointing",
        what="blocks recomputed in the backward pass",
        ours=adapted(lambda config: config.with_(activation_checkpointing=True)),
    ),
)
