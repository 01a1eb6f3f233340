"""Records: written and read whole, refused where they contradict themselves; rewards to advantages."""

from dataclasses import replace

import numpy as np
import pytest

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.algorithms import ALGORITHMS, named
from bestiary.training.rl.assess import Overlong, assess
from bestiary.training.rl.packing import pack
from bestiary.training.rl.records import (
    Experience,
    RecordsRefused,
    Trajectory,
    load_experiences,
    load_trajectories,
    save,
    sound,
)
from bestiary.training.rl.rollout import Rollout

from .experiences import LENGTHS, PACK, trajectory


def experiences(**changes):
    return [Experience.of(trajectory(place, **changes)) for place in range(len(LENGTHS))]


def same(found, expected):
    for name, value in vars(expected).items():
        other = vars(found)[name]
        if isinstance(value, Trajectory):
            same(other, value)
        elif isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            np.testing.assert_array_equal(other, value, err_msg=name)
        else:
            assert other == value, name


def test_answers_are_sound_together_where_a_record_can_be_made_of_each():
    ids, values, allowed = np.array([3, 4], np.int32), np.array([-1.0, 0.0], np.float32), np.array([[3, -1], [2, 4]])
    good = [Rollout(0, ids, values, "stop", 0), Rollout(0, ids, values, "length", 0, allowed)]
    assert sound(good)
    assert sound([])
    for wrong in (
        {"log_probs": np.array([-1.0, np.nan])},
        {"log_probs": np.array([-np.inf, -1.0])},
        {"log_probs": np.array([0.1, -1.0])},
        {"log_probs": values[:1]},
        {"ids": ids[::-1]},
        {"allowed": allowed[:1]},
        {"finish": "end"},
    ):
        bad = replace(good[1], **wrong)
        assert not sound([*good, bad])
        with pytest.raises(RecordsRefused):
            Trajectory.of(bad, [1], prompt_id="p", group_id="p", sample=0, temperature=1.0)


def test_trajectories_are_read_as_they_were_written(tmp_path):
    written = [trajectory(place, rewards={"right": None if place else 1.0}) for place in range(6)]
    save(tmp_path / "a.safetensors", written)
    for found, expected in zip(load_trajectories(tmp_path / "a.safetensors"), written, strict=True):
        same(found, expected)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_experiences_are_read_as_they_were_written(tmp_path):
    """With columns that some of them lack, and none at all."""
    written = [
        replace(
            one,
            advantages=one.trajectory.sampled * 0.5,
            trained=place != 2,
            old_log_probs=one.trajectory.rollout_log_probs - 1 if place % 2 else None,
            reference_log_probs=one.trajectory.rollout_log_probs - 2 if place > 3 else None,
        )
        for place, one in enumerate(experiences())
    ]
    for records in (written, []):
        save(tmp_path / "b.safetensors", records)
        if records:
            for found, expected in zip(load_experiences(tmp_path / "b.safetensors"), records, strict=True):
                same(found, expected)
        assert len(load_trajectories(tmp_path / "b.safetensors")) == len(records)


def test_a_damaged_file_and_one_of_another_kind_are_refused(tmp_path):
    file = tmp_path / "c.safetensors"
    save(file, [trajectory(0)])
    with pytest.raises(RecordsRefused, match="kind Trajectory"):
        load_experiences(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RecordsRefused, match="damaged"):
        load_trajectories(file)


