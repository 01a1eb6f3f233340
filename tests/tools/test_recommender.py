"""The recommender example: users whom no training saw are shown better lists after GRPO than after SFT."""

import json

import numpy as np
import pytest
import torch

from bestiary.tools import recommender
from bestiary.tools.movielens import Interactions
from bestiary.tools.recommender_study import RecommenderConfig, Study
from bestiary.training.data.tokens import IGNORED

SMALL = {"films": 30, "hidden": 16, "codes": 4, "same": 40, "before": 3, "ahead": 4, "stretch": 8, "cuts": 2}
PARTS = {"held_out": 0.25, "validation": 0.2, "logged": 0.6}
TINY = RecommenderConfig(**SMALL, **PARTS, epochs=2, rounds=2, moments=3, answers=2)


def walks(users=12, items=30, length=20):
    """Who goes through a ring of items from somewhere, now and then a step too far."""
    random = np.random.default_rng(0)
    steps = random.choice([1, 2], (users, length), p=[0.8, 0.2]).cumsum(1)
    ratings = random.integers(1, 6, (users, length))
    return Interactions(
        {f"u{user}": ((steps[user] + 3 * user) % items).tolist() for user in range(users)},
        items,
        {f"u{user}": ratings[user].tolist() for user in range(users)},
    )


def trained(found, out):
    made = Study(TINY, found, out, seed=3)
    made.imitate()
    made.reinforce()
    return made


@pytest.mark.slow
def test_what_users_who_are_judged_did_changes_no_weight(tmp_path):
    """Other histories of theirs, and the same semantic ids and weights after both trainings."""
    found = walks()
    one = trained(found, tmp_path / "one")
    parts = (one.held_out, one.validation, one.logged, one.online)
    assert [len(part) for part in parts] == [3, 2, 4, 3]
    assert len(set().union(*parts)) == 12
    others = {user: history[::-1] for user, history in found.histories.items() if user in one.held_out}
    two = trained(found._replace(histories=found.histories | others), tmp_path / "two")
    assert two.held_out != one.held_out
    assert all(np.array_equal(one.catalogue.tokens(item), two.catalogue.tokens(item)) for item in range(found.items))
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, two.model.get_parameter(name)), name
    assert one.judge() != two.judge()


@pytest.mark.slow
def test_what_online_users_did_is_heard_of_what_is_shown_to_them_alone(tmp_path):
    """Neither ids nor imitation know their histories; GRPO begins at moments of theirs and of nobody else."""
    found = walks()
    one = Study(TINY, found, tmp_path / "one", seed=3)
    others = {user: history[::-1] for user, history in found.histories.items() if user in one.online}
    two = Study(TINY, found._replace(histories=found.histories | others), tmp_path / "two", seed=3)
    for made in (one, two):
        made.imitate()
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, two.model.get_parameter(name)), name
    one.reinforce()
    known = {}
    for history in one.online.values():
        for place in range(3, 17):
            row = one._row([event.item for event in history[place - 3 : place + 1]], trained_from=3)
            later = history[place : place + 4]
            worth = [(2**event.rating - 1) / 31 for event in later]
            known.setdefault(str(row["input_ids"]), []).append(([event.item for event in later], worth))
    rows = [json.loads(line) for line in (tmp_path / "one" / "moments.jsonl").read_text().splitlines()]
    assert len(rows) == TINY.rounds * TINY.moments
    assert all((row["later"], row["worth"]) in known[str(row["input_ids"])] for row in rows)


def test_imitation_ends_with_the_weights_that_other_users_find_best(tmp_path):
    """And not with its last ones, which a learning rate far too high has thrown somewhere."""
    losses = []

    class Logged:
        def log(self, step, values):
            losses.extend([values["eval/loss"]] if "eval/loss" in values else [])

    made = Study(TINY.model_copy(update={"epochs": 30, "sft_lr": 0.1}), walks(), tmp_path, seed=3, log=Logged())
    made.imitate()
    assert len(losses) == 30
    assert min(losses) < losses[-1]
    total, tokens = 0.0, 0
    for row in made._stretches(made.validation):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = made.model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        tokens += (labels != IGNORED).sum().item()
    assert total / tokens == pytest.approx(min(losses), rel=1e-4)


def test_lists_leave_out_what_was_seen_and_popularity_is_no_oracle(tmp_path):
    made = Study(TINY, walks(), tmp_path, seed=3)
    assert 0.0 <= made.judge_popularity().ndcg < 1.0
    judged = made.judge()
    assert len(judged.values) == len(made.held_out)
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
        assert row["improvement"] == pytest.approx(row["ndcg"]["GRPO"] - row["ndcg"]["SFT"])
    assert code == (0 if all(row["improvement"] > 0 for row in found["seeds"]) else 1)
    file.write_text(json.dumps({"round": 3}))
    assert recommender.main(told) == 7
    assert "did you mean rounds?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_grpo_improves_on_sft_for_users_whom_it_never_saw(tmp_path, seed):
    """In a small world with the same stages; on MovieLens it takes minutes, and the command says whether it does."""
    settings = {"logged": 0.3, "epochs": 10, "rounds": 25, "moments": 16, "answers": 16, "rl_lr": 3e-3}
    made = Study(TINY.model_copy(update=settings), walks(users=40), tmp_path, seed=seed)
    made.imitate()
    before = made.judge()
    made.reinforce()
    assert made.judge().ndcg > before.ndcg + 0.05
