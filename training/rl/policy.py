"""The policy in this process: the loop's trainer, driven by primitives in place of a loader.

With several processes every one has such a policy, given its part of the experiences; all of them are asked alike and
at once, and what they tell of figures, units and names is of all of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder
from bestiary.models.lora import adapters_off
from bestiary.training.checkpoint import Checkpoints
from bestiary.training.data.loader import Slots, Waits
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import InvalidRun
from bestiary.training.export import write_result
from bestiary.training.loop import Trainer, Update
from bestiary.training.optim import schedule
from bestiary.training.recipes.base import Batch
from bestiary.training.rl.embedded import Agree, EmbeddedEngine
from bestiary.training.rl.mismatch import Parity, parity
from bestiary.training.rl.packing import Column, ExperiencePack, pack, with_log_probs
from bestiary.training.rl.records import Experience, Trajectory, Values
from bestiary.training.rl.rollout import Constraint, Rollout, RolloutEngine, Sampling, remembered
from bestiary.training.rl.rollout_check import FULL, HALF, StaleWeights, check_allowed, check_rollouts, computed_in
from bestiary.training.rl.trained_names import packed, unpacked
from bestiary.training.rl.weight_sync import Synced, sync

T = TypeVar("T")
_COUNTS = ("tokens", "useful_tokens", "loss_tokens")


@dataclass(frozen=True)
class Room:
    """How experiences are laid out for a forward pass.

    Attributes:
        pack_length: tokens of a row.   pad_id: fills its tail.
        agree: a number of each process to the largest of all, for a model in parts; None: there is one process.
        shares: a prompt is computed once for its answers, see `shared_prompts`; not of a model in parts.
    """

    pack_length: int
    pad_id: int
    agree: Agree | None = None
    shares: bool = False

    def packs(self, experiences: Sequence[Experience]) -> list[ExperiencePack]:
        """The rows, as many in every process."""
        most = self._most(experiences)
        return pack(experiences, self.pack_length, self.pad_id, at_least=most, shares=self.shares)

    def _most(self, experiences: Sequence[Experience]) -> int:
        """How many rows every process makes of them, padding included."""
        if self.agree is None:
            return 0
        return self.agree(len(pack(experiences, self.pack_length, self.pad_id, at_least=0)))

    def log_probs(self, model: Decoder, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """`packing.with_log_probs` under a model."""
        return with_log_probs(
            model,
            experiences,
            column,
            pack_length=self.pack_length,
            pad_id=self.pad_id,
            at_least=self._most(experiences),
            shares=self.shares,
        )


class Account:
    """What resume points of a policy hold in the place of the data: it is a `Batches` of none.

    Attributes:
        controller: what it says of itself; None: nothing yet.
        trained: names of prompts to the steps they were in.
    """

    def __init__(self) -> None:
        self.controller: Mapping[str, Any] | None = None
        self.trained: Counter[str] = Counter()
        self.waits, self.given = Waits(), Slots()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def global_state(self) -> dict[str, Any]:
        """JSON values, the same in every process."""
        return {"controller": self.controller, "trained_names": packed(self.trained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `global_state` gave."""
        self.controller, self.trained = state["controller"], Counter(trained_in(state))

    def close(self) -> None:
        """Nothing is open."""


def trained_in(state: Mapping[str, Any]) -> dict[str, int]:
    """Names of prompts to the steps they were in, of what `Account.global_state` gave, now or before it packed them."""
    stored = state.get("trained_names")
    return dict(state["trained"]) if stored is None else unpacked(stored)


