"""The controller: nothing lost and nothing trained twice, whatever dies, stops or says nothing."""

import errno
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

from bestiary.training import checkpoint as checkpoints
from bestiary.training.config import LoopSection
from bestiary.training.errors import InvalidRun, RoleLost, SaveFailed
from bestiary.training.rl import records
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.controller import Controller
from bestiary.training.rl.held_out import HeldOut
from bestiary.training.rl.ledger import Ledger, LedgerBroken
from bestiary.training.rl.records import load_experiences
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout_check import StaleWeights
from bestiary.training.rl.weight_sync import SyncFailed

from .small_rounds import SAMPLING, Even, Numbers, controller, result

ANCHORED = named("grpo", kl_coef=0.05)
ONCE = {f"n{place}": 1 for place in range(6)}


class StopsAfter:
    """Asks for an end as SIGTERM does, in every round."""

    def on_step(self, made: Controller, values):
        os.kill(os.getpid(), signal.SIGTERM)


def equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def whole():
    """Weights and rows of three rounds that nothing disturbed, by how often a round is passed over."""
    found = {}
    for passes in (1, 2):
        made = controller(algorithm=ANCHORED, updates=2, passes=passes)
        made.fit()
        found[passes] = (*result(made), made.log.rows)
    return found


@pytest.mark.slow
def test_a_run_stopped_after_every_round_is_the_run_that_was_not(tmp_path, whole):
    weights, trained, rows = whole[2]
    told = []
    for stop in range(4):
        made = controller(
            tmp_path, algorithm=ANCHORED, updates=2, passes=2, callbacks=[StopsAfter()] if stop < 3 else ()
        )
        made.fit()
        assert made.stopped == ("SIGTERM" if stop < 3 else None)
        assert made.resumed == (None if stop == 0 else 4 * min(stop, 3))
        told += made.log.rows
    assert made.round == 3
    ours, names = result(made)
    assert equal(ours, weights)
    assert names == trained == dict.fromkeys(ONCE, 2)
    timed = ("time", "_s")
    kept = [
        [(step, {name: value for name, value in values.items() if not name.endswith(timed)}) for step, values in each]
        for each in (told, rows)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("role", "when"),
    [
        ("rollout", {"generate": (2, 4)}),  # the first answers, and those of the second round; odd ones are syncs
        ("rollout", {"generate": (3,)}),  # in a sync
        ("reward", {"score": (2,), "figures": (1, 4)}),
        ("reference", {"log_probs": (1, 3)}),
        ("policy", {"forward_backward": (1,)}),  # before there is a resume point
        ("policy", {"check": (2,), "save_state": (3,)}),
        ("policy", {"optim_step": (4,)}),  # between the two updates of a round
        ("policy", {"sync": (1, 4)}),
        ("policy", {"trained": (2,), "load_state": (1,)}),
    ],
)
def test_whoever_dies_every_prompt_is_trained_once_and_to_the_same_weights(tmp_path, whole, role, when):
    made = controller(tmp_path, algorithm=ANCHORED, updates=2, dies={role: when})
    made.fit()
    assert made.deaths[role].restarts >= len([call for calls in when.values() for call in calls])
    ours, trained = result(made)
    assert trained == ONCE
    assert equal(ours, whole[1][0])
    steps = [step for step, _ in made.log.rows]
    assert steps == sorted(set(steps)) == [2, 4, 6]


@pytest.mark.slow
def test_a_role_that_dies_again_and_again_ends_the_run_with_a_resume_point(tmp_path):
    made = controller(tmp_path, dies={"reward": {"score": (2, 3, 4)}}, restarts=2, save_every=None)
    with pytest.raises(RoleLost, match="the reward died 3 times in round 1: the reward died in score") as caught:
        made.fit()
    assert caught.value.role == "reward"
    again = controller(tmp_path)
    again.fit()
    assert again.resumed == 1
    assert result(again)[1] == ONCE


def test_a_policy_that_dies_in_the_same_round_again_and_again_ends_the_run(tmp_path):
    """Rounds that are only made again, on the way there, are no progress."""
    made = controller(tmp_path, dies={"policy": {"optim_step": range(2, 20, 2)}}, restarts=2, save_every=None)
    with pytest.raises(RoleLost, match="the policy died 3 times in round 1"):
        made.fit()


class Elsewhere:
    """A policy in another process: its version is what it said when it last answered."""

    def __init__(self, policy):
        self.policy, self.version = policy, policy.version

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def optim_step(self):
        found = self.policy.optim_step()
        self.version = self.policy.version
        return found


