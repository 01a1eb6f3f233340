"""Routed experts: router, experts, and the shared expert beside them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from bestiary.kernels.experts import ExpertLinear, experts_mlp
from bestiary.kernels.precision import at_least_fp32
from bestiary.models.config import DecoderConfig, LoRAConfig, MoE, RouterKind
from bestiary.models.errors import InvalidConfig, MissingBridge
from bestiary.models.layers.linear import Linear
from bestiary.models.layers.mlp import MLP
from bestiary.models.lora import ADAPTER_LEAVES, Adaptable, LowRank, Site, adapter, new_adapter
from bestiary.models.protocol import bridge_of

PROJECTIONS = ("gate_up_proj", "down_proj")


class Router(nn.Module, Adaptable):
    """Chooses experts and their weights. weight (E, H), bias (E,), e_score_correction_bias (E,) for sigmoid routers.

    LoRA: lora_A (r, H), lora_B (E, r), without dropout.
    """

    def __init__(self, config: DecoderConfig, moe: MoE, name: str) -> None:
        super().__init__()
        self.config, self.num_experts = moe.router, moe.num_experts
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.router.bias else None
        self.lora = _without_dropout(adapter(config, name), name)
        if self.lora is not None:
            self.lora_A, self.lora_B = new_adapter(self.weight, self.lora)
        if moe.router.kind is RouterKind.SIGMOID:
            # Trained by its own rule, not by gradients (DeepSeek-V3, arXiv:2412.19437).
            wide = at_least_fp32(torch.get_default_dtype())
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.num_experts, dtype=wide), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, H) → logits (N, E), weights (N, K) in x's dtype (with `weights_in_fp32` wider), experts (N, K)."""
        if self.config.kind is RouterKind.SIGMOID:
            return self._sigmoid(x)
        logits = self._logits(x, self.weight)
        if self.config.kind is RouterKind.TOPK_SOFTMAX:
            top, indices = logits.topk(self.config.top_k, dim=-1)
            return logits, top.softmax(-1), indices
        weights, indices = logits.softmax(-1, dtype=at_least_fp32(logits.dtype)).topk(self.config.top_k, dim=-1)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, self._cast(weights, x), indices

    def _cast(self, weights: Tensor, x: Tensor) -> Tensor:
        return weights if self.config.weights_in_fp32 else weights.to(x.dtype)

    def sites(self, name: str) -> Iterator[Site]:
        """The weight."""
        low_rank = None if self.lora is None else LowRank(self.lora_A, self.lora_B, self.lora)
        yield Site(name, f"{name}.weight", self.weight, low_rank, takes_dropout=False)

    def drop_adapters(self) -> None:
        """Be a plain router again."""
        if self.lora is not None:
            del self.lora_A, self.lora_B
            self.lora = None

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight, self.bias)
        if self.lora is None:
            return logits
        low = F.linear(x.to(self.lora_A.dtype), self.lora_A)
        return (logits + F.linear(low, self.lora_B) * self.scaling(self.lora)).to(logits.dtype)

    def _sigmoid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Group-limited choice by biased scores, weights from the unbiased ones (transformers' Glm4MoeTopkRouter)."""
        router, dtype = self.config, at_least_fp32(x.dtype)
        logits = self._logits(x.to(dtype), self.weight.to(dtype))
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        if router.num_groups > 1:
            grouped = rearrange(biased, "n (groups e) -> n groups e", groups=router.num_groups)
            best_groups = grouped.topk(2, dim=-1).values.sum(-1).topk(router.topk_groups, dim=-1).indices
            open_groups = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter(
                1, best_groups, True
            )
            biased = rearrange(grouped.masked_fill(~open_groups[..., None], -torch.inf), "n groups e -> n (groups e)")
        indices = biased.topk(router.top_k, dim=-1).indices
        weights = scores.gather(1, indices)
        if router.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, self._cast(weights * router.scale, x), indices


class Experts(nn.Module, Adaptable):
    """All experts as 3-D parameters: gate_up_proj (E, 2I, H), gate rows first; down_proj (E, H, I); `_bias` of both.

    LoRA: gate_up_proj_lora_A (E, r, H), gate_up_proj_lora_B (E, 2I, r), likewise down_proj; one adapter per expert.
    """

    def __init__(self, config: DecoderConfig, moe: MoE, name: str) -> None:
        super().__init__()
        self.name, self.model_type = name, config.model_type
        self.activation = config.activation
        self.clamp = None if moe.clamp is None else (moe.clamp.alpha, moe.clamp.limit)
        count, hidden, width = moe.num_experts, config.hidden_size, moe.intermediate_size
        self.lora = {p: _without_dropout(adapter(config, f"{name}.{p}"), f"{name}.{p}") for p in PROJECTIONS}
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width)) if moe.bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden)) if moe.bias else None
        for projection, lora in self.lora.items():
            if lora is not None:
                for leaf, parameter in zip(ADAPTER_LEAVES, new_adapter(getattr(self, projection), lora), strict=True):
                    self.register_parameter(f"{projection}_{leaf}", parameter)

    def sites(self, name: str) -> Iterator[Site]:
        """Both projections."""
        for projection, lora in self.lora.items():
            low_rank = None
            if lora is not None:
                lora_A, lora_B = (getattr(self, f"{projection}_{leaf}") for leaf in ADAPTER_LEAVES)
                low_rank = LowRank(lora_A, lora_B, lora)
            full = f"{name}.{projection}"
            yield Site(full, full, getattr(self, projection), low_rank, takes_dropout=False)

    def wrapping_obstacle(self) -> str | None:
        """Besides an adapter of its own: a layout that is not the one PEFT's files assume."""
        try:
            bridge = bridge_of(self.model_type)
        except MissingBridge:
            return super().wrapping_obstacle()  # a family that never meets Hugging Face
        if not all(bridge.lies_as_in_hf(f"{self.name}.{projection}") for projection in PROJECTIONS):
            return "its weights lie otherwise than in Hugging Face's model, which its files would be loaded onto"
        return super().wrapping_obstacle()

    def drop_adapters(self) -> None:
        """Be plain experts again."""
        for projection, lora in self.lora.items():
            for leaf in () if lora is None else ADAPTER_LEAVES:
                delattr(self, f"{projection}_{leaf}")
        self.lora = dict.fromkeys(PROJECTIONS)

    def _linear(self, projection: str) -> ExpertLinear:
        weight, bias, lora = getattr(self, projection), getattr(self, f"{projection}_bias"), self.lora[projection]
        if lora is None:
            return ExpertLinear(weight, bias)
        lora_A, lora_B = getattr(self, f"{projection}_lora_A"), getattr(self, f"{projection}_lora_B")
        return ExpertLinear(weight, bias, lora_A, lora_B, self.scaling(lora))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """(N, H), experts (N, K), weights (N, K) → (N, H)."""
        return experts_mlp(
            x,
            indices,
            weights,
            self._linear("gate_up_proj"),
            self._linear("down_proj"),
            activation=self.activation,
            clamp=self.clamp,
        )


