"""What `make demo-rl` and `make demo-rl-real` share: a trial, how it is judged, what is printed and drawn of it.

Judged is the mean reward twice: on prompts that nothing was trained on, by answers sampled at temperature 1 as in
training, before the first step of reinforcement learning and after the last; and in training, over the first rounds and
the last ones.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import write_json
from bestiary.tools.demo_rl_rewards import right
from bestiary.tools.demo_steps import NUMERIC, LineWatcher, StepFailed
from bestiary.training.plot import draw, read_runs

if TYPE_CHECKING:
    from rich.console import Console


Row = dict[str, str]

GAIN = 0.3  # in mean reward, that every seed has to reach by both measures
REWARD = "bestiary.tools.demo_rl_rewards:right"


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is learned, from what start.

    Attributes:
        title: of the table.   schema: of the JSON result.
        max_tokens: of an answer.   judged: answers to each held-out prompt.   rows: answers sampled together.
        edge: rounds at either end of training that are compared.
    """

    title: str
    schema: str
    max_tokens: int
    judged: int = 4
    rows: int = 256
    edge: int = 4

    @abstractmethod
    def write(self, folder: Path, seed: int) -> list[Row]:
        """Put `demonstrations.jsonl` and `prompts.jsonl` into a folder; rows that are in neither are returned."""

    @abstractmethod
    def imitation(self, folder: Path, out: Path, seed: int) -> dict[str, Any]:
        """The file of the warm start, a `RunConfig`.

        Args:
            folder: that `write` wrote to.   out: of the run.
        """

    @abstractmethod
    def start(self, exported: Path, folder: Path) -> Path:
        """The checkpoint to learn from, made of what the warm start exported."""

    @abstractmethod
    def learning(self, base: Path, folder: Path, seed: int) -> dict[str, Any]:
        """The file of reinforcement learning in `folder`, a `GrpoConfig`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One seed's course.

    Attributes:
        seed: of data, weights and sampling.
        before, after: mean reward on held-out prompts.   first, last: in the first and last `Task.edge` rounds.
        rounds: made.   mismatch: the largest mean difference of log-probabilities of engine and policy in a round.
        seconds: of all of it.   training_s: of the rounds alone.
        folder: of the run; `bestiary grpo FOLDER/config.yaml out=…` repeats it.
    """

    seed: int
    before: float
    after: float
    first: float
    last: float
    rounds: int
    mismatch: float
    seconds: float
    training_s: float
    folder: str

    @property
    def holds(self) -> bool:
        """Whether it earns more than before, by both measures."""
        return min(self.after - self.before, self.last - self.first) >= GAIN

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return (
            asdict(self)
            | {"gain": self.after - self.before, "training_gain": self.last - self.first}
            | {"holds": self.holds}
        )


