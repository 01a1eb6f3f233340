"""Resume points: exact, atomic, refused when anything about them is wrong."""

import json
import math
import os
import shutil
import threading

import pytest
import torch

from bestiary.training import checkpoint as checkpoints
from bestiary.training.checkpoint import MANIFEST, STATE, frozen_checksums, saved_steps, seed_all
from bestiary.training.checkpoint_reader import ResumePointReader
from bestiary.training.config import CheckpointSection, OptimSection
from bestiary.training.data.errors import StateMismatch
from bestiary.training.errors import CheckpointRefused, SaveFailed

from .small_run import STEPS, Kept, trainer, written

SETTINGS = {
    "full": {},
    "lora": {"lora": True},
    "muon": {"optim": OptimSection(name="muon", lr=3e-3, warmup=2)},
    "8 bits": {"optim": OptimSection(name="adamw8bit", lr=3e-3, warmup=2), "dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "experts": {"family": "gpt_oss"},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


def weights(made):
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}


def same(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_resumed_after_every_step_is_the_uninterrupted_one_bit_for_bit(file, tmp_path, setting):
    """Twice in a row: every checkpoint is resumed, and what that run writes is resumed again."""
    whole = trainer(file, **SETTINGS[setting], log=Kept())
    whole.fit()
    for turn in range(STEPS):
        made = trainer(file, tmp_path / "run", **SETTINGS[setting], log=Kept())
        step = made.saver.resume(made)
        assert step == (turn or None)
        made.callbacks = (Stopper(turn + 1),)
        made.fit()
        assert made.log.of("loss") == whole.log.of("loss")[turn : turn + 1]
        assert made.log.of("grad_norm") == whole.log.of("grad_norm")[turn : turn + 1]
    assert same(weights(made), weights(whole))


class Stopper:
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, values):
        if trainer.progress.step == self.step:
            trainer.stopped = "the test"


@pytest.fixture
def run(file, tmp_path):
    """A finished run of four steps with a checkpoint of each."""
    made = trainer(file, tmp_path / "run", steps=4, lora=True)
    made.fit()
    return tmp_path / "run"


def resumed(file, run, **changes):
    made = trainer(file, run, **({"steps": 4, "lora": True} | changes))
    return made, made.saver.resume(made)


def test_only_what_trains_is_stored(run, file):
    made, _ = resumed(file, run)
    trained = {name for name, parameter in made.model.named_parameters() if parameter.requires_grad}
    stored = ResumePointReader(run / "step-00000004").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == trained


@pytest.mark.parametrize("damage", ["flipped", "missing", "short", "manifest", "pickle"])
def test_a_damaged_checkpoint_is_refused_by_file_and_the_one_before_is_named(run, file, damage):
    newest = run / "step-00000004"
    (victim,) = list(newest.glob("*.distcp"))
    name = victim.name
    if damage == "flipped":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "missing":
        victim.unlink()
    elif damage == "short":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "manifest":
        (newest / MANIFEST).write_text("{")
        name = MANIFEST
    else:  # a pickle that would run something on being read
        name = ".metadata"
        (newest / name).write_bytes(b"cos\nsystem\n(S'touch planted'\ntR.")
    with pytest.raises(CheckpointRefused, match=rf"(?s){name} .*without it the run goes on from step 3"):
        resumed(file, run)
    assert not os.path.exists("planted")
    shutil.rmtree(newest)
    assert resumed(file, run)[1] == 3


def test_a_checkpoint_that_was_cut_off_is_none(run, file):
    shutil.move(run / "step-00000004", run / ".writing-step-00000004")
    assert resumed(file, run)[1] == 3
    (run / "step-00000003" / MANIFEST).unlink()
    assert resumed(file, run)[1] == 2


def test_what_it_is_bound_to_is_named(run, file):
    made = trainer(file, run, steps=4, lora=True)
    made.saver.bound = {"recipe": "dpo", "family": "qwen3"}
    with pytest.raises(CheckpointRefused, match=r'recipe was "sft" and is "dpo"'):
        made.saver.resume(made)


def test_another_base_is_refused(run, file):
    made = trainer(file, run, steps=4, lora=True)
    with torch.no_grad():
        made.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-9
    with pytest.raises(CheckpointRefused, match="frozen weights are not those"):
        made.saver.resume(made)


@pytest.mark.slow
def test_other_data_is_refused(run, file, tmp_path):
    other = written(tmp_path, seed=7)
    with pytest.raises(StateMismatch, match=r"file tokens-0\.jsonl is gone"):
        resumed(other, run)


def test_another_model_is_refused_by_name_and_shape(run, file):
    made = trainer(file, run, steps=4)
    with pytest.raises(CheckpointRefused, match="frozen weights"):
        made.saver.resume(made)
    with pytest.raises(CheckpointRefused, match=r"model\.model\.embed_tokens\.weight is missing in the checkpoint"):
        checkpoints.read_tensors(run / "step-00000004", made.model, made.optimiser)


def test_another_dtype_of_what_trains_is_refused_and_not_cast(file, tmp_path):
    trainer(file, tmp_path / "run", steps=1).fit()
    made = trainer(file, tmp_path / "run", steps=2, dtype=torch.float32)
    with pytest.raises(CheckpointRefused, match=r"torch\.float64 in the checkpoint and .* torch\.float32") as caught:
        made.saver.resume(made)
    assert "precision.parameters" in caught.value.remedy


def test_the_newest_and_the_multiples_stay(file, tmp_path):
    section = CheckpointSection(every=1, keep=2, keep_every=3)
    trainer(file, tmp_path / "run", steps=6, checkpoint=section).fit()
    assert saved_steps(tmp_path / "run") == [3, 5, 6]


def test_a_full_disk_leaves_the_checkpoint_before(run, file, monkeypatch):
    """The write fails in its middle: the error names the step, what was there stays, nothing half written stays."""
    made, _ = resumed(file, run)
    made.steps = 5
    before = saved_steps(run)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(SaveFailed, match=r"(?s)step 5 could not be written.*No space left.*GiB are free"):
        made.fit()
    assert saved_steps(run) == before
    assert [folder.name for folder in run.iterdir() if folder.name.startswith(".")] == []
    monkeypatch.undo()
    made, step = resumed(file, run, steps=5)
    assert step == 4


def test_a_failure_in_the_background_is_told_at_the_next_one(file, tmp_path, monkeypatch):
    made = trainer(file, tmp_path / "run")
    monkeypatch.setattr(checkpoints, "save", _refused)
    with pytest.raises(SaveFailed, match="step 1 could not be written"):
        made.fit()
    assert made.progress.step == 2


def _refused(*args, **kwargs):
    raise OSError(5, "Input/output error")


def test_the_next_step_runs_while_one_is_written(file, tmp_path, monkeypatch):
    """What is written is the state of its step, though the weights have moved on since."""
    moved = threading.Event()
    write = checkpoints.save

    def late(*args, **kwargs):
        assert moved.wait(60)
        return write(*args, **kwargs)

    made = trainer(file, tmp_path / "run", steps=2)
    monkeypatch.setattr(checkpoints, "save", late)
    after = []

    class Watcher:
        def on_step(self, trainer, values):
            after.append(weights(trainer))
            if trainer.progress.step == 2:
                moved.set()

    made.callbacks = (Watcher(),)
    made.fit()
    other = trainer(file, tmp_path / "run", steps=2)
    shutil.rmtree(tmp_path / "run" / "step-00000002")
    assert other.saver.resume(other) == 1
    assert same(weights(other), after[0])
    assert not same(after[0], after[1])


def test_every_random_generator_goes_on(file, tmp_path):
    import random

    import numpy as np

    made = trainer(file, tmp_path / "run", steps=1)
    made.fit()
    expected = [random.random(), np.random.rand(), float(torch.rand(()))]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    trainer(file, tmp_path / "run", steps=1).saver.resume(trainer(file, tmp_path / "run", steps=1))
    assert [random.random(), np.random.rand(), float(torch.rand(()))] == expected


def test_on_another_number_of_processes_copies_of_one_place_draw_alike(file, tmp_path, monkeypatch):
    """Ranks of a tensor group drop the same elements."""
    trainer(file, tmp_path / "run", steps=1).fit()
    state = tmp_path / "run" / "step-00000001" / STATE
    state.write_text(json.dumps({**json.loads(state.read_text()), "world_size": 8}))
    monkeypatch.setattr(checkpoints, "verify", lambda place, remedy: None)
    drawn = []
    for place in (0, 0, 1):
        made = trainer(file, tmp_path / "run", steps=1)
        made.saver.place = place
        made.saver.resume(made)
        drawn.append(float(torch.rand(())))
    seed_all(0, 1, 1)
    assert drawn[0] == drawn[1] != drawn[2] == float(torch.rand(()))


def test_a_copy_of_a_checkpoint_is_none(run, file):
    for name in ("step-00000009.kept", "step-9"):
        shutil.copytree(run / "step-00000004", run / name)
    assert resumed(file, run)[1] == 4


def test_a_run_without_a_best_evaluation_is_json(run):
    state = json.loads((run / "step-00000004" / STATE).read_text())
    assert state["progress"]["best"] is None
    assert math.isinf(checkpoints.Progress.from_json(state["progress"]).best)


def test_checksums_see_one_bit(file):
    made = trainer(file, lora=True)
    before = frozen_checksums(made.model)
    weight = made.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(torch.int64)[3, 3] ^= 1
    after = frozen_checksums(made.model)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.0.mlp.up_proj.weight"]