@pytest.mark.slow
def test_a_step_that_fails_behind_its_books_leaves_no_resume_point_that_contradicts_itself(tmp_path):
    made = controller(tmp_path, more={"loop": LoopSection(max_skips=1)}, algorithm=named("dapo"))
    made.roles.scorer.says = lambda one: 1.0
    made.roles.policy = Elsewhere(made.roles.policy)
    with pytest.raises(InvalidRun, match="2 steps in a row had nothing to train on"):
        made.fit()
    made.roles.policy.close()
    again = controller(tmp_path)
    again.fit()
    assert again.resumed == 1
    assert result(again)[1] == ONCE


@pytest.mark.slow
def test_weights_come_while_nothing_is_sampled_also_to_an_engine_that_is_new(tmp_path):
    made = controller(tmp_path, dies={"rollout": {"generate": (2, 4, 6)}})
    sync, sampler = made.roles.policy.sync, made.roles.sampler
    still = []

    def watched(engine):
        still.append(sampler.paused)
        return sync(engine)

    made.roles.policy.sync = watched
    made.fit()
    assert made.deaths["rollout"].restarts == 3
    assert len(still) > 4
    assert all(still)
    assert not sampler.paused


def test_a_role_that_nobody_can_restart_ends_the_run():
    made = controller()

    def lost(*_):
        raise RoleLost("the judge is gone.", role="reward")

    made.roles.scorer.score = lost
    with pytest.raises(RoleLost, match="the judge is gone"):
        made.fit()


def test_the_last_round_has_what_the_data_leaves(tmp_path):
    made = controller(source=Numbers(5))
    made.fit()
    assert [values["rl/prompts"] for _, values in made.log.rows] == [2, 2, 1]
    assert made.stopped is None
    assert set(result(made)[1].values()) == {1}
    empty = controller(source=Numbers(0))
    with pytest.raises(InvalidRun, match="the data has no prompts"):
        empty.fit()


def test_a_policy_that_dies_when_the_data_is_over_trains_it_again_from_its_resume_point(tmp_path):
    made = controller(source=Numbers(5), rounds=9, save_every=None, dies={"policy": {"trained": (2,)}})
    made.fit()
    assert (made.stopped, made.round, made.deaths["policy"].restarts) == ("the data is over", 3, 1)
    assert result(made)[1] == {f"n{place}": 1 for place in range(5)}
    asked = controller(dies={"policy": {"trained": (2,)}}, callbacks=[StopsAfter()])
    asked.fit()  # told to stop, and without a resume point: the next one begins anew
    assert (asked.stopped, asked.round) == ("SIGTERM", 0)


def test_equal_rewards_are_steps_that_are_skipped_and_bounded(tmp_path):
    made = controller(tmp_path, scorer=None, more={"loop": LoopSection(max_skips=2)}, algorithm=named("dapo"))
    made.roles.scorer.says = lambda one: 1.0
    before = result(made)[0]
    with pytest.raises(InvalidRun, match="3 steps in a row had nothing to train on"):
        made.fit()
    assert equal(result(made)[0], before)
    assert [values["skipped"] for _, values in made.log.rows] == [1, 2]
    assert [values["rl/equal_groups"] for _, values in made.log.rows] == [1, 1]


@pytest.mark.slow
def test_groups_that_say_nothing_are_refilled_and_used_up(tmp_path):
    """Prompts of even places have equal rewards: a round looks for others in their place, a bounded number of times."""
    made = controller(tmp_path, rounds=2, refill=3, algorithm=named("dapo"), updates=2)
    made.roles.scorer.says = lambda one: float(one.sample) if one.extra["row"]["place"] % 2 else 1.0
    made.fit()
    assert made.log.of("rl/refills") == [2, 2]
    assert made.log.of("rl/prompts") == [4, 4]
    assert made.log.of("skipped") == [0, 0]
    assert result(made)[1] == {f"n{place}": 1 for place in range(8)}
    bounded = controller(rounds=1, refill=2, algorithm=named("dapo"))
    bounded.roles.scorer.says = lambda one: 1.0
    bounded.fit()
    assert (bounded.values["rl/refills"], bounded.values["rl/prompts"], bounded.values["skipped"]) == (2, 6, 1)


def test_answers_without_a_reward_are_in_no_mean_and_groups_without_one_train_nothing():
    made = controller(rounds=2)
    made.roles.scorer.says = lambda one: None if one.prompt_id != "n0" or one.sample == 0 else float(one.sample)
    made.fit()
    first, second = (values for _, values in made.log.rows)
    assert (first["rl/unscored"], first["rl/reward"]) == (5 / 8, 2.0)
    assert first["rl/trained"] == 3 / 8
    assert (second["skipped"], second["grad_norm"]) == (1, 0)


