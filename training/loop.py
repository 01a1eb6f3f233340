"""The training loop: blind to the algorithm, exact in what a step divides by, interruptible after any step.

A step takes one pack of every stream. Each micro-batch gives a sum; the divisor is the number of tokens or sequences of
the whole step over all processes. So accumulation, packing and the number of processes change no gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.config import EvaluationSection, LoopSection, OptimSection
from bestiary.training.control import Control, Interruption
from bestiary.training.data.loader import Batches
from bestiary.training.data.packing import Pack
from bestiary.training.errors import Diverged, InvalidRun
from bestiary.training.optim import Optimisers, schedule
from bestiary.training.recipes.base import Batch, Prepares, Recipe

_REMEMBERED = 50  # losses whose median a spike is measured by
_FEW = 8  # losses before which there is no such median


@dataclass
class Progress:
    """Where a run stands; what a checkpoint holds beside tensors and data.

    Attributes:
        step: updates made or skipped.   seconds: of training, over all resumes.
        tokens, useful_tokens, loss_tokens: slots given, those without padding, those with a label.
        skipped: steps without an update.   in_a_row: of those, the last ones.
        losses: of the last steps.
        best: evaluation loss, infinite before the first.   worse: evaluations since.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    useful_tokens: int = 0
    loss_tokens: int = 0
    skipped: int = 0
    in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    best: float = math.inf
    worse: int = 0

    def as_json(self) -> dict[str, Any]:
        """JSON values; an infinity is null."""
        return {**asdict(self), "best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Progress:
        """What `as_json` gave."""
        best = stored["best"]
        return cls(**{**stored, "best": math.inf if best is None else best})


class Callback(Protocol):
    """What a component named in `loop.callbacks` may have; each method may be missing."""

    def on_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """After every step, with what is logged of it."""

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """After every evaluation."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, before the last checkpoint."""


class Meter(Protocol):
    """Speed and memory of a step, in the keys of metrics.jsonl."""

    def read(
        self, *, seconds: float, tokens: int, useful_tokens: int, loss_tokens: int, data_wait_s: float
    ) -> dict[str, float]:
        """Figures of one step; the counts are those of all processes."""


class Log(Protocol):
    """Where figures go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step."""


class Saver(Protocol):
    """Resume points."""

    def save(self, trainer: Trainer, *, last: bool = False) -> None:
        """Write one; `last`: and wait until it is there."""

    def due(self, step: int) -> bool:
        """Whether one is written after this step."""


@dataclass(frozen=True)
class Update:
    """What became of a step.

    Attributes:
        norm: of its gradients, before they were clipped.   lr: of it.
        wrong: why it was not made; None: it was.
        harmless: there was nothing to make it of, which is no divergence.
    """

    norm: float
    lr: float
    wrong: str | None = None
    harmless: bool = False


@dataclass
class Trainer:
    """A run in one process; every process of a run has one and they step together.

    Attributes:
        model, recipe, loader, optimiser: what is trained, by which loss, on what, and how it moves.
        steps: of the whole run.   per_step: micro-batches of a step in this process.
        loop, optim: settings.   lr: at the top of the schedule.
        control: the other processes.   data_parallel: how many of them take different data.
        clip: model and bound (None: no bound) → norm of all gradients together, over all processes.
        log, meter, saver: None: not wanted.
        held_out: packs of the evaluation, the same on every process.   callbacks: as `Callback`.
    """

    model: Decoder
    recipe: Recipe
    loader: Batches
    optimiser: Optimisers
    steps: int
    per_step: int
    loop: LoopSection
    optim: OptimSection
    lr: float
    control: Control = field(default_factory=Control)
    data_rank: int = 0
    data_parallel: int = 1
    clip: Callable[[Decoder, float | None], Tensor] | None = None
    log: Log | None = None
    meter: Meter | None = None
    saver: Saver | None = None
    held_out: Sequence[Pack] = ()
    callbacks: Sequence[Any] = ()
    progress: Progress = field(default_factory=Progress)
    interruption: Interruption = field(default_factory=Interruption)
    stopped: str | None = None
    """Why the run ended before its last step; None: it did not."""
    interrupted: bool = False
    """Whether it ended because it was told to, and has not done what it was for."""

    def fit(self) -> None:
        """Steps until the end of the run, of the data, or a request to stop; then the last checkpoint.

        Raises:
            Diverged: a loss or gradient that is not finite, or a spike, under `on_nan: stop` or too often.
            InvalidRun: a step without anything to train on, or no step at all.
        """
        self.model.train()
        batches = iter(self.loader)
        with ExitStack() as stack:
            stack.enter_context(self.interruption.listening())
            evaluation = self.loop.evaluation
            if evaluation is not None and evaluation.at_start and self.progress.step == 0:
                self._evaluated(evaluation)
            elif evaluation is not None:
                self._run_out(evaluation.patience)  # a run that ended so ends so again
            while self.progress.step < self.steps and self.stopped is None:
                if not self._step(batches):
                    self.stopped = "the data is over"
        if self.progress.step == 0:
            raise InvalidRun("the data does not fill one step.", remedy="fewer data.streams, or more data")
        for callback in self.callbacks:
            if hasattr(callback, "on_end"):
                callback.on_end(self)
        if self.saver is not None:
            self.saver.save(self, last=True)

    # ------------------------------------------------------------------ a step

    def _step(self, batches: Iterator[Batch]) -> bool:
        """One step; False where the data is over."""
        start = time.perf_counter()
        waited = self.loader.waits.total
        taken = [batch for _, batch in zip(range(self.per_step), batches, strict=False)]
        if len(taken) < self.per_step:
            return False
        self.prepare(taken)
        given = self.loader.given
        before, more = (self._slots, self._useful, self._labelled), self._more
        self._slots, self._useful, self._labelled = given.slots, given.useful_tokens, given.loss_tokens
        self._more = dict(given.more)
        counted = self.control.sums(
            {
                "units": sum(self.recipe.count(batch) for batch in taken),
                "tokens": self._slots - before[0],
                "useful_tokens": self._useful - before[1],
                "loss_tokens": self._labelled - before[2],
                "stop": float(self.interruption.by is not None),
                **{name: value - more.get(name, 0.0) for name, value in given.more.items()},
            }
        )
        units = counted.pop("units")
        stop = counted.pop("stop") > 0
        if units == 0:
            raise InvalidRun(
                f"step {self.progress.step + 1} has no {self.recipe.unit} to train on.",
                remedy="`bestiary data inspect` shows what is trained; more streams, or data with trained tokens",
            )
        # Sharded and replicated gradients are means over the processes with different data.
        sums = self.gradients(taken, self.data_parallel / units)
        values = {name: total / units for name, total in self.control.sums(sums).items()}
        values |= {name: counted[name] for name in given.more}
        made = self.update(values["loss"])
        self.book(counted, time.perf_counter() - start, made, values["loss"])
        self._report(values | {"grad_norm": made.norm, "lr": made.lr}, counted, start, self.loader.waits.total - waited)
        self._after(stop)
        return True

    _slots = _useful = _labelled = 0
    _more: Mapping[str, float] = field(default_factory=dict, init=False)

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Let the recipe look at them, where it wants to."""
        if isinstance(self.recipe, Prepares):
            self.recipe.prepare(self.model, batches, self.control, self.data_rank, self.data_parallel)

    # ------------------------------------------------------------------ its parts, for loops of another kind

    def gradients(self, taken: Sequence[Batch], scale: float) -> dict[str, float]:
        """Add the gradients of some micro-batches, times `scale`, to those there are; sums of this process."""
        sums: dict[str, Tensor] = {}
        for place, batch in enumerate(taken):
            last = place + 1 == len(taken)
            synchronise = getattr(self.model, "set_requires_gradient_sync", None)
            if synchronise is not None and len(taken) > 1:
                synchronise(last)
            found = self.recipe.loss(self.model, batch)
            (found.total * scale).backward()
            for name, value in {"loss": found.total.detach(), **found.metrics}.items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        return {name: float(value) for name, value in sums.items()}

    def update(self, loss: float) -> Update:
        """Clip, look at loss and norm, and move the weights unless something is wrong; gradients are gone afterwards.

        Args:
            loss: of the step, the same in every process; so is the norm, and all of them decide alike.
        """
        norm = self._norm()
        lr = schedule(self.optim, self.lr, self.progress.step, self.steps)
        wrong = self._wrong(loss, norm)
        if wrong is None:
            self.optimiser.set_lr(lr)
            self.optimiser.step()
        self.optimiser.zero_grad()
        return Update(norm, lr, wrong)

    def _norm(self) -> float:
        if self.clip is not None:
            return float(self.clip(self.model, self.optim.max_grad_norm))
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        bound = math.inf if self.optim.max_grad_norm is None else self.optim.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(trained, bound))

    def _wrong(self, loss: float, norm: float) -> str | None:
        """Why the step is not taken; None: it is."""
        past = self.progress.losses
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradients is {norm}"
        if self.loop.spike is not None and len(past) >= _FEW and loss > self.loop.spike * median(past):
            return f"the loss {loss:.4g} is above {self.loop.spike:g} times the median {median(past):.4g}"
        return None

    def book(self, counted: Mapping[str, float], seconds: float, made: Update, loss: float) -> None:
        """Count a step.

        Args:
            counted: tokens, useful_tokens and loss_tokens of it, of all processes.
        Raises:
            Diverged: it was not made, under `on_nan: stop` or too often.
        """
        progress = self.progress
        progress.step += 1
        progress.seconds += seconds
        for name in ("tokens", "useful_tokens", "loss_tokens"):
            setattr(progress, name, getattr(progress, name) + round(counted[name]))
        if made.wrong is None:
            progress.in_a_row = 0
            progress.losses = [*progress.losses, loss][-_REMEMBERED:]
            return
        progress.skipped += 1
        progress.in_a_row += 1
        if not made.harmless and (self.loop.on_nan == "stop" or progress.in_a_row > self.loop.max_skips):
            again = f", the {progress.in_a_row}th time in a row" if progress.in_a_row > 1 else ""
            raise Diverged(
                f"step {progress.step}: {made.wrong}{again}. The weights are those before the step.",
                remedy="a smaller optim.lr, a longer optim.warmup, a look at the data of this step; "
                "loop.on_nan=skip leaves such steps out",
            )

    # ------------------------------------------------------------------ what follows a step

    def _report(self, values: dict[str, float], counted: Mapping[str, float], start: float, waited: float) -> None:
        progress = self.progress
        if self.meter is not None:
            counts = {name: round(counted[name]) for name in ("tokens", "useful_tokens", "loss_tokens")}
            values |= self.meter.read(seconds=time.perf_counter() - start, data_wait_s=waited, **counts)
        values |= {"time": progress.seconds, "skipped": progress.skipped}
        if self.log is not None and (progress.step % self.loop.log_every == 0 or progress.step == self.steps):
            self.log.log(progress.step, values)
        self._call("on_step", values)

    def _after(self, stop: bool) -> None:
        """Evaluation, checkpoint, and the end where one is asked for."""
        step, evaluation = self.progress.step, self.loop.evaluation
        if evaluation is not None and (step % evaluation.every == 0 or step == self.steps):
            self._evaluated(evaluation)
        if stop:
            self.stopped = self.interruption.by or "a signal to another process"
            self.interrupted = True
        elif self.saver is not None and self.saver.due(step) and step < self.steps and self.stopped is None:
            self.saver.save(self)

    def _evaluated(self, evaluation: EvaluationSection) -> None:
        """A pass over the held-out packs, logged and judged.

        Raises:
            Diverged: a loss that is not finite before anything was trained.
        """
        found = self.evaluate()
        if self.log is not None:
            self.log.log(self.progress.step, found)
        self._call("on_evaluation", found)
        if self.progress.step == 0 and not math.isfinite(found["eval/loss"]):
            raise Diverged(
                f"the evaluation before the first step gives {found['eval/loss']}.",
                remedy="another checkpoint in model.src, a wider precision, a look at the held-out data",
            )
        self._judge(found["eval/loss"], evaluation.patience)

    def _judge(self, loss: float, patience: int | None) -> None:
        progress = self.progress
        if loss < progress.best:
            progress.best, progress.worse = loss, 0
            return
        progress.worse += 1
        self._run_out(patience)

    def _run_out(self, patience: int | None) -> None:
        """Stop where nothing got better for so many evaluations."""
        progress = self.progress
        if patience is not None and progress.worse >= patience:
            self.stopped = f"no better evaluation than {progress.best:.4g} in {progress.worse}"

    def _call(self, name: str, values: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self, values)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The recipe's figures on the held-out packs, as `eval/…`.

        Raises:
            InvalidRun: nothing in them is trained.
        """
        was_training = self.model.training
        self.model.eval()
        sums: dict[str, float] = {}
        # Every process runs equally often, as sharded models must: what is left over runs everywhere and counts once.
        rounds = -(-len(self.held_out) // self.data_parallel)
        places = [turn * self.data_parallel + self.data_rank for turn in range(rounds)]
        batches = [self.recipe.batch(self.held_out[min(place, len(self.held_out) - 1)]) for place in places]
        self.prepare(batches)
        for place, batch in zip(places, batches, strict=True):
            counts = place < len(self.held_out)
            found = self.recipe.loss(self.model, batch)
            values = {"loss": found.total, **found.metrics}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + counts * float(value)
            sums["units"] = sums.get("units", 0.0) + counts * self.recipe.count(batch)
        self.model.train(was_training)
        sums = self.control.sums(sums)
        units = sums.pop("units", 0.0)
        if units == 0:
            raise InvalidRun("the held-out data has nothing to train on.", remedy="other loop.evaluation.sources")
        return {f"eval/{name}": total / units for name, total in sums.items()}
