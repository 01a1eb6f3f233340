"""A process of its own for each sample: nothing of one arm warms, fragments or fills what the next one sees."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.training.memory import peak, reset_peak, resident

__all__ = ["WorkerFailed", "peak", "reset_peak", "resident", "run_worker", "settle"]


class WorkerFailed(BestiaryError):
    """A measuring process that did not end well; holds the end of its error output.

    Remedy: read the end of its output in the message; a peer may not be installed.
    """


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
