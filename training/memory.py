"""How much memory this process and its device hold, and the most they held since somebody asked."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30

_STATUS = Path("/proc/self/status")  # Linux
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int:
    """Resident bytes now; off Linux the peak so far."""
    return _status("VmRSS") if _STATUS.exists() else peak()


def reset_peak() -> int:
    """Starts a new peak; returns resident bytes now, or the peak so far where the kernel cannot reset it."""
    if _CLEAR.exists():
        _CLEAR.write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    """Peak resident bytes of this process since `reset_peak`."""
    if _STATUS.exists():
        return _status("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class PeakMemory:
    """The most memory held since this was made: make it before the model is loaded.

    On CUDA what torch allocated on the device. Elsewhere resident memory above what the process held then.

    Args:
        device: that the model is on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._level = 0
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._level = resident()
            reset_peak()

    def read(self) -> int:
        """Bytes so far."""
        if self._device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._device)
        return max(peak() - self._level, 0)


def _status(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
