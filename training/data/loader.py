"""What a trainer iterates: packs of its streams in a fixed order, and a state of the last one it took.

A global step takes one pack of every canonical stream. Rank r of W computes those of streams r, r + W, r + 2·W, …, one
after the other, as micro-batches. So the packs of a step do not depend on W, on processes or on prefetching.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from bestiary.training.data.balance import Cost
from bestiary.training.data.batch import batch
from bestiary.training.data.errors import InvalidPlan, StateMismatch
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import ListedPlan, Plan, check_same
from bestiary.training.data.ranks import State, all_done, exchange, gather_state
from bestiary.training.data.stream import COUNTS, StreamState
from bestiary.training.data.workers import Inline, Produced, Producer, Workers

LOGGER = logging.getLogger(__name__)
VERSION = 1
LONG_WAIT_S = 1.0  # a trainer that waits this long for a pack is worth a warning


@dataclass
class Waits:
    """How long the trainer stood still for data, in seconds; the first pack apart, which nothing could overlap."""

    last: float = 0.0
    total: float = 0.0
    longest: float = 0.0
    first: float | None = None

    def book(self, seconds: float) -> None:
        """Count one wait."""
        self.last = seconds
        if self.first is None:
            self.first = seconds
            return
        self.total += seconds
        self.longest = max(self.longest, seconds)
        if seconds > LONG_WAIT_S:
            LOGGER.warning("the trainer waited %.1f s for data: more workers, or a faster encode", seconds)


@dataclass
class Slots:
    """Token slots given to the trainer since the loader was made, and what stood in them.

    Attributes:
        more: further sums over what was given, by their keys in metrics.jsonl.
    """

    slots: int = 0
    useful_tokens: int = 0
    loss_tokens: int = 0
    packs: int = 0
    more: dict[str, float] = field(default_factory=dict)

    @property
    def efficiency(self) -> float:
        """Useful tokens of all slots."""
        return self.useful_tokens / self.slots if self.slots else 0.0

    def book(self, pack: Pack) -> None:
        """Count one pack."""
        self.packs += 1
        self.slots += len(pack.input_ids)
        self.useful_tokens += pack.useful_tokens
        self.loss_tokens += pack.loss_tokens


class Batches(Protocol):
    """What the training loop takes its batches from.

    Attributes:
        waits: how long `next` stood still for data.   given: slots and tokens so far.
    """

    @property
    def waits(self) -> Waits: ...  # noqa: D102  see the class

    @property
    def given(self) -> Slots: ...  # noqa: D102  see the class

    def __iter__(self) -> Iterator[Any]: ...

    def global_state(self) -> State:
        """What leads behind the last batch taken, of all ranks; a collective."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken."""
        ...

    def close(self) -> None:
        """Let go of processes."""
        ...


