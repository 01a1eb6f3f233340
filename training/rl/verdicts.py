"""What is said of answers, and the account of what could not be said."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bestiary.training.errors import RewardFailed
from bestiary.training.rl.allowance import Allowance

Why = Literal["error", "timeout", "nan", "none"]
_COUNTED: Mapping[Why, str] = {"error": "errors", "timeout": "timeouts", "nan": "nan", "none": "none"}


@dataclass(frozen=True)
class Failure:
    """Why an answer has no reward.

    Attributes:
        alone: asking about each answer of the call by itself may help.
    """

    why: Why
    told: str
    alone: bool = True


Verdict = float | Failure | None


def verdict(value: float | None, *, abstains: bool = False) -> Verdict:
    """What a number means; None is a failure unless who gave it may abstain."""
    if value is None:
        return None if abstains else Failure("none", "returned None")
    return value if math.isfinite(value) else Failure("nan", f"returned {value}")


class Accounts:
    """Failures of judges: counted since the last look, and bounded. Safe to use from several threads.

    Args:
        names: of the judges.   max_errors, window: of each, see `Allowance`.
    """

    def __init__(self, names: Iterable[str], max_errors: float, window: int) -> None:
        self._allowances = {name: Allowance(max_errors, window) for name in names}
        self._lock, self._counts = threading.Lock(), _nothing()

    def book(self, name: str, of: str, found: Verdict) -> float | None:
        """The reward in a verdict.

        Args:
            of: the answer, for the error.
        Raises:
            RewardFailed: this failure is one more than allowed; names the judge, the answer and what went wrong.
        """
        failed = isinstance(found, Failure)
        with self._lock:
            over = self._allowances[name].book(failed)
            if not isinstance(found, Failure):
                return found
            self._counts[f"reward/{_COUNTED[found.why]}"] += 1
            if not over:
                return None
            raise RewardFailed(
                f"the reward {name} failed too often ({self._allowances[name]}); the last time for {of}: {found.told}.",
                remedy="see the error; max_errors is the share that is let pass, timeout_s the patience",
            )

    def spend(self, seconds: float) -> None:
        """Book time."""
        with self._lock:
            self._counts["reward/score_s"] += seconds

    def figures(self) -> dict[str, float]:
        """reward/errors, reward/timeouts, reward/nan, reward/none and reward/score_s since the last call."""
        with self._lock:
            found, self._counts = self._counts, _nothing()
        return found


def _nothing() -> dict[str, float]:
    return dict.fromkeys([f"reward/{one}" for one in (*_COUNTED.values(), "score_s")], 0.0)
