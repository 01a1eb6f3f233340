"""Every recipe as a run: from its file through the loop, stopped and resumed, exported."""

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from bestiary.models import AutoDecoder
from bestiary.tools import cli
from bestiary.training.config import load_run_config
from bestiary.training.errors import InvalidRun
from bestiary.training.run import run

from .test_run import figures, metrics
from .test_run import place as place  # the fixture

RECIPES = ("dpo", "kto", "reward", "distill")
KINDS = {"dpo": "preference", "kto": "unpaired", "reward": "preference", "distill": "chat"}


def said(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def files(place):
    """Pairs and labelled answers beside the talks; the teacher is another model of the same vocabulary."""
    pairs, labelled = [], []
    for n in range(30):
        asked, right, wrong = [said("user", f"{n} + {n}?")], said("assistant", f"It is {2 * n}."), f"No idea, {n}."
        pairs.append({"prompt": asked, "chosen": [right], "rejected": [said("assistant", wrong)]})
        labelled.append({"messages": [*asked, right], "label": n % 3 > 0})
    for name, rows in (("preference", pairs), ("unpaired", labelled)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = AutoDecoder.from_pretrained(place / "model")
    with torch.no_grad():
        teacher.model.norm.weight.mul_(1.5)
    teacher.save_pretrained(place / "teacher", overwrite=True)
    return place


def changes(recipe, out, *more):
    source = "talks" if recipe == "distill" else KINDS[recipe]
    found = [
        f"data.sources.0.kind={KINDS[recipe]}",
        f"data.sources.0.files={source}.jsonl",
        "data.pack_length=128",
        "loop.evaluation=null",
        "loop.steps=4",
        f"out={out}",
        *more,
    ]
    return [*found, "loss.teacher=teacher"] if recipe == "distill" else found


class Once:
    """Asks the run to stop after its first step."""

    def on_step(self, trainer, values):
        trainer.interruption.by = "the test"


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_was_stopped_is_the_run_that_was_not(files, tmp_path, recipe, adapters):
    lora = ["lora.r=2"] if adapters else []
    file, whole, parts = files / "run.json", tmp_path / "whole", tmp_path / "parts"
    finished = run(load_run_config(file, changes(recipe, whole, *lora), recipe=recipe))
    assert (finished.step, finished.stopped) == (4, None)
    stop = "loop.callbacks=[tests.training.test_run_recipes:Once]"
    stopped = run(load_run_config(file, changes(recipe, parts, *lora, stop), recipe=recipe))
    assert (stopped.step, stopped.export) == (2, None)  # heard before the step that follows
    resumed = run(load_run_config(file, changes(recipe, parts, *lora), recipe=recipe))
    assert (resumed.resumed, resumed.step) == (2, 4)
    assert figures(parts) == figures(whole)
    losses = [row["loss"] for row in metrics(whole)]
    assert len(set(losses)) == 4
    if recipe in ("dpo", "reward"):  # the others' batches differ too much for four steps to show
        assert losses[-1] < losses[0]
    if recipe == "dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-7)


def test_a_reward_model_is_exported_as_transformers_reads_it(files, tmp_path):
    outcome = run(load_run_config(files / "run.json", changes("reward", tmp_path / "run"), recipe="reward"))
    theirs = AutoModelForSequenceClassification.from_pretrained(outcome.export).eval()
    ours = AutoDecoder.from_pretrained(outcome.export)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(ours(ids).scores, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "change", "said"),
    [
        ("dpo", "loss.name=sigmid", r"loss\.name = 'sigmid'(.|\n)*did you mean sigmoid"),
        ("dpo", "loss.reference=adapters_off", r"adapters_off and the run has no section lora"),
        ("dpo", "loss.options.smoothing=0.1", r"loss\.options = 'smoothing'(.|\n)*label_smoothing"),
        ("dpo", "loss.teacher=teacher", r"loss\.teacher = .*, which dpo does not have"),
        ("reward", "loss.beta=0.1", r"loss\.beta = 0\.1, which reward does not have"),
        ("distill", "loss.teacher=null", r"loss\.teacher is missing"),
        ("kto", "data.sources.0.kind=chat", r"talks is of kind 'chat', and kto trains on others"),
    ],
)
def test_what_a_recipe_does_not_know_is_refused(files, tmp_path, recipe, change, said):
    given = [*changes(recipe, tmp_path / "run"), change]
    with pytest.raises(InvalidRun, match=said):
        run(load_run_config(files / "run.json", given, recipe=recipe))


@pytest.mark.parametrize("lora", [[], ["lora.r=2"]])
def test_any_resume_point_is_exported_as_the_run_s_end_is(files, tmp_path, lora, capsys):
    out = tmp_path / "run"
    finished = run(load_run_config(files / "run.json", changes("reward", out, *lora), recipe="reward"))
    point = out / "checkpoints" / "step-00000004"
    assert cli.main(["export", str(point), str(tmp_path / "end")]) == 0
    for file in finished.export.iterdir():
        assert (tmp_path / "end" / file.name).read_bytes() == file.read_bytes(), file.name
    victim = next(point.glob("*.distcp"))
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    assert cli.main(["export", str(point), str(tmp_path / "bad")]) == 7
    assert "CheckpointRefused" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
