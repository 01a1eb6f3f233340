"""A sampler in this process: one engine, one kind of environment, and episodes that go back and forth between them.

All episodes that wait for an answer go into one call of the engine, in the order in which their prompts were put; while
it runs, environments step in threads of their own. A call does not begin with the first episode that is ready: it gives
the environments that are busy a moment, a small part of what a call takes, so that episodes stay together. Without an
environment an episode is one answer.

The answer of a turn is a function of the weights, of what stands before it and of
`seed_of(sampling.seed, prompt_id, sample, turn)`, which is the name that the engine makes its seed of: who else is
asked in the same call, and after how many failures, changes nothing but rounding.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from bestiary.training.errors import ClusterLost, EnvironmentFailed, InvalidRun, RoleLost
from bestiary.training.rl.allowance import Allowance
from bestiary.training.rl.calls import Calls, TimedOut
from bestiary.training.rl.environments import EnvironmentFactory, Heard, Said
from bestiary.training.rl.episode import Episode, Group, added
from bestiary.training.rl.records import RecordsRefused, Trajectory, sound
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Finish, Rollout, RolloutEngine, Sampling, seed_of

LINGER = 0.05  # of the last call's time, that a call waits for busy environments
_FIRST_S = 0.2  # what the first call is thought to take
_CLOSING_S = 5.0  # how long `close` waits for environments, at most


class Episodes:
    """A `Sampler` in this process.

    After an error of the engine, `EnvironmentFailed`, or `RoleLost` of an environment, `take` raises it once no more
    groups are complete, and nothing is sampled until `resume`; then unfinished answers are asked for again with the
    same seeds, and episodes of a lost environment begin again.

    Args:
        engine: whose answers they are.
        context: positions of the model. A prompt that leaves fewer than `max_tokens` of them is refused; a later answer
            has those that are left, and where none is left the episode ends, cut off.
        vocabulary: ids that the model has; a prompt with another one is refused, an environment that says one has
            failed. None: those that records can hold.
        environment: makes the world of one episode; None: an episode is one answer to its prompt.
        threads: environments that are asked at one time.
        timeout_s: of one call of an environment. A thread whose call hangs is left behind and replaced.
        at_once: episodes that have an environment at one time; others wait until one of these ends. None: all.
        max_turns: answers of an episode, at most; an environment that wants more is cut off.
        batch: answers asked of the engine in one call, at most; None: all that wait.
        max_errors, window: of environments, see `Allowance`.

    Attributes:
        engine: given.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        context: int,
        vocabulary: int | None = None,
        environment: EnvironmentFactory | None = None,
        threads: int = 8,
        timeout_s: float = 60.0,
        at_once: int | None = None,
        max_turns: int = 64,
        batch: int | None = None,
        max_errors: float = 0.05,
        window: int = 256,
    ) -> None:
        counts = {"threads": threads, "max_turns": max_turns, "batch": batch, "at_once": at_once}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise InvalidRun(f"{name} = {value}.", remedy="at least 1")
        if not timeout_s > 0:
            raise InvalidRun(f"timeout_s = {timeout_s}.", remedy="seconds, above 0")
        self.engine = engine
        self._context, self._factory, self._max_turns, self._batch = context, environment, max_turns, batch
        self._timeout_s, self._at_once = timeout_s, at_once
        self._vocabulary = 1 << 31 if vocabulary is None else vocabulary
        self._allowance = Allowance(max_errors, window)
        self._changed = threading.Condition()
        self._groups: dict[str, Group] = {}
        self._waiting: list[Episode] = []
        self._lost: list[Episode] = []
        self._later: deque[Episode] = deque()
        self._fault: Exception | None = None
        self._told = self._paused = self._sampling = self._closed = False
        self._begun = self._complete = self._playing = self._open = 0
        self._took_s = _FIRST_S
        self._calls = Calls(threads, timeout_s, "environment")
        self._thread = threading.Thread(target=self._sample, name="rollout", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what a controller asks

    def put(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """See `Sampler`; all of them or none.

        Raises:
            InvalidRun: a prompt that is in flight, is empty, leaves no room for an answer, or has an id outside of the
                vocabulary; names it.
        """
        with self._changed:
            if self._closed:
                raise InvalidRun("the sampler is closed.", remedy="put before close")
            names = set(self._groups)
            for one in prompts:
                if one.prompt_id in names:
                    raise InvalidRun(f"prompt {one.prompt_id} is in flight.", remedy="another name, or take it first")
                names.add(one.prompt_id)
                self._check_room(f"prompt {one.prompt_id}", one.ids, sampling)
            for one in prompts:
                group = Group([Episode(one, n, sampling, self._begun + n) for n in range(sampling.n)])
                self._begun += sampling.n
                self._groups[one.prompt_id] = group
                for episode in group.episodes:
                    self._begin(episode)
            self._changed.notify_all()

    def take(self, at_least: int) -> list[list[Trajectory]]:
        """See `Sampler`. Errors of the engine are raised as they are."""
        while True:
            left = self._calls.expire()
            with self._changed:
                if at_least > len(self._groups):
                    raise InvalidRun(
                        f"{at_least} groups are asked for and {len(self._groups)} are in flight.",
                        remedy="put before take, and nothing after close",
                    )
                complete = [one for one in self._groups.values() if one.ended is not None]
                if len(complete) >= at_least and (complete or self._fault is None):
                    complete.sort(key=lambda one: one.ended or 0)
                    for one in complete:
                        del self._groups[one.episodes[0].prompt.prompt_id]
                    return [[each.trajectory for each in one.episodes if each.trajectory] for one in complete]
                if self._fault is not None:
                    self._told = True
                    raise self._fault
                self._changed.wait(left)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """See `Sampler`."""
        with self._changed:
            return tuple(self._groups)

    def pause(self) -> None:
        """See `Sampler`."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._sampling)

    def resume(self) -> None:
        """See `Sampler`."""
        with self._changed:
            self._paused = False
            if self._told or isinstance(self._fault, RoleLost):  # any other fault is for `take` to tell first
                self._fault, self._told = None, False
            lost, self._lost = self._lost, []
            for episode in lost:
                episode.begin_again()
                self._reset(episode)
            self._changed.notify_all()

    def close(self) -> None:
        """See `Sampler`; waits for the answers being sampled, a little for environments, then closes the engine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._groups.clear()
            self._later.clear()
            self._changed.notify_all()
        self._thread.join()
        for episode in self._waiting:
            if episode.environment is not None:
                self._calls.submit(episode.close, done=_nothing, late=_nothing)
        self._calls.close(min(_CLOSING_S, self._timeout_s))
        self.engine.close()

    # ------------------------------------------------------------------ the engine's thread

    def _sample(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_sample)
                self._changed.wait_for(
                    lambda: self._closed or not self._playing or not self._may_sample, LINGER * self._took_s
                )
                if self._closed:
                    return
                if not self._may_sample:
                    continue
                batch, sampling = self._next()
                self._sampling = True
            start, found, raised = time.perf_counter(), list[Rollout](), None
            try:
                found = self.engine.generate(
                    [one.ids for one in batch], sampling, keys=[one.answer_name for one in batch]
                )
                _check_answers(found, batch)
            except Exception as error:  # noqa: BLE001 (raised again by `take`)
                raised = error
            with self._changed:
                self._sampling, self._took_s = False, time.perf_counter() - start
                if raised is not None:
                    self._broken(raised)
                if raised is not None or self._closed:
                    self._waiting += batch
                else:
                    for episode, rollout in zip(batch, found, strict=True):
                        self._answered(episode, rollout, self._took_s)
                self._changed.notify_all()

    @property
    def _may_sample(self) -> bool:
        return bool(self._waiting) and not self._paused and self._fault is None

    def _next(self) -> tuple[list[Episode], Sampling]:
        """Those that are asked together: the oldest, and those sampled like it."""
        self._waiting.sort(key=lambda one: one.order)
        wanted = self._wanted(self._waiting[0])
        compared: dict[tuple[int, int], bool] = {}
        chosen, left = list[Episode](), list[Episode]()
        for one in self._waiting:
            kind = id(one.sampling), self._room(one)
            if kind not in compared:
                compared[kind] = _alike(self._wanted(one), wanted)
            (chosen if compared[kind] and len(chosen) != self._batch else left).append(one)
        self._waiting = left
        return chosen, wanted

    def _wanted(self, episode: Episode) -> Sampling:
        """One answer; the seed is part of its name, so rounds that differ in nothing else are asked together."""
        return replace(episode.sampling, n=1, seed=0, max_tokens=self._room(episode))

    def _room(self, episode: Episode) -> int:
        """Tokens of its next answer, at most."""
        return min(episode.sampling.max_tokens, self._context - len(episode.ids))

    def _answered(self, episode: Episode, rollout: Rollout, seconds: float) -> None:
        said = episode.say(rollout, seconds)
        if self._factory is None:
            self._end(episode, said.finish)
        else:
            self._ask(episode, lambda: self._step(episode, said))

    # ------------------------------------------------------------------ environments, in their threads

    def _begin(self, episode: Episode) -> None:
        if self._factory is None:
            self._waiting.append(episode)
        elif self._at_once is not None and self._open >= self._at_once:
            self._later.append(episode)
        else:
            self._open += 1
            self._reset(episode)

    def _reset(self, episode: Episode) -> None:
        assert self._factory is not None
        factory = self._factory
        self._ask(episode, lambda: self._opening(episode, factory))

    def _ask(self, episode: Episode, work: Callable[[], Heard]) -> None:
        self._playing += 1
        self._calls.submit(
            lambda: _closing_on_error(episode, work),
            done=lambda heard, raised, seconds: self._heard(episode, heard, raised, seconds),
            late=episode.close,
        )

    def _opening(self, episode: Episode, factory: EnvironmentFactory) -> Heard:
        episode.environment = made = factory()
        seed = seed_of(episode.sampling.seed, episode.prompt.prompt_id, "environment")
        ids = _ids(made.reset(episode.prompt, seed=seed))
        self._check_room("what the environment begins with", ids, episode.sampling)
        return Heard(ids=ids)

    def _step(self, episode: Episode, said: Said) -> Heard:
        environment = episode.environment
        assert environment is not None
        heard = environment.step(said)
        rewards, finish = added({}, heard.rewards), heard.finish
        if finish not in (None, *get_args(Finish)):
            raise ValueError(f"finish = {finish!r}")
        extra = _plain(heard.extra)
        ids = () if heard.done else _ids(heard.ids)
        self._check_ids("what the environment says", ids)
        more = len(episode.ids) + len(ids) < self._context and episode.turns < self._max_turns
        if not heard.done and not more:
            ids, rewards, finish = (), added(rewards, environment.cut_off()), "length"
        done = heard.done or not more
        if done:
            episode.close()
        return replace(heard, ids=ids, done=done, rewards=rewards, finish=finish, extra=extra)

    def _heard(self, episode: Episode, heard: Heard | None, raised: Exception | None, seconds: float) -> None:
        """What an environment answered; in its thread, or in that of `take` when it hangs."""
        with self._changed:
            self._playing -= 1
            complete = self._complete
            if not self._closed:
                episode.environment_s += seconds
                if isinstance(raised, RoleLost | ClusterLost):  # no fault of the environment
                    self._lost.append(episode)
                    self._broken(raised)
                elif raised is not None:
                    self._failed(episode, raised)
                elif heard is not None:
                    episode.hear(heard)
                    if heard.done:
                        self._allowance.book(False)
                        self._end(episode, heard.finish or episode.finish)
                    else:
                        self._waiting.append(episode)
                # To wake all at every answer would cost more than the answers.
                if raised is not None or complete < self._complete or len(self._waiting) == 1 or not self._playing:
                    self._changed.notify_all()
                return
        if not isinstance(raised, TimedOut):
            episode.close()

    def _failed(self, episode: Episode, raised: Exception) -> None:
        told = f"{type(raised).__name__}: {raised}"
        episode.fail(told)
        self._end(episode, "length")
        if self._allowance.book(True):
            self._broken(
                EnvironmentFailed(
                    f"environments failed too often ({self._allowance}); the last one, of prompt "
                    f"{episode.prompt.prompt_id}, answer {episode.sample}, turn {episode.turns}: {told}.",
                    remedy="see the error; max_errors is the share that is let pass, timeout_s the patience",
                )
            )

    def _broken(self, fault: Exception) -> None:
        """Sample no more; of several faults those count most that no restart mends."""
        if self._fault is None or isinstance(self._fault, RoleLost):
            self._fault, self._told = fault, False

    def _end(self, episode: Episode, finish: Finish) -> None:
        episode.end(finish)
        group = self._groups[episode.prompt.prompt_id]
        if all(one.trajectory is not None for one in group.episodes):
            self._complete += 1
            group.ended = self._complete
        if self._factory is not None:
            self._open -= 1
            if self._later:
                self._begin(self._later.popleft())

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        outside = next((word for word in ids if not 0 <= word < self._vocabulary), None)
        if outside is not None:
            raise InvalidRun(
                f"{what} has the id {outside}, and the model's vocabulary {self._vocabulary} of them from 0 on.",
                remedy="ids of the policy's own tokenizer",
            )

    def _check_room(self, what: str, ids: Sequence[int], sampling: Sampling) -> None:
        if not len(ids):
            raise InvalidRun(f"{what} is empty.", remedy="at least one token")
        self._check_ids(what, ids)
        if len(ids) + sampling.max_tokens > self._context:
            raise InvalidRun(
                f"{what} has {len(ids)} tokens; with max_tokens = {sampling.max_tokens} that is more than the "
                f"{self._context} positions of the context.",
                remedy="fewer max_tokens, or leave such prompts out (data.overflow=drop and data.pack_length)",
            )


def _check_answers(found: Sequence[Rollout], asked: Sequence[Episode]) -> None:
    """Refuse what no record can be made of while it can still be asked for again."""
    if len(found) != len(asked):
        raise RecordsRefused(f"the engine gave {len(found)} answers to {len(asked)} prompts.", remedy="one for each")
    if sound(found):
        return
    for one, episode in zip(found, asked, strict=True):
        Trajectory.of(
            one,
            episode.ids,
            prompt_id=episode.prompt.prompt_id,
            group_id=episode.prompt.prompt_id,
            sample=episode.sample,
            temperature=episode.sampling.temperature,
        )


def _alike(one: Sampling, other: Sampling) -> bool:
    """Whether they say the same; what equality of constraints means, or costs, is theirs to know."""
    return one.constraint is other.constraint and replace(one, constraint=None) == replace(other, constraint=None)


def _closing_on_error(episode: Episode, work: Callable[[], Heard]) -> Heard:
    try:
        return work()
    except Exception:
        episode.close()
        raise


def _ids(given: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(word) for word in given)


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """As records keep it."""
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"its extra is not JSON: {error}") from error
    return dict(extra)


def _nothing(*_told: object) -> None:
    """An outcome that nobody waits for."""