class LocalPolicy:
    """A `roles.Policy` on a model in this process, or on this process's part of one.

    Gradients are sums until `optim_step` divides them by the units of all `forward_backward` since the last one, so how
    experiences are divided over calls, packs and processes changes no step.

    Args:
        trainer: with a `recipes.base.Recipe` over packs of experiences (`PolicyGradient`); its loader is replaced.
        room: of its packs.
        saver: of resume points; None: there are none, and `save_state` does nothing.
        make: a pack to a batch; None: the recipe's own.
        tokenizer: that an export is written with; None: without.
        rows: answers that `sample` writes together, at most.
        tolerance, engine_dtype, constraint: of `check`, as `check_rollouts` and `Sampling` have them.

    Attributes:
        version: steps made or skipped.
    """

    def __init__(
        self,
        trainer: Trainer,
        room: Room,
        *,
        saver: Checkpoints | None = None,
        make: Callable[[Pack], Batch] | None = None,
        tokenizer: BaseHFModelTokenizer | None = None,
        rows: int = 64,
        tolerance: float | None = None,
        engine_dtype: torch.dtype | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.trainer, self.room, self.model = trainer, room, trainer.model
        self._account = Account()
        trainer.loader = self._account
        self.model.train()
        self._saver, self._make, self._tokenizer = saver, make or trainer.recipe.batch, tokenizer
        self._own = EmbeddedEngine(self.model, rows=rows, agree=room.agree)
        self._tolerance, self._engine_dtype, self._constraint = tolerance, engine_dtype, constraint
        self.version = trainer.progress.step
        self._known: dict[tuple[str, int], tuple[Trajectory, Values]] = {}
        self._begin()

    def _begin(self) -> None:
        """Nothing since the last step."""
        self._known.clear()
        self._units, self._loss, self._seconds = 0.0, 0.0, 0.0
        self._names: set[str] = set()
        self._counted = dict.fromkeys(_COUNTS, 0.0)

    # ------------------------------------------------------------------ training

    def forward_backward(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """See `roles.Policy`; no figures where nothing is trained."""
        start = time.perf_counter()
        trainer, room = self.trainer, self.room
        self._names |= {one.trajectory.prompt_id for one in experiences}
        packs = room.packs(experiences)
        batches = [self._make(each) for each in packs]
        trainer.prepare(batches)
        counted = trainer.control.sums(
            {
                "units": sum(trainer.recipe.count(batch) for batch in batches),
                "tokens": sum(each.slots for each in packs),
                "useful_tokens": sum(each.useful_tokens for each in packs),
                "loss_tokens": sum(each.loss_tokens for each in packs),
            }
        )
        units = counted.pop("units")
        if not units:
            return {}
        sums = trainer.control.sums(trainer.gradients(batches, 1.0))
        self._units += units
        self._loss += sums["loss"]
        for name, count in counted.items():
            self._counted[name] += count
        self._seconds += time.perf_counter() - start
        return {name: total / units for name, total in sums.items()}

    def optim_step(self) -> dict[str, float]:
        """See `roles.Policy`. Without anything trained since the last step it is skipped, and counts.

        Raises:
            Diverged: also.
            InvalidRun: more than `loop.max_skips` steps in a row were skipped for want of anything to train on.
        """
        start = time.perf_counter()
        trainer, counted, units = self.trainer, self._counted, self._units
        names, progress = set().union(*trainer.control.gathered(self._names)), trainer.progress
        loss = self._loss / units if units else 0.0
        if units:
            # Sharded and replicated gradients are means over the processes with different data.
            scale = trainer.data_parallel / units
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            made = trainer.update(loss)
        else:
            trainer.optimiser.zero_grad()
            rate = schedule(trainer.optim, trainer.lr, progress.step, trainer.steps)
            made = Update(0.0, rate, f"no {trainer.recipe.unit} to train on", harmless=True)
        seconds = self._seconds + time.perf_counter() - start
        self._account.trained.update(names)
        self._begin()
        self.version += 1
        trainer.book(counted, seconds, made, loss)
        if made.harmless and progress.in_a_row > trainer.loop.max_skips:
            raise InvalidRun(
                f"{progress.in_a_row} steps in a row had nothing to train on: every group's rewards are equal, or all "
                "answers are without a reward or masked.",
                remedy="prompts that the policy answers now right, now wrong; a higher rollouts.temperature; "
                "loop.max_skips says how many such steps are borne",
            )
        figures = {"loss": loss, "grad_norm": made.norm, "lr": made.lr, "skipped": float(progress.skipped), **counted}
        if trainer.meter is not None and units:
            counts = {name: round(counted[name]) for name in _COUNTS}
            figures |= trainer.meter.read(seconds=seconds, data_wait_s=0.0, **counts)
        return figures

    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `roles.Frozen`; what `check` has computed under these weights is not computed again."""
        missing = [Experience.of(one.trajectory) for one in experiences if one.trains and self._known_of(one) is None]
        for one in self.room.log_probs(self.model, missing, "old_log_probs"):
            if one.old_log_probs is not None:
                self._known[_name(one)] = (one.trajectory, one.old_log_probs)
        found: list[Experience] = []
        for one in experiences:
            made: dict[str, Any] = {column: self._known_of(one)} if one.trains else {}
            found.append(replace(one, **made))
        return found

    def _known_of(self, one: Experience) -> Values | None:
        """Log-probabilities of an answer under the weights as they are."""
        known, values = self._known.get(_name(one), (None, None))
        own = one.trajectory
        same = known is own or (
            known is not None
            and known.temperature == own.temperature
            and np.array_equal(known.ids, own.ids)
            and np.array_equal(known.sampled, own.sampled)
        )
        return values if same else None

    # ------------------------------------------------------------------ answers

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `roles.Policy`."""
        self._own.version = self.version
        return self._own.generate(prompts, sampling, keys=keys)

    def sync(self, engine: RolloutEngine) -> Synced:
        """See `roles.Policy`."""
        return sync(self.model, engine, self.version, tolerance=self._tolerance)

    def check(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """See `roles.Policy`.

        Log-probabilities of older versions differ since the weights moved: they are measured and not bounded. Those
        weights were compared by `sync`, before they sampled.

        Raises:
            StaleWeights, WrongTemperature, Retokenised: of answers sampled by this version, see `check_rollouts`.
            WrongConstraint: of any.
        """
        self._all(lambda: self._check_allowed(trajectories))
        known = self.log_probs([Experience.of(one) for one in trajectories], "old_log_probs")
        every = self._all(lambda: self._parity(known))
        found, current = sum((each for each, _ in every), Parity()), sum((each for _, each in every), Parity())
        mean, bound = current.absolute / max(1, current.tokens), self._bound()
        if mean > bound:
            self._blame([one for one in trajectories if one.version == self.version])
            raise StaleWeights(
                f"log-probabilities of the engine and the policy differ by {mean:.2g} in the mean (at most {bound:g}).",
                remedy="the engine has other weights than the policy: sync it",
            )
        return {f"rl/{name.replace('/', '_')}": value for name, value in found.figures().items()}

    def _all(self, look: Callable[[], T]) -> list[T]:
        """What every process finds; an error of one is raised in all, so that none waits for it in a collective."""
        found: T | None = None
        failure: BestiaryError | None = None
        try:
            found = look()
        except BestiaryError as error:
            failure = error
        every = self.trainer.control.gathered((found, failure))
        for _, other in every:
            if other is not None:
                raise other
        return [cast(T, one) for one, _ in every]

    def _check_allowed(self, trajectories: Sequence[Trajectory]) -> None:
        constraint = remembered(self._constraint)
        for place, one in enumerate(trajectories):
            for _, turn in turns_of(one):
                check_allowed(place, turn, constraint)

    def _parity(self, known: Sequence[Experience]) -> tuple[Parity, Parity]:
        """Of all answers, and of those that these weights sampled."""
        compared = [one for one in known if one.old_log_probs is not None]
        current = [one for one in compared if one.trajectory.version == self.version]
        found = _compared(compared)
        return found, found if len(current) == len(compared) else _compared(current)

    def _bound(self) -> float:
        dtypes = [computed_in(self.model), *([self._engine_dtype] if self._engine_dtype else [])]
        half = any(torch.finfo(dtype).bits < 32 for dtype in dtypes)
        return (HALF if half else FULL) if self._tolerance is None else self._tolerance

    def _blame(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises what is wrong with answers that are off, by its name.

        Every process looks at those of all: one that stopped earlier would leave the others waiting for its weights.
        """
        trajectories = [one for each in self.trainer.control.gathered(trajectories) for one in each]
        turns = [turn for one in trajectories for turn in turns_of(one)]
        if turns:
            prompts = [prompt for prompt, _ in turns]
            rollouts = [replace(answer, prompt=place) for place, (_, answer) in enumerate(turns)]
            temperature = trajectories[0].temperature
            asked = Sampling(max_tokens=1, temperature=temperature, constraint=self._constraint)
            check_rollouts(
                self.model, prompts, rollouts, asked, tolerance=self._tolerance, engine_dtype=self._engine_dtype
            )

    # ------------------------------------------------------------------ resume points

    def save_state(self, controller: Mapping[str, Any], *, wait: bool = False) -> None:
        """See `roles.Policy`; between two steps.

        Raises:
            SaveFailed: this one, if waited for, or the one before could not be written.
        """
        self._account.controller = controller
        if self._saver is not None:
            self._saver.save(self.trainer)
            if wait:
                self._saver.finish()

    def load_state(self) -> Mapping[str, Any] | None:
        """See `roles.Policy`.

        Raises:
            CheckpointRefused: damaged, or of another run.
        """
        if self._saver is None:
            return None
        self._saver.join()
        self.trainer.optimiser.zero_grad()
        self._begin()
        if self._saver.resume(self.trainer) is None:
            return None
        self.version = self.trainer.progress.step
        return self._account.controller

    def close(self) -> None:
        """Wait for the resume point that is being written, whether it can be or not."""
        if self._saver is not None:
            self._saver.join()

    def trained(self) -> dict[str, int]:
        """See `roles.Policy`; skipped steps count, they use their prompts up."""
        return dict(self._account.trained)

    def export(self, folder: Path) -> None:
        """See `roles.Policy`."""
        control = self.trainer.control
        if self._tokenizer is None:
            self.model.save_pretrained(folder, overwrite=True)
        else:
            write_result(self.model, self._tokenizer, folder, first=control.first, overwrite=True)
        control.wait()


class LocalFrozen:
    """A `roles.Frozen` in this process: a model of its own, or the policy without its adapters.

    Args:
        model: that computes.   room: of its packs.
        without_adapters: as if its adapters weighed 0.
    """

    def __init__(self, model: Decoder, room: Room, *, without_adapters: bool = False) -> None:
        self._model, self._room, self._without = model, room, without_adapters

    def log_probs(self, experiences: Sequence[Experience], column: Column) -> list[Experience]:
        """See `roles.Frozen`."""
        with adapters_off(self._model) if self._without else nullcontext():
            return self._room.log_probs(self._model, experiences, column)


def _compared(known: Sequence[Experience]) -> Parity:
    """What the engines and this policy say of the sampled tokens of all these answers."""
    if not known:
        return Parity()
    columns = [(vars(one)["old_log_probs"], one.trajectory.rollout_log_probs, one.trajectory.sampled) for one in known]
    return parity(*(torch.from_numpy(np.concatenate(each)) for each in zip(*columns, strict=True)))


def _name(one: Experience) -> tuple[str, int]:
    return one.trajectory.group_id, one.trajectory.sample


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], Rollout]]:
    """What was sampled in one go, and the ids before it, of every turn of a conversation."""
    edges = np.diff(np.concatenate([[0], trajectory.sampled.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [
        (
            trajectory.ids[:start].tolist(),
            Rollout(
                0,
                trajectory.ids[start:end],
                trajectory.rollout_log_probs[start:end],
                trajectory.finish,
                trajectory.version,
                None if trajectory.allowed is None else trajectory.allowed[start:end],
            ),
        )
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
