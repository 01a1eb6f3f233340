"""One run at a time in a folder: who works in `out`, told by a file, since many shared file systems have no locks.

    out/owner.json    host and process, touched every few seconds for as long as the run lives

It is made whole, and by one of several that want to. Who finds it there looks whether its owner lives: a process of the
same machine is asked for; of any other the file has to be touched. A killed run's file goes to the next one, at once on
the same machine, and else after `GONE_S`. An owner that slept through that time finds that the file is another's, and
ends before it writes a resume point.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bestiary.training.control import Control
from bestiary.training.errors import FolderTaken

OWNER = "owner.json"
BEAT_S = 5.0  # between two touches
GONE_S = 60.0  # without a touch, and the owner is dead
GRACE_S = 10.0  # in which the rest of a run that was killed ends, and one that lives is waited for
POLL_S = 0.2


class Owner:
    """The right to write into a run's folder; a callback of the loops, which ends a run that has lost it.

    Args:
        out: the run's folder; it is made.
    """

    def __init__(self, out: Path) -> None:
        self.file = out / OWNER
        self._name = os.urandom(8).hex()
        self._ended, self._lost = threading.Event(), threading.Event()
        self._made: list[Path] = []
        self._beating: threading.Thread | None = None
        self._mine = b""

    def take(self) -> None:
        """Become the owner; waits for one of whom it is not known whether he lives.

        Raises:
            FolderTaken: another one lives.
        """
        out = self.file.parent
        self._made = [place for place in (out, *out.parents) if not place.exists()]
        out.mkdir(parents=True, exist_ok=True)
        self._mine = json.dumps({"name": self._name, **_self()}).encode()
        begun = changed = time.monotonic()
        seen: tuple[bytes, int] | None = None
        touched = False
        while not self._create(self._mine):
            found, now = self._look(), time.monotonic()
            if found is None:
                continue
            if found != seen:
                touched = seen is not None
                seen, changed = found, now
            told = _read(found[0])
            lives = _lives(told)
            if lives is False or (lives is None and now - changed >= GONE_S):
                self._clear(found[0])
            elif (lives or touched) and now - begun >= GRACE_S:
                raise FolderTaken(
                    f"out = {out} is in the hands of process {told.get('pid')} on {told.get('host')}, since "
                    f"{told.get('since')}: two runs would write the same resume points.",
                    read_from=str(self.file),
                    remedy="another `out`, or end that run first (SIGTERM, or `bestiary jobs stop`, ends it behind its "
                    "step)",
                )
            else:
                time.sleep(POLL_S)
        self._beating = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._beating.start()

    def check(self) -> None:
        """Nothing, while the folder is this run's.

        Raises:
            FolderTaken: another run took it over.
        """
        if self._lost.is_set():
            raise FolderTaken(
                f"out = {self.file.parent} was taken over by another run: this one gave no sign of life for "
                f"{GONE_S:g} s.",
                read_from=str(self.file),
                remedy="nothing, if the other run is the one that goes on; else the same command once it has ended",
            )

    def on_step(self, trainer: Any, values: Mapping[str, float]) -> None:
        """`check`, before a resume point."""
        self.check()

    def on_end(self, trainer: Any) -> None:
        """`check`, before the last resume point."""
        self.check()

    def release(self) -> None:
        """Let the next one in; a folder that was made for this and is empty goes."""
        self._ended.set()
        if self._beating is None:
            return
        self._beating.join()
        with suppress(OSError):
            if self.file.read_bytes() == self._mine:
                self.file.unlink()
        with suppress(OSError):
            for place in self._made:
                place.rmdir()

    # ------------------------------------------------------------------ the file

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):  # a file system that is away is so for whoever waits, too
                if self.file.read_bytes() != self._mine:
                    self._lost.set()
                    return
                os.utime(self.file)

    def _create(self, content: bytes) -> bool:
        """Whether the file was not there and is now."""
        own = self.file.with_name(f".{OWNER}-{self._name}")
        try:
            own.write_bytes(content)
            try:
                os.link(own, self.file)
            except FileExistsError:
                return False
            except OSError:  # no links: whoever looks may see half of it, which is nobody's until it is whole
                try:
                    with self.file.open("xb") as opened:
                        opened.write(content)
                except FileExistsError:
                    return False
        finally:
            own.unlink(missing_ok=True)
        return True

    def _look(self) -> tuple[bytes, int] | None:
        """Content and time of the last touch; opened, since a client of NFS then asks its server."""
        with suppress(FileNotFoundError), self.file.open("rb") as opened:
            return opened.read(), os.fstat(opened.fileno()).st_mtime_ns
        return None

    def _clear(self, dead: bytes) -> None:
        """Take a dead owner's file away, and not that of one who did so first."""
        aside = self.file.with_name(f".{OWNER}-{self._name}-dead")
        with suppress(FileNotFoundError):
            self.file.rename(aside)
            if aside.read_bytes() != dead:
                try:
                    os.link(aside, self.file)
                except FileExistsError:  # a third one's, whom the second will see
                    pass
                except OSError:
                    if not self.file.exists():
                        aside.rename(self.file)
            aside.unlink(missing_ok=True)


@contextmanager
def owned(out: Path, control: Control | None = None) -> Iterator[Owner]:
    """The folder is this run's alone inside.

    Args:
        control: of a run in several processes, which all call it at once; the first of them is the owner.
    Raises:
        FolderTaken: it is another's; in all processes.
    """
    control = control or Control()
    owner = Owner(out)
    try:
        failure: Exception | None = None
        if control.first:
            try:
                owner.take()
            except (OSError, FolderTaken) as error:  # for all of them, who would wait
                failure = error
        for told in control.gathered(failure):
            if told is not None:
                raise told
        yield owner
    finally:
        owner.release()


# ---------------------------------------------------------------------- who lives


def _self() -> dict[str, Any]:
    """This process, for whoever asks whether it lives."""
    known = _stat(os.getpid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": None if known is None else known[1],
        "machine": _machine(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _read(content: bytes) -> dict[str, Any]:
    """What the file says; nothing while it is written."""
    with suppress(ValueError):
        told = json.loads(content)
        if isinstance(told, dict):
            return told
    return {}


def _lives(told: Mapping[str, Any]) -> bool | None:
    """Whether the owner's process does; None: that cannot be seen from here."""
    pid, machine = told.get("pid"), _machine()
    if machine is None or told.get("machine") != machine or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process
        return None
    known = _stat(pid)
    if known is None:
        return None
    state, began = known
    return state not in "ZX" and began == told.get("began")


def _machine() -> str | None:
    """Where a process id means the same process: host, boot and namespace; None where Linux does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, int] | None:
    """State of a process and when it began, in ticks since boot; ids are used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # what is before it is a name, and may be anything
    return fields[0], int(fields[19])
