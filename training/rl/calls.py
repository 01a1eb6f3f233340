"""Threads that call what may hang, and are given up when it does.

A thread cannot be ended from outside. One whose call takes too long is left behind (its outcome is thrown away when it
comes, if it ever does) and another one takes its place, so a hung call costs a thread and never the run. How many that
may be is for the caller to bound.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Outcome = Callable[[Any, Exception | None, float], None]


class TimedOut(Exception):
    """What a call that was given up ends with."""


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    done: Outcome
    late: Callable[[], None]
    thread: threading.Thread | None = None
    started: float = 0.0
    given_up: bool = False


class Calls:
    """A pool of threads.

    Args:
        threads: calls at one time.
        timeout_s: of one call, from when it begins.
        name: of the threads.
    """

    def __init__(self, threads: int, timeout_s: float, name: str) -> None:
        self._count, self._timeout, self._name = threads, timeout_s, name
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[_Call] = set()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Any], done: Outcome, late: Callable[[], None]) -> None:
        """Have a call made.

        Args:
            done: is told what it returned, what it raised, and how long it took; once, from any thread.
            late: called in place of `done` when a call that was given up comes back.
        """
        with self._lock:
            if len(self._threads) < self._count:
                self._start()
        self._queue.put(_Call(work, done, late))

    def expire(self) -> float:
        """Give up what takes too long; seconds until any other call can."""
        now, left, over = time.monotonic(), self._timeout, []
        with self._lock:
            for call in list(self._running):
                rest = call.started + self._timeout - now
                if rest > 0:
                    left = min(left, rest)
                    continue
                call.given_up = True
                self._running.remove(call)
                self._threads = [one for one in self._threads if one is not call.thread]
                self._start()
                over.append(call)
        for call in over:
            call.done(None, TimedOut(f"took more than {self._timeout:g} s"), self._timeout)
        return left

    def close(self, wait_s: float) -> None:
        """Have the threads end once their calls do; waits for them so long."""
        until = time.monotonic() + wait_s
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for one in threads:
            one.join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        made = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(made)
        made.start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._lock:
                call.thread, call.started = threading.current_thread(), time.monotonic()
                self._running.add(call)
            value: Any = None
            raised: Exception | None = None
            try:
                value = call.work()
            except Exception as error:  # noqa: BLE001 (whoever submitted it is told)
                raised = error
            with self._lock:
                self._running.discard(call)
            if call.given_up:
                call.late()
                return
            call.done(value, raised, time.monotonic() - call.started)
