"""A run goes on beside the checkpoints that it began with, and not beside others at the same paths."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import yaml

from bestiary.models import AutoDecoder
from bestiary.training import contents as module
from bestiary.training.checkpoint import CHECKPOINTS, MANIFEST, STATE, _digest
from bestiary.training.config import load_run_config
from bestiary.training.contents import check_contents, checkpoints_of, contents_in
from bestiary.training.control import decided
from bestiary.training.errors import CheckpointRefused
from bestiary.training.processes import processes
from bestiary.training.rl import placed
from bestiary.training.rl.config import load_grpo_config
from bestiary.training.rl.grpo import run as learn
from bestiary.training.rl.teacher import teacher_process
from bestiary.training.run import run

from ..docs.workplace import lay_out

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the pages' commands run in, a reward model, and the file of a run of reinforcement learning."""
    place = tmp_path_factory.mktemp("contents")
    lay_out(place)
    judge = AutoDecoder.from_pretrained(place / "base", head="score")
    judge.save_pretrained(place / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "base" / name, place / "judge")
    content = {
        "model": {"src": "base"},
        "data": {
            "tokenizer": {"src": "base"},
            "sources": [{"name": "sums", "files": "sums.jsonl", "kind": "prompt"}],
            "pack_length": 64,
        },
        "rewards": {"functions": [{"name": "judge", "model": "judge"}]},
        "rollouts": {"max_tokens": 2, "n": 2},
        "algorithm": {"options": {"kl_coef": 0.1}},
        "loop": {"prompts": 2, "steps": 1},
        "checkpoint": {"every": 1, "export": False},
    }
    (place / "grpo.yaml").write_text(yaml.safe_dump(content))
    np.savez(place / "sums.npz", digests=np.array(["a"]), sums=np.zeros(1))
    return place


@pytest.fixture
def other(place):
    """Puts another checkpoint where one lies; at the end the first lies there again."""
    moved = []

    def put(name):
        shutil.copytree(place / name, place / f"{name}-then")
        moved.append(name)
        model = AutoDecoder.from_pretrained(place / name)
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        files = [file for file in (place / name).iterdir() if "tokenizer" in file.name or file.suffix == ".jinja"]
        kept = {file.name: file.read_bytes() for file in files}
        model.save_pretrained(place / name, overwrite=True)
        for file, content in kept.items():
            (place / name / file).write_bytes(content)

    yield put
    for name in moved:
        shutil.rmtree(place / name)
        (place / f"{name}-then").rename(place / name)


def config(place, file, out, *changes, recipe=None):
    return load_run_config(place / file, [f"out={out}", "checkpoint.export=false", *changes], recipe=recipe)


def test_what_is_read_beside_the_model_is_bound_by_its_key(place, tmp_path):
    def keys(*given, **named):
        found = config(place, *given, **named)
        assert set(contents_in(found)) == set(checkpoints_of(found))
        return set(checkpoints_of(found))

    assert keys("run.yaml", tmp_path, recipe="sft") == set()
    assert keys("run.yaml", tmp_path, "loss.teacher=base", recipe="distill") == {"loss.teacher"}
    assert keys("pairs.yaml", tmp_path, recipe="reward") == set()
    for file, recipe in (("pairs.yaml", "dpo"), ("labelled.yaml", "kto")):
        assert keys(file, tmp_path, recipe=recipe) == {"model.src"}  # the model before training
        assert keys(file, tmp_path, "lora={r: 2}", recipe=recipe) == set()
        assert keys(file, tmp_path, "loss.reference=base", recipe=recipe) == {"loss.reference"}
    sums = config(place, "pairs.yaml", tmp_path, "loss.reference=sums.npz", recipe="dpo")
    assert set(contents_in(sums)["loss.reference"]) == {"sums.npz"}

    learned = partial(load_grpo_config, place / "grpo.yaml")
    judged = "rewards.judge.model"
    assert set(contents_in(learned([f"out={tmp_path}"]))) == {"model.src", judged}
    named = learned([f"out={tmp_path}", f"algorithm.reference={place / 'judge'}"])
    assert set(contents_in(named)) == {"algorithm.reference", judged}
    adapted = [f"out={tmp_path}", "lora={r: 2}"]
    assert set(contents_in(learned(adapted))) == {judged}
    assert set(contents_in(learned([*adapted, "placement={}"]))) == {"model.src", judged}  # in a process of its own


