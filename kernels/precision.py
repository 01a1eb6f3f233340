"""The dtype that reductions run in."""

import torch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """float32 for everything narrower; float64 stays float64, so that a reference run has no fp32 island."""
    return torch.promote_types(dtype, torch.float32)
