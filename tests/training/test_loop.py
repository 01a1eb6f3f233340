"""The loop: one divisor a step, what is skipped, what stops it, what it tells."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from bestiary.training.config import EvaluationSection, LoopSection, OptimSection
from bestiary.training.data.packing import assemble
from bestiary.training.errors import Diverged, InvalidRun
from bestiary.training.recipes.base import LossSum

from .small_run import Kept, Plain, trainer, written


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


def weights(made):
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}


def test_micro_batches_of_a_step_are_one_batch(file):
    """The gradient of a step is that of −Σ log p / tokens over all its packs, however unequal they are."""
    made = trainer(file, steps=1)
    reference = trainer(file, steps=1)
    packs = [batch for _, batch in zip(range(2), reference.loader, strict=False)]
    tokens = sum(reference.recipe.count(batch) for batch in packs)
    assert len({reference.recipe.count(batch) for batch in packs}) == 2
    for batch in packs:
        (reference.recipe.loss(reference.model, batch).total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
    reference.optimiser.set_lr(3e-3 / 2)
    reference.optimiser.step()
    made.log = Kept()
    made.fit()
    assert made.log.of("grad_norm") == [pytest.approx(float(norm), rel=1e-12)]
    for (name, ours), theirs in zip(weights(made).items(), weights(reference).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=name)


def test_the_loss_falls_and_every_step_is_told(file):
    made = trainer(file, steps=12, lora=True, loop=LoopSection(steps=12, log_every=5), log=Kept())
    made.fit()
    assert [step for step, _ in made.log.rows] == [5, 10, 12]
    losses = made.log.of("loss")
    assert losses[-1] < losses[0]
    assert made.progress.step == 12
    assert made.progress.tokens == 12 * 2 * 48
    assert 0 < made.progress.loss_tokens < made.progress.useful_tokens < made.progress.tokens


class Poisoned(Plain):
    """NaN in the steps named."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, 0

    def loss(self, model, batch):
        self.seen += 1
        found = super().loss(model, batch)
        return LossSum(found.total * math.nan) if (self.seen + 1) // 2 in self.steps else found


def test_a_step_that_is_not_finite_stops_the_run_before_it_moves_a_weight(file):
    made = trainer(file)
    made.recipe = Poisoned(3)
    good = trainer(file, steps=2)
    good.steps, good.progress.step = 6, 0
    before = None
    with pytest.raises(Diverged, match=r"step 3: the loss is nan\. The weights are those before"):
        made.fit()
    for _ in range(2):
        before = good._step(iter(good.loader))
    assert before
    for (name, ours), theirs in zip(weights(made).items(), weights(good).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)


def test_steps_may_be_skipped_and_are_counted(file):
    made = trainer(file, loop=LoopSection(steps=6, on_nan="skip"), log=Kept())
    made.recipe = Poisoned(2, 4)
    made.fit()
    assert (made.progress.step, made.progress.skipped, made.progress.in_a_row) == (6, 2, 0)
    assert made.log.of("skipped") == [0, 1, 1, 2, 2, 2]
    assert all(parameter.isfinite().all() for parameter in made.model.parameters())


def test_too_many_skips_in_a_row_stop_the_run(file):
    made = trainer(file, loop=LoopSection(steps=6, on_nan="skip", max_skips=2))
    made.recipe = Poisoned(2, 3, 4)
    with pytest.raises(Diverged, match=r"step 4: .*the 3th time in a row"):
        made.fit()


