"""The recommender example: users whom no training saw are shown better lists after GRPO than after its warm start."""

import json
import os

import numpy as np
import pytest
import torch

from bestiary.tools import recommender
from bestiary.tools.movielens import Interactions
from bestiary.tools.recommender_study import RecommenderConfig, Study
from bestiary.training.integrations.needs import MissingLibrary

SMALL = {"films": 30, "hidden": 16, "codes": 4, "same": 40, "before": 3, "ahead": 4, "stretch": 8, "beams": 12}
TINY = RecommenderConfig(**SMALL, epochs=1, rounds=2, moments=3, answers=2)


def walks(users=12, items=30, length=20):
    """Who goes through a ring of items from somewhere, now and then a step too far."""
    random = np.random.default_rng(0)
    steps = random.choice([1, 2], (users, length), p=[0.8, 0.2]).cumsum(1)
    return Interactions({f"u{user}": ((steps[user] + 3 * user) % items).tolist() for user in range(users)}, items)


def trained(found, out):
    made = Study(TINY, found, out, seed=3)
    made.warm_start()
    made.reinforce()
    return made


@pytest.mark.slow
def test_what_users_who_are_judged_did_changes_no_weight(tmp_path):
    """Other histories of theirs, and the same semantic ids and weights after both trainings."""
    found = walks()
    one = trained(found, tmp_path / "one")
    assert len(one.held_out) == 3
    assert not one.held_out.keys() & one.training.keys()
    others = {user: history[::-1] for user, history in found.histories.items() if user in one.held_out}
    two = trained(found._replace(histories=found.histories | others), tmp_path / "two")
    assert two.held_out == others
    assert all(np.array_equal(one.catalogue.tokens(item), two.catalogue.tokens(item)) for item in range(found.items))
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, two.model.get_parameter(name)), name
    assert one.judge() != two.judge()


def test_moments_are_worth_what_their_users_did_behind_them(tmp_path):
    made = trained(walks(), tmp_path)
    known = [
        (made._row(history[place - 3 : place + 1], trained_from=3)["input_ids"], history[place : place + 4])
        for history in made.training.values()
        for place in range(3, 17)
    ]
    rows = [json.loads(line) for line in (tmp_path / "moments.jsonl").read_text().splitlines()]
    assert len(rows) == TINY.rounds * TINY.moments
    assert all((row["input_ids"], row["later"]) in known for row in rows)


def test_lists_leave_out_what_was_seen_and_popularity_is_no_oracle(tmp_path):
    made = Study(TINY, walks(), tmp_path, seed=3)
    assert 0.0 <= made.judge_popularity().ndcg < 1.0
    judged = made.judge()
    assert len(judged.values) == len(made.held_out) * TINY.cuts
    assert judged.ndcg == pytest.approx(np.mean(judged.values))


@pytest.mark.slow
def test_the_command_says_what_every_seed_gained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recommender, "interactions", walks)
    file = tmp_path / "tiny.json"
    file.write_text(TINY.model_dump_json())
    told = ["--config", str(file), "--out", str(tmp_path / "out")]
    code = recommender.main([*told, "--seeds", "1", "2", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in found["seeds"]] == [1, 2]
    for row in found["seeds"]:
        assert row["improvement"] == pytest.approx(row["ndcg"]["GRPO"] - row["ndcg"]["warm start"])
    assert code == (0 if all(row["improvement"] > 0 for row in found["seeds"]) else 1)
    file.write_text(json.dumps({"round": 3}))
    assert recommender.main(told) == 7
    assert "did you mean rounds?" in capsys.readouterr().err


@pytest.mark.slow
def test_grpo_improves_on_its_warm_start_for_users_whom_it_never_saw(tmp_path, capsys):
    try:
        code = recommender.main(["--seeds", "2", "--out", str(tmp_path), "--json", "-"])
    except MissingLibrary:
        if os.environ.get("CI") == "true":
            pytest.fail("CI=true and recbole, which holds MovieLens-100k, is not installed")
        pytest.skip("recbole, which holds MovieLens-100k, is not installed (tools/requirements/demo.txt)")
    (row,) = json.loads(capsys.readouterr().out)["seeds"]
    assert code == 0
    assert row["ndcg"]["GRPO"] > row["ndcg"]["warm start"], row
    assert row["next_item"]["GRPO"] > row["next_item"]["warm start"], row