class Watcher(LineWatcher):
    """A tracker that shows each step in a line, and keeps rewards and mismatches.

    Args:
        describe: is given the line.
    """

    def __init__(self, describe: Callable[[str], None]) -> None:
        super().__init__(describe)
        self.rewards: list[float] = []
        self.mismatches: list[float] = []
        self.seconds = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show and keep."""
        reward = values.get("rl/reward")
        if reward is None:
            self.describe(f"step {step}/{self.steps}, loss {values.get('loss', 0.0):.3f}")
            return
        self.rewards.append(reward)
        self.mismatches.append(values["rl/mismatch_mean"])
        self.seconds += values["rl/round_s"]
        self.describe(f"round {len(self.rewards)}, reward {reward:.2f}")

    def ends(self, edge: int) -> tuple[float, float]:
        """Mean reward of the first rounds, so many, and of the last ones."""
        few = min(edge, len(self.rewards))
        return sum(self.rewards[:few]) / few, sum(self.rewards[-few:]) / few


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trial(task: Task, out: Path, seed: int, describe: Callable[[str], None]) -> Trial:
    """One seed, from its start to what it learned; folders of results are written anew.

    Raises:
        StepFailed: a run did not reach its end.
    """
    from bestiary.training.config import RunConfig
    from bestiary.training.rl.config import GrpoConfig
    from bestiary.training.rl.grpo import run as learn
    from bestiary.training.run import run

    begun = time.perf_counter()
    folder = (out / f"seed-{seed}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    held_out, watcher = task.write(folder, seed), Watcher(describe)
    imitated = run(
        RunConfig.model_validate(task.imitation(folder, folder / "imitation", seed)),
        also=(watcher,),
    )
    if imitated.export is None:
        raise StepFailed(f"the imitation ended at step {imitated.step} of {imitated.steps}: {imitated.stopped}.")
    base = task.start(imitated.export, folder)
    describe("judging answers to held-out prompts")
    before = mean_reward(task, base, held_out)
    learned = learn(GrpoConfig.model_validate(task.learning(base, folder, seed)), also=(watcher,))
    if learned.export is None:
        raise StepFailed(f"the run ended at round {learned.round} of {learned.rounds}: {learned.stopped}.")
    describe("judging answers to held-out prompts")
    after = mean_reward(task, learned.export, held_out)
    first, last = watcher.ends(task.edge)
    return Trial(
        seed=seed,
        before=before,
        after=after,
        first=first,
        last=last,
        rounds=learned.round,
        mismatch=max(watcher.mismatches),
        seconds=time.perf_counter() - begun,
        training_s=watcher.seconds,
        folder=str(folder),
    )


def mean_reward(task: Task, checkpoint: Path, rows: Sequence[Row]) -> float:
    """Of answers to the prompts of rows, sampled at temperature 1.

    Args:
        checkpoint: folder of a model, whole or as an adapter, with its tokenizer.
    """
    import torch

    from bestiary.models import AutoDecoder
    from bestiary.training.data.tokenizer import BaseHFModelTokenizer
    from bestiary.training.rl.embedded import EmbeddedEngine
    from bestiary.training.rl.records import Trajectory
    from bestiary.training.rl.rewards import answer_of
    from bestiary.training.rl.rollout import Sampling

    model = AutoDecoder.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = BaseHFModelTokenizer.from_pretrained(checkpoint)
    front = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    prompts = [[*front, *ids] for ids in tokenizer.encode_texts([row["prompt"] for row in rows], bos=False)]
    asked = Sampling(max_tokens=task.max_tokens, n=task.judged, stop_ids=tuple(sorted(tokenizer.stop_ids)), seed=1)
    answers = []
    for place, one in enumerate(EmbeddedEngine(model, rows=task.rows).generate(prompts, asked)):
        name = f"held-out/{one.prompt}"
        made = Trajectory.of(
            one,
            prompts[one.prompt],
            prompt_id=name,
            group_id=name,
            sample=place % task.judged,
            temperature=asked.temperature,
            extra={"row": rows[one.prompt]},
        )
        answers.append(answer_of(made, tokenizer))
    values = right(answers)
    return sum(values) / len(values)


def conduct(task: Task, out: Path, seeds: int, target: str | None) -> int:
    """A trial a seed, their table and curves; returns the exit code: 1 unless every seed holds.

    Args:
        out: folder of results.   target: where the JSON result goes, as `write_json` takes it.
    """
    from rich.console import Console

    logging.getLogger("bestiary").setLevel(logging.ERROR)
    shown, begun = Console(stderr=True), time.perf_counter()
    made: list[Trial] = []
    code, error, picture = 0, None, None
    try:
        for seed in range(seeds):
            with shown.status("") as status:

                def describe(line: str, seed: int = seed, status: Any = status) -> None:
                    status.update(f"seed {seed}: {line}")

                made.append(trial(task, out, seed, describe))
            shown.print(_line(made[-1]), highlight=False, soft_wrap=True)
        picture = out / "rewards.png"
        draw(read_runs([Path(one.folder) for one in made]), picture)
    except BestiaryError as caught:
        code, error = caught.exit_code, f"{type(caught).__name__}: {caught}"
    if not code and not all(one.holds for one in made):
        code = NUMERIC
    seconds = time.perf_counter() - begun
    if target != "-":
        console = Console()
        show(made, task.title, console)
        console.print(f"{seconds:.0f} s; {picture or out}", highlight=False, soft_wrap=True)
        missed = [str(one.seed) for one in made if not one.holds]
        if missed:
            console.print(f"gained less than {GAIN}: seed {', '.join(missed)}", highlight=False)
    if error is not None:
        print(error, file=sys.stderr)
    write_json(
        target,
        {
            "schema": task.schema,
            "exit_code": code,
            "error": error,
            "seconds": seconds,
            "trials": [one.as_json() for one in made],
            "picture": None if picture is None else str(picture),
        },
    )
    return code


def _line(one: Trial) -> str:
    return (
        f"seed {one.seed}: {one.before:.3f} → {one.after:.3f} on held-out prompts, {one.first:.3f} → {one.last:.3f} in "
        f"training, {one.rounds} rounds, {one.seconds:.0f} s"
    )


def show(trials: Sequence[Trial], title: str, console: Console) -> None:
    """The table: a row a seed."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("seed", "held-out", "in training", "mismatch", "s", ""):
        table.add_column(column, justify="right")
    for one in trials:
        ways = ((one.before, one.after), (one.first, one.last))
        table.add_row(
            str(one.seed),
            *(f"{start:.2f} → {end:.2f} ({end - start:+.2f})" for start, end in ways),
            f"{one.mismatch:.0e}",
            f"{one.seconds:.0f}",
            "ok" if one.holds else "MISSED",
        )
    console.print(table)
