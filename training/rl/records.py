"""What passes between sampling, scoring and training: typed records with token ids, kept without pickles.

A `Trajectory` is what was sampled and by whom; an `Experience` is the same with what training reads at each token. All
arrays of one record are (n,), aligned to its ids: the value at a place belongs to the token at that place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bestiary.kernels.errors import BestiaryError
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.errors import SaveFailed
from bestiary.training.rl.rollout import Finish, Rollout

Values = NDArray[np.floating[Any]]
_FORMAT = "1"
_ABOVE = 1e-3  # log-probabilities above 0 by more than rounding are none


class RecordsRefused(BestiaryError):
    """A record that contradicts itself, or a file of them that is damaged or of another kind.

    Remedy: sample again; records are not repaired.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One sampled answer, or conversation, to one prompt.

    Attributes:
        prompt_id: name of the prompt, by which a run knows what it has trained on.
        group_id: of the answers that are compared with one another: the prompt's, in one round.
        sample: number of the answer in its group.
        ids: int32, the prompt and all that followed.   sampled: bool, what the policy sampled of it; never the first.
        rollout_log_probs: of the sampled tokens, as the engine gave them; 0 elsewhere.
        temperature: of the distribution that they belong to.
        version: of the weights that sampled: optimiser steps behind them. Of several, the oldest.
        finish: why it ended; "length" is cut off.
        rewards: by reward function, None where it could not judge.
        extra: JSON values that travel along (turns, timings, what an environment said).
        allowed: (n, k) int32, the ids among which each sampled token was chosen, -1 for no further one and elsewhere;
            None: the whole vocabulary.

    Raises:
        RecordsRefused: lengths differ, the first token counts as sampled, a sampled token was not allowed, or a
            log-probability is none.
    """

    prompt_id: str
    group_id: str
    sample: int
    ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    rollout_log_probs: Values
    temperature: float
    version: int
    finish: Finish
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    allowed: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        _check_lengths(self.name, len(self.ids), sampled=self.sampled, rollout_log_probs=self.rollout_log_probs)
        if not len(self.ids) or self.sampled[0]:
            raise RecordsRefused(
                f"{self.name}: its first token counts as sampled.", remedy="a prompt of at least one token before it"
            )
        if self.finish not in get_args(Finish):
            raise RecordsRefused(f"{self.name}: finish = {self.finish!r}.", remedy=f"one of {get_args(Finish)}")
        _check_log_probs(self.name, "rollout_log_probs", self.rollout_log_probs[self.sampled])
        if self.allowed is not None:
            _check_allowed(self.name, self.allowed, self.ids, self.sampled)

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        prompt: Sequence[int] | NDArray[np.int32],
        *,
        prompt_id: str,
        group_id: str,
        sample: int,
        temperature: float,
        rewards: Mapping[str, float | None] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """An engine's answer behind its prompt."""
        before = len(prompt)
        return cls(
            prompt_id=prompt_id,
            group_id=group_id,
            sample=sample,
            ids=np.concatenate([np.asarray(prompt, np.int32), rollout.ids]),
            sampled=np.arange(before + len(rollout)) >= before,
            rollout_log_probs=np.concatenate([np.zeros(before, rollout.log_probs.dtype), rollout.log_probs]),
            temperature=temperature,
            version=rollout.version,
            finish=rollout.finish,
            rewards=dict(rewards or {}),
            extra=dict(extra or {}),
            allowed=None if rollout.allowed is None else _behind(before, rollout.allowed),
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def name(self) -> str:
        """For errors."""
        return f"answer {self.sample} to prompt {self.prompt_id}"

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        return int(self.sampled.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """A trajectory with what a policy loss reads.

    Attributes:
        advantages: at each sampled token; 0 elsewhere.
        trained: False: it is in no loss (no reward, cut off, a group that says nothing).
        old_log_probs: under the policy before the step, by the trainer's own computation; None: the first step on it,
            where those are the policy's own.
        reference_log_probs: under the reference; None: there is none.

    Raises:
        RecordsRefused: lengths differ, an advantage is not finite, or a log-probability is none.
    """

    trajectory: Trajectory
    advantages: Values
    trained: bool = True
    old_log_probs: Values | None = None
    reference_log_probs: Values | None = None

    def __post_init__(self) -> None:
        name, sampled = self.trajectory.name, self.trajectory.sampled
        _check_lengths(name, len(sampled), advantages=self.advantages)
        if not np.isfinite(self.advantages).all():
            raise RecordsRefused(f"{name}: an advantage is not finite.", remedy="rewards are finite or None")
        for column in ("old_log_probs", "reference_log_probs"):
            values = vars(self)[column]
            if values is not None:
                _check_lengths(name, len(sampled), **{column: values})
                _check_log_probs(name, column, values[sampled])

    @classmethod
    def of(cls, trajectory: Trajectory) -> Experience:
        """Without advantages yet."""
        return cls(trajectory=trajectory, advantages=np.zeros(len(trajectory)))

    @property
    def trains(self) -> bool:
        """Whether a loss reads any token of it."""
        return self.trained and bool(self.trajectory.sampled.any())

    @property
    def document(self) -> Tokens:
        """Ids and labels, as packs take them; nothing has a label where it is not trained."""
        ids = self.trajectory.ids
        return Tokens(ids, np.where(self.trajectory.sampled & self.trained, ids, np.int32(IGNORED)).astype(np.int32))


# ------------------------------------------------------------------ files


def save(path: Path, records: Sequence[Trajectory] | Sequence[Experience]) -> None:
    """Write records of one kind, whole or not at all: arrays one behind the other, the rest as JSON in the header.

    Raises:
        RecordsRefused: records of both kinds; an `extra` that is not JSON.
        SaveFailed: the file could not be written.
    """
    kinds = {type(record).__name__ for record in records}
    if len(kinds) > 1:
        raise RecordsRefused(f"{path}: records of kinds {sorted(kinds)} in one file.", remedy="a file for each")
    experiences = [record for record in records if isinstance(record, Experience)]
    trajectories = [record.trajectory if isinstance(record, Experience) else record for record in records]
    arrays: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(one) for one in trajectories], np.int64),
        "ids": _joined([one.ids for one in trajectories], np.int32),
        "sampled": _joined([one.sampled for one in trajectories], np.bool_),
        "rollout_log_probs": _joined([one.rollout_log_probs for one in trajectories]),
    }
    if experiences:
        arrays["advantages"] = _joined([one.advantages for one in experiences])
    constrained = [one.allowed.reshape(-1) for one in trajectories if one.allowed is not None]
    if constrained:
        arrays["allowed"] = _joined(constrained, np.int32)
    for column in ("old_log_probs", "reference_log_probs"):
        given = [vars(one)[column] for one in experiences if vars(one)[column] is not None]
        if given:
            arrays[column] = _joined(given)
    rows = [
        {name: vars(one)[name] for name in _FIELDS} | {"rewards": dict(one.rewards), "extra": dict(one.extra)}
        for one in trajectories
    ]
    for row, each in zip(rows, trajectories, strict=True):
        if each.allowed is not None:
            row["width"] = each.allowed.shape[1]
    for row, one in zip(rows, experiences, strict=False):
        row["trained"] = one.trained
        row["columns"] = [name for name in ("old_log_probs", "reference_log_probs") if vars(one)[name] is not None]
    kind = next(iter(kinds), "Trajectory")
    try:
        described = json.dumps(rows, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordsRefused(
            f"{path}: {error}.", remedy="extra holds JSON values, rewards are finite or None"
        ) from error
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part, metadata={"format": _FORMAT, "kind": kind, "records": described})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise SaveFailed(
            f"{len(rows)} records could not be written ({error}).",
            read_from=str(path),
            remedy="free the disk or repair the folder; of a run, rollouts.keep=false keeps none",
        ) from error


