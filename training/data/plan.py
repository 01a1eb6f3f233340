"""The whole data plan as one value, what of it a state is bound to, and what differs between two of them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from bestiary.training.data.errors import InvalidPlan, StateMismatch
from bestiary.training.data.mixing import Stage, check_schedule
from bestiary.training.data.packing import Overflow
from bestiary.training.data.source import Source
from bestiary.training.data.storage import FileEntry


@runtime_checkable
class Described(Protocol):
    """An `encode` that says what its tokens and labels depend on beside the tokenizer."""

    def describe(self) -> str:
        """Its settings, the same text for the same tokens."""


FILES_NAMED = 32  # of a source's files, those that a state lists one by one; more are hashed together


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides which tokens stand in which batch.

    Attributes:
        sources: with distinct names; their order does not matter.
        pack_length: tokens of a pack.   pad_id: fills its tail; masked by length, never by id.
        tokenizer: fingerprint of whatever `encode` depends on; a state taken under another one is refused.
        seed: of every order and choice.
        streams: canonical streams, i.e. packs of one global step. Each world size that divides it gives the same steps.
        look_ahead: documents that a packer looks through for one that fits.
        overflow: what becomes of documents longer than a pack: `error`, `truncate` on the right, `split`, or `drop` and
            count. Pieces without a trained token are left out and counted.
        parts: documents that one row becomes: 1, or 2 for preference pairs, which share a pack, the chosen one first.
        mix_by: whether weights count documents or tokens.
        schedule: weights over time; empty: those of the sources, always.
        epochs: after which a source leaves the mixture; None: never, and the trainer counts steps.
    """

    sources: tuple[Source, ...]
    pack_length: int
    pad_id: int
    tokenizer: str = ""
    seed: int = 0
    streams: int = 1
    look_ahead: int = 100
    overflow: Overflow = "error"
    parts: int = 1
    mix_by: Literal["document", "token"] = "document"
    schedule: tuple[Stage, ...] = ()
    epochs: int | None = None

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise InvalidPlan(f"sources are named {names}.", remedy="at least one, each with a name of its own")
        sizes = {"streams": self.streams, "look_ahead": self.look_ahead, "parts": self.parts}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidPlan(f"{name} = {value}.", remedy="at least 1")
        if self.pack_length < 2 * self.parts:
            raise InvalidPlan(f"pack_length = {self.pack_length}.", remedy=f"at least {2 * self.parts}")
        if self.epochs is not None and self.epochs < 1:
            raise InvalidPlan(f"epochs = {self.epochs}.", remedy="at least 1, or None for no end")
        if self.overflow not in ("error", "truncate", "split", "drop"):
            raise InvalidPlan(f"overflow = {self.overflow!r}.", remedy="error, truncate, split or drop")
        if self.overflow == "split" and self.parts > 1:
            raise InvalidPlan(
                f"overflow = 'split' and parts = {self.parts}: pieces of a pair cannot be compared.",
                remedy="overflow = 'truncate' or 'drop'",
            )
        check_schedule(self.stages, names)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The schedule, or one stage with the weights of the sources."""
        return self.schedule or (Stage(0, {source.name: source.weight for source in self.sources}),)

    def listed(self) -> "ListedPlan":
        """The plan with the files that exist now; asks every storage once.

        Raises:
            InvalidPlan, StorageFailed.
        """
        return ListedPlan(self, {source.name: source.shards() for source in self.sources})


@dataclass(frozen=True)
class ListedPlan:
    """A plan and the files of its sources, by name."""

    plan: Plan
    shards: Mapping[str, tuple[FileEntry, ...]]

    def describe(self) -> dict[str, Any]:
        """What a state is bound to, as JSON values."""
        plan = self.plan
        return {
            "pack_length": plan.pack_length,
            "tokenizer": plan.tokenizer,
            "seed": plan.seed,
            "streams": plan.streams,
            "look_ahead": plan.look_ahead,
            "overflow": plan.overflow,
            "parts": plan.parts,
            "mix_by": plan.mix_by,
            "epochs": plan.epochs,
            "weights": [[stage.start, dict(sorted(stage.weights.items())), stage.ramp] for stage in plan.stages],
            "sources": {source.name: self._source(source) for source in plan.sources},
        }

    def _source(self, source: Source) -> dict[str, Any]:
        shards = self.shards[source.name]
        named = {_leaf(shard): f"{shard.size} bytes, {shard.identity[:16]}" for shard in shards}
        whole = hashlib.sha256(repr([(_leaf(shard), shard.size, shard.identity) for shard in shards]).encode())
        return {
            "files": named if len(shards) <= FILES_NAMED else {},
            "all files": f"{len(shards)}, {sum(shard.size for shard in shards)} bytes, {whole.hexdigest()[:16]}",
            "shuffle": source.shuffle,
            "block_rows": source.block_rows,
            "buffer_bytes": source.buffer_bytes,
            "encode": source.encode.describe() if isinstance(source.encode, Described) else "not described",
        }


def _leaf(shard: FileEntry) -> str:
    """The name without its folder: a data set may move."""
    return shard.path.rpartition("/")[2]


def check_same(
    now: Mapping[str, Any],
    then: Mapping[str, Any],
    *,
    added: Collection[str],
    removed: Collection[str],
    reweighted: bool,
) -> None:
    """Refuse a state whose plan differs from the present one in anything that the caller did not name.

    Args:
        now, then: what `describe` says.   added, removed: sources.   reweighted: whether weights may differ.

    Raises:
        StateMismatch: lists every difference.
    """
    then_sources, now_sources = set(then["sources"]), set(now["sources"])
    differences = [f"source {name!r} is new" for name in sorted(now_sources - then_sources - set(added))]
    differences += [f"source {name!r} is gone" for name in sorted(then_sources - now_sources - set(removed))]
    differences += [
        f"source {name!r} is said to be added and is in the state" for name in sorted(then_sources & set(added))
    ]
    differences += [
        f"source {name!r} is said to be removed and is in the plan" for name in sorted(now_sources & set(removed))
    ]
    for field, value in now.items():
        if (
            field != "sources"
            and value != then.get(field)
            and not (field == "weights" and (reweighted or added or removed))
        ):
            differences.append(f"{field} was {then.get(field)!r} and is {value!r}")
    for name in sorted(then_sources & now_sources):
        differences += _differences(f"source {name!r}", then["sources"][name], now["sources"][name])
    if differences:
        raise StateMismatch(
            "the state was taken under another plan:" + "".join(f"\n    {line}" for line in differences),
            read_from="state_dict",
            remedy="restore what changed, or start the data anew; load_state_dict(added=…, removed=…, reweighted=True) "
            "accepts another mixture",
        )


def _differences(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if then["files"] and now["files"]:
        gone, new = then["files"].keys() - now["files"].keys(), now["files"].keys() - then["files"].keys()
        found = [f"{where}: file {name} is gone" for name in sorted(gone)]
        found += [f"{where}: file {name} is new" for name in sorted(new)]
        for name in sorted(then["files"].keys() & now["files"].keys()):
            if then["files"][name] != now["files"][name]:
                found.append(f"{where}: file {name} was {then['files'][name]} and is {now['files'][name]}")
    else:
        found = []
    for field in sorted((then.keys() | now.keys()) - {"files"}):
        if then.get(field) != now.get(field) and not (field == "all files" and found):
            found.append(f"{where}: {field} was {then.get(field)!r} and is {now.get(field)!r}")
    return found
