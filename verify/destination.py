"""Where results go: stdout for "-", else a file that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from bestiary.kernels.errors import BestiaryError

STDOUT = "-"


class BadDestination(BestiaryError):
    """A place that a result cannot be written to.

    Remedy: give a path in a folder that exists and is writable.
    """


def check(destination: str) -> None:
    """Complain before a long run about a place that cannot be written to after it.

    Raises:
        BadDestination: a folder, or a file in a folder that does not exist.
    """
    path = Path(destination)
    if destination == STDOUT:
        return
    if path.is_dir():
        raise BadDestination(f"{destination} is a folder.", remedy="name a file, or - for stdout")
    if not path.parent.is_dir():
        raise BadDestination(f"the folder of {destination} does not exist.", remedy=f"mkdir -p {path.parent}")


def write_text(destination: str, text: str) -> None:
    """Writes a document and a last line end.

    A file is written under another name beside its own and renamed, so that a reader, or a run that is stopped, never
    leaves half of one; what was there stays until then. A link keeps pointing where it points, and what is no regular
    file (a pipe, /dev/null) is written to directly, because it cannot be replaced.
    """
    if destination == STDOUT:
        say(text.removesuffix("\n"))
        return
    whole = text if text.endswith("\n") else text + "\n"
    target = Path(destination).resolve()
    if target.exists() and not target.is_file():
        target.write_text(whole, encoding="utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def say(text: str) -> None:
    """Prints to stdout. A reader that has had enough (`| head`) changes no exit code."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter ends, with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
