"""A process of its own for each sample: nothing of one arm warms, fragments or fills what the next one sees."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError

_STATUS = Path("/proc/self/status")  # Linux


class WorkerFailed(BestiaryError):
    """A measuring process that did not end well; holds the end of its error output."""


def run_worker(
    module: str,
    job: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Runs `python -m module --worker JOB` and returns the JSON object on the last line of its output.

    Args:
        module: its `main` understands `--worker`.
        job: plain JSON values.
        environment: added to this process's.
        timeout: seconds after which it is killed.
    Raises:
        WorkerFailed: it ended with an error or a signal, printed nothing, or took too long.
    """
    command = [sys.executable, "-m", module, "--worker", json.dumps(job)]
    merged = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=merged, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(
            f"the process of {job.get('arm')!r} in {module} ran for more than {timeout:.0f} s.",
            remedy="give it more time",
        ) from error
    if done.returncode != 0 or not done.stdout.strip():
        raise WorkerFailed(
            f"the process of {job.get('arm')!r} in {module} ended with {done.returncode}.\n{done.stderr[-2000:]}",
            remedy=f"run it alone: python -m {module} --worker '{json.dumps(job)}'",
        )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def settle() -> None:
    """Collects garbage and hands free heap pages back, so that what is resident is what is held (glibc alone)."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Resident bytes now; off Linux the peak so far."""
    return _status("VmRSS") if _STATUS.exists() else peak()


def reset_peak() -> int:
    """Starts a new peak; returns resident bytes now, or the peak so far where the kernel cannot reset it."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    """Peak resident bytes of this process since `reset_peak`."""
    if _STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


def _status(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
