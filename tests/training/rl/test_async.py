"""The controller with episodes in threads: worlds that wait, sampling ahead, and a loop of one's own."""

import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from bestiary.training.control import Interruption
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.assess import assess
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.environments import Heard
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.records import Experience
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rollout_check import StaleWeights, WrongTemperature

from .small_policy import policy
from .small_rounds import Even, Numbers, controller, result


class Waits:
    """Two answers, after each of which the world takes its time: most a moment, some ten times that."""

    def reset(self, prompt, *, seed):
        self.seconds = 0.005 * (1 + 9 * (seed % 4 == 0))
        return prompt.ids

    def step(self, said):
        time.sleep(self.seconds)
        return Heard(done=True) if said.turn else Heard(ids=(7,))

    def cut_off(self):
        return {}

    def close(self):
        pass


def run(out, rounds, *, until=None, **changes):
    interruption = Interruption()

    class Stops:
        def on_step(self, made, values):
            if made.round == until:
                interruption.by = "SIGTERM"

    made = controller(out, rounds=rounds, prompts=3, callbacks=[Stops()], **changes)
    made.interruption = interruption
    made.roles.sampler = Episodes(made.roles.sampler.engine, context=48, environment=Waits, threads=12)
    try:
        made.fit()
    finally:
        made.roles.sampler.close()
    return made


@pytest.mark.slow
def test_worlds_that_wait_are_sampled_ahead_within_the_bound_and_nothing_is_lost_at_a_stop(tmp_path):
    ages = []
    for until in (2, 5, None):
        made = run(tmp_path, 7, until=until, staleness=1)
        assert all(values["rl/mismatch_mean"] < 1e-4 for values in [made.values] if values["rl/staleness_max"] == 0)
        ages += made.log.of("rl/staleness_max")
    assert len(ages) == 7
    assert max(ages) == 1
    assert result(made)[1] == {f"n{place}": 1 for place in range(21)}


@pytest.mark.slow
def test_without_running_ahead_threads_change_nothing(tmp_path):
    one, other = run(None, 2), run(None, 2)
    for (name, ours), theirs in zip(result(one)[0].items(), result(other)[0].values(), strict=True):
        assert (ours - theirs).abs().max() < 1e-12, name
    assert one.log.of("rl/staleness_max") == [0, 0]


class Off(EmbeddedEngine):
    """From a version on it says what other weights would; or it samples for rounds at another temperature."""

    behind = temperature = None

    def generate(self, prompts, sampling, *, keys=None):
        if keys is not None and self.temperature is not None:
            sampling = replace(sampling, temperature=self.temperature)
        said = super().generate(prompts, sampling, keys=keys)
        off = self.behind is not None and self.version >= self.behind
        return [replace(one, log_probs=one.log_probs - 0.5) for one in said] if off else said


@pytest.mark.parametrize(
    ("behind", "temperature", "error", "rounds"),
    [(None, None, None, 2), (1, None, StaleWeights, 0), (None, 1.3, WrongTemperature, 0)],
)
def test_rounds_without_an_answer_of_their_own_version_rest_on_the_sync_and_on_the_first_round(
    behind, temperature, error, rounds
):
    """Each version is asked before it samples for a round; what is wrong in every round is so in the first."""
    made = controller(rounds=2, staleness=1, algorithm=named("grpo"))
    engine = made.roles.sampler.engine = Off(made.roles.policy.model)
    engine.behind, engine.temperature = behind, temperature
    with nullcontext() if error is None else pytest.raises(error):
        made.fit()
    assert made.round == rounds
    if error is None:
        assert made.log.of("rl/staleness_max") == [0, 1]  # the second round has answers of the version before alone
        assert made.log.of("rl/staleness_mean") == [0, 1]


@pytest.mark.slow
def test_a_loop_of_ones_own_takes_the_primitives_alone():
    """What the controller's page promises, with a rule that it has not: prompts that grow longer."""
    actor, scorer, algorithm = policy(flat=True, rate=5e-3), Even(), named("rloo")
    sampler, prompts, earned = Episodes(EmbeddedEngine(actor.model), context=48), Numbers(), []
    for step in range(6):
        actor.sync(sampler.engine)
        batch = [replace(one, ids=(*one.ids, *(9,) * len(earned))) for one in prompts.next(3)]
        sampler.put(batch, Sampling(max_tokens=6, temperature=0.8, n=8, seed=1))
        answers = scorer.score([one for group in sampler.take(len(batch)) for one in group])
        actor.check(answers)
        experiences, figures = assess([Experience.of(one) for one in answers], algorithm)
        earned.append(figures["reward"])
        actor.forward_backward(experiences)
        actor.optim_step()
        actor.save_state({"step": step})
    sampler.close()
    assert np.mean(earned[-2:]) > earned[0] + 0.1, earned
    assert len(actor.trained()) == 18