class MoEBlock(nn.Module):
    """Router, experts and, where the config has one, the shared expert."""

    def __init__(self, config: DecoderConfig, moe: MoE, name: str) -> None:
        super().__init__()
        self.jitter = moe.input_jitter
        self.gate = Router(config, moe, f"{name}.gate")
        self.experts = Experts(config, moe, f"{name}.experts")
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if moe.shared is not None:
            self.shared_expert = MLP(config, f"{name}.shared_expert", moe.shared.intermediate_size)
            if moe.shared.gated:
                gate = f"{name}.shared_expert_gate"
                self.shared_expert_gate = Linear(config.hidden_size, 1, lora=adapter(config, gate))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H) → (B, T, H) and the router logits (B·T, E)."""
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        tokens = x.flatten(0, 1)
        router_logits, weights, indices = self.gate(tokens)
        out = self.experts(tokens, indices, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(tokens).sigmoid() * shared
            out = out + shared
        return out.view_as(x), router_logits


def _without_dropout(lora: LoRAConfig | None, name: str) -> LoRAConfig | None:
    if lora is not None and lora.dropout:
        raise InvalidConfig(
            f"lora.dropout = {lora.dropout} with a target on {name}.",
            remedy="set dropout to 0: adapters of experts and routers have none, in PEFT neither",
        )
    return lora