def load_trajectories(path: Path) -> list[Trajectory]:
    """What `save` wrote of trajectories; of experiences, theirs.

    Raises:
        RecordsRefused: damaged, or no file of records.
    """
    return [trajectory for trajectory, _ in _read(path)[1]]


def load_experiences(path: Path) -> list[Experience]:
    """What `save` wrote of experiences.

    Raises:
        RecordsRefused: damaged, or a file of trajectories.
    """
    kind, found = _read(path)
    if kind != "Experience":
        raise RecordsRefused(f"{path} holds records of kind {kind}.", remedy="load_trajectories")
    return [Experience(trajectory=trajectory, **more) for trajectory, more in found]


_FIELDS = ("prompt_id", "group_id", "sample", "temperature", "version", "finish")


def _read(path: Path) -> tuple[str, list[tuple[Trajectory, dict[str, Any]]]]:
    try:
        with safe_open(path, framework="numpy") as opened:
            described = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        rows = json.loads(described["records"])
        kind, version = described["kind"], described["format"]
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise RecordsRefused(
            f"{path} is no file of records, or a damaged one: {error}.",
            remedy="what bestiary.training.rl.records wrote",
        ) from error
    if version != _FORMAT:
        raise RecordsRefused(f"{path} has format {version}.", remedy=f"this version of bestiary reads {_FORMAT}")
    places = dict.fromkeys(arrays, 0)

    def next_of(column: str, length: int) -> NDArray[Any]:
        start = places[column]
        places[column] = start + length
        return arrays[column][start : start + length]

    found = []
    for row, length in zip(rows, arrays["lengths"].tolist(), strict=True):
        common: dict[str, Any] = {name: next_of(name, length) for name in ("ids", "sampled", "rollout_log_probs")}
        if (width := row.pop("width", None)) is not None:
            common["allowed"] = next_of("allowed", length * width).reshape(length, width)
        more: dict[str, Any] = {}
        if kind == "Experience":
            more = {name: next_of(name, length) for name in ("advantages", *row.pop("columns"))}
            more["trained"] = row.pop("trained")
        found.append((Trajectory(**common, **row), more))
    return kind, found


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any = None) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32 if dtype is None else dtype)