@pytest.mark.slow
def test_another_reference_at_its_path_is_refused_and_the_first_one_goes_on(place, tmp_path, other):
    shutil.copytree(place / "base", place / "reference", dirs_exist_ok=True)
    asked = partial(config, place, "pairs.yaml", tmp_path, "loss.reference=reference", recipe="dpo")
    run(asked())
    shutil.rmtree(tmp_path / CHECKPOINTS / "step-00000002")
    other("reference")
    with pytest.raises(CheckpointRefused) as refused:
        run(asked())
    message = str(refused.value)
    assert (
        f"loss.reference: the checkpoint at that place is not the one that the run began with: {WEIGHTS} was "
        in message
    )
    assert "step-00000001" in message
    assert "put back what loss.reference was; or another `out`" in message

    newest = tmp_path / CHECKPOINTS / "step-00000001"  # as one of before contents were written down
    state = json.loads((newest / STATE).read_text())
    assert set(state.pop("contents")) == {"loss.reference"}
    (newest / STATE).write_text(json.dumps(state))
    manifest = json.loads((newest / MANIFEST).read_text())
    manifest["files"][STATE] = {"bytes": (newest / STATE).stat().st_size, "sha256": _digest(newest / STATE)}
    (newest / MANIFEST).write_text(json.dumps(manifest))
    assert run(asked()).resumed == 1


@pytest.mark.slow
def test_another_reward_model_or_model_before_training_is_refused(place, tmp_path, other):
    asked = load_grpo_config(place / "grpo.yaml", [f"out={tmp_path}"])
    learn(asked)
    other("judge")
    with pytest.raises(CheckpointRefused, match=rf"rewards\.judge\.model: .* {WEIGHTS} was"):
        learn(asked)
    shutil.rmtree(place / "judge")
    shutil.copytree(place / "judge-then", place / "judge")
    assert learn(asked).resumed is not None
    other("base")
    with pytest.raises(CheckpointRefused, match=rf"model\.src: .* {WEIGHTS} was"):
        learn(asked)


def test_every_file_that_differs_counts():
    then = {"loss.teacher": {"config.json": "1 bytes", WEIGHTS: "2 bytes"}, "gone": {"x": "3 bytes"}}
    check_contents(then, {"loss.teacher": then["loss.teacher"], "new": {}}, read_from="here")
    now = {"loss.teacher": {"config.json": "4 bytes", "model.safetensors.index.json": "5 bytes"}}
    with pytest.raises(CheckpointRefused, match=r"config\.json was 1 bytes and is 4 bytes, and 2 more of its files"):
        check_contents(then, now, read_from="here")
    now = {"loss.teacher": {"config.json": "1 bytes"}}
    with pytest.raises(CheckpointRefused, match=rf"{WEIGHTS} was 2 bytes and is not there\."):
        check_contents(then, now, read_from="here")


def test_a_process_that_is_started_once_more_reads_what_the_run_began_with(place, tmp_path, other, monkeypatch):
    monkeypatch.chdir(place)
    groups = {}

    class Group:
        def __init__(self, role, worker, make, **given):
            groups[role] = make

        def close(self):
            pass

    monkeypatch.setattr(placed, "Group", Group)
    monkeypatch.setattr(placed, "Pool", lambda *args, **given: Group("", None, None))
    asked = load_grpo_config(place / "grpo.yaml", [f"out={tmp_path}", "placement={reward: 1}"])
    with placed.ExitStack() as stack:
        placed.started(asked, 1, asked.placement, stack)
    then = contents_in(asked)
    assert groups["policy"].keywords["contents"] == then
    other("judge")
    other("base")
    for role, key in (("reward", r"rewards\.judge\.model"), ("reference", r"model\.src")):
        with pytest.raises(CheckpointRefused, match=key), groups[role]():
            pass
    with pytest.raises(CheckpointRefused, match=r"loss\.teacher"):
        teacher_process("base", None, False, str(place), {"loss.teacher": then["model.src"]})


def test_one_process_reads_and_all_take_it(place, tmp_path, monkeypatch):
    asked = config(place, "run.yaml", tmp_path, "loss.teacher=base", recipe="distill")
    with processes(60) as here, monkeypatch.context() as other:
        sent = contents_in(asked)
        assert contents_in(asked, here.control) == sent
        answers = [sent, CheckpointRefused("lost")]
        other.setattr("torch.distributed.get_rank", lambda group=None: 1)
        other.setattr(
            "torch.distributed.broadcast_object_list", lambda found, **_: found.__setitem__(0, answers.pop(0))
        )
        other.setattr(module, "contents", None)  # which would not be called
        assert contents_in(asked, here.control) is sent
        with pytest.raises(CheckpointRefused, match="lost"):
            decided(lambda: None, here.control)
