"""Producers: canonical streams in processes of their own, or in this one, behind one interface.

A producer sends every pack with the state of its stream *after* that pack. What the trainer has not taken is thrown
away on a restart and made again, so prefetching never shows in a state.
"""

import os
import pickle
import queue
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import connection, get_context, parent_process, process
from typing import Any, NamedTuple, Protocol, cast

from bestiary.training.data.errors import InvalidPlan, WorkerFailed
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import ListedPlan
from bestiary.training.data.stream import Stream, StreamState

NICE = 10
"""How much a producer steps back: it works ahead, so the trainer's threads go first where both want a core. With two
equal threads of a product on two cores every moment that a producer takes from one is lost to both."""
POLL_S = 0.02  # how soon a producer that is far enough ahead sees a new start


class Produced(NamedTuple):
    """A pack, the state of its stream after it, and whether the stream was over before it."""

    pack: Pack
    state: StreamState
    ended: bool


class Producer(Protocol):
    """Where the loader gets the packs of its streams from."""

    def start(self, states: Mapping[int, StreamState | None]) -> None:
        """(Re)start the streams at these states."""

    def take(self, stream: int) -> Produced:
        """The next pack of a stream; streams are asked in the order of their packs, then of their numbers."""

    def close(self) -> None:
        """Let go of everything."""


class Inline:
    """The streams in this process: no prefetching, every pack is waited for."""

    def __init__(self, listed: ListedPlan) -> None:
        self._listed = listed
        self._streams: dict[int, Stream] = {}

    def start(self, states: Mapping[int, StreamState | None]) -> None:
        """See `Producer`."""
        self._streams = {index: Stream(self._listed, index, state) for index, state in states.items()}

    def take(self, stream: int) -> Produced:
        """See `Producer`."""
        return _produce(self._streams[stream])

    def close(self) -> None:
        """See `Producer`."""
        self._streams = {}


class Workers:
    """The streams dealt to processes, each with packs made ahead.

    The processes are started once, by `spawn`: torch's threads do not survive a fork. So a script that makes them needs
    the usual `if __name__ == "__main__":`, and what the plan holds must be importable. A restart reuses them.

    Args:
        count: processes; not more than streams are started.   ahead: packs that a process makes ahead, for each stream.
    """

    def __init__(self, listed: ListedPlan, count: int, ahead: int) -> None:
        if process.current_process().daemon:
            raise InvalidPlan(
                f"workers = {count} inside a worker of another loader, which may not start processes.",
                remedy="workers = 0 there: that worker already is the producer",
            )
        self._listed, self._count, self._ahead = listed, count, ahead
        self._generation = 0
        self._processes: list[Any] = []
        self._commands: list[connection.Connection] = []
        self._packs: list[connection.Connection] = []

    def start(self, states: Mapping[int, StreamState | None]) -> None:
        """See `Producer`; the streams must be the same each time."""
        self._generation += 1
        streams = sorted(states)
        if not self._processes:
            self._launch(min(self._count, len(streams)), len(streams))
        self._owner = {stream: place % len(self._processes) for place, stream in enumerate(streams)}
        for worker, command in enumerate(self._commands):
            own = {stream: states[stream] for stream in streams if self._owner[stream] == worker}
            command.send((self._generation, own))

    def _launch(self, count: int, streams: int) -> None:
        context = get_context("spawn")
        for worker in range(count):
            receiver, sender = context.Pipe(duplex=False)
            own = len(range(worker, streams, count))
            packs, sent = context.Pipe(duplex=False)
            producer = context.Process(
                target=_work, args=(self._listed, receiver, sent, self._ahead * own), name=f"data-{worker}", daemon=True
            )
            producer.start()
            receiver.close()
            sent.close()  # so that the other end's death is the end of what can be read
            self._processes.append(producer)
            self._commands.append(sender)
            self._packs.append(packs)

    def take(self, stream: int) -> Produced:
        """See `Producer`.

        Raises:
            WorkerFailed: the process was killed; whatever it raised itself is raised here.
        """
        worker = self._owner[stream]
        while True:
            try:
                generation, found = self._packs[worker].recv()
            except (EOFError, OSError):  # the second where it died in the middle of a pack
                self._processes[worker].join()
                raise WorkerFailed(
                    f"the process of data stream {stream} ended with exit code {self._processes[worker].exitcode}.",
                    remedy="a negative code is a signal, −9 most often a lack of memory: lower buffer_bytes, "
                    "block_rows or workers",
                ) from None
            if generation != self._generation:
                continue
            if isinstance(found, _Raised):
                found.error.add_note(found.trace)
                raise found.error
            return cast(Produced, found)

    def close(self) -> None:
        """Stop the processes."""
        for producer, command, packs in zip(self._processes, self._commands, self._packs, strict=True):
            producer.terminate()
            producer.join()
            command.close()
            packs.close()
        self._processes, self._commands, self._packs = [], [], []


class _Raised(NamedTuple):
    """An exception of a producer and where it came from."""

    error: BaseException
    trace: str


def _produce(stream: Stream) -> Produced:
    pack = stream.next()
    return Produced(pack, stream.state(), stream.ended)


def _work(listed: ListedPlan, commands: connection.Connection, packs: connection.Connection, ahead: int) -> None:
    """The life of a producer process: wait for a start, then produce until the next one."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICE)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    made: queue.Queue[Any] = queue.Queue(ahead)
    threading.Thread(target=_send, args=(made, packs), daemon=True).start()
    while True:
        try:
            generation, states = commands.recv()
        except EOFError:
            return
        try:
            streams = [Stream(listed, index, state) for index, state in states.items()]
            while not commands.poll():
                stream = min(streams, key=lambda one: (one.packs, one.index))  # the order in which the trainer asks
                _put((generation, _produce(stream)), made, commands)
        except Exception as error:  # noqa: BLE001  raised again in the trainer's process
            trace = "".join(traceback.format_exception(error))
            _put((generation, _Raised(_portable(error), trace)), made, commands)


def _put(message: Any, made: "queue.Queue[Any]", commands: connection.Connection) -> None:
    """Queue a message, unless a new start comes while the queue is full."""
    while not commands.poll():
        try:
            made.put(message, timeout=POLL_S)
        except queue.Full:
            continue
        return


def _send(made: "queue.Queue[Any]", packs: connection.Connection) -> None:
    while True:
        packs.send(made.get())


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot travel between processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:  # noqa: BLE001  a class may refuse in any way
        return WorkerFailed(f"{type(error).__name__}: {error}", read_from=f"a producer process ({why})")
    return error


def _leave_with_parent() -> None:
    """A trainer that was killed takes its producers along."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
