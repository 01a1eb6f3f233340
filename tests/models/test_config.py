"""Fields of a DecoderConfig that contradict each other are one clear error, before anything is built."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bestiary.models import Gemma3, Qwen3, Qwen3MoE
from bestiary.models.config import DecoderConfig
from bestiary.models.errors import InvalidConfig

QWEN3, GEMMA3, MOE = Qwen3.sizes["0.6b"], Gemma3.sizes["270m"], Qwen3MoE.sizes["30b-a3b"]


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (QWEN3, {"num_hidden_layers": 3}, "layer_types has 28 entries"),
        (GEMMA3, {"sliding_window": None}, "sliding_window = None"),
        (QWEN3, {"attention": replace(QWEN3.attention, num_kv_heads=5)}, "num_kv_heads = 5"),
    ],
)
def test_contradicting_fields_are_named(config: DecoderConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        config.with_(**changes)


@pytest.mark.parametrize("top_k", [0, 129])
def test_a_router_chooses_between_one_and_all_experts(top_k: int) -> None:
    assert MOE.moe is not None
    router = replace(MOE.moe.router, top_k=top_k)
    with pytest.raises(InvalidConfig, match=f"top_k = {top_k} of num_experts = 128"):
        MOE.with_(moe=replace(MOE.moe, router=router))


def test_published_sizes_have_their_published_parameter_counts() -> None:
    counts = {(Qwen3, "0.6b"): 596_049_920, (Gemma3, "270m"): 268_098_176, (Qwen3MoE, "30b-a3b"): 30_532_122_624}
    for (family, size), count in counts.items():
        with torch.device("meta"):
            assert family(family.sizes[size]).num_parameters() == count
