"""RoPE frequencies, bit for bit those of transformers in fp32; nothing of them is stored."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bestiary.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from bestiary.models.layers.rotary import RotaryTable, rope_frequencies
from bestiary.verify.reference import promoted

DIM = 64
SHORT, LONG = tuple(1.0 + i / 7 for i in range(32)), tuple(1.3 + i for i in range(32))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GPT_OSS = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
# name: (theta, transformers' parameters, ours)
KINDS: dict[str, tuple[float, dict[str, Any], RopeScaling | None]] = {
    "default": (1e6, {"rope_type": "default"}, None),
    "linear": (1e6, {"rope_type": "linear", "factor": 8.0}, LinearScaling(factor=8.0)),
    "dynamic": (
        1e4,
        {"rope_type": "dynamic", "factor": 3.0},
        DynamicScaling(factor=3.0, original_max_position_embeddings=2048),
    ),
    "llama3": (5e5, {"rope_type": "llama3", **LLAMA3}, Llama3Scaling(**LLAMA3)),
    "yarn of gpt_oss": (
        15e4,
        {"rope_type": "yarn", **GPT_OSS, "truncate": False},
        YarnScaling(**GPT_OSS, truncate=False),
    ),
    "yarn truncated": (1e4, {"rope_type": "yarn", **GPT_OSS}, YarnScaling(**GPT_OSS)),
    "yarn with mscale": (
        1e4,
        {"rope_type": "yarn", **GPT_OSS, "mscale": 0.7, "mscale_all_dim": 1.0},
        YarnScaling(**GPT_OSS, mscale=0.7, mscale_all_dim=1.0),
    ),
    "yarn that shrinks nothing": (
        1e4,
        {"rope_type": "yarn", **GPT_OSS, "factor": 1.0},
        YarnScaling(**{**GPT_OSS, "factor": 1.0}),
    ),
    "proportional": (
        1e6,
        {"rope_type": "proportional", "partial_rotary_factor": 0.3},
        ProportionalScaling(partial_rotary_factor=0.3),
    ),
    "proportional and stretched": (
        1e4,
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 3.0},
        ProportionalScaling(partial_rotary_factor=0.5, factor=3.0),
    ),
    "proportional, the whole head": (1e4, {"rope_type": "proportional"}, ProportionalScaling()),
    "longrope": (
        1e4,
        {
            "rope_type": "longrope",
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.19,
        },
        LongRopeScaling(
            short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=4096, attention_factor=1.19
        ),
    ),
}


def setting(kind: str) -> tuple[LlamaConfig, Rope]:
    theta, parameters, scaling = KINDS[kind]
    config = LlamaConfig(
        head_dim=DIM, rope_parameters={"rope_theta": theta, **parameters}, max_position_embeddings=2048
    )
    return config, Rope(theta=theta, rotary_dim=DIM, scaling=scaling)


@pytest.mark.parametrize("length", [5, 2048, 2049, 4096, 4097, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_bit_equal(kind: str, dtype: torch.dtype, length: int) -> None:
    """Inside and beyond the original context, and the factor on cos and sin."""
    config, rope = setting(kind)
    ours, factor = rope_frequencies(rope, dtype, length=length)
    init = ROPE_INIT_FUNCTIONS.get(
        str(config.rope_parameters["rope_type"]), LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    if dtype is torch.float64:
        with promoted():
            expected, expected_factor = init(config, seq_len=torch.tensor(length))
    else:
        expected, expected_factor = init(config, seq_len=torch.tensor(length))
    assert ours.dtype == dtype
    assert torch.equal(ours, expected)
    assert factor == expected_factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 30_000])
@pytest.mark.parametrize("kind", KINDS)
def test_cos_and_sin_are_bit_equal(kind: str, offset: int, dtype: torch.dtype) -> None:
    """Angles in fp32 whatever the model's dtype, at offsets where bf16 would lose them."""
    config, rope = setting(kind)
    positions = torch.arange(offset, offset + 40)[None]
    cos, sin = RotaryTable(rope)(positions, dtype)
    expected = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=dtype), positions)
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs[..., : DIM // 2])


def test_the_length_counts_only_where_it_matters() -> None:
    """Fixed kinds are computed once a dtype; the moving ones follow each call, back down too."""
    table = RotaryTable(setting("yarn of gpt_oss")[1])
    short, long = torch.arange(10)[None], torch.arange(9000)[None]
    assert table.frequencies(short, torch.float32)[0] is table.frequencies(long, torch.float32)[0]
    for kind in ("dynamic", "longrope"):
        table = RotaryTable(setting(kind)[1])
        first, beyond, again = (table.frequencies(p, torch.float32)[0] for p in (short, long, short))
        assert torch.equal(first, again)
        assert not torch.equal(first, beyond)


def test_frequencies_are_real_whatever_the_default_device() -> None:
    """A model that is built on meta computes them all the same: nothing of RoPE is in a checkpoint."""
    rope = setting("llama3")[1]
    expected, _ = rope_frequencies(rope)
    for kind in KINDS:
        with torch.device("meta"):
            frequencies, _ = rope_frequencies(setting(kind)[1], length=9000)
        assert frequencies.device.type == "cpu"
    with torch.device("meta"):
        assert torch.equal(rope_frequencies(rope)[0], expected)


def test_turning_in_fp32_keeps_the_tables_wide() -> None:
    """OLMo 2 and 3; float64 stays float64."""
    rope = Rope(theta=1e4, rotary_dim=DIM, turn_in_fp32=True)
    positions = torch.arange(5)[None]
    assert RotaryTable(rope)(positions, torch.bfloat16)[0].dtype == torch.float32
    assert RotaryTable(rope)(positions, torch.float64)[0].dtype == torch.float64
