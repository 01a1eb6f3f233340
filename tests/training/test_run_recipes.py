"""Every recipe as a run: from its file through the loop, stopped and resumed, exported."""

import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from bestiary.models import AutoDecoder
from bestiary.tools import cli
from bestiary.training.config import load_run_config
from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import CorruptRow, OverflowRefused, SampleRefused
from bestiary.training.data.formats import Place
from bestiary.training.data.rows import fields_of
from bestiary.training.data.samples import Distillation, parse
from bestiary.training.data.source import Source
from bestiary.training.errors import Diverged, InvalidRun
from bestiary.training.recipes import teacher_file
from bestiary.training.recipes.teacher_file import _Row, _written, store_teacher
from bestiary.training.run import run

from .test_run import figures, metrics
from .test_run import place as place  # the fixture

RECIPES = ("dpo", "kto", "reward", "distill")
KINDS = {"dpo": "preference", "kto": "unpaired", "reward": "preference", "distill": "chat"}


def say(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def files(place):
    """Pairs and labelled answers beside the talks; the teacher is another model of the same vocabulary."""
    pairs, labelled = [], []
    for n in range(30):
        asked, right, wrong = [say("user", f"{n} + {n}?")], say("assistant", f"It is {2 * n}."), f"No idea, {n}."
        pairs.append({"prompt": asked, "chosen": [right], "rejected": [say("assistant", wrong)]})
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "adapters"), [*((recipe, False) for recipe in RECIPES), ("dpo", True), ("kto", True)]
)  # with adapters the reference is the model without them
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


@pytest.fixture(scope="module")
def stored(files):
    """What the teacher says about the talks, in both formats, and in `live` a run on its words as they come."""
    given = changes("distill", files / "none", "loss.options.top_k=8", "loss.options.temperature=2")
    for suffix in ("jsonl", "parquet"):
        command = ["distill", str(files / "run.json"), *given, "--store-teacher", str(files / f"told.{suffix}")]
        assert cli.main(command) == 0
    asked = ["loss.name=jsd", "loss.options.top_k=8", "loss.options.temperature=2"]
    run(load_run_config(files / "run.json", changes("distill", files / "live", *asked), recipe="distill"))
    return files


def told(out, suffix, *more):
    """A run on those words."""
    source = ["data.sources.0.kind=distillation", f"data.sources.0.files=told.{suffix}"]
    asked = ["loss.name=jsd", "loss.options.temperature=2"]
    return [*changes("distill", out, *asked, *source), "loss.teacher=null", *more]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_run_on_a_teacher_s_stored_words_is_the_run_with_the_teacher(stored, tmp_path, suffix):
    """No teacher in memory, the same curve; stopped and resumed, too."""
    file, live, parts = stored / "run.json", stored / "live", tmp_path / "parts"
    stop = "loop.callbacks=[tests.training.test_run_recipes:Once]"
    run(load_run_config(file, told(parts, suffix, stop), recipe="distill"))
    resumed = run(load_run_config(file, told(parts, suffix), recipe="distill"))
    assert (resumed.resumed, resumed.step) == (2, 4)
    assert [row["loss"] for row in metrics(parts)] == pytest.approx([row["loss"] for row in metrics(live)], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"teacher_ids": lambda ids: ids[1:], "teacher_log_probs": lambda rows: rows[1:]},
            r"rows for \d+ trained tokens",
        ),
        ({"teacher_ids": lambda ids: [[49152, *ids[0][1:]], *ids[1:]]}, "id 49152, and the student knows 49152"),
        ({"teacher_digest": lambda digest: digest[::-1]}, "stored for other tokens: another tokenizer, template"),
        ({"teacher_temperature": lambda _: 1.0}, "taken at temperature 1 and the run's is 2"),
    ],
)
def test_a_teacher_s_words_for_something_else_are_one_error_with_its_row(stored, tmp_path, change, said):
    lines = []
    for line in (stored / "told.jsonl").read_text().splitlines():
        row = json.loads(line)
        lines.append(json.dumps(row | {name: made(row[name]) for name, made in change.items()}))
    (tmp_path / "wrong.jsonl").write_text("\n".join(lines))
    given = [*told(tmp_path / "run", "jsonl"), f"data.sources.0.files={tmp_path / 'wrong.jsonl'}"]
    with pytest.raises(CorruptRow, match=said) as caught:
        run(load_run_config(stored / "run.json", given, recipe="distill"))
    assert re.search(r"wrong\.jsonl row \d+", str(caught.value))


