"""Expert routers, bit for bit against the classes of transformers: which experts, with which weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from bestiary.models.config import MoE, RouterKind
from bestiary.models.config import Router as RouterConfig
from bestiary.models.layers.moe import Router
from bestiary.verify.reference import default_dtype

from .tiny import tiny_config

EXPERTS, TOP_K, HIDDEN = 12, 3, 80


@dataclass(frozen=True)
class Case:
    """A router there, with the fields it reads, and the config here."""

    theirs: type[nn.Module]
    config: Any
    ours: RouterConfig


SOFTMAX = RouterConfig(kind=RouterKind.SOFTMAX_TOPK, top_k=TOP_K)
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
CASES = {
    "qwen3_moe": Case(Qwen3MoeTopKRouter, Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=False), SOFTMAX),
    "qwen3_moe renormalised": Case(
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True),
        RouterConfig(kind=RouterKind.SOFTMAX_TOPK, top_k=TOP_K, normalize=True),
    ),
    "mixtral": Case(
        MixtralTopKRouter,
        MixtralConfig(**SIZES, num_local_experts=EXPERTS),
        RouterConfig(kind=RouterKind.SOFTMAX_TOPK, top_k=TOP_K, normalize=True, weights_in_fp32=True),
    ),
    "gpt_oss": Case(
        GptOssTopKRouter,
        GptOssConfig(**SIZES, num_local_experts=EXPERTS),
        RouterConfig(kind=RouterKind.TOPK_SOFTMAX, top_k=TOP_K, bias=True),
    ),
    "glm4_moe": Case(
        Glm4MoeTopkRouter,
        Glm4MoeConfig(**SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2, routed_scaling_factor=1.7),
        RouterConfig(
            kind=RouterKind.SIGMOID,
            top_k=TOP_K,
            normalize=True,
            num_groups=4,
            topk_groups=2,
            scale=1.7,
            weights_in_fp32=True,
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_choice_and_weights_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    """Logits, weights and their dtype, experts; the order of the chosen does not count."""
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    with default_dtype(dtype):
        theirs = case.theirs(case.config)
        moe = MoE(num_experts=EXPERTS, intermediate_size=8, router=case.ours)
        ours = Router(tiny_config("qwen3_moe", moe=moe), moe, "mlp.gate")
    state = {
        key: torch.randn(value.shape, generator=generator).mul(0.3).to(value.dtype)
        for key, value in theirs.state_dict().items()
    }
    theirs.load_state_dict(state)
    ours.load_state_dict(state)
    assert {key: value.dtype for key, value in ours.state_dict().items()} == {k: v.dtype for k, v in state.items()}
    x = torch.randn(200, HIDDEN, generator=generator).to(dtype)
    logits, weights, experts = ours(x)
    expected_logits, expected_weights, expected_experts = theirs(x)
    assert torch.equal(logits, expected_logits)
    assert weights.dtype == expected_weights.dtype
    order, expected_order = experts.argsort(-1), expected_experts.argsort(-1)
    assert torch.equal(experts.gather(-1, order), expected_experts.gather(-1, expected_order))
    assert torch.equal(weights.gather(-1, order), expected_weights.gather(-1, expected_order))
