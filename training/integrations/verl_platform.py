"""Processors as a platform of verl, which registers none for them.

Without it `get_device_name()` answers "cuda" on a machine without a GPU (the last line of `_detect_platform_name` in
verl/plugin/platform/platform_manager.py). VERL_PLATFORM=cpu asks for this one: a process without a GPU may be the head
of a cluster that has them.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from bestiary.training.integrations.needs import needs

INSTALL = "--no-deps -r tools/requirements/verl.txt"

with needs("verl", INSTALL), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines for libraries that are not there
    from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Processors as verl's device; VERL_PLATFORM=cpu asks for it."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        """There is no accelerator: verl asks before it saves and restores generators of one."""
        return False

    def current_device(self) -> str:
        """Its name: verl hands this to `.to()`, which reads a number as a GPU's."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs behind."""

    def manual_seed(self, seed: int) -> None:
        """Of torch's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Of torch's generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """Gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """One that hides nothing."""
        return "VERL_VISIBLE_CPUS"

    def nvtx_range(self, msg: str) -> Any:
        """Nothing."""
        return nullcontext()

    def profiler_start(self) -> None:
        """Nothing."""

    def profiler_stop(self) -> None:
        """Nothing."""

    def ray_resource_name(self) -> str:
        """Ray's own."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """No."""
        return False

    def cudart(self) -> None:
        """None."""
