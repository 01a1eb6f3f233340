"""Environments that can be ended: each in a process of its own while its episode is played.

In a thread an environment that hangs is left behind and goes on hanging, with what it holds and computes. Here its
process is ended. So is one that crashes, at the price of its episode alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.environments import Heard, Said
from bestiary.training.rl.isolated import CallFailed, Isolated, Limits
from bestiary.training.rl.prompt import Prompt


class IsolatedEnvironments:
    """An `EnvironmentFactory` of environments by their import path.

    There are as many processes as episodes with an environment at one time (`Episodes.at_once`); later episodes use
    them again. What passes is JSON.

    Args:
        path: `module:name` of what makes an environment; imported in those processes only.
        options: given to it, by name, JSON values.
        timeout_s: of a call. `Episodes.timeout_s`, which ends no process, is for a start and three calls.
        limits: of each process.

    Raises:
        InvalidRun: no such name, or its module raises or hangs.
    """

    def __init__(
        self, path: str, options: Mapping[str, Any] | None = None, *, timeout_s: float, limits: Limits | None = None
    ) -> None:
        self.options, self.timeout_s = dict(options or {}), timeout_s
        self._path, self._limits = path, limits or Limits()
        self._lock, self._free = threading.Lock(), list[Isolated]()
        first = self.taken()
        try:
            first.start()
        except CallFailed as error:
            raise InvalidRun(
                f"the environment {path!r} cannot be loaded: {error}.", remedy="module:name of something installed"
            ) from error
        self.give_back(first)

    def __call__(self) -> IsolatedEnvironment:
        """One more."""
        return IsolatedEnvironment(self)

    def taken(self) -> Isolated:
        """A process that plays nothing."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return Isolated(self._path, "bestiary.training.rl.environment_child:playing", self._limits)

    def give_back(self, process: Isolated) -> None:
        """It plays nothing any more."""
        with self._lock:
            self._free.append(process)

    def close(self) -> None:
        """End the processes that play nothing; others end with their episodes' sampler."""
        with self._lock:
            free, self._free = self._free, []
        for process in free:
            process.close()


class IsolatedEnvironment:
    """An `Environment` in a process. Raises `CallFailed` where it hangs, crashes or raises there."""

    def __init__(self, home: IsolatedEnvironments) -> None:
        self._home, self._process = home, home.taken()

    def reset(self, prompt: Prompt, *, seed: int) -> Sequence[int]:
        """See `Environment`."""
        found: Sequence[int] = self._ask(
            "reset",
            name=prompt.prompt_id,
            ids=list(prompt.ids),
            row=dict(prompt.row),
            seed=seed,
            options=self._home.options,
        )
        return found

    def step(self, said: Said) -> Heard:
        """See `Environment`."""
        found: dict[str, Any] = self._ask("step", ids=list(said.ids), finish=said.finish, turn=said.turn)
        return Heard(**found)

    def cut_off(self) -> Mapping[str, float | None]:
        """See `Environment`."""
        found: Mapping[str, float | None] = self._ask("cut_off")
        return found

    def close(self) -> None:
        """See `Environment`; its process goes on, unless that fails."""
        try:
            self._ask("close")
        except CallFailed:
            self._process.close()
            raise
        finally:
            self._home.give_back(self._process)

    def _ask(self, what: str, **more: Any) -> Any:
        return self._process.call({"do": what, **more}, self._home.timeout_s)