def test_a_file_is_left_alone_where_the_new_one_cannot_be_written(tmp_path):
    file = tmp_path / "d.safetensors"
    save(file, [trajectory(0)])
    before = file.read_bytes()
    with pytest.raises(RecordsRefused, match="extra holds JSON"):
        save(file, [trajectory(1, extra={"environment": object()})])
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_log_probs": np.full(9, np.nan)}, "rollout_log_probs of sampled token 0 is nan"),
        ({"rollout_log_probs": np.full(9, 0.5)}, "is 0.5"),
        ({"rollout_log_probs": np.zeros(8)}, r"shape \(8,\) for 9 tokens"),
        ({"sampled": np.ones(9, bool)}, "first token counts as sampled"),
        ({"finish": "abort"}, "finish = 'abort'"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(RecordsRefused, match=said):
        trajectory(0, **changes)


def test_an_answer_stands_behind_its_prompt():
    answer = Rollout(0, np.array([7, 8], np.int32), np.array([-1.0, -2.0], np.float32), "stop", 4)
    made = Trajectory.of(answer, [1, 2, 3], prompt_id="p", group_id="p/0", sample=1, temperature=0.5)
    assert made.ids.tolist() == [1, 2, 3, 7, 8]
    assert made.sampled.tolist() == [False] * 3 + [True] * 2
    assert made.rollout_log_probs.tolist() == [0, 0, 0, -1, -2]
    assert (made.version, made.tokens) == (4, 2)


# ------------------------------------------------------------------ packs


def test_packs_hold_every_trained_answer_once_and_whole():
    given = experiences()
    given[1] = replace(given[1], trained=False)
    packs = pack(given, **PACK)
    held = [one.trajectory.name for each in packs for one in each.experiences]
    assert sorted(held) == sorted(one.trajectory.name for one in given if one.trained)
    for each in packs:
        for one, start, end in zip(each.experiences, each.borders, each.borders[1:], strict=False):
            np.testing.assert_array_equal(each.input_ids[start:end], one.trajectory.ids)
            np.testing.assert_array_equal(each.labels[start:end] >= 0, one.trajectory.sampled)
            np.testing.assert_array_equal(each.rollout_log_probs[start:end], one.trajectory.rollout_log_probs)


def test_packs_of_padding_fill_up():
    packs = pack(experiences()[:1], **PACK, at_least=3)
    assert [each.documents for each in packs] == [1, 0, 0]


def test_what_does_not_belong_into_one_step_is_refused():
    given = experiences()
    with pytest.raises(InvalidRun, match="14 tokens, a pack holds 13"):
        pack(given, 13, 5)
    with pytest.raises(InvalidRun, match="temperatures"):
        pack([given[0], *experiences(temperature=1.0)[1:]], **PACK)
    with pytest.raises(InvalidRun, match="old_log_probs: answer 1 to prompt p0 has none"):
        pack([replace(given[0], old_log_probs=given[0].trajectory.rollout_log_probs), *given[1:]], **PACK)


# ------------------------------------------------------------------ advantages


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_advantages_to_sampled_tokens_alone(name):
    given = [replace(one, reference_log_probs=one.trajectory.rollout_log_probs * 1.1) for one in experiences()]
    made, figures = assess(given, ALGORITHMS[name])
    assert all(one.trained for one in made)
    for one in made:
        assert not one.advantages[~one.trajectory.sampled].any()
    assert sum(float(one.advantages.sum()) for one in made) != 0 or name == "ppo_clip"
    assert figures["reward"] == pytest.approx(1 / 3 - 0.1 * np.mean([answer for _, answer in LENGTHS]))
    assert figures["cut_off"] == 0.5


def test_answers_without_a_reward_or_cut_off_or_of_equal_groups_are_not_trained():
    given = experiences()
    given[0] = Experience.of(trajectory(0, rewards={"right": None, "short": None}))
    for place in (3, 4, 5):
        given[place] = Experience.of(trajectory(place, rewards={"right": 1.0, "short": None}))
    made, figures = assess(given, named("dapo"), overlong=Overlong(masked=True))
    # 0 has no reward, 2 was cut off, 3 to 5 are equal; the advantage of 1 still knows of 2.
    assert [one.trained for one in made] == [False, True, False, False, False, False]
    assert made[1].advantages.max() > 0
    assert (figures["unscored"], figures["equal_groups"]) == (pytest.approx(1 / 6), 0.5)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("every", [True, False])
def test_episodes_that_ended_without_a_word_or_a_reward_train_nothing(name, every):
    """As an error of their environment leaves them; all of a step, or some."""
    given = experiences(rewards={"right": 1.0})
    given[1] = Experience.of(trajectory(1, rewards={"right": 0.0}))
    for place in range(len(given) if every else 1):
        lost = trajectory(place, rewards={})
        nothing = np.zeros(len(lost))
        given[place] = Experience.of(replace(lost, sampled=nothing.astype(bool), rollout_log_probs=nothing))
    given = [replace(one, reference_log_probs=one.trajectory.rollout_log_probs) for one in given]
    for weights in (None, {"right": 2.0}):
        made, figures = assess(given, ALGORITHMS[name], weights=weights)
        assert [one.trains for one in made][: 1 if not every else None] == [False] * (len(made) if every else 1)
        assert every or made[2].trains
        assert figures["unscored"] == pytest.approx(1.0 if every else 1 / 6)


def test_long_answers_are_punished_beside_their_rewards():
    plain, _ = assess(experiences(), named("dr_grpo"))
    punished, figures = assess(experiences(), named("dr_grpo"), overlong=Overlong(max_tokens=8, cache=4))
    # Answers of 5, 1 and 8 tokens: −1/4, 0, −1.
    expected = np.array([-0.25, 0.0, -1.0]) - np.mean([-0.25, 0.0, -1.0])
    moved = [two.advantages.sum() - one.advantages.sum() for one, two in zip(plain, punished, strict=True)][:3]
    np.testing.assert_allclose(moved, expected * [5, 1, 8])
    assert figures["overlong_penalty"] < 0


def test_the_answers_of_a_conversation_are_long_each_and_not_together():
    talks = []
    for one in experiences():
        sampled = np.arange(len(one.trajectory)) % 6 != 0  # answers of five tokens at most
        talks.append(replace(one, trajectory=replace(one.trajectory, sampled=sampled)))
    assert max(one.trajectory.tokens for one in talks) > 8
    _, figures = assess(talks, named("dr_grpo"), overlong=Overlong(max_tokens=8, cache=4, factor=4.0))
    assert -1.0 <= figures["overlong_penalty"] < 0.0


def test_the_divergence_in_the_reward_is_that_of_the_whole_answer():
    """RLOO as TRL: R − β Σ (log π_old − log π_ref) before the baseline."""
    given = [
        replace(one, reference_log_probs=one.trajectory.rollout_log_probs - 0.5 * one.trajectory.sampled)
        for one in experiences(rewards={"right": 1.0})
    ]
    made, figures = assess(given, named("rloo", reward_kl_coef=0.1))
    rewards = 1.0 - 0.1 * 0.5 * np.array([answer for _, answer in LENGTHS])
    for place, one in enumerate(made):
        group = rewards[place // 3 * 3 : place // 3 * 3 + 3]
        baseline = (group.sum() - rewards[place]) / 2
        np.testing.assert_allclose(one.advantages[one.trajectory.sampled], rewards[place] - baseline)
    assert figures["kl_in_reward"] == pytest.approx(0.05 * np.mean([answer for _, answer in LENGTHS]))
    with pytest.raises(InvalidRun, match="no reference_log_probs"):
        assess(experiences(), named("rloo", reward_kl_coef=0.1))
    # One that arrives untrained has no reference, and none is asked of it.
    mixed = [replace(given[0], trained=False, reference_log_probs=None), *given[1:]]
    made, found = assess(mixed, named("rloo", reward_kl_coef=0.1))
    assert not made[0].trained
    assert found["kl_in_reward"] == pytest.approx(figures["kl_in_reward"] - 0.05 * LENGTHS[0][1] / len(LENGTHS))


def test_weights_are_taken_by_the_name_of_the_reward():
    _, figures = assess(experiences(), named("grpo"), weights={"right": 2.0, "short": 0.0})
    assert figures["reward"] == pytest.approx(2 / 3)
    with pytest.raises(InvalidRun, match=r"weights of \['right'\]"):
        assess(experiences(), named("grpo"), weights={"right": 2.0})


def test_a_step_whose_episodes_all_failed_or_were_cut_off_may_lack_the_rewards_of_the_environment():
    plain = experiences(rewards={"judged": None})
    given = [
        replace(one, trajectory=replace(one.trajectory, extra={"failed": "it hung"} if n % 2 else {}, finish="length"))
        for n, one in enumerate(plain)
    ]
    made, figures = assess(given, named("grpo"), weights={"judged": 1.0, "of the environment": 1.0})
    assert figures["unscored"] == 1.0
    assert not any(one.trained for one in made)
    ended = replace(given[0], trajectory=replace(given[0].trajectory, finish="stop"))
    with pytest.raises(InvalidRun, match="weights of"):
        assess([ended, *given[1:]], named("grpo"), weights={"judged": 1.0, "of the environment": 1.0})