def test_a_spike_is_measured_by_the_median(file):
    made = trainer(file, steps=12, loop=LoopSection(steps=12, on_nan="skip", spike=2.0))
    loss, calls = made.recipe.loss, []

    def spiked(model, batch):
        calls.append(None)
        found = loss(model, batch)
        return LossSum(found.total * (5.0 if (len(calls) + 1) // 2 in (3, 10) else 1.0))

    made.recipe.loss = spiked
    made.fit()
    assert made.progress.skipped == 1  # the third step comes before there is a median


def test_an_interruption_ends_after_the_step(file):
    before = signal.getsignal(signal.SIGTERM)
    made = trainer(file)

    class Killer:
        def on_step(self, trainer, values):
            if trainer.progress.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    made.callbacks = (Killer(),)
    made.fit()
    assert made.stopped == "SIGTERM"
    assert made.progress.step == 3  # heard where the processes next agree
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_without_trained_tokens_is_refused(file):
    made = trainer(file)
    made.recipe.count = lambda batch: 0
    with pytest.raises(InvalidRun, match="step 1 has no tokens to train on"):
        made.fit()


def test_the_run_ends_with_its_data(file):
    made = trainer(file, steps=10_000, epochs=1)
    made.fit()
    assert made.stopped == "the data is over"
    assert 0 < made.progress.step < 40


def held_out(file, count):
    return [pack for _, pack in zip(range(count), _packs(file), strict=False)]


def _packs(file):
    made = trainer(file)
    made.loader._make = lambda pack: pack
    yield from made.loader


def test_an_evaluation_is_the_mean_over_its_tokens_on_any_number_of_processes(file):
    packs = held_out(file, 5)
    found = []
    for size in (1, 2, 3):
        sums, units = 0.0, 0.0
        for rank in range(size):
            made = trainer(file, held_out=packs, data_rank=rank, data_parallel=size)
            made.control = Recorded()
            made.evaluate()
            sums, units = sums + made.control.seen["loss"], units + made.control.seen["units"]
        found.append((sums / units, units))
    labelled = sum(pack.loss_tokens for pack in packs)
    assert [units for _, units in found] == [labelled] * 3
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert found[2][0] == pytest.approx(found[0][0], rel=1e-12)


class Recorded:
    """Another process's view of the sums."""

    def sums(self, values):
        self.seen = dict(values)
        return values


def test_the_run_stops_when_evaluations_get_no_better(file):
    evaluation = EvaluationSection(sources=(), every=2, patience=2)
    loop = LoopSection(steps=40, evaluation=evaluation)
    made = trainer(file, steps=40, loop=loop, held_out=held_out(file, 2), log=Kept())
    made.optim = OptimSection(lr=3e-3, warmup=0, schedule="constant")
    made.lr = 0.0  # nothing moves, so nothing gets better
    made.fit()
    assert made.progress.step == 6
    assert made.stopped is not None
    assert "no better evaluation" in made.stopped
    assert len(set(made.log.of("eval/loss"))) == 1
    again, more = (trainer(file, steps=40, loop=loop, held_out=held_out(file, 2)) for _ in range(2))
    more.loop = loop.model_copy(update={"evaluation": evaluation.model_copy(update={"patience": 3})})
    for one, step in ((again, 6), (more, 8)):  # started again it has ended, but for one that has more patience
        one.progress, one.lr = replace(made.progress), 0.0
        one.fit()
        assert (one.progress.step, one.stopped is None) == (step, False)


def test_an_evaluation_at_the_start_is_that_of_the_model_as_it_came(file):
    evaluation = EvaluationSection(sources=(), every=2, at_start=True)
    made = trainer(
        file, steps=2, loop=LoopSection(steps=2, evaluation=evaluation), held_out=held_out(file, 2), log=Kept()
    )
    before = made.evaluate()
    made.fit()
    first = made.log.rows[0]
    assert first == (0, before)
    assert len(made.log.of("eval/loss")) == 2


def test_an_evaluation_at_the_start_that_is_not_finite_ends_the_run(file):
    """With the reason; patience and the end of the data have nothing to do with it."""
    evaluation = EvaluationSection(sources=(), every=2, at_start=True, patience=1)
    made = trainer(file, steps=2, loop=LoopSection(steps=2, evaluation=evaluation), held_out=held_out(file, 2))
    with torch.no_grad():
        made.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="evaluation before the first step gives nan"):
        made.fit()


def test_held_out_data_without_trained_tokens_is_refused(file):
    made = trainer(file, held_out=[assemble([], 48, 0)])
    with pytest.raises(InvalidRun, match="held-out data has nothing"):
        made.evaluate()
