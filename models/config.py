"""`DecoderConfig`: everything in which decoder families differ, as named fields of one frozen tree.

The tree is complete before any module is built, so LoRA, windows, norms and routers are decided by data. An enum member
exists only because a Hugging Face block needs it; `tests/models/test_blocks.py` holds the proof for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any

import torch

from bestiary.models.errors import InvalidConfig
from bestiary.models.recomputation import Checkpointing


class LayerType(StrEnum):
    """What an attention layer sees, under the names of Hugging Face's `layer_types`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


class NormPlacement(StrEnum):
    """Where the norms of a block stand (names of the norm modules in `bestiary.models.decoder`)."""

    PRE = "pre"  # Llama, Qwen: before attention and before the MLP
    POST = "post"  # OLMo 2: on each branch's output, inside the residual
    SANDWICH = "sandwich"  # Gemma 2 and 3, GLM-4: both
    PARALLEL = "parallel"  # Cohere 2: one before attention and MLP, which both take what it gives


class NormCast(StrEnum):
    """When an RMSNorm leaves fp32."""

    CAST_THEN_SCALE = "cast_then_scale"  # Llama, Qwen: back to the input dtype, then × weight
    SCALE_THEN_CAST = "scale_then_cast"  # Gemma, GPT-OSS, OLMo 2: × weight in fp32, cast last


class QKNormSpan(StrEnum):
    """What a query/key norm normalises over."""

    HEAD = "head"  # Qwen3, Gemma 3: each head alone, weight (head_dim,)
    FULL = "full"  # OLMo 2, OLMoE: all heads together, weight (heads · head_dim,)


class RopeLayout(StrEnum):
    """Which two coordinates of a head turn together."""

    HALF = "half"  # (i, i + rotary_dim / 2)
    INTERLEAVED = "interleaved"  # (2i, 2i + 1): GLM-4