def test_a_reward_that_is_no_number_is_an_error_before_anything_moves(tmp_path):
    made = controller(tmp_path)
    made.roles.scorer.says = lambda one: float("nan")
    before = result(made)[0]
    with pytest.raises(InvalidRun, match="reward 0 of answer 0 is nan"):
        made.fit()
    assert equal(result(made)[0], before)
    assert result(made)[1] == {}


def test_an_answer_of_the_stop_token_alone_is_an_answer():
    made = controller()
    every = tuple(range(203))
    made.rounds = replace(made.rounds, sampling=replace(made.rounds.sampling, stop_ids=every))
    made.fit()
    assert made.values["rl/answer_tokens"] == 1
    assert made.values["rl/cut_off"] == 0
    assert result(made)[1] == ONCE


def test_stale_answers_are_an_error(tmp_path):
    made = controller(tmp_path)
    generate = made.roles.sampler.engine.generate
    made.roles.sampler.engine.generate = lambda *given, **more: [
        replace(one, version=0) for one in generate(*given, **more)
    ]
    with pytest.raises(StaleWeights, match=r"answer 0 to prompt n2 is of version 0, the policy at 1; allowed are 0"):
        made.fit()


def test_a_sync_that_breaks_off_is_tried_once_more(tmp_path):
    made = controller(tmp_path, save_every=None)
    sync, failures = made.roles.policy.sync, []

    def broken(engine):
        if len(failures) < wanted:
            failures.append(None)
            raise SyncFailed("the sync was interrupted by OSError: gone (3 of 9 tensors were sent).")
        return sync(engine)

    made.roles.policy.sync, wanted = broken, 1
    made.fit()
    assert result(made)[1] == ONCE
    failures.clear()
    made = controller(tmp_path / "other", save_every=None)
    made.roles.policy.sync, wanted = broken, 2
    with pytest.raises(SyncFailed):
        made.fit()


@pytest.mark.slow
def test_a_full_disk_names_itself_and_leaves_the_resume_points_before(tmp_path, monkeypatch):
    made = controller(tmp_path)
    write = checkpoints._write_json

    def full(file, content):
        if "00000002" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, content)

    monkeypatch.setattr(checkpoints, "_write_json", full)
    with pytest.raises(SaveFailed, match=r"the checkpoint of step 2 could not be written .*No space left"):
        made.fit()
    monkeypatch.undo()
    assert not [*tmp_path.glob(".writing*")]
    again = controller(tmp_path)
    again.fit()
    assert result(again)[1] == ONCE


@pytest.mark.slow
def test_sampling_ahead_keeps_its_bound_and_counts_every_prompt_once(tmp_path):
    ages, ahead = [], []
    for stop in range(5):
        made = controller(tmp_path, staleness=2, rounds=5, callbacks=[StopsAfter()] if stop < 4 else ())
        made.fit()
        ages += made.log.of("rl/staleness_max")
        ahead.append(len(made.ledger.waiting))
    assert len(ages) == 5
    assert max(ages) <= 2
    assert ahead == [4, 4, 4, 2, 0]
    assert result(made)[1] == {f"n{place}": 1 for place in range(10)}


@pytest.mark.slow
def test_a_run_that_ran_ahead_goes_on_without(tmp_path):
    controller(tmp_path, staleness=2, rounds=5, callbacks=[StopsAfter()]).fit()
    made = controller(tmp_path, rounds=5)
    made.fit()
    assert made.log.of("rl/staleness_max") == [0, 0, 0, 0]
    assert result(made)[1] == {f"n{place}": 1 for place in range(10)}


def test_what_was_sampled_ahead_is_two_rounds_old(tmp_path):
    """Without a stop, prompts are put when they may be, not when they are trained."""
    made = controller(staleness=2, rounds=5)
    made.fit()
    assert made.log.of("rl/staleness_max") == [0, 1, 2, 0, 1]
    assert [version for version, _ in made.roles.sampler.puts] == [0] * 6 + [1] * 2 + [2] * 2
    late = controller(staleness=2, rounds=5)
    late.rounds = replace(late.rounds, staleness=1)
    take = late.roles.sampler.take
    late.roles.sampler.take = lambda count: [[replace(one, version=0) for one in group] for group in take(count)]
    with pytest.raises(StaleWeights, match="of version 0, the policy at 2; allowed are 1 rounds of 1 steps"):
        late.fit()


@pytest.mark.slow
def test_a_lost_policy_takes_with_it_what_was_sampled_ahead(tmp_path):
    made = controller(tmp_path, staleness=1, rounds=4, dies={"policy": {"optim_step": (3,)}})
    made.fit()
    assert result(made)[1] == {f"n{place}": 1 for place in range(8)}


