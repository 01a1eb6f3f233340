"""When what happens in reinforcement learning: the stages of a round, how far sampling runs ahead, what follows a loss.

A round takes the oldest prompts that wait, and passes on, stage by stage, records with the prompts' names and the
versions of the weights that wrote them:

    prompts → Sampler → trajectories → Scorer → rewards → Policy.check → experiences (old and reference
    log-probabilities) → assess: advantages → forward_backward, optim_step → Policy.sync → the next round

Prompts are trained in the order in which they were issued, so what a round trains on does not depend on who answered
first. `staleness` rounds of prompts beyond the one that trains are sampled ahead; with 0 nothing is, and the run is a
function of its file and its seeds. Answers older than that many rounds are an error.

What is not in the policy's resume point never happened: it holds the data's state and every prompt issued and not yet
trained, beside weights, generators and the names of the prompts trained. After the loss of the policy the run goes back
to it; after that of any other role it goes on where it stood, since all that is asked is asked by name and version.

The stages are methods of the roles, and a loop of one's own needs nothing else:

    for step, prompts in enumerate(batches):                       # of roles.Prompt
        policy.sync(sampler.engine)
        sampler.put(prompts, Sampling(max_tokens=64, n=8, seed=1))
        answers = scorer.score([one for group in sampler.take(len(prompts)) for one in group])
        policy.check(answers)
        found, figures = assess([Experience.of(one) for one in answers], algorithm)
        print(figures["reward"], policy.forward_backward(found), policy.optim_step())
        policy.save_state({"step": step})
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol, TypeVar

from bestiary.kernels.errors import BestiaryError
from bestiary.training.control import Interruption
from bestiary.training.errors import ClusterLost, FolderTaken, InvalidRun, Role, RoleLost
from bestiary.training.loop import Log
from bestiary.training.rl.assess import assess, informative_groups
from bestiary.training.rl.held_out import HeldOut
from bestiary.training.rl.ledger import Ledger
from bestiary.training.rl.played import played
from bestiary.training.rl.records import Experience, RecordsRefused, Trajectory, save
from bestiary.training.rl.roles import Restarts
from bestiary.training.rl.rollout_check import StaleWeights
from bestiary.training.rl.rounds import PromptSource, Roles, Rounds
from bestiary.training.rl.weight_sync import SyncFailed

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
_SUMMED = frozenset({"tokens", "useful_tokens", "loss_tokens", "step_s"})
_LAST = frozenset({"lr", "skipped"})


class Callback(Protocol):
    """What a component of `loop.callbacks` may have; each method may be missing."""

    def on_step(self, controller: Controller, values: Mapping[str, float]) -> None:
        """After every round, with what is logged of it."""

    def on_evaluation(self, controller: Controller, values: Mapping[str, float]) -> None:
        """After every pass over held-out prompts."""

    def on_end(self, controller: Controller) -> None:
        """After the last round, before the last resume point."""


@dataclass
class Controller:
    """The one that decides; a run is `fit`.

    Args:
        roles, prompts, rounds: who, on what, and how much.
        held_out: None: no passes over held-out prompts.
        log: of figures, by version; None: nowhere.   callbacks: as `Callback`.

    Attributes:
        round: rounds made.   ledger: prompts issued and not trained.
        stopped: why the run ended before its last round.   interrupted: because it was told to.
        resumed: version that it went on from, or None.   values: figures of the last round.
    """

    roles: Roles
    prompts: PromptSource
    rounds: Rounds
    held_out: HeldOut | None = None
    log: Log | None = None
    callbacks: Sequence[Any] = ()
    interruption: Interruption = field(default_factory=Interruption)
    round: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    stopped: str | None = None
    interrupted: bool = False
    resumed: int | None = None
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seconds, self._begun = 0.0, time.monotonic()
        self._answered: dict[str, list[Trajectory]] = {}
        self._lost: Counter[Role] = Counter()
        self._ready = self._paused = False
        self._logged = self._examined = -1
        self._beginning: Mapping[str, Any] = self._state()
        self._boundary: Mapping[str, Any] = self._beginning

    def fit(self) -> None:
        """Rounds until the end of the run, of the data, or a request to stop; then the last resume point.

        Raises:
            RoleLost: a role that cannot be restarted, or was too often.
            Others: as the roles raise them. What was trained is in a resume point first, if it can be.
        """
        with self.interruption.listening():
            try:
                self._fit()
            except BestiaryError as error:
                self._rescue(error)
                raise

    def _fit(self) -> None:
        ended = False
        while not ended:
            try:
                if not self._ready:
                    self._prepare()
                if self.round < self.rounds.rounds and self.stopped is None:
                    self._round()
                else:
                    ended = self._end()
            except RoleLost as lost:
                if lost.role != "policy":
                    raise
                LOGGER.warning("%s; going back to the newest resume point", lost.what)
                self._ready = False
                self._restart(self.roles.policy, lost)

    def _end(self) -> bool:
        if self.round == 0 and not self.interrupted:
            raise InvalidRun("the data has no prompts.", remedy="more data, or fewer that are left out")
        self.ledger.check(self.roles.policy.trained())
        self._call("on_end")
        self.roles.policy.save_state(self._boundary, wait=True)
        return True

    # ------------------------------------------------------------------ where it stands

    def _state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "seconds": self._seconds + time.monotonic() - self._begun,
            "prompts": self.prompts.state(),
            "ledger": self.ledger.as_json(),
            "held_out": None if self.held_out is None else self.held_out.state(),
        }

    def _prepare(self) -> None:
        """Go to the newest resume point, or to the run's beginning, and put the weights of there into the engine."""
        policy, sampler = self.roles.policy, self.roles.sampler
        found = policy.load_state()
        state: Mapping[str, Any] = self._beginning if found is None else found
        self._boundary = state
        self.round, self._seconds, self._begun = state["round"], state["seconds"], time.monotonic()
        self.prompts.load_state(state["prompts"])
        self.ledger = Ledger.from_json(state["ledger"])
        self.ledger.check(policy.trained())
        enough = None
        if self.held_out is not None:
            self.held_out.load_state(state["held_out"])
            enough = self.held_out.enough()
        if self._logged < 0:
            self._logged, self.resumed = policy.version, None if found is None else policy.version
        self._answered.clear()
        self.stopped = self.stopped if self.interrupted else enough
        sampler.pause()
        self._paused = True
        self._sync()
        self._resume()
        # What was in flight was asked of weights that are gone.
        while sampler.in_flight:
            self._asked(lambda: sampler.take(len(sampler.in_flight)))
        self._ready = True
        if self.round == 0 and not self.interrupted:
            self._examine()

    def _rescue(self, error: BestiaryError) -> None:
        """A resume point of where the last round ended, unless the weights have moved since, or are lost.

        A step that failed may have been booked, and the version of a policy elsewhere is what it last said.
        """
        policy = self.roles.policy
        if isinstance(error, ClusterLost | FolderTaken):
            return  # the policy is gone too, or the folder is another run's
        try:
            if self._ready and self.round and policy.version == self.round * self.rounds.steps:
                self.ledger.check(policy.trained())
                policy.save_state(self._boundary, wait=True)
        except BestiaryError as second:
            LOGGER.warning("no resume point after %s: %s", type(error).__name__, second.what)

    # ------------------------------------------------------------------ a round

    def _round(self) -> None:
        """One round, from prompts to synced weights; without any prompt left the run stops."""
        plan, policy, times, start = self.rounds, self.roles.policy, dict[str, float](), time.monotonic()
        scored, refills = self._scored(times)
        if not scored:
            self._examine(last=True)
            self.stopped = "the data is over"
            return
        figures = self._ages(scored) | {
            f"rl/{name}": value for name, value in self._asked(self.roles.scorer.figures).items()
        }
        if plan.refill:
            figures["rl/refills"] = float(refills)
        with self._still(self.roles.shares), _timed(times, "rl/train_s"):
            checked = dict(policy.check(scored))
            experiences, told = self._assessed(scored)
            figures |= {f"rl/{name}": value for name, value in told.items()}
            if plan.keep is not None:
                save(plan.keep / f"round-{self.round:08d}.safetensors", experiences)
            figures |= self._train(experiences) | checked
        with self._still(True), _timed(times, "rl/sync_s"):
            figures["rl/sync_mismatch"] = self._sync()
        self._book(scored, figures | times | {"rl/round_s": time.monotonic() - start})

    def _scored(self, times: dict[str, float]) -> tuple[list[Trajectory], int]:
        """Whole groups with their rewards; and how often further ones were sampled, too few saying something."""
        plan, found, names = self.rounds, list[Trajectory](), list[str]()
        wanted, refills = plan.prompts, -1
        while wanted > 0 and refills < plan.refill:
            refills += 1
            with _timed(times, "rl/rollout_s"):
                chosen, answers = self._collect(wanted, names)
            if not chosen:
                break
            with _timed(times, "rl/score_s"):
                found += self._asked(partial(self.roles.scorer.score, answers))
            names += chosen
            if plan.refill:
                wanted = plan.prompts - len(informative_groups(found, weights=plan.weights, overlong=plan.overlong))
        return found, refills

    def _collect(self, count: int, own: Sequence[str]) -> tuple[list[str], list[Trajectory]]:
        """Names and whole groups of the oldest prompts, in the order in which they were issued.

        Args:
            own: those that the round has already.
        """
        plan = self.rounds
        later = min(plan.staleness, plan.rounds - self.round - 1) * plan.prompts
        ahead = len(own) + count + later
        if ahead > len(self.ledger.waiting):
            self.ledger.issue(self.prompts.next(ahead - len(self.ledger.waiting)))
        names = self.ledger.oldest(len(own) + count)[len(own) :]
        self._put(ahead)
        while any(name not in self._answered for name in names):
            self._take()
            self._put(ahead)
        return names, [one for name in names for one in self._answered[name]]

    def _put(self, ahead: int) -> None:
        """Have the oldest so many prompts sampled, as far as they are neither answered nor in flight.

        More may wait after a resume with a smaller staleness; put now, they would be too old when their round comes.
        """
        known = {*self._answered, *self.roles.sampler.in_flight}
        missing = [self.ledger.waiting[name] for name in self.ledger.oldest(ahead) if name not in known]
        if missing:
            self._asked(lambda: self.roles.sampler.put(missing, self.rounds.sampling))

    def _take(self) -> None:
        """Keep what is complete, of prompts that somebody waits for."""
        held_out = {} if self.held_out is None else self.held_out.by_name
        for group in self._asked(lambda: self.roles.sampler.take(1)):
            name = group[0].prompt_id
            wanted = self.held_out.n if self.held_out is not None and name in held_out else self.rounds.sampling.n
            if len(group) != wanted:
                raise RecordsRefused(
                    f"the group of prompt {name} has {len(group)} answers.", remedy=f"whole groups of {wanted}"
                )
            if name in self.ledger.waiting or name in held_out:
                self._answered[name] = group

    def _examine(self, *, last: bool = False) -> None:
        """A pass over the held-out prompts with the weights as they are, if one is due; logged and judged."""
        held_out, sampler = self.held_out, self.roles.sampler
        last = self.round == self.rounds.rounds or (last and self._examined < self.roles.policy.version)
        if held_out is None or not held_out.due(self.round, last=last):
            return
        start, names = time.monotonic(), held_out.by_name
        while missing := [one for name, one in names.items() if name not in self._answered]:
            flying = set(sampler.in_flight)
            new = [one for one in missing if one.prompt_id not in flying]
            if new:
                self._asked(partial(sampler.put, new, held_out.sampling))
            self._take()
        answers, version = [one for name in names for one in self._answered.pop(name)], self.roles.policy.version
        scored = self._asked(partial(self.roles.scorer.score, answers))
        told = {f"eval/{name}": value for name, value in self._asked(self.roles.scorer.figures).items()}
        found = held_out.figures(scored) | told | {"eval/seconds": time.monotonic() - start}
        if self.log is not None and version > self._examined:
            self.log.log(version, found)
        self._examined = max(version, self._examined)
        self._call("on_evaluation", found)
        self.stopped = held_out.judge(found) or self.stopped  # which a callback may have set
        self._boundary = {**self._boundary, "held_out": held_out.state()}

    def _ages(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """How many optimiser steps behind the policy answers are.

        Raises:
            StaleWeights: more than the run allows.
        """
        plan, version = self.rounds, self.roles.policy.version
        told = [one for one in trajectories if one.sampled.any()]  # else no weights wrote anything
        ages = [version - one.version for one in told] or [0]
        wrong = next(
            (one for one, age in zip(told, ages, strict=False) if not 0 <= age <= plan.staleness * plan.steps), None
        )
        if wrong is not None:
            raise StaleWeights(
                f"{wrong.name} is of version {wrong.version}, the policy at {version}; allowed are {plan.staleness} "
                f"rounds of {plan.steps} steps.",
                remedy="sync the engine after every round; a larger staleness",
            )
        return {"rl/staleness_max": float(max(ages)), "rl/staleness_mean": fmean(ages)}

    def _assessed(self, scored: Sequence[Trajectory]) -> tuple[list[Experience], dict[str, float]]:
        """Experiences with all that the loss reads."""
        plan, roles = self.rounds, self.roles
        experiences = [Experience.of(one) for one in scored]
        if plan.steps > 1:
            experiences = roles.policy.log_probs(experiences, "old_log_probs")
        reference = roles.reference
        if reference is not None:
            given = experiences
            experiences = self._asked(lambda: reference.log_probs(given, "reference_log_probs"))
        return assess(experiences, plan.algorithm, weights=plan.weights, overlong=plan.overlong)

    def _train(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """All optimiser steps of the round; figures of them together."""
        plan, policy = self.rounds, self.roles.policy
        rows: list[dict[str, float]] = []
        for _ in range(plan.passes):
            for part in _parts(experiences, plan.updates):
                told = policy.forward_backward(part)
                losses = {f"rl/{name}": value for name, value in told.items() if name != "loss"}
                rows.append({**losses, **policy.optim_step()})
        names = {name for row in rows for name in row}
        columns = {name: [row[name] for row in rows if name in row] for name in sorted(names)}
        return {
            name: values[-1] if name in _LAST else sum(values) if name in _SUMMED else fmean(values)
            for name, values in columns.items()
        }

    def _book(self, trajectories: Sequence[Trajectory], figures: dict[str, float]) -> None:
        """The round is over: close its prompts, tell, and write a resume point where one is due."""
        policy = self.roles.policy
        names = dict.fromkeys(one.prompt_id for one in trajectories)
        self.ledger.close(names)
        for name in names:
            del self._answered[name]
        self.round += 1
        state = self._boundary = self._state()
        more = {"rl/prompts": float(len(names)), "rl/answers": float(len(trajectories))}
        more |= {f"rl/{name}": value for name, value in played(trajectories).items()}
        self.values = figures | more | {"time": state["seconds"]}
        if policy.version > self._logged:
            self._logged = policy.version
            self._lost.clear()  # a round that is made again is no progress
            if self.log is not None:
                self.log.log(policy.version, self.values)
        self._call("on_step", self.values)
        self._examine(last=self.stopped is not None)  # by a callback
        state = self._boundary
        if self.interruption.by is not None:
            self.stopped, self.interrupted = self.interruption.by, True
        every = self.rounds.save_every
        if every is not None and self.round % every == 0 and self.round < self.rounds.rounds:
            with self._still(self.roles.shares):
                policy.save_state(state)

    # ------------------------------------------------------------------ roles

    def _sync(self) -> float:
        """Weights of the policy in the engine; one that failed half way is tried once more."""
        for last in (False, True):
            try:
                done = self._asked(lambda: self.roles.policy.sync(self.roles.sampler.engine), syncs=False)
            except SyncFailed as error:
                if last:
                    raise
                LOGGER.warning("%s; trying once more", error.what)
            else:
                return done.parity.absolute / max(1, done.parity.tokens)
        raise AssertionError("a sync returns or raises")

    @contextmanager
    def _still(self, wanted: bool) -> Iterator[None]:
        """Inside, nothing is sampled; not taken back after an error, which ends the round."""
        if wanted:
            self.roles.sampler.pause()
            self._paused = True
        yield
        if wanted:
            self._resume()

    def _resume(self) -> None:
        self._paused = False
        self.roles.sampler.resume()

    def _asked(self, ask: Callable[[], T], *, syncs: bool = True) -> T:
        """What a role answers, restarted and asked again where its process died.

        Args:
            syncs: give an engine that was restarted its weights before it is asked again.
        """
        while True:
            try:
                return ask()
            except RoleLost as lost:
                if lost.role == "policy":
                    raise
                LOGGER.warning("%s; restarting the %s", lost.what, lost.role)
                if lost.role == "rollout" and syncs:  # also the engines that live are given weights
                    with self._still(not self._paused):
                        self._restart(self._of(lost.role), lost)
                        self._sync()
                    continue
                self._restart(self._of(lost.role), lost)
                if not self._paused:
                    self._resume()

    def _of(self, role: Role) -> object:
        roles = self.roles
        found: Mapping[Role, object] = {
            "policy": roles.policy,
            "rollout": roles.sampler.engine,
            "environment": roles.sampler,
            "reward": roles.scorer,
            "reference": roles.reference,
        }
        return found.get(role)

    def _restart(self, role: object, lost: RoleLost) -> None:
        """New processes in place of those that died.

        Raises:
            RoleLost: as given, where there is no way to, or it was done too often in this round.
        """
        self._lost[lost.role] += 1
        if self._lost[lost.role] > self.rounds.restarts:
            raise RoleLost(
                f"the {lost.role} died {self._lost[lost.role]} times in round {self.round}: {lost.what}",
                role=lost.role,
                remedy=lost.remedy or "its own log says why; the same command goes on from the newest resume point",
            ) from lost
        if isinstance(role, Restarts):
            role.restart()
        elif lost.role != "environment":  # which the sampler begins again by itself
            raise lost

    def _call(self, name: str, *values: Any) -> None:
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self, *values)


def _parts(experiences: Sequence[Experience], count: int) -> list[list[Experience]]:
    """Groups in their order, those that train divided over `count` steps as evenly as can be; the others are in the
    first."""
    groups: dict[str, list[Experience]] = {}
    for one in experiences:
        groups.setdefault(one.trajectory.group_id, []).append(one)
    training = [group for group in groups.values() if any(one.trains for one in group)]
    cuts = [len(training) * place // count for place in range(count + 1)]
    parts = [[one for group in training[start:end] for one in group] for start, end in pairwise(cuts)]
    parts[0] += [one for group in groups.values() if not any(one.trains for one in group) for one in group]
    return parts


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    times[name] = times.get(name, 0.0) + time.monotonic() - start
