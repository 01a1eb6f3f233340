"""A run's file: defaults that run, errors that name key, value and the nearest key."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bestiary.models.recomputation import Checkpointing, Part
from bestiary.training.config import RunConfig, load_run_config
from bestiary.training.errors import InvalidRun

SMALL = {
    "recipe": "sft",
    "model": {"src": "Qwen/Qwen3-0.6B"},
    "data": {"tokenizer": {"src": "Qwen/Qwen3-0.6B"}, "sources": [{"name": "a", "files": "a.jsonl", "kind": "text"}]},
    "loop": {"steps": 10},
    "out": "runs/a",
}


def written(folder: Path, content: object = SMALL, name: str = "run.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(content))
    return file


def test_what_a_run_saves_of_itself_is_the_same_run(tmp_path):
    config = load_run_config(written(tmp_path), ["optim.lr=3e-4", "lora.r=4", "data.sources.0.weight=0.5"])
    assert config.lr == 3e-4
    assert config.lora is not None
    assert config.lora.r == 4
    assert config.data.sources[0].weight == 0.5
    assert config.data.sources[0].files == str(tmp_path / "a.jsonl")
    again = written(tmp_path, yaml.safe_load(config.yaml()))
    assert load_run_config(again) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optim.learning_rate=1", r"optim\.learning_rate is no known key(.|\n)*one of name, lr"),
        ("optim.betass=1", r"optim\.betass is no known key(.|\n)*did you mean betas\?"),
        ("modle.src=x", r"modle is no known key(.|\n)*did you mean model\?"),
        ("data.sources.0.kinds=text", r"data\.sources\.0\.kinds is no known key(.|\n)*did you mean kind\?"),
        ("optim.lr=-1", r"optim\.lr = -1: .*greater than 0"),
        ("optim.betas=[0.9,1.5]", r"optim\.betas\.1 = 1\.5: .*less than 1"),
        ("optim.name=adam", r"optim\.name = 'adam': .*'adamw'"),
        ("loop.steps=null", r"neither loop\.steps nor data\.epochs"),
        ("optim", r"'optim' is no change"),
        ("optim.lr.top=1", r"optim\.lr has no keys below it"),
        ("data.sources.3=1", r"the list has 1 elements"),
        ("recipe=dpo", r"recipe = 'dpo' and the command is sft"),
        ("precision.parameters=float16", r"float16: updates vanish"),
        ("model.checkpointing=some", r"model\.checkpointing = 'some': .*'selective'"),
        ("model.checkpoint_every=2", r"checkpoint_every and checkpoint_first say of which blocks"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, change, said):
    changes = ["optim.lr=1e-5", change] if change.startswith("optim.lr.") else [change]
    with pytest.raises(InvalidRun, match=said):
        load_run_config(written(tmp_path), changes, recipe="sft")


@pytest.mark.parametrize(
    ("recipe", "change", "said"),
    [
        ("reward", "data.pack_length=64", r"parallel\.context = 5 with the recipe reward"),
        ("distill", "rollouts.max_tokens=8", r"parallel\.context = 5 with rollouts"),
        ("sft", "data.pack_length=9", r"parallel\.context = 5 with data\.pack_length = 9"),
    ],
)
def test_what_takes_whole_rows_is_refused_where_processes_share_them(tmp_path, recipe, change, said):
    changes = [f"recipe={recipe}", "loss.teacher=x", "parallel.context=5", change]
    with pytest.raises(InvalidRun, match=said):
        load_run_config(written(tmp_path), changes)


def test_checkpointing_reaches_the_model_as_it_is_written(tmp_path):
    changes = ["model.checkpointing=mlp", "model.checkpoint_every=2", "model.checkpoint_first=5"]
    model = load_run_config(written(tmp_path), changes).model
    assert model.recomputes == Checkpointing(part=Part.MLP, every=2, first=5)
    assert load_run_config(written(tmp_path)).model.recomputes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"optim": {"lr": 1}, "optim": {"name": "sgd"}}'),
        ("run.yaml", "out: a\noptim: {lr: 1}\noptim: {name: sgd}"),
        ("run.yaml", "out: a\noptim:\n  lr: 1\n  'lr': 2"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path, name, text):
    """JSON and YAML would take the last one, and the first be lost without a word."""
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidRun, match=r"the key '(optim|lr)' stands twice"):
        load_run_config(file)


def test_what_a_merge_of_yaml_brings_may_be_overruled(tmp_path):
    file = tmp_path / "run.yaml"
    text = yaml.safe_dump({**SMALL, "optim": {"lr": 1e-4, "warmup": 5}}).replace("optim:", "optim: &same")
    file.write_text(text + "tracking: {project: x}\n")
    assert load_run_config(file).optim.warmup == 5
    merged = text.replace("&same", "\n  <<: {lr: 0.5, eps: 0.25}")
    file.write_text(merged)
    assert (load_run_config(file).optim.lr, load_run_config(file).optim.eps) == (1e-4, 0.25)


def test_a_file_in_another_encoding_is_named_and_a_mark_of_utf_8_is_none(tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(json.dumps(SMALL).replace("runs/a", "caf\xe9").encode("latin-1").replace(b"\\u00e9", b"\xe9"))
    with pytest.raises(InvalidRun, match=r"byte \d+ is no UTF-8: b'\\xe9'(.|\n)*save the file as UTF-8"):
        load_run_config(file)
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert str(load_run_config(file).out) == "runs/a"


@pytest.mark.parametrize(("name", "text"), [("run.yaml", "a: ["), ("run.json", "{"), ("run.yaml", "- 1"), (None, "")])
def test_a_file_that_is_none_is_said_so(tmp_path, name, text):
    file = tmp_path / (name or "missing.yaml")
    if name:
        file.write_text(text)
    with pytest.raises(InvalidRun, match=str(file)):
        load_run_config(file)


@pytest.mark.slow
@given(
    lr=st.floats(1e-9, 1.0),
    warmup=st.floats(0, 1e4),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    steps=st.integers(1, 10**9),
)
def test_every_value_survives_the_file(lr, warmup, schedule, steps):
    changes = {"optim": {"lr": lr, "warmup": warmup, "schedule": schedule}, "loop": {"steps": steps}}
    config = RunConfig.model_validate(SMALL | changes)
    assert RunConfig.model_validate(yaml.safe_load(config.yaml())) == config


def test_held_out_sources_are_packed_as_the_others(tmp_path):
    held = {"sources": [{"name": "b", "files": "b.jsonl", "kind": "text"}]}
    config = load_run_config(written(tmp_path, SMALL | {"loop": {"steps": 10, "evaluation": held}}))
    data = config.evaluation_data()
    assert data is not None
    assert (data.sources[0].files, data.epochs, data.pack_length) == (str(tmp_path / "b.jsonl"), 1, 4096)
    held["sources"][0]["kindd"] = "text"
    with pytest.raises(InvalidRun, match=r"loop\.evaluation\.sources\.0\.kindd(.|\n)*did you mean kind"):
        load_run_config(written(tmp_path, SMALL | {"loop": {"steps": 10, "evaluation": held}}))


@pytest.mark.parametrize("made", ["checkpoint", "sums.npz"])
def test_whom_a_loss_compares_with_counts_from_the_file(tmp_path, made):
    """A folder, and a file of stored sums; what is neither is a hub id."""
    (tmp_path / made).touch() if made.endswith(".npz") else (tmp_path / made).mkdir()
    for src, found in ((made, str(tmp_path / made)), ("org/name", "org/name")):
        config = load_run_config(written(tmp_path), ["recipe=dpo", f"loss.reference={src}"])
        assert config.reference == found