def examined(**given):
    """Two held-out prompts, one of them a row that is trained on too."""
    prompts = [Prompt(prompt_id="n0", ids=(3, 17)), Prompt(prompt_id="other", ids=(40, 17))]
    return HeldOut(prompts, SAMPLING, **{"every": 2, "n": 3, "at_start": True, **given})


@pytest.mark.parametrize("staleness", [0, 1])
def test_held_out_prompts_are_answered_between_rounds_and_never_trained(staleness):
    plain = controller(staleness=staleness)
    plain.fit()
    made = controller(staleness=staleness, held_out=examined())
    made.fit()
    rows = [(step, values) for step, values in made.log.rows if "eval/reward" in values]
    assert [step for step, _ in rows] == [0, 2, 3]
    assert all(values["eval/reward"] == values["eval/reward/even"] > 0 for _, values in rows)
    assert [step for step, values in made.log.rows if "loss" in values] == [1, 2, 3]
    ours, trained = result(made)
    assert trained == ONCE
    assert equal(ours, result(plain)[0])


def test_a_pass_depends_on_the_weights_alone():
    """The same prompts, seeds and weights: in a run that was resumed, or before a round of another size."""
    once, again = (controller(held_out=examined(every=9), prompts=prompts, rounds=1) for prompts in (1, 2))
    once.fit()
    again.fit()
    first, second = (made.log.rows[0][1] for made in (once, again))
    assert first["eval/reward"] == second["eval/reward"]
    assert first["eval/answer_tokens"] == second["eval/answer_tokens"]


@pytest.mark.parametrize("every", [1, 9])
def test_a_callback_that_ends_the_run_is_heard_beside_held_out_prompts(every):
    """Which are answered once more, by the weights that the run ends with."""

    class Ends:
        def on_step(self, made, values):
            made.stopped = "enough"

    made = controller(held_out=examined(every=every), callbacks=[Ends()])
    made.fit()
    assert (made.stopped, made.round) == ("enough", 1)
    assert [step for step, values in made.log.rows if "eval/reward" in values] == [0, 1]


@pytest.mark.slow
def test_held_out_rewards_that_get_no_better_end_the_run_and_a_resume_remembers(tmp_path):
    def flat(one):
        return 0.5 if one.prompt_id.startswith("held out") else one.sample / 4

    stopped = controller(
        tmp_path, scorer=Even(flat), held_out=examined(every=1, patience=3), callbacks=[StopsAfter()], save_every=None
    )
    stopped.fit()
    assert (stopped.round, stopped.stopped) == (1, "SIGTERM")
    again = controller(tmp_path, scorer=Even(flat), held_out=examined(every=1, patience=3), rounds=9)
    again.fit()
    assert (again.resumed, again.round) == (1, 3)
    assert again.stopped == "no better held-out reward than 0.5 in 3"
    ended = controller(tmp_path, scorer=Even(flat), held_out=examined(every=1, patience=3), rounds=9)
    ended.fit()
    assert (ended.resumed, ended.round, ended.stopped) == (3, 3, again.stopped)


def test_experiences_are_kept_where_asked(tmp_path):
    made = controller(keep=tmp_path / "rollouts")
    made.fit()
    files = sorted((tmp_path / "rollouts").iterdir())
    assert [file.name for file in files] == [f"round-{number:08d}.safetensors" for number in range(3)]
    kept = load_experiences(files[1])
    assert {one.trajectory.prompt_id for one in kept} == {"n2", "n3"}
    assert kept[0].trajectory.extra["row"] == {"place": 2}
    assert kept[0].trajectory.rewards.keys() == {"even"}


def test_experiences_that_cannot_be_kept_end_the_run_before_anything_moves(tmp_path, monkeypatch):
    made = controller(tmp_path / "points", keep=tmp_path / "rollouts")

    def full(arrays, file, metadata):
        file.write_text("half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(records, "save_file", full)
    with pytest.raises(SaveFailed, match=r"8 records could not be written .*No space left"):
        made.fit()
    assert not [*(tmp_path / "rollouts").iterdir()]
    assert made.roles.policy.version == 0


def test_a_ledger_refuses_what_does_not_add_up():
    one = Prompt(prompt_id="a", ids=(1, 2), row={"answer": "7"})
    books = Ledger()
    books.issue([one])
    with pytest.raises(LedgerBroken, match="prompt a was issued twice"):
        books.issue([one])
    assert Ledger.from_json(json.loads(json.dumps(books.as_json()))) == books
    with pytest.raises(LedgerBroken, match="prompt a waits to be trained and was"):
        books.check({"a"})
    books.close(["a"])
    books.check({"a"})
    with pytest.raises(LedgerBroken, match="trained on 0 prompts, the controller has closed 1"):
        books.check(set())
    with pytest.raises(LedgerBroken, match="prompt a was trained and did not wait"):
        books.close(["a"])
