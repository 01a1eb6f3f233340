"""Processes beside the one that tests: their Python finds this folder as `tests`, whatever libraries bring along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

TESTS = Path(__file__).parent
# By its path alone: another distribution may install a package `tests` (verl does), and with the checkout on the path
# the folder kernels/ would shadow Hugging Face's package of that name.
_OURS = (
    "import sys, types; ours = types.ModuleType('tests'); "
    f"ours.__path__ = [{str(TESTS)!r}]; sys.modules['tests'] = ours; "
)
_READY = ["bestiary.tools.cli", "bestiary.training.run", "bestiary.training.export", "transformers", "torch._dynamo"]
_READY += ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel"]


def python(code: str, *arguments: object) -> list[str]:
    """The command of a process that runs `code`, which finds `arguments` in `sys.argv[1:]`, as text."""
    return [sys.executable, "-c", _OURS + code, *map(str, arguments)]


class Child:
    """A process that runs `code` as `python()` would, forked from one that has imported torch, transformers and us.

    It is there after milliseconds instead of five seconds, and nothing of the process that tests is in it.
    """

    def __init__(self, code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        """Starts it.

        Args:
            code: of a command; its exit code is `returncode`, what it writes to stderr is kept.
            arguments: `sys.argv[1:]`, as text.
            environment: beside this process's own.
        """
        context = get_context("forkserver")
        context.set_forkserver_preload(_READY)
        self._errors = tempfile.NamedTemporaryFile("r", suffix=".stderr")  # noqa: SIM115
        surroundings = {**os.environ, **(environment or {})}
        start = (
            "import os, sys, torch\n"
            "out, told = os.open(os.devnull, os.O_WRONLY), os.open(" + repr(self._errors.name) + ", os.O_WRONLY)\n"
            "os.dup2(out, 1), os.dup2(told, 2)\n"
            f"os.environ.clear(), os.environ.update({surroundings!r})\n"
            "torch.set_num_threads(int(os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())))\n"
            f"sys.argv = ['-c', *{list(map(str, arguments))!r}]\n"
        )
        self._process = context.Process(target=exec, args=(start + _OURS + code, {"__name__": "__child__"}))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As subprocess has it: negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the process, unless it has ended."""
        if self.returncode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it runs for longer than `timeout` seconds from now.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode

    def ended(self, timeout: float = 240) -> tuple[int, str]:
        """The exit code and what it told; it is killed after `timeout` seconds."""
        try:
            self.wait(timeout)
        finally:
            self.kill()
        return self.wait(timeout), self._errors.read()

    def __enter__(self) -> Child:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing of it is left behind; what it told is shown beside an error of this process."""
        self.kill()
        if kind is not None:
            sys.stderr.write(self._errors.read())
        self._process.join()
        self._errors.close()