@pytest.mark.parametrize(
    ("file", "more", "error", "said"),
    [
        ("told.jsonl", [], InvalidRun, r"told\.jsonl exists"),
        ("new.csv", [], InvalidRun, "its suffix names no format"),
        ("new.jsonl", ["loss.teacher=null"], InvalidRun, "there is nobody to ask"),
        ("new.jsonl", ["data.sources.0.kind=text"], InvalidRun, "talks is of kind 'text'"),
        (
            "new.parquet",
            ["data.sources.0.files=half.jsonl"],
            SampleRefused,
            r"half\.jsonl row 30: messages: Field required",
        ),
    ],
)
def test_a_teacher_s_file_is_whole_or_not_there(stored, file, more, error, said):
    (stored / "half.jsonl").write_text("".join((stored / "talks.jsonl").read_text().splitlines(True)[:30]) + "{}\n")
    config = load_run_config(stored / "run.json", [*changes("distill", "x"), *more], recipe="distill")
    before = sorted(stored.iterdir())
    with pytest.raises(error, match=said):
        store_teacher(config, stored / file)
    assert sorted(stored.iterdir()) == before


@pytest.mark.slow
def test_without_a_teacher_held_out_data_must_bring_its_words_too(stored, tmp_path):
    """Refused before anything is loaded, not at the first evaluation."""
    held = '[{"name": "held", "files": "held.jsonl", "kind": "chat"}]'
    given = [*told(tmp_path / "run", "jsonl"), f'loop.evaluation={{"sources": {held}, "every": 4}}']
    with pytest.raises(InvalidRun, match=r"loss\.teacher is missing(.|\n)*held-out ones too"):
        run(load_run_config(stored / "run.json", given, recipe="distill"))


@pytest.mark.slow
def test_a_teacher_s_file_holds_what_can_be_read_again(stored, tmp_path, monkeypatch):
    """No line longer than readers take, no words of a teacher that computes NaN, no file of few rows that were left."""
    given = changes("distill", "x")
    config = load_run_config(stored / "run.json", given, recipe="distill")
    with monkeypatch.context() as patched:
        patched.setattr(teacher_file, "BUFFER_BYTES", 100)
        with pytest.raises(InvalidRun, match=r"MiB of JSON(.|\n)*FILE\.parquet"):
            store_teacher(config, tmp_path / "long.jsonl")
    broken = AutoDecoder.from_pretrained(stored / "teacher")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    for other, error, said in (
        ([f"loss.teacher={tmp_path / 'broken'}"], Diverged, "the teacher gives NaN"),
        (["data.sources.0.files=asked.jsonl", "data.sources.0.on_corrupt=skip"], CorruptRow, "101 rows were left out"),
    ):
        (stored / "asked.jsonl").write_text((json.dumps({"messages": [say("user", "so?")]}) + "\n") * 101)
        config = load_run_config(stored / "run.json", [*given, *other], recipe="distill")
        with pytest.raises(error, match=said):
            store_teacher(config, tmp_path / "a.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["broken"]


ON_POLICY = ["rollouts.max_tokens=12", "rollouts.temperature=0.8", "data.overflow=drop"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["lora.r=2"]])
def test_a_run_on_its_own_answers_goes_on_bit_for_bit(files, tmp_path, lora):
    """Stopped after two steps: the answers to come are those that the whole run sampled, under reverse KL."""
    file, whole, parts = files / "run.json", tmp_path / "whole", tmp_path / "parts"
    given = partial(changes, "distill")
    finished = run(load_run_config(file, given(whole, *ON_POLICY, *lora), recipe="distill"))
    assert finished.step == 4
    stop = "loop.callbacks=[tests.training.test_run_recipes:Once]"
    run(load_run_config(file, given(parts, *ON_POLICY, *lora, stop), recipe="distill"))
    resumed = run(load_run_config(file, given(parts, *ON_POLICY, *lora), recipe="distill"))
    assert (resumed.resumed, resumed.step) == (2, 4)
    names = ("loss", "grad_norm", "loss_tokens", "tokens", "rl/answers", "rl/answer_tokens", "rl/truncated")
    assert [[row[name] for name in names] for row in metrics(parts)] == [
        [row[name] for name in names] for row in metrics(whole)
    ]
    first = metrics(whole)[0]
    assert first["loss_tokens"] == first["rl/answer_tokens"] > first["rl/answers"] > 0
    if not lora:
        named = given(tmp_path / "named", *ON_POLICY, "loss.name=reverse_kl", "loop.steps=1")
        assert run(load_run_config(file, named, recipe="distill")).loss == first["loss"]


