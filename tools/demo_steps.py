"""What the steps of the demos share: a row of the result, how a step fails, who shows a run as it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError

if TYPE_CHECKING:
    from bestiary.training.tracking import RunInfo

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


class LineWatcher:
    """A tracker that shows a line as a run goes on; what it logs is a subclass's.

    Args:
        describe: is given the line.

    Attributes:
        steps: of the run.
    """

    def __init__(self, describe: Callable[[str], None]) -> None:
        self.describe = describe
        self.steps = 0

    def start(self, run: RunInfo) -> None:
        """Learn how many steps there are."""
        self.steps = run.steps

    def close(self) -> None:
        """Nothing is left."""