class PackLoader(IterableDataset[Any]):
    """Packed micro-batches of one rank, with an exact state.

    Iterating goes on behind the last batch that was taken, whatever had been made ahead, so a second `iter` neither
    repeats nor loses one. `state_dict` and `load_state_dict` are the protocol of torchdata's StatefulDataLoader, which
    may hold a loader with `workers=0` in at most one worker of its own.

    Args:
        plan: what to load.
        rank, world_size: of the data-parallel group; `world_size` divides `plan.streams`.
        workers: producer processes; 0: in this one, which then waits for every pack.
        ahead: packs made ahead for each stream.
        make: a pack to what is yielded; the default is what `forward` takes.
        group: of all ranks, on gloo. A plan with `epochs` needs it, so that all ranks stop at the same step, and
            `balance` does. The collectives happen where the first batch of a step is taken.
        balance: cost of a pack. Given, the packs of a step change ranks so that each has about equal work.

    Attributes:
        waits: how long `next` stood still.   given: slots and tokens so far.

    Raises:
        InvalidPlan, StorageFailed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 1,
        ahead: int = 4,
        make: Callable[[Pack], Any] = batch,
        group: dist.ProcessGroup | None = None,
        balance: Cost | None = None,
    ) -> None:
        super().__init__()
        if plan.streams % world_size or not 0 <= rank < world_size:
            raise InvalidPlan(
                f"streams = {plan.streams}, rank {rank} of {world_size}.",
                remedy="streams a multiple of every world size that the run may have",
            )
        if group is None and world_size > 1 and (plan.epochs is not None or balance is not None):
            raise InvalidPlan(
                f"world_size = {world_size} with {'balance' if plan.epochs is None else 'epochs'} and no group.",
                remedy="group=torch.distributed.new_group(backend='gloo')",
            )
        if workers < 0 or ahead < 1:
            raise InvalidPlan(f"workers = {workers}, ahead = {ahead}.", remedy="at least 0 and 1")
        self._listed: ListedPlan = plan.listed()
        self._described = self._listed.describe()
        self._own = list(range(rank, plan.streams, world_size))
        self._states: dict[int, StreamState | None] = dict.fromkeys(self._own)
        self._workers, self._ahead, self._make, self._group = workers, ahead, make, group
        self._balance = balance
        self._producer: Producer | None = None
        self._iteration = 0
        self._between = True  # no step is half taken
        self.waits, self.given = Waits(), Slots()

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise InvalidPlan(
                f"a PackLoader in {info.num_workers} workers of another loader: each would give every pack.",
                remedy="num_workers at most 1 there, and workers=… here",
            )
        self._iteration += 1
        if self._producer is None:
            self._producer = (
                Workers(self._listed, self._workers, self._ahead) if self._workers else Inline(self._listed)
            )
        self._producer.start(self._states)
        return self._batches(self._iteration, self._producer)

    def _batches(self, iteration: int, producer: Producer) -> Iterator[Any]:
        while True:
            self._check_current(iteration)
            start = time.perf_counter()
            # A step that was left half taken is finished first, stream by stream.
            behind = min(self._packs(stream) for stream in self._own)
            step = {stream: producer.take(stream) for stream in self._own if self._packs(stream) == behind}
            if self._listed.plan.epochs is not None:
                if all_done(all(made.ended for made in step.values()), self._group):
                    return
            if self._balance is None:
                packs = [made.pack for made in step.values()]
            else:
                packs = exchange({stream: made.pack for stream, made in step.items()}, self._balance, self._group)
            self.waits.book(time.perf_counter() - start)
            yield from self._given(iteration, packs, step)

    def _given(self, iteration: int, packs: list[Pack], step: Mapping[int, Produced]) -> Iterator[Any]:
        for place, (pack, (stream, made)) in enumerate(zip(packs, step.items(), strict=True)):
            self._check_current(iteration)
            self.given.book(pack)
            self._between = place + 1 == len(packs)
            if self._balance is None:
                self._states[stream] = made.state
            elif self._between:  # packs are not those of this rank's streams, the step as a whole is
                self._states = {own: taken.state for own, taken in step.items()}
            yield self._make(pack)

    def _packs(self, stream: int) -> int:
        state = self._states[stream]
        return 0 if state is None else int(state["packs"])

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise StateMismatch(
                "this iterator is of an earlier position of its loader.",
                remedy="take a new one: iter(loader), after load_state_dict too",
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> State:
        """What leads behind the last batch taken: this rank's streams, as JSON values, about 1.5 KB each.

        Raises:
            StateMismatch: under `balance`, between the first and the last micro-batch of a step.
        """
        if self._balance is not None and not self._between:
            raise StateMismatch(
                "with balance, a state in the middle of a step would lose or repeat packs.",
                remedy="take it after the last micro-batch of a step",
            )
        streams = {str(stream): state for stream, state in self._states.items()}
        return {"version": VERSION, "plan": self._described, "streams": streams}

    def global_state(self) -> State:
        """The state of all ranks, on each of them; a collective of `group`."""
        return gather_state(self.state_dict(), self._group)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        added: Collection[str] = (),
        removed: Collection[str] = (),
        reweighted: bool = False,
    ) -> None:
        """Go to where a state was taken; iterators taken before are of no use afterwards.

        Args:
            state: of this loader's streams at least, e.g. of all ranks (`global_state`, `merge_states`).
            added, removed: sources that the plan has and the state lacks, and the other way round. What waited of a
                removed source is dropped; the others go on where they were.
            reweighted: whether weights and schedule may differ.

        Raises:
            StateMismatch: lists what differs between the plans, or the streams that are missing.
        """
        if state.get("version") != VERSION:
            raise StateMismatch(f"state of version {state.get('version')!r}.", remedy=f"version {VERSION}")
        check_same(self._described, state["plan"], added=added, removed=removed, reweighted=reweighted)
        streams = state["streams"]
        missing = [stream for stream in self._own if str(stream) not in streams]
        if missing:
            raise StateMismatch(
                f"the state holds streams {', '.join(streams)} and this rank needs {missing}.",
                read_from="state_dict",
                remedy="the state of all ranks: global_state() when saving, or merge_states() of every rank's",
            )
        packs = {0 if held is None else held["packs"] for held in streams.values()}
        if len(packs) > 1 and (set(streams) != {str(stream) for stream in self._own} or self._balance is not None):
            raise StateMismatch(
                f"the state was taken in the middle of step {min(packs)} and by other ranks.",
                read_from="state_dict",
                remedy="save after the last micro-batch of a step, on all ranks",
            )
        self._iteration += 1
        self._states = {stream: streams[str(stream)] for stream in self._own}
        self._between = True

    # ------------------------------------------------------------------ the rest

    def counts(self) -> dict[str, dict[str, int]]:
        """By source, over this rank's streams up to the last batch taken: epoch (of the slowest stream), documents,
        tokens, loss_tokens, corrupt and left_out rows.
        """
        total: dict[str, dict[str, int]] = {}
        for state in self._states.values():
            for name, held in ({} if state is None else state["sources"]).items():
                counts = total.setdefault(name, {"epoch": held["epoch"], **dict.fromkeys(COUNTS, 0)})
                counts["epoch"] = min(counts["epoch"], held["epoch"])
                for count in COUNTS:
                    counts[count] += held[count]
        return total

    def close(self) -> None:
        """Stop the producers; iterating starts new ones."""
        self._iteration += 1
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producer": None}

    def __del__(self) -> None:
        producer = self.__dict__.get("_producer")
        if producer is not None:
            producer.close()
