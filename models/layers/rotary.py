"""RoPE frequencies of every scaling kind, and the cos/sin of one forward pass. No buffers: nothing to load or to lose.

The formulas follow transformers' `modeling_rope_utils` operation by operation, so that float32 tables are bit-equal.
"""

import math

import torch
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32
from bestiary.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)


class RotaryTable:
    """cos and sin of one RoPE kind for the positions of a forward pass."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self._frequencies: dict[torch.dtype, tuple[Tensor, float]] = {}

    def __call__(
        self, position_ids: Tensor, dtype: torch.dtype, row_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos, sin (B or 1, T, rotary_dim / 2) in `dtype`, or wider where RoPE turns in fp32; angles in at least fp32.

        With `round_tables` the wider ones hold values that `dtype` has.

        Args:
            position_ids: (B or 1, T) int64.
            row_positions: of the whole rows of which these are a slice; None: they are whole.
        """
        wide = at_least_fp32(dtype)
        rounded = dtype if self.rope.round_tables else wide
        dtype = wide if self.rope.turn_in_fp32 else dtype
        inv_freq, attention_factor = self.frequencies(position_ids if row_positions is None else row_positions, wide)
        angles = position_ids[..., None].to(wide) * inv_freq.to(position_ids.device)
        cos, sin = (angles.cos() * attention_factor).to(rounded), (angles.sin() * attention_factor).to(rounded)
        return cos.to(dtype), sin.to(dtype)

    def frequencies(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        """inv_freq (rotary_dim / 2,) on the CPU and the factor on cos and sin."""
        if isinstance(self.rope.scaling, DynamicScaling | LongRopeScaling):
            return rope_frequencies(self.rope, dtype, length=int(position_ids.max()) + 1)
        if torch.compiler.is_compiling():  # a graph that fills the cache is traced again once it is full
            return rope_frequencies(self.rope, dtype)
        if dtype not in self._frequencies:
            self._frequencies[dtype] = rope_frequencies(self.rope, dtype)
        return self._frequencies[dtype]


def rope_frequencies(rope: Rope, dtype: torch.dtype = torch.float32, length: int = 0) -> tuple[Tensor, float]:
    """Inverse frequencies (rotary_dim / 2,) and the factor on cos and sin.

    Args:
        dtype: float32 or float64.
        length: longest position + 1; only dynamic and LongRoPE scaling read it.
    Source: transformers `modeling_rope_utils.py`, one function a kind there.
    """
    scaling = rope.scaling
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / rope.rotary_dim
    if scaling is None:
        return 1.0 / rope.theta**exponents, 1.0
    if isinstance(scaling, LinearScaling):
        return 1.0 / rope.theta**exponents / scaling.factor, 1.0
    if isinstance(scaling, DynamicScaling):
        return 1.0 / _dynamic_theta(rope, scaling, torch.tensor(length, dtype=dtype, device="cpu")) ** exponents, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(1.0 / rope.theta**exponents, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(rope, scaling, exponents), _yarn_attention_factor(scaling)
    if isinstance(scaling, ProportionalScaling):
        return _proportional(1.0 / rope.theta**exponents, rope, scaling), 1.0
    long = length > scaling.original_max_position_embeddings
    factors = torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=dtype, device="cpu")
    return 1.0 / (factors * rope.theta**exponents), scaling.attention_factor


def _dynamic_theta(rope: Rope, scaling: DynamicScaling, length: Tensor) -> Tensor | float:
    original, power = scaling.original_max_position_embeddings, rope.rotary_dim / (rope.rotary_dim - 2)
    if scaling.alpha is not None and length <= original:
        stretched: float = rope.theta * scaling.alpha**power
        return stretched
    stretch = scaling.factor * length.clamp(min=original) / original - (scaling.factor - 1)
    return rope.theta * stretch**power


def _proportional(inv_freq: Tensor, rope: Rope, scaling: ProportionalScaling) -> Tensor:
    turning = int(scaling.partial_rotary_factor * rope.rotary_dim // 2)
    return torch.cat((inv_freq[:turning], torch.zeros_like(inv_freq[turning:]))) / scaling.factor


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    original, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / scaling.factor, inv_freq)
    ramp = (original / wavelength - low) / (high - low)
    smoothed = (1 - ramp) * scaled / scaling.factor + ramp * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: Rope, scaling: YarnScaling, exponents: Tensor) -> Tensor:
    def correction_dim(rotations: float) -> float:
        return (
            rope.rotary_dim
            * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=exponents.dtype, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = rope.theta**exponents
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
