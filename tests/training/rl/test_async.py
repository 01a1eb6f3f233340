"""The controller with episodes in threads: worlds that wait, sampling ahead, and a loop of one's own."""

import time
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
