"""Experiences in packs: rows of fixed length that hold whole answers, and what a policy loss reads beside the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.data.packing import Candidate, Pack, assemble
from bestiary.training.data.source import Cursor
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.documents import document_batch, model_inputs, scoring_pass
from bestiary.training.rl.records import Experience, Values
from bestiary.training.rl.shared_prompts import Shared, scored, share

Column = Literal["old_log_probs", "reference_log_probs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencePack(Pack):
    """A pack and its columns, (T,) each, aligned to the ids; 0 in the padding and where nothing was sampled.

    Attributes:
        experiences: in the order of the documents.
        rollout_log_probs, advantages, old_log_probs, reference_log_probs: of the experiences; None: they have none.
        temperature: that all of them were sampled at.
        allowed: (T, k) int32, of the experiences, -1 for no further id; None: they were not constrained.
        shared: the documents as prompts and answers, if that is how they are computed.
    """

    experiences: tuple[Experience, ...]
    rollout_log_probs: Values
    advantages: Values
    old_log_probs: Values | None
    reference_log_probs: Values | None
    temperature: float
    allowed: NDArray[np.int32] | None = None
    shared: Shared | None = None

    @property
    def slots(self) -> int:
        """See `Pack`."""
        return len(self.input_ids) if self.shared is None else self.shared.slots

    @property
    def useful_tokens(self) -> int:
        """See `Pack`."""
        return int(self.borders[self.documents]) if self.shared is None else self.shared.useful_tokens

    @property
    def repeated(self) -> tuple[int, ...]:
        """See `Pack`."""
        return () if self.shared is None else self.shared.repeated

    def chosen_among(self) -> dict[str, Tensor]:
        """What forward takes beside `shift_labels`: `allowed` (1, T, k), of the next token; nothing of free answers."""
        if self.allowed is None:
            return {}
        return {"allowed": torch.from_numpy(self.allowed).long().roll(-1, 0)[None]}


def pack(
    experiences: Sequence[Experience], pack_length: int, pad_id: int, *, at_least: int = 1, shares: bool = False
) -> list[ExperiencePack]:
    """Packs of all experiences that train something, the longest first into the first pack with room.

    Which answers share a pack changes no gradient. What trains nothing costs nothing: it is in no pack.

    Args:
        at_least: packs of padding alone fill up to this number, so that processes run equally often.
        shares: answers to one prompt are together, and it is computed once, wherever that is worth it; such packs have
            no padding, and `pack_length` bounds what is computed.
    Raises:
        InvalidRun: an answer longer than a pack; experiences of several temperatures, or some with log-probabilities of
            the old policy or the reference, or sampled under a constraint, and some not.
    """
    kept = [one for one in experiences if one.trains]
    for one in kept:
        if len(one.trajectory) > pack_length:
            raise InvalidRun(
                f"{one.trajectory.name} has {len(one.trajectory)} tokens, a pack holds {pack_length}.",
                remedy="a longer pack_length, at least the longest prompt and max_tokens together",
            )
    temperatures = sorted({one.trajectory.temperature for one in kept})
    if len(temperatures) > 1:
        raise InvalidRun(
            f"answers sampled at temperatures {temperatures} in one step.",
            remedy="one temperature, that the policy's log-probabilities are taken at",
        )
    columns = {name: _all_or_none(kept, name) for name in ("old_log_probs", "reference_log_probs", "allowed")}
    temperature = temperatures[0] if temperatures else 1.0
    made: list[ExperiencePack] = []
    if shares:
        together, kept = _together(kept, pack_length), []
        for few in together:
            shared = share([one.document.input_ids for one in few], [one.document.labels for one in few])
            if shared is None:
                kept += few
            else:
                length = sum(len(one.trajectory) for one in few)
                made.append(replace(_assembled(few, length, pad_id, columns, temperature), shared=shared))
    chosen = _first_fit(kept, pack_length)
    chosen += [[] for _ in range(at_least - len(chosen) - len(made))]
    return made + [_assembled(few, pack_length, pad_id, columns, temperature) for few in chosen]


def _first_fit(experiences: Sequence[Experience], pack_length: int) -> list[list[Experience]]:
    """The longest first into the first pack with room."""
    rooms: list[int] = []
    chosen: list[list[Experience]] = []
    for one in sorted(experiences, key=lambda found: -len(found.trajectory)):
        length = len(one.trajectory)
        place = next((place for place, room in enumerate(rooms) if room >= length), None)
        if place is None:
            place = len(rooms)
            rooms.append(pack_length)
            chosen.append([])
        rooms[place] -= length
        chosen[place].append(one)
    return chosen


def _together(experiences: Sequence[Experience], pack_length: int) -> list[list[Experience]]:
    """Answers to one prompt beside each other, as many in a part as a pack has room for, each prompt counted once."""
    groups: dict[bytes, list[Experience]] = {}
    for one in experiences:
        groups.setdefault(_prompt(one).tobytes(), []).append(one)
    parts: list[list[Experience]] = []
    room, here = 0, b""
    for prompt, group in sorted(groups.items(), key=lambda named: -max(len(one.trajectory) for one in named[1])):
        for one in sorted(group, key=lambda found: -len(found.trajectory)):
            whole, behind = len(one.trajectory), len(one.trajectory) - len(_prompt(one))
            needed = behind if here == prompt and parts else whole
            if not parts or needed > room:
                parts.append([])
                room, needed = pack_length, whole
            parts[-1].append(one)
            room, here = room - needed, prompt
    return parts


def _prompt(one: Experience) -> NDArray[np.int32]:
    """Everything before the first sampled token."""
    return one.trajectory.ids[: int(one.trajectory.sampled.argmax())]


def with_log_probs(
    model: Decoder,
    experiences: Sequence[Experience],
    column: Column,
    *,
    pack_length: int,
    pad_id: int,
    at_least: int = 1,
    shares: bool = False,
) -> list[Experience]:
    """The experiences, in their order, with log-probabilities under a model, at the temperature they were sampled at.

    Without a graph and without dropout. Those that train nothing stay as they are.

    Args:
        column: old_log_probs: the model is the policy before the step. reference_log_probs: it is the reference.
        pack_length, pad_id, at_least, shares: as `pack`.
    """
    found = {id(one): one for one in experiences}
    for each in pack(experiences, pack_length, pad_id, at_least=at_least, shares=shares):
        batch = document_batch(each)
        with scoring_pass(model):
            given = model_inputs(batch | each.chosen_among(), model, "shift_labels", *each.chosen_among())
            values = scored(model, given, each.shared, temperature=each.temperature)["log_probs"][0]
        aligned = values.to("cpu", torch.promote_types(values.dtype, torch.float32)).roll(1).numpy()
        for one, (start, end) in zip(each.experiences, pairwise(each.borders.tolist()), strict=False):
            of_answer = np.where(one.trajectory.sampled, aligned[start:end], 0.0).astype(aligned.dtype)
            made: dict[str, Any] = {column: of_answer}
            found[id(one)] = replace(one, **made)
    return [found[id(one)] for one in experiences]


def _all_or_none(experiences: Sequence[Experience], column: str) -> bool:
    have = [vars(one.trajectory if column == "allowed" else one)[column] is not None for one in experiences]
    if any(have) and not all(have):
        raise InvalidRun(
            f"{column}: {experiences[have.index(False)].trajectory.name} has none, others of the step do.",
            remedy="all answers of a step have them, or none",
        )
    return any(have)


def _assembled(
    few: Sequence[Experience], length: int, pad_id: int, columns: dict[str, bool], temperature: float
) -> ExperiencePack:
    made = assemble(
        [Candidate(place, "rollout", place, Cursor(), 0, (one.document,)) for place, one in enumerate(few)],
        length,
        pad_id,
    )

    def column(values: list[NDArray[Any]]) -> Values:
        joined = np.concatenate([*values, np.zeros(0, np.float32)])
        return np.pad(joined, (0, length - len(joined)))

    return ExperiencePack(
        made.input_ids,
        made.labels,
        made.borders,
        made.documents,
        experiences=tuple(few),
        rollout_log_probs=column([one.trajectory.rollout_log_probs for one in few]),
        advantages=column([one.advantages for one in few]),
        temperature=temperature,
        old_log_probs=column([vars(one)["old_log_probs"] for one in few]) if columns["old_log_probs"] else None,
        reference_log_probs=(
            column([vars(one)["reference_log_probs"] for one in few]) if columns["reference_log_probs"] else None
        ),
        allowed=_allowed([one.trajectory.allowed for one in few], length) if columns["allowed"] else None,
    )


def _allowed(given: Sequence[NDArray[np.int32] | None], length: int) -> NDArray[np.int32]:
    """Of documents one behind the other: (length, the widest of theirs)."""
    rows = [one for one in given if one is not None]
    made = np.full((length, max((one.shape[1] for one in rows), default=1)), -1, np.int32)
    start = 0
    for one in rows:
        made[start : start + len(one), : one.shape[1]] = one
        start += len(one)
    return made
