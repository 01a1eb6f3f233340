"""The demos of reinforcement learning: what they train on is not what they judge, and a seed that misses is told."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bestiary.tools import demo_rl, demo_rl_real, demo_rl_rewards
from bestiary.tools.demo_rl_real import Naming
from bestiary.tools.demo_rl_sorting import Sorting
from bestiary.tools.demo_rl_trial import DEMONSTRATIONS, EDGE, HELD_OUT, PLENTY, PROMPTS, Goal, Trial
from bestiary.training.components import component
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.answer import Answer
from bestiary.training.rl.config import GrpoConfig

TRIAL = Trial(
    seed=0, before=0.4, after=0.8, first=0.4, last=0.8, rounds=9, mismatch=0.0, seconds=1.0, training_s=1.0, folder="x"
)


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def parts(task, folder, seed=0):
    """Rows that are imitated, learned from and judged."""
    task.write(folder, seed)
    return tuple(read(folder / name) for name in (DEMONSTRATIONS, PROMPTS, HELD_OUT))


def apart(*lists):
    prompts = [row["prompt"] for rows in lists for row in rows]
    return len(set(prompts)) == len(prompts)


def test_digits_that_are_judged_were_neither_imitated_nor_learned_from(tmp_path):
    shown, asked, held_out = parts(Sorting(), tmp_path)
    assert (len(shown), len(asked), len(held_out)) == (4000, 4000, 200)
    assert apart(shown, asked, held_out)
    for row in [*asked, *held_out]:
        assert row["completion"] == "".join(sorted(row["prompt"].rstrip("=")))
    wrong = [row for row in shown if row["completion"] != "".join(sorted(row["prompt"].rstrip("=")))]
    assert len(wrong) / len(shown) == pytest.approx(0.6, abs=0.03)
    assert all(sorted(row["completion"]) == sorted(row["prompt"].rstrip("=")) for row in wrong)


def test_sentences_that_are_judged_were_neither_imitated_nor_learned_from(tmp_path, monkeypatch):
    made = [f"Return the value number {chr(97 + n // 26)}{chr(97 + n % 26)} of one list." for n in range(300)]
    monkeypatch.setattr(demo_rl_real, "sentences", lambda: list(made))
    shown, asked, held_out = parts(Naming(demonstrations=200, held_out=20), tmp_path)
    assert (len(shown), len(asked), len(held_out)) == (200, 80, 20)
    assert apart(shown, asked, held_out)
    assert {row["completion"] for row in [*asked, *held_out]} == {" list"}
    wrong = [row for row in shown if row["completion"] != " list"]
    assert len(wrong) / len(shown) == pytest.approx(0.6, abs=0.1)
    assert all(row["completion"] in row["prompt"] for row in shown)


@pytest.mark.parametrize(
    ("text", "finish", "expected"), [(" 01233 ", "stop", 1.0), ("01233", "length", 0.0), ("0123", "stop", 0.0)]
)
def test_a_reward_is_for_the_whole_answer_that_ends_by_itself(text, finish, expected):
    one = Answer(
        prompt_id="p",
        sample=0,
        prompt="31203=",
        text=text,
        turns=(text,),
        prompt_ids=(1,),
        ids=(1,),
        row={"completion": "01233"},
        finish=finish,
        extra={},
    )
    assert demo_rl_rewards.right([one]) == [expected]


def test_a_seed_holds_where_both_measures_gain():
    assert TRIAL.holds
    assert not replace(TRIAL, after=0.69).holds
    assert not replace(TRIAL, last=0.69).holds


def test_a_run_ends_once_it_has_gained_plenty():
    """Over as many rounds at either end as are judged, none of them at both."""
    goal, made = Goal(), SimpleNamespace(stopped=None)
    rewards = [0.2] * EDGE + [0.21 + PLENTY] * EDGE
    for reward in rewards[:-1]:
        goal.on_step(made, {"rl/reward": reward})
    assert made.stopped is None
    goal.on_step(made, {"rl/reward": rewards[-1]})
    assert made.stopped == "the reward in training rose from 0.20 to 0.66"
    high = Goal()
    for _ in range(3 * EDGE):
        high.on_step(made := SimpleNamespace(stopped=None), {"rl/reward": 0.9})
        assert made.stopped is None


def test_adapters_of_the_imitation_train_on_until_the_goal(tmp_path):
    """No fresh adapters, and rows to judge by that no file trains on."""
    config = GrpoConfig.model_validate(Naming().learning(tmp_path / "adapters", tmp_path, 3))
    assert config.model.src == str(tmp_path / "adapters")
    assert config.lora is None
    assert [component(path, "loop.callbacks", InvalidRun) for path in config.loop.callbacks] == [Goal]
    files = [held["files"] for held in config.loop.evaluation.sources] + [one.files for one in config.data.sources]
    assert files == [str(tmp_path / HELD_OUT), str(tmp_path / PROMPTS)]


@pytest.mark.slow
def test_a_seed_that_does_not_gain_ends_the_demo_with_one(tmp_path, capsys):
    """Warm start, rounds, judgement, curves: all of it, and too little of each."""
    little = Sorting(demonstrations=60, prompts=20, held_out=6, hidden=32, layers=1, warm_steps=3, rounds=2)
    result = tmp_path / "result.json"
    arguments = ["--seeds", "1", "--out", str(tmp_path), "--json", str(result)]
    assert demo_rl.main(arguments, little) == 1
    assert "gained less than 0.3: seed 0" in capsys.readouterr().out
    found = json.loads(result.read_text())
    (trial,) = found["trials"]
    assert (trial["rounds"], trial["holds"], found["exit_code"]) == (2, False, 1)
    assert trial["mismatch"] < 1e-4
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "seed-0" / "config.yaml").is_file()
    assert demo_rl.main([*arguments[:-1], "-"], little) == 1  # again in the same folder: from the beginning
    assert json.loads(capsys.readouterr().out)["trials"][0]["before"] == trial["before"]