@pytest.mark.slow
def test_prompts_alone_are_answered_and_a_share_of_the_rest(files, tmp_path):
    """Of kind prompt each is; of talks as many as asked, and the others train on what was said."""
    rows = [{"prompt": f"{n} - {n}?"} for n in range(20)]
    (files / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["data.sources.0.kind=prompt", "data.sources.0.files=prompts.jsonl", "loop.steps=1"]
    run(
        load_run_config(files / "run.json", [*changes("distill", tmp_path / "a", *ON_POLICY), *asked], recipe="distill")
    )
    (row,) = metrics(tmp_path / "a")
    assert row["loss_tokens"] == row["rl/answer_tokens"] > 0
    some = ["rollouts.share=0.5", "loss.name=jsd", "loop.steps=1"]
    run(load_run_config(files / "run.json", [*changes("distill", tmp_path / "b", *ON_POLICY), *some], recipe="distill"))
    (row,) = metrics(tmp_path / "b")
    assert row["loss_tokens"] > row["rl/answer_tokens"] > 0


@pytest.mark.parametrize(
    ("recipe", "change", "said"),
    [
        ("distill", "rollouts.top_p=0.9", r"top_p is refused: under a filter"),
        ("distill", "rollouts.temperature=0", r"rollouts\.temperature = 0"),
        ("distill", "loss.teacher=null", r"rollouts without loss\.teacher"),
        ("distill", "data.overflow=split", r"rollouts with data\.overflow = split"),
        ("distill", "rollouts.max_tokens=128", r"rollouts\.max_tokens = 128 leaves no room"),
        ("distill", "data.sources.0.kind=text", r"data\.sources: talks is of kind 'text'"),
        ("distill", "loop.evaluation.sources.0.kind=prompt", r"loop\.evaluation\.sources: held is of kind 'prompt'"),
        ("distill", "data.overflow=error", r"tokens with the answer that is to be sampled, a pack holds 128"),
        ("kto", "rollouts.max_tokens=4", r"rollouts are of distill, the recipe is kto"),
    ],
)
def test_rollouts_that_make_no_sense_are_refused(files, tmp_path, recipe, change, said):
    long = [say("user", "why? " * 120), say("assistant", "so")]
    (files / "long.jsonl").write_text(json.dumps({"messages": long}) + "\n")
    given = changes(recipe, tmp_path / "run") + (ON_POLICY if recipe == "distill" else [])
    held = '[{"name": "held", "files": "held.jsonl", "kind": "chat"}]'
    given = [one for one in given if "evaluation" not in one] + [f'loop.evaluation={{"sources": {held}, "every": 4}}']
    if change == "data.overflow=error":
        given.append("data.sources.0.files=long.jsonl")
    with pytest.raises((InvalidRun, OverflowRefused), match=said):
        run(load_run_config(files / "run.json", [*given, change], recipe=recipe))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_calls_and_tools_survive_a_teacher_s_file(tmp_path, suffix):
    """Of a format with columns, too: what is read again is the record that was written."""
    call = {"name": "add", "arguments": {"a": 1, "b": [2, None]}}
    messages = [
        say("user", "1 + 2?"),
        say("assistant", "") | {"tool_calls": [call], "reasoning": "hm", "train": False},
        {"role": "tool", "content": "3", "name": "add"},
        say("assistant", "It is 3.") | {"train_spans": [[0, 5]]},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    told = {"teacher_ids": [[3, 1], [2]], "teacher_log_probs": [[-0.5, -2.0], [-1.0]]}
    record = {"messages": messages, "tools": tools, "teacher": "t", "teacher_digest": "d", "teacher_temperature": 2.0}
    sample = Distillation(**record, **told)
    words, log_probs = ([np.array(row, kind) for row in told[name]] for name, kind in zip(told, "if", strict=True))
    with _written(tmp_path / f"told.{suffix}") as writer:
        writer.write(_Row(sample, "t", 2.0, "d", words, log_probs))
    source = Source(name="told", files=str(tmp_path / f"told.{suffix}"), encode=encoded)
    (raw,) = source.open(source.shards()[0], Place())
    assert parse("distillation", fields_of(raw.decode(), "distillation"), "") == sample


@pytest.mark.slow
def test_a_reward_model_is_exported_as_transformers_reads_it(files, tmp_path):
    outcome = run(load_run_config(files / "run.json", changes("reward", tmp_path / "run"), recipe="reward"))
    theirs = AutoModelForSequenceClassification.from_pretrained(outcome.export).eval()
    ours = AutoDecoder.from_pretrained(outcome.export)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(ours(ids).scores, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["lora.r=2"]])
def test_any_resume_point_is_exported_as_the_run_s_end_is(files, tmp_path, lora, capsys, monkeypatch):
    out = tmp_path / "run"
    finished = run(load_run_config(files / "run.json", changes("reward", out, *lora), recipe="reward"))
    point = out / "checkpoints" / "step-00000004"
    monkeypatch.chdir(point.parent)
    assert cli.main(["export", point.name, str(tmp_path / "end")]) == 0
    for file in finished.export.iterdir():
        assert (tmp_path / "end" / file.name).read_bytes() == file.read_bytes(), file.name
    file, victim = out / "config.yaml", next(point.glob("*.distcp"))
    told = file.read_text()
    for damage, words in (
        (lambda: file.write_text(told.replace("pad_token: null", "pad_token: <|im_start|>")), "FingerprintChanged"),
        (lambda: victim.write_bytes(b"x" + victim.read_bytes()[1:]), "CheckpointRefused"),
    ):
        damage()
        assert cli.main(["export", str(point), str(tmp_path / "bad")]) == 7
        assert words in capsys.readouterr().err
        assert not (tmp_path / "bad").exists()
