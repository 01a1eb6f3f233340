"""What the steps of `make demo` share: a row of the result, and how a step fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError

NUMERIC, INCONCLUSIVE = 1, 5  # exit codes, as `verify-bridge` counts them


class StepFailed(BestiaryError):
    """A step whose result is not what it must be.

    Remedy: `bestiary doctor`, then the command that the step names.
    """

    exit_code = NUMERIC


class Tie(StepFailed):
    """Continuations that part where two tokens are equally likely up to rounding.

    Remedy: another length: `--new-tokens`.
    """

    exit_code = INCONCLUSIVE


@dataclass
class Step:
    """One row of the result: what it found, how long it took, and figures for `metrics.jsonl`."""

    name: str
    seconds: float = 0.0
    ok: bool = False
    result: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def megabytes(folder: Path) -> float:
    """Size of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
