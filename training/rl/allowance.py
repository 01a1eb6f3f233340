"""How many failures a run puts up with: a few are the world's, many are a fault that nobody should train through."""

from __future__ import annotations

from collections import deque

from bestiary.training.errors import InvalidRun


class Allowance:
    """Failures among the last `window` attempts.

    Counted in whole windows, so one failure among the first three attempts is one of `window` and no third.

    Args:
        share: of a window that may fail; 0: the first failure is one too many.
        window: attempts that are remembered.

    Raises:
        InvalidRun: a value outside its range.
    """

    def __init__(self, share: float = 0.05, window: int = 256) -> None:
        if not 0 <= share <= 1 or window < 1:
            raise InvalidRun(
                f"max_errors = {share}, window = {window}.", remedy="a share from 0 to 1, of at least one attempt"
            )
        self.share, self.window = share, window
        self._failed: deque[bool] = deque(maxlen=window)

    def book(self, failed: bool) -> bool:
        """Remember an attempt; whether failures are more than allowed."""
        self._failed.append(failed)
        return failed and sum(self._failed) > self.share * self.window

    def __str__(self) -> str:
        return f"{sum(self._failed)} of the last {len(self._failed)}, allowed are {self.share:g} of {self.window}"
