"""Tools that a policy calls: Python functions, each call in a process that can be ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from bestiary.training.data.messages import Tool, ToolCall
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.isolated import CallDied, CallFailed, CallHung, CallRaised, Isolated, Limits

SANDBOX = Limits(memory_bytes=2 << 30, file_bytes=64 << 20, apart=True)


@dataclass(frozen=True)
class Result:
    """What a call gave.

    Attributes:
        text: for the policy: the result, or what went wrong.
        failed: "timeout", "died", "raised" or "unknown" (no such tool, no such arguments); None: nothing.
    """

    text: str
    failed: str | None = None


class Tools:
    """Functions by their import paths, `module:name`, called with named arguments that are JSON values.

    A result that is no text is written as JSON. A function runs in an empty folder, without this process's environment
    variables, within limits; a call that takes too long ends with its process. This guards a run against accidents; it
    is no wall against malice, for which the whole run goes into a container without a network.

    Args:
        paths: of the functions, whose names, annotations and docstrings describe them to the policy.
        timeout_s: of a call.
        processes: of each function, that is calls of it at one time; others wait, which `Episodes.timeout_s` counts.
        fresh: a process for each call, for functions that keep something; otherwise processes are used again.
        limits: of each process.

    Attributes:
        described: as chat templates take them.

    Raises:
        InvalidRun: a function that cannot be loaded, or two of one name.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        timeout_s: float = 10.0,
        processes: int = 4,
        fresh: bool = False,
        limits: Limits = SANDBOX,
    ) -> None:
        if not timeout_s > 0 or processes < 1:
            raise InvalidRun(
                f"tools: timeout_s = {timeout_s}, processes = {processes}.", remedy="seconds above 0, at least 1"
            )
        self._timeout, self._fresh = timeout_s, fresh
        self._all: list[Isolated] = []
        self._free: dict[str, SimpleQueue[Isolated]] = {}
        self.described: list[Tool] = []
        for path in paths:
            made = [Isolated(path, "bestiary.training.rl.tool_child:calling", limits) for _ in range(processes)]
            self._all += made
            try:
                told: Tool = made[0].call(None, timeout_s)
            except CallFailed as error:
                self.close()
                raise InvalidRun(f"the tool {path!r} cannot be loaded: {error}.", remedy="module:name") from error
            name = str(told["function"]["name"])
            if name in self._free:
                self.close()
                raise InvalidRun(f"two tools are named {name!r}.", remedy="a name for each")
            self.described.append(told)
            self._free[name] = SimpleQueue()
            for one in made:
                self._free[name].put(one)

    def call(self, call: ToolCall) -> Result:
        """The result of a call; never raises for what the policy or the tool did."""
        if call.name not in self._free:
            return Result(f"Error: there is no tool {call.name!r}; there are {sorted(self._free)}.", "unknown")
        if not isinstance(call.arguments, dict):
            return Result("Error: the arguments are no JSON object.", "unknown")
        with self._borrowed(call.name) as process:
            try:
                return Result(self._text(process, call.arguments))
            except CallHung as error:
                return Result(f"Error: the call {error}.", "timeout")
            except CallDied as error:
                return Result(f"Error: {error}.", "died")
            except CallRaised as error:
                return Result(f"Error: {error}", "raised")

    def close(self) -> None:
        """End all processes."""
        for one in self._all:
            one.close()

    def _text(self, process: Isolated, arguments: dict[str, Any]) -> str:
        found: str = process.call(arguments, self._timeout)
        return found

    @contextmanager
    def _borrowed(self, name: str) -> Iterator[Isolated]:
        process = self._free[name].get()
        try:
            yield process
        finally:
            if self._fresh:
                process.close()
            self._free[name].put(process)
