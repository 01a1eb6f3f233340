"""A scorer in this process: reward functions asked side by side, and what becomes of those that fail.

A failure is counted and the answer has None of that function; none is ever a zero. More failures than the run allows
end it: a reward that is often missing trains something else than what was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.answer import Answer
from bestiary.training.rl.judges import Judge
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.roles import Scorer
from bestiary.training.rl.verdicts import Accounts


class Rewards:
    """A `Scorer` of several judges.

    An episode that an environment's error ended is not judged: it has None of every function.

    Args:
        judges: by the name that their rewards get.
        tokenizer: for the texts of answers; None: they have only ids.
        max_errors, window: of each judge, see `Allowance`.
    """

    def __init__(
        self,
        judges: Mapping[str, Judge],
        *,
        tokenizer: BaseHFModelTokenizer | None = None,
        max_errors: float = 0.05,
        window: int = 256,
    ) -> None:
        self._judges, self._tokenizer = dict(judges), tokenizer
        self._accounts = Accounts(judges, max_errors, window)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Scorer`.

        Raises:
            RewardFailed: names the function, the prompt and the error.
            InvalidRun: a reward of that name is there already.
        """
        check_names(self._judges, trajectories)
        if not self._judges:
            return list(trajectories)
        start = time.perf_counter()
        whole = [place for place, one in enumerate(trajectories) if "failed" not in one.extra]
        answers = [answer_of(trajectories[place], self._tokenizer) for place in whole]
        with ThreadPoolExecutor(max(1, len(self._judges)), thread_name_prefix="judge") as pool:
            asked = {name: pool.submit(self._judged, name, answers) for name in self._judges}
        rewards: list[dict[str, float | None]] = [dict.fromkeys(self._judges) for _ in trajectories]
        for name, found in asked.items():
            for place, value in zip(whole, found.result(), strict=True):
                rewards[place][name] = value
        self._accounts.spend(time.perf_counter() - start)
        return [replace(one, rewards={**one.rewards, **more}) for one, more in zip(trajectories, rewards, strict=True)]

    def figures(self) -> dict[str, float]:
        """See `Scorer` and `Accounts.figures`."""
        return self._accounts.figures()

    def close(self) -> None:
        """Let go of the judges."""
        for judge in self._judges.values():
            judge.close()

    def _judged(self, name: str, answers: Sequence[Answer]) -> list[float | None]:
        values: list[float | None] = [None] * len(answers)
        for place, found in self._judges[name].judge(answers):
            one = answers[place]
            values[place] = self._accounts.book(name, f"answer {one.sample} to prompt {one.prompt_id}", found)
        return values


class Chained:
    """A `Scorer` that asks several, one after the other: functions here, a reward model elsewhere."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = list(scorers)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Scorer`."""
        found = list(trajectories)
        for one in self._scorers:
            found = one.score(found)
        return found

    def figures(self) -> dict[str, float]:
        """Sums of theirs."""
        found: dict[str, float] = {}
        for one in self._scorers:
            for name, value in one.figures().items():
                found[name] = found.get(name, 0.0) + value
        return found


def check_names(names: Iterable[str], trajectories: Sequence[Trajectory]) -> None:
    """Refuse a reward that is there already.

    Raises:
        InvalidRun: names it.
    """
    taken = sorted({name for one in trajectories for name in one.rewards} & set(names))
    if taken:
        raise InvalidRun(f"two rewards are named {taken[0]!r}.", remedy="a name for each reward function")


def answer_of(trajectory: Trajectory, tokenizer: BaseHFModelTokenizer | None) -> Answer:
    """What reward functions see of a trajectory."""
    edges = np.flatnonzero(np.diff(trajectory.sampled.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    words = [tuple(trajectory.ids[start:end].tolist()) for start, end in edges]
    prompt = tuple(trajectory.ids[: edges[0, 0] if len(edges) else len(trajectory)].tolist())
    extra = dict(trajectory.extra)
    turns = () if tokenizer is None else tuple(tokenizer.decode(_unstopped(one, tokenizer)) for one in words)
    return Answer(
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        prompt=None if tokenizer is None else tokenizer.decode(prompt),
        text=None if tokenizer is None else (turns[-1] if turns else ""),
        turns=turns,
        prompt_ids=prompt,
        ids=words[-1] if words else (),
        row=extra.pop("row", {}),
        finish=trajectory.finish,
        extra=extra,
    )


def _unstopped(ids: tuple[int, ...], tokenizer: BaseHFModelTokenizer) -> tuple[int, ...]:
    return ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids
