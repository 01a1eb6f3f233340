"""What devices can compute at most: published dense bf16 rates of tensor cores, or a measured rate."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache

import torch

from bestiary.kernels.products import mm

_T = 1e12

PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"\bA100\b", 312.0 * _T, "NVIDIA A100 datasheet"),
    (r"\bH100 NVL\b", 835.5 * _T, "NVIDIA H100 datasheet, half of the rate with sparsity"),
    (r"\bH100 PCIe\b", 756.5 * _T, "NVIDIA H100 datasheet, half of the rate with sparsity"),
    (r"\bH100\b", 989.5 * _T, "NVIDIA H100 datasheet (SXM), half of the rate with sparsity"),
    (r"\bH200 NVL\b", 835.5 * _T, "NVIDIA H200 datasheet, half of the rate with sparsity"),
    (r"\bG?H200\b", 989.5 * _T, "NVIDIA H200 datasheet (SXM; GH200 has the same die), half of the rate with sparsity"),
    (r"\bGB200\b", 2500.0 * _T, "NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s with sparsity over 72 devices, halved"),
    (r"\bB200\b", 2250.0 * _T, "NVIDIA DGX B200 datasheet: 36 PFLOP/s with sparsity over 8 devices, halved"),
    (r"\bL40S\b", 362.05 * _T, "NVIDIA L40S datasheet"),
    (r"\bL4\b", 121.0 * _T, "NVIDIA L4 datasheet, half of the rate with sparsity"),
    (r"\bRTX 4090 D\b", 147.0 * _T, "NVIDIA Ada whitepaper's rate of the RTX 4090, by the number of its processors"),
    (r"\bRTX 4090\b", 165.2 * _T, "NVIDIA Ada whitepaper, appendix A: dense, sums in fp32"),
    (r"\bMI3(00|25)X\b", 1307.4 * _T, "AMD Instinct MI300X and MI325X datasheets, matrix cores"),
)
"""(pattern over the name that torch gives the device, FLOP/s of dense bf16 products with sums in fp32, source)."""

_SIDE = {"cpu": 1024}
_REPEATS = 6


@dataclass(frozen=True, slots=True)
class Peak:
    """FLOP/s that a utilisation is a share of, and where the number is from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / _T:.4g} TFLOP/s ({self.source})"


def device_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> Peak:
    """The published dense bf16 rate of a known device, whatever the dtype; of others the measured one.

    Args:
        dtype: of the products that are measured.
    """
    if device.type == "cuda":
        known = published(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measured_peak(device, dtype, torch.get_num_threads())


def published(name: str) -> Peak | None:
    """The rate of a device by the name that torch gives it, or None."""
    for pattern, flops, source in PEAKS:
        if re.search(pattern, name):
            return Peak(flops, f"dense bf16, {source}")
    return None


@cache
def measured_peak(device: torch.device, dtype: torch.dtype, threads: int) -> Peak:
    """The best rate of a square product in the library that the model's own products go to; once a process.

    Args:
        threads: that torch uses now.
    """
    side = _SIDE.get(device.type, 8192)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_REPEATS):
        _settle(device)
        start = time.perf_counter()
        mm(a, b)
        _settle(device)
        best = min(best, time.perf_counter() - start)
    name = str(dtype).removeprefix("torch.")
    return Peak(2.0 * side**3 / best, f"measured: {name} product of side {side}, {threads} threads")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