class Activation(StrEnum):
    """Gate activations, under Hugging Face's names."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    RELU2 = "relu2"  # the square of relu


class HeadKind(StrEnum):
    """What stands on the final norm."""

    LM = "lm"  # logits over the vocabulary
    SCORE = "score"  # a reward model: `num_labels` scores a document, transformers' …ForSequenceClassification


class RouterKind(StrEnum):
    """How an expert router turns logits into weights."""

    SOFTMAX_TOPK = "softmax_topk"  # Qwen3-MoE, Mixtral, OLMoE: softmax over all experts, then the top k
    TOPK_SOFTMAX = "topk_softmax"  # GPT-OSS: the top k, then softmax over those
    SIGMOID = "sigmoid"  # GLM-4-MoE: sigmoid, correction bias and groups choose, the unbiased score weighs


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm of the whole model: x / rms(x) × weight (× (1 + weight) with `plus_one`)."""

    eps: float
    placement: NormPlacement = NormPlacement.PRE
    cast: NormCast = NormCast.CAST_THEN_SCALE
    plus_one: bool = False
    subtract_mean: bool = False  # Cohere 2: a LayerNorm without a bias


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """RMSNorm on queries and keys, in the style and with the eps of `Norm`."""

    span: QKNormSpan = QKNormSpan.HEAD
    after_rope: bool = False  # True: HunYuan dense


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK-aware base that grows once the sequence is longer than `original_max_position_embeddings`.

    `alpha` stretches the base of shorter sequences: theta · alpha^(d / (d − 2)); of longer ones it does not count.
    """

    factor: float
    original_max_position_embeddings: int
    alpha: float | None = None  # HunYuan


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071), `attention_factor` on cos and sin; None: 0.1·ln(factor) + 1, or the mscale quotient."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): one factor per frequency, the long list beyond the original context."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4: the first `partial_rotary_factor` of the frequencies of the whole head turn, the other pairs stand."""

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.partial_rotary_factor <= 1:
            raise InvalidConfig(
                f"rope.scaling.partial_rotary_factor = {self.partial_rotary_factor}.", remedy="a share in [0, 1]"
            )


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding on the first `rotary_dim` coordinates of each head."""

    theta: float
    rotary_dim: int
    layout: RopeLayout = RopeLayout.HALF
    turn_in_fp32: bool = False  # OLMo 2 and 3, Cohere 2; the others cast cos and sin first
    round_tables: bool = False  # Cohere 2: cos and sin are rounded to the model's dtype, then turn in fp32
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2 and V3, arXiv:2405.04434); modules in `models/layers/mla.py`.

    Keys and values come out of one latent of `kv_lora_rank`, queries out of one of `q_lora_rank` (None: straight out of
    x), each latent normed with `norm_eps`. A head has `qk_nope_head_dim` coordinates that stand and then
    `qk_rope_head_dim` that turn, of keys the same ones for all heads; its values have `v_head_dim`.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float
    q_lora_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention; `scale` multiplies q·k, `sinks` adds one learned logit per head to each softmax.

    `dropout` falls on the softmax weights while training. Not `causal`: a token sees both ways, and a window W reaches
    W − 1 tokens to either side; such a model embeds or labels text, it cannot continue it from a cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    sinks: bool = False
    logit_softcap: float | None = None  # Gemma 2
    qkv_clip: float | None = None  # OLMoE
    dropout: float = 0.0
    causal: bool = True  # False: EmbeddingGemma
    mla: MLA | None = None  # DeepSeek-V3: head_dim is then that of queries and keys

    def __post_init__(self) -> None:
        if self.mla is not None:
            self._check_latent(self.mla)
        if not 0 <= self.dropout < 1:
            raise InvalidConfig(f"attention.dropout = {self.dropout}.", remedy="a probability in [0, 1)")

    def _check_latent(self, mla: MLA) -> None:
        size = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if (self.num_kv_heads, self.head_dim) != (self.num_heads, size):
            raise InvalidConfig(
                f"num_kv_heads = {self.num_kv_heads}, head_dim = {self.head_dim} with a latent for "
                f"num_heads = {self.num_heads} of {size}.",
                remedy="the latent serves every head alike: num_kv_heads = num_heads, head_dim = nope + rope",
            )
        if self.qk_norm is not None or self.qkv_clip is not None:
            raise InvalidConfig("qk_norm or qkv_clip with a latent.", remedy="the latents have norms of their own")

    @property
    def v_head_dim(self) -> int:
        """Coordinates of a value."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim


@dataclass(frozen=True, kw_only=True)
class Router:
    """Expert choice: `top_k` of the experts, weights summing to one with `normalize`, times `scale`."""

    kind: RouterKind
    top_k: int
    normalize: bool = False
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    weights_in_fp32: bool = False  # Mixtral, GLM-4-MoE; the others cast them to the model's dtype

    def __post_init__(self) -> None:
        sigmoid = self.kind is RouterKind.SIGMOID
        if not 1 <= self.topk_groups <= self.num_groups:
            raise InvalidConfig(
                f"router.topk_groups = {self.topk_groups} of num_groups = {self.num_groups}.",
                remedy="choose between one and all groups for a token",
            )
        if sigmoid and self.bias:
            raise InvalidConfig("router.bias = True on a sigmoid router.", remedy="it has the correction bias instead")
        if not sigmoid and (self.num_groups, self.topk_groups, self.scale) != (1, 1, 1.0):
            raise InvalidConfig(
                f"router.num_groups = {self.num_groups}, topk_groups = {self.topk_groups}, scale = {self.scale} "
                f"on a {self.kind} router.",
                remedy="only sigmoid routers have groups and a scale",
            )