# ------------------------------------------------------------------ checks


def _check_lengths(name: str, length: int, **columns: NDArray[Any]) -> None:
    for column, values in columns.items():
        if values.shape != (length,):
            raise RecordsRefused(
                f"{name}: {column} has shape {values.shape} for {length} tokens.", remedy="one value for each token"
            )


def _behind(before: int, allowed: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of an answer to of the prompt of so many tokens and the answer."""
    return np.pad(allowed, ((before, 0), (0, 0)), constant_values=-1)


def _check_allowed(name: str, allowed: NDArray[np.int32], ids: NDArray[np.int32], sampled: NDArray[np.bool_]) -> None:
    if allowed.ndim != 2 or len(allowed) != len(ids):
        raise RecordsRefused(
            f"{name}: allowed has shape {allowed.shape} for {len(ids)} tokens.", remedy="one row of ids for each token"
        )
    places = np.flatnonzero(sampled)
    outside = ~(allowed[places] == ids[places, None]).any(1)
    if outside.any():
        place = int(places[outside.argmax()])
        raise RecordsRefused(
            f"{name}: token {place}, id {int(ids[place])}, is not among the "
            f"{int((allowed[place] >= 0).sum())} that were allowed there.",
            remedy="`Rollout.allowed` of the answer, and the ids that were sampled",
        )


def sound(answers: Sequence[Rollout]) -> bool:
    """Whether records can be made of all these answers; looked at together, so that many cost little."""
    return all(
        one.finish in get_args(Finish)
        and one.ids.ndim == 1
        and one.ids.shape == one.log_probs.shape
        and (one.allowed is None or _are_allowed(one.allowed, one.ids))
        for one in answers
    ) and not (answers and _are_none(np.concatenate([one.log_probs for one in answers])).any())


def _are_allowed(allowed: NDArray[np.int32], ids: NDArray[np.int32]) -> bool:
    return allowed.ndim == 2 and len(allowed) == len(ids) and bool((allowed == ids[:, None]).any(1).all())


def _are_none(values: Values) -> NDArray[np.bool_]:
    """Which are no log-probabilities."""
    return ~(np.isfinite(values) & (values <= _ABOVE))


def _check_log_probs(name: str, column: str, values: Values) -> None:
    wrong = _are_none(values)
    if wrong.any():
        place = int(wrong.argmax())
        raise RecordsRefused(
            f"{name}: {column} of sampled token {place} is {float(values[place]):g}.",
            remedy="the logarithm of a probability, of every token that was sampled",
        )
