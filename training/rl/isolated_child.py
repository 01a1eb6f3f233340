"""The process behind `isolated.Isolated`: loads one function, calls it when asked, dies with whoever started it.

Messages are JSON behind their length, on what were standard input and output; whatever the function prints goes to
standard error. Only the standard library is imported before the function's own module.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Serve until the input ends."""
    asked, told = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, messages), daemon=True).start()
    call: Callable[[Any], Any] | None = None
    while True:
        message = messages.get()
        try:
            if call is None:
                call, value = _prepared(**message), None
            else:
                value = call(message)
            answer = json.dumps({"value": value})
        except Exception as error:  # noqa: BLE001 (whoever asked is told)
            answer = json.dumps({"raised": _told(error)})
        written = answer.encode()
        told.write(_LENGTH.pack(len(written)) + written)
        told.flush()


def _told(error: Exception) -> str:
    """What was raised, and where: the traceback stays here."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _listen(asked: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """In a thread, so that a function that hangs does not outlive whoever started this process."""
    while len(head := asked.read(_LENGTH.size)) == _LENGTH.size:
        messages.put(json.loads(asked.read(_LENGTH.unpack(head)[0])))
    os.killpg(0, signal.SIGKILL)


def _prepared(path: list[str], function: str, adapter: str | None, limits: dict[str, int]) -> Callable[[Any], Any]:
    for name, value in limits.items():
        resource.setrlimit(vars(resource)[f"RLIMIT_{name}"], (value, value))
    sys.path[:] = path
    found = _named(function)
    made: Callable[[Any], Any] = found if adapter is None else _named(adapter)(found)
    return made


def _named(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} is no module:name")
    found = getattr(import_module(module), name)
    if not callable(found):
        raise TypeError(f"{path} is no class or function")
    return found


if __name__ == "__main__":
    main()