@dataclass(frozen=True, kw_only=True)
class SwiGLUClamp:
    """GPT-OSS: gate·sigmoid(alpha·gate)·(up + 1), gate clamped above and up on both sides at `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """A dense MLP beside the routed experts; `gated` weighs it by a sigmoid (Qwen2-MoE)."""

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Routed experts in place of the dense MLP.

    While training, what router and experts read is multiplied by noise in [1 − input_jitter, 1 + input_jitter].
    """

    num_experts: int
    intermediate_size: int
    router: Router
    bias: bool = False
    clamp: SwiGLUClamp | None = None
    shared: SharedExpert | None = None
    input_jitter: float = 0.0  # Mixtral

    def __post_init__(self) -> None:
        if not 0 <= self.input_jitter < inf:
            raise InvalidConfig(f"moe.input_jitter = {self.input_jitter}.", remedy="a share of the input, 0 for none")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685): y += x Aᵀ Bᵀ · scaling, alpha / r, or alpha / √r with `rslora`.

    Every pattern is a glob over module names, matched on the whole name or on its end after a dot: `"q_proj"`,
    `"*_proj"` (every projection, experts too), `"layers.3.mlp.*_proj"`, `"mlp.experts.gate_up_proj"`, `"mlp.gate"`
    (a router). A pattern that matches nothing is an error.

    Attributes:
        r, alpha: rank and numerator of the scaling.
        rank_pattern, alpha_pattern: (pattern, value) where others hold; the first match counts.
        targets: which weights carry an adapter.
        dropout: on the adapter's input while training; experts and routers have none.
        dtype: of the adapters; None: the model's. float32 on a bfloat16 base keeps small steps from rounding away.
    """

    r: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("targets", "rank_pattern", "alpha_pattern"):
            value = vars(self)[name]
            if isinstance(value, str):
                raise InvalidConfig(f"lora.{name} = {value!r} is one string.", remedy=f"a tuple: ({value!r},)")
            object.__setattr__(self, name, tuple(value.items() if isinstance(value, dict) else value))
        if not self.targets:
            raise InvalidConfig("lora.targets is empty.", remedy='name what to adapt, e.g. ("q_proj", "v_proj")')
        for rank in (self.r, *(rank for _, rank in self.rank_pattern)):
            if rank < 1:
                raise InvalidConfig(f"lora rank r = {rank}.", remedy="at least 1")
        if not 0 <= self.dropout < 1:
            raise InvalidConfig(f"lora.dropout = {self.dropout}.", remedy="a probability in [0, 1)")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise InvalidConfig(f"lora.dtype = {self.dtype}.", remedy="a floating-point dtype, or None")

    @property
    def scaling(self) -> float:
        """Factor on the low-rank product."""
        return self.alpha / self.r**0.5 if self.rslora else self.alpha / self.r


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder-only transformer; sizes in elements, layers counted from 0.

    `model_type` names the bridge (Hugging Face's `model_type`). `sliding_rope` None means that sliding layers turn like
    full ones. `nope_layers` have no RoPE. With `moe`, every layer outside `dense_layers` routes to experts.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention: Attention
    norm: Norm
    rope: Rope
    sliding_rope: Rope | None = None
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = None
    nope_layers: tuple[int, ...] = ()
    activation: Activation = Activation.SILU
    mlp_bias: bool = False
    mlp_gated: bool = True  # False: Arcee, down(act(up x))
    moe: MoE | None = None
    dense_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    embedding_multiplier_in_weight_dtype: bool = False  # Gemma rounds √H to the weight's dtype first
    scales_inputs_embeds: bool = False  # Granite: the multiplier falls on embeddings that a caller gives, too
    residual_multiplier: float = 1.0  # Granite
    residual_dropout: float = 0.0  # Seed-OSS, Phi-3: on what attention and the MLP add while training
    logits_divisor: float = 1.0  # Granite
    final_logit_softcap: float | None = None
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False
    head: HeadKind = HeadKind.LM
    num_labels: int = 1  # scores a document; of a score head alone
    lora: LoRAConfig | None = None
    padding_idx: int | None = field(default=None, compare=False)  # token whose lookup gets no gradient
    activation_checkpointing: bool | Checkpointing = field(default=False, compare=False)  # True: all blocks, in full
    compile_blocks: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (LayerType.FULL,) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise InvalidConfig(
                f"layer_types has {len(self.layer_types)} entries and num_hidden_layers = {self.num_hidden_layers}.",
                remedy="give one entry per layer",
            )
        if LayerType.SLIDING in self.layer_types and self.sliding_window is None:
            raise InvalidConfig(
                "sliding_window = None, and layer_types names sliding_attention.", remedy="give the window in tokens"
            )
        qk_norm = self.attention.qk_norm
        if qk_norm is not None and qk_norm.after_rope and qk_norm.span is QKNormSpan.FULL:
            raise InvalidConfig(
                "qk_norm.span = full with qk_norm.after_rope = True.", remedy="after RoPE each head is normed alone"
            )
        if self.moe is not None and not 1 <= self.moe.router.top_k <= self.moe.num_experts:
            raise InvalidConfig(
                f"router.top_k = {self.moe.router.top_k} of num_experts = {self.moe.num_experts}.",
                remedy="choose between one and all experts for a token",
            )
        if self.num_labels < 1 or (self.num_labels > 1 and self.head is not HeadKind.SCORE):
            raise InvalidConfig(
                f"num_labels = {self.num_labels} with head = {self.head}.",
                remedy="at least one label, and more than one with a score head alone",
            )
        if self.moe is not None and not self.mlp_gated:
            raise InvalidConfig("mlp_gated = False with moe.", remedy="experts have a gate")
        if not 0 <= self.residual_dropout < 1:
            raise InvalidConfig(f"residual_dropout = {self.residual_dropout}.", remedy="a probability in [0, 1)")
        if self.moe is not None and self.moe.router.num_groups > 1:
            if (count := self.moe.num_experts) % (groups := self.moe.router.num_groups) or count < 2 * groups:
                raise InvalidConfig(
                    f"router.num_groups = {groups} of num_experts = {count}.",
                    remedy="groups of equal size, of two experts at least: a group counts by its two best",
                )
        for rope in (self.rope, self.sliding_rope):
            if rope is not None and rope.rotary_dim % 2:
                raise InvalidConfig(f"rope.rotary_dim = {rope.rotary_dim}.", remedy="an even number: pairs turn")
        if self.attention.num_heads % self.attention.num_kv_heads:
            raise InvalidConfig(
                f"num_heads = {self.attention.num_heads} is not a multiple of "
                f"num_kv_heads = {self.attention.num_kv_heads}.",
                remedy="every key/value head serves the same number of query heads",
            )

    @property
    def checkpointing(self) -> Checkpointing | None:
        """Which blocks compute what again in the backward pass; None: none."""
        given = self.activation_checkpointing
        return given if isinstance(given, Checkpointing) else Checkpointing() if given else None

    @property
    def padded_vocab_size(self) -> int:
        """Columns the head computes in: the next multiple of 64."""
        return -(-self.vocab_size // 64) * 64

    @property
    def ties_head(self) -> bool:
        """Whether there is a head that is the embedding; a score head never is."""
        return self.tie_word_embeddings and self.head is HeadKind.LM

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` routes to experts."""
        return self.moe is not None and index not in self.dense_layers

    def window(self, index: int) -> int | None:
        """Tokens that layer `index` sees, itself included; None: all before it."""
        return self.sliding_window if self.layer_types[index] is LayerType.SLIDING else None

    def rope_of(self, index: int) -> Rope | None:
        """RoPE of layer `index`; None where the layer has none."""
        if index in self.nope_layers:
            return None
        sliding = self.layer_types[index] is LayerType.SLIDING
        return self.sliding_rope if sliding and self.sliding_rope is not None else self.rope

    def with_(self, **changes: Any) -> DecoderConfig:
        """A copy with `changes` applied."""
        return replace(self, **changes)
