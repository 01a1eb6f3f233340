"""A function in a process of its own, that can be ended when it hangs.

What a run calls and did not write (a reward function, a tool) may never return, exhaust memory or crash. Here it costs
a process: the call ends at its time, with an error, and the next call starts another process. Values that pass are
JSON. It is no wall against malice: code that is not trusted belongs into a container.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16
START_S = 120.0
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "OMP_NUM_THREADS", "PYTHONPATH")


class CallFailed(Exception):
    """A call that gave no value; says why."""


class CallHung(CallFailed):
    """It took too long; its process was ended."""


class CallRaised(CallFailed):
    """The function raised; its process goes on."""


class CallDied(CallFailed):
    """Its process ended by itself: a crash, `os._exit`, no memory."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the process may use; None: as much as this one.

    Attributes:
        memory_bytes: of address space.   file_bytes: of one file that it writes.
        apart: in an empty folder of its own, removed at the end, and without this process's environment variables.
    """

    memory_bytes: int | None = None
    file_bytes: int | None = None
    apart: bool = False

    def as_set(self) -> dict[str, int]:
        """By the names of `resource`."""
        named = {"AS": self.memory_bytes, "FSIZE": self.file_bytes, "CORE": 0}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(eq=False)
class Isolated:
    """A function by its import path. Calls from several threads wait for one another.

    Args:
        function: `module:name`; imported in its process only, with this process's `sys.path`.
        adapter: `module:name` of what makes of the function one that takes and returns a JSON value; None: it is one.
        limits: of the process.
        start_s: patience for its start, imports included.
    """

    function: str
    adapter: str | None = None
    limits: Limits = field(default_factory=Limits)
    start_s: float = START_S

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stop: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            CallFailed: it does not start: no such function, or its module raises or hangs.
        """
        with self._lock:
            self._started()

    def call(self, value: Any, timeout_s: float) -> Any:
        """What the function returns for a JSON value; starts the process where there is none.

        Raises:
            CallFailed: CallHung, CallRaised or CallDied.
        """
        with self._lock:
            self._started()
            return self._asked(value, timeout_s)

    def close(self) -> None:
        """End the process; a later call would start another."""
        with self._lock:
            self._end()

    def _started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        environment: Mapping[str, str] = os.environ
        if self.limits.apart:
            self._folder = tempfile.TemporaryDirectory(prefix="bestiary-")
            environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
            environment = {**environment, "HOME": self._folder.name, "TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bestiary.training.rl.isolated_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=None if self._folder is None else self._folder.name,
            env=dict(environment),
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _stop, self._process)  # where nobody closes it
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        hello = {
            "path": sys.path,
            "function": self.function,
            "adapter": self.adapter,
            "limits": self.limits.as_set(),
        }
        try:
            self._asked(hello, self.start_s)
        except CallFailed:
            self._end()
            raise

    def _asked(self, value: Any, timeout_s: float) -> Any:
        written = json.dumps(value).encode()
        until = time.monotonic() + timeout_s
        try:
            self._write(_LENGTH.pack(len(written)) + written, until)
            answer = json.loads(self._read(_LENGTH.unpack(self._read(_LENGTH.size, until))[0], until))
        except CallHung:
            self._end()
            raise CallHung(f"took more than {timeout_s:g} s") from None
        except (CallDied, BrokenPipeError):
            assert self._process is not None
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started itself; it is not reaped yet
            code = self._process.wait()
            self._end()
            told = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise CallDied(f"its process died ({told})") from None
        except BaseException:  # an interruption: what comes back now would answer the next call
            self._end()
            raise
        if "raised" in answer:
            raise CallRaised(answer["raised"])
        return answer["value"]

    def _write(self, content: bytes, until: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        file, left = self._process.stdin.fileno(), memoryview(content)
        while left:
            _wait([], [file], until)
            left = left[os.write(file, left[:_CHUNK]) :]

    def _read(self, count: int, until: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        file, parts = self._process.stdout.fileno(), list[bytes]()
        while count:
            _wait([file], [], until)
            part = os.read(file, min(count, _CHUNK))
            if not part:
                raise CallDied
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _end(self) -> None:
        self._process = None
        if self._stop is not None:
            self._stop()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def _stop(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(read: list[int], write: list[int], until: float) -> None:
    poll = select.poll()
    for file in read:
        poll.register(file, select.POLLIN)
    for file in write:
        poll.register(file, select.POLLOUT)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise CallHung
