"""Prompts from the data pillar: rows of its sources in their shuffled and mixed order, one at a time, with exact state.

What a document trains on is of no interest here: a prompt is what stands before its last answer, all of it where there
is none. The columns of the row travel along, for rewards and environments to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bestiary.training.data.encode import RowEncoder
from bestiary.training.data.errors import CorruptRow, InvalidPlan, OverflowRefused, StateMismatch
from bestiary.training.data.formats import Row
from bestiary.training.data.mixing import Mixer
from bestiary.training.data.plan import Plan, check_same
from bestiary.training.data.source import Cursor, Drawn, Reader, Source
from bestiary.training.data.stream import documents_of
from bestiary.training.rl.roles import Prompt

VERSION = 1


class Prompts:
    """The prompts of a plan, in the order of its one stream.

    A prompt is named by source, epoch, file and row, so no two of a run have one name.

    Args:
        plan: of one stream, its documents single ones.
        longest: tokens that a prompt may have; longer ones are an error, or left out and counted (`overflow: drop`).

    Raises:
        InvalidPlan, StorageFailed.
    """

    def __init__(self, plan: Plan, longest: int) -> None:
        for name, value, wanted in (("streams", plan.streams, 1), ("parts", plan.parts, 1)):
            if value != wanted:
                raise InvalidPlan(f"{name} = {value} of prompts.", remedy=f"{name} = {wanted}")
        if plan.overflow not in ("error", "drop"):
            raise InvalidPlan(f"overflow = {plan.overflow!r}: a part of a prompt is no prompt.", remedy="error or drop")
        self._listed = plan.listed()
        self._described = self._listed.describe() | {"longest": longest}
        self._plan, self._longest = plan, longest
        self._sources = {source.name: source for source in plan.sources}
        self._files = {
            name: {shard.path: place for place, shard in enumerate(shards)}
            for name, shards in self._listed.shards.items()
        }
        self._begin()

    def _begin(self) -> None:
        plan = self._plan
        self._readers = {
            name: Reader(source, self._listed.shards[name], seed=plan.seed, stream=0, streams=1, epochs=plan.epochs)
            for name, source in self._sources.items()
        }
        self._mixer = Mixer(plan.stages, plan.mix_by, seed=plan.seed, stream=0, streams=1)
        self._active = set(self._sources)
        self._counts = {name: {"prompts": 0, "corrupt": 0, "left_out": 0} for name in self._sources}
        self._draw = 0
        self._barren: dict[str, int] = {}

    def next(self, count: int) -> list[Prompt]:
        """The next prompts; fewer once every source is over.

        Raises:
            CorruptRow, OverflowRefused, StorageFailed; InvalidPlan where a whole epoch gives none.
        """
        found: list[Prompt] = []
        while len(found) < count and self._active:
            name = self._mixer.choose(self._draw, self._active)
            if name is None:
                break
            drawn = self._readers[name].next()
            if drawn is None:
                self._active.remove(name)
                continue
            one = self._prompt(self._sources[name], drawn)
            self._check_gives(name, drawn.cursor.epoch, one)
            self._mixer.charge(self._draw, self._active, name, 0 if one is None else len(one.ids))
            self._draw += 1
            if one is not None:
                self._counts[name]["prompts"] += 1
                found.append(one)
        return found

    @property
    def left_out(self) -> int:
        """Rows so far that were too long or corrupt."""
        return sum(counts["left_out"] + counts["corrupt"] for counts in self._counts.values())

    # ------------------------------------------------------------------ a row

    def _prompt(self, source: Source, drawn: Drawn) -> Prompt | None:
        counts = self._counts[source.name]
        documents = documents_of(source, drawn, 1)
        if documents is None:
            counts["corrupt"] += 1
            if counts["corrupt"] > source.max_corrupt:
                raise CorruptRow(
                    f"source {source.name}: more than {source.max_corrupt} corrupt rows.",
                    read_from=drawn.where,
                    remedy="repair the data, or raise Source.max_corrupt",
                )
            return None
        (document,) = documents
        ids = document.input_ids[: document.prompt].tolist()
        if len(ids) > self._longest:
            if self._plan.overflow == "drop":
                counts["left_out"] += 1
                return None
            raise OverflowRefused(
                f"source {source.name}: a prompt has {len(ids)} tokens, and {self._longest} leave room for an answer.",
                read_from=drawn.where,
                remedy="data.overflow=drop leaves such prompts out; a larger data.pack_length or fewer "
                "rollouts.max_tokens give room",
            )
        path = drawn.where.removesuffix(f" row {drawn.raw.place.row}")
        file = self._files[source.name][path]
        name = f"{source.name}/{drawn.cursor.epoch}/{file}/{drawn.raw.place.row}"
        return Prompt(prompt_id=name, ids=tuple(ids), row=_columns(source, drawn))

    def _check_gives(self, name: str, epoch: int, found: Prompt | None) -> None:
        """Refuse to read for ever where a whole epoch of a source gave no prompt."""
        if found is not None:
            self._barren.pop(name, None)
        elif self._plan.epochs is None and epoch > self._barren.setdefault(name, epoch) + 1:
            counts = self._counts[name]
            raise InvalidPlan(
                f"source {name}: a whole epoch gave no prompt ({counts['left_out']} longer than {self._longest} "
                f"tokens, {counts['corrupt']} corrupt).",
                remedy="a larger data.pack_length, or fewer rollouts.max_tokens",
            )

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """What leads behind the last prompt given, as JSON values."""
        return {
            "version": VERSION,
            "plan": self._described,
            "draw": self._draw,
            "over": sorted(set(self._sources) - self._active),
            "credit": dict(self._mixer.credit),
            "sources": {
                name: {"cursor": list(reader.cursor), "ordinal": reader.ordinal, **self._counts[name]}
                for name, reader in self._readers.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken.

        Raises:
            StateMismatch: it was taken of another plan; lists the differences.
        """
        if state.get("version") != VERSION:
            raise StateMismatch(f"state of version {state.get('version')!r}.", remedy=f"version {VERSION}")
        check_same(self._described, state["plan"], added=(), removed=(), reweighted=False)
        self._begin()
        self._draw = state["draw"]
        self._mixer.credit = dict(state["credit"])
        self._active -= set(state["over"])
        for name, held in state["sources"].items():
            self._readers[name].seek(Cursor(*held["cursor"]), held["ordinal"])
            self._counts[name] = {count: held[count] for count in self._counts[name]}


def count_prompts(plan: Plan, longest: int) -> int:
    """Prompts of all epochs of a plan, by reading all of it once."""
    prompts, found = Prompts(plan, longest), 0
    while given := len(prompts.next(1024)):
        found += given
    return found


def _columns(source: Source, drawn: Drawn) -> dict[str, Any]:
    """A row as the file has it, or as the source's function makes it, also under the names that columns give.

    Raises:
        CorruptRow: a value that is not JSON.
    """
    raw: Row = drawn.raw.decode()
    encoder = source.encode
    if isinstance(encoder, RowEncoder):
        raw = raw if encoder.rows is None else encoder.rows(raw)
        raw = {**raw, **{field: raw[column] for field, column in encoder.columns.items()}}
    for column, value in raw.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CorruptRow(
                f"source {source.name}: column {column!r} is no JSON value ({error}).",
                read_from=drawn.where,
                remedy="a function over rows (sources: rows) that leaves it out or makes it one",
            ) from error
    return dict(raw)
