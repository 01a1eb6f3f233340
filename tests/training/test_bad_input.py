"""What goes wrong in a run, planted through the command: its exit code, one clear message, nothing half written left.

Config typos                        test_config: a_wrong_key_or_value_is_named, a_file_that_is_none_is_said_so;
                                    test_run: what_cannot_be_run_is_refused_before_training;
                                    test_run_recipes: what_a_recipe_does_not_know_is_refused
data without loss tokens            here: data_of_which_nothing_is_trained_ends_the_run;
                                    test_loop: a_step_without_trained_tokens_is_refused, held_out_data_without_…
pair with identical sides after     here: pairs_that_are_equal_after_the_cut_end_the_run;
  truncation                        test_recipes: a_pair_that_is_equal_after_truncation_is_left_out
batch smaller than world size       here: a_batch_smaller_than_the_world_…; test_run: streams_that_the_processes_…
checkpoint of another model         test_checkpoint: another_model_is_refused_…, another_base_is_refused
  tokenizer                         test_run: what_cannot_be_run_is_refused_before_training (pad_token)
  world                             test_run_ranks: two_processes_then_one_then_two_… (it is taken, and resharded)
  data                              test_checkpoint: other_data_is_refused
half-written or bit-flipped         test_checkpoint: a_checkpoint_that_was_cut_off_is_none, a_damaged_checkpoint_is_
  checkpoint                        refused_by_file_…
disk full during save               test_checkpoint: a_full_disk_leaves_the_checkpoint_before
a rank killed with SIGKILL          test_run_ranks: two_processes_then_one_then_two_train_as_one_does
NaN in the data                     here: a_token_whose_embedding_is_nan_…, a_number_that_is_none_in_a_row_…,
                                    events_with_nan_are_refused; test_loop: steps_may_be_skipped_…, too_many_skips_…
OOM                                 here: a_run_that_does_not_fit_…, memory_that_ends_…
"""

import json
import time

import pytest
import torch
from tokenizers import Tokenizer

from bestiary.models import AutoDecoder
from bestiary.tools import cli
from bestiary.training import checkpoint as checkpoints
from bestiary.training import run as runs
from bestiary.training.checkpoint import saved_steps, verify
from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.samples import parse

from ..child import Child
from .data.conftest import folder
from .test_run import COMMAND, metrics
from .test_run import place as place  # the fixture
from .test_run_ranks import ended, start

KNOBS = ("data.pack_length", "model.checkpointing=full", "lora.r=16")


def said(role, content):
    return {"role": role, "content": content}


def rows(file, found):
    file.write_text("".join(json.dumps(row) + "\n" for row in found))


def bestiary(place, out, *changes, recipe="sft"):
    """Exit code of the command, on the run of the fixture without its evaluation."""
    return cli.main([recipe, str(place / "run.json"), f"out={out}", "loop.evaluation=null", *changes])


def whole(out):
    """Steps of a run's checkpoints, all of which are as they were written; nothing that is half one is beside them."""
    kept = out / "checkpoints"
    assert [found.name for found in kept.glob(".*")] == []
    for step in saved_steps(kept):
        verify(kept / f"step-{step:08d}", remedy="")
    return saved_steps(kept)


# ---------------------------------------------------------------------- NaN


@pytest.fixture(scope="module")
def poisoned(place):
    """A model one of whose embeddings is NaN; one talk in thirteen uses its token. No head is tied to it."""
    model = AutoDecoder.from_pretrained(place / "model")
    model = type(model)(model.decoder_config.with_(tie_word_embeddings=False), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder("smollm") / "tokenizer.json"))
    (token, *_) = tokenizer.encode(" zebra").ids
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    model.save_pretrained(place / "poisoned")
    talks = [json.loads(line) for line in (place / "talks.jsonl").read_text().splitlines()]
    marked = {"messages": [said("user", "What has stripes?"), said("assistant", "A zebra has.")]}
    rows(place / "marked.jsonl", [*talks[:12], marked])
    return token


@pytest.mark.slow
def test_a_token_whose_embedding_is_nan_stops_the_run_and_may_be_skipped(
    place, poisoned, tmp_path, capsys, monkeypatch
):
    """The step is not made: the resume point before it, still being written then, is whole; the next try goes on."""
    slow = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda *args, **kwargs: (pause(), slow(*args, **kwargs))[1])
    out = tmp_path / "run"
    data = ["model.src=poisoned", "data.sources.0.files=marked.jsonl", "data.seed=1"]  # in steps 3 and 4
    assert bestiary(place, out, *data) == 1
    told = capsys.readouterr().err
    assert "Diverged: step 3: the loss is nan. The weights are those before the step." in told
    assert "loop.on_nan=skip" in told
    assert [row["step"] for row in metrics(out)] == whole(out) == [1, 2]
    assert not (out / "export").exists()
    monkeypatch.undo()

    assert bestiary(place, out, *data, "loop.on_nan=skip") == 0
    assert [(row["step"], row["skipped"]) for row in metrics(out)] == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 2), (6, 2)]
    tuned = dict(AutoDecoder.from_pretrained(out / "export").named_parameters())
    embedding = tuned.pop("model.embed_tokens.weight")
    assert embedding.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [poisoned]
    assert all(parameter.isfinite().all() for parameter in tuned.values())


def pause():
    """Longer than a step takes."""
    time.sleep(0.5)


@pytest.mark.slow
def test_a_number_that_is_none_in_a_row_is_refused_by_its_place_and_may_be_skipped(place, tmp_path, capsys):
    """A score of a reward model's data."""
    scored = [
        {
            "messages": [said("user", f"{n}?"), said("assistant", f"It is {n}.")],
            "score": n / 40 if n != 7 else float("nan"),
        }
        for n in range(40)
    ]
    rows(place / "scored.jsonl", scored)
    data = ["loss.name=squared", "data.sources.0.kind=reward", "data.sources.0.files=scored.jsonl", "loop.steps=2"]
    out = tmp_path / "run"
    assert bestiary(place, out, *data, recipe="reward") == 7
    told = capsys.readouterr().err
    assert "scored.jsonl row 7" in told
    assert "finite" in told
    assert "on_corrupt='skip'" in told
    assert not (out / "export").exists()
    assert whole(out) == []
    assert bestiary(place, out, *data, "data.sources.0.on_corrupt=skip", recipe="reward") == 0
    state = json.loads((out / "checkpoints" / "step-00000002" / checkpoints.STATE).read_text())
    streams = state["data"]["streams"].values()
    assert sum(stream["sources"]["talks"]["corrupt"] for stream in streams) >= 1


@pytest.mark.parametrize(
    "row",
    [
        {"items": [1, 2], "features": {"price": [1.0, float("nan")]}},
        {"items": [1, 2], "times": [0.0, float("nan")]},
    ],
)
def test_events_with_nan_are_refused(row):
    with pytest.raises(SampleRefused, match=r"row 3: (features\.price\.1|times\.1): .*finite"):
        parse("events", row, "row 3")


# ---------------------------------------------------------------------- data


@pytest.mark.slow
def test_data_of_which_nothing_is_trained_ends_the_run(place, tmp_path, capsys):
    """Prompts fill the packs: no answer is left to train, in any row of an epoch."""
    out = tmp_path / "run"
    assert bestiary(place, out, "data.pack_length=8", "data.overflow=truncate") == 7
    told = capsys.readouterr().err
    assert "source talks: a whole epoch gave nothing to train" in told
    assert "pack_length = 8" in told
    assert not (out / "export").exists()


@pytest.mark.slow
def test_pairs_that_are_equal_after_the_cut_end_the_run(place, tmp_path, capsys):
    """Sides that differ in their last word, behind what a pack can hold."""
    long = "It is the sum of both, as anybody could have told you. " * 4
    found = [
        {
            "prompt": [said("user", f"{n}?")],
            "chosen": [said("assistant", long + "Yes")],
            "rejected": [said("assistant", long + "No")],
        }
        for n in range(20)
    ]
    rows(place / "alike.jsonl", found)
    data = ["data.sources.0.kind=preference", "data.sources.0.files=alike.jsonl", "data.overflow=truncate"]
    assert bestiary(place, tmp_path / "run", *data, recipe="dpo") == 7
    told = capsys.readouterr().err
    assert "a whole epoch gave nothing to train" in told
    assert "equal sides of a pair" in told
    assert bestiary(place, tmp_path / "run", *data, "data.pack_length=256", "loop.steps=1", recipe="dpo") == 0


@pytest.mark.slow
def test_a_batch_smaller_than_the_world_is_refused_in_every_process(place, tmp_path):
    """One pack a step, two processes."""
    codes, told = ended(start(place / "run.json", tmp_path / "run", "data.streams=1"))
    assert codes == [7, 7], told
    for text in told:
        assert "InvalidRun: data.streams = 1 packs a step over 2 processes" in text
        assert "a multiple of 2" in text
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- memory

SPARE = 1 << 30  # bytes of address space beside what the libraries take
LIMITED = f"""
import resource
import bestiary.training.run, transformers
from pathlib import Path
held = int(next(row for row in Path("/proc/self/status").read_text().splitlines() if "VmSize" in row).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + {SPARE},) * 2)
"""


@pytest.mark.slow
def test_a_run_that_does_not_fit_says_what_it_needs_and_what_helps(place, tmp_path):
    """A real allocation fails: a pack of two million tokens, most of them padding, in one spare GiB."""
    out = tmp_path / "run"
    changes = [f"out={out}", "loop.evaluation=null", "loop.steps=null", "data.epochs=1", f"data.pack_length={2**21}"]
    with Child(LIMITED + COMMAND, "sft", place / "run.json", *changes) as process:
        code, told = process.ended()
    assert code == 7, told
    assert "OutOfMemory: the run does not fit into memory. Estimated need: " in told
    assert "GiB a device (parameters " in told
    assert all(knob in told for knob in KNOBS)
    assert not (out / "export").exists()
    assert whole(out) == []


class Full:
    """After the first step a block finds no memory."""

    error: Exception

    def on_step(self, trainer, values):
        trainer.model.model.layers[1].register_forward_pre_hook(self._fail)

    def _fail(self, *args):
        raise self.error


class FullDevice(Full):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class FullHost(Full):
    error = MemoryError("Unable to allocate 2.00 GiB for an array")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["FullDevice", "FullHost"])
def test_memory_that_ends_in_a_step_leaves_the_step_before(place, tmp_path, capsys, which):
    """Raised inside a module; the same command then goes on from the resume point."""
    out = tmp_path / "run"
    assert bestiary(place, out, f"loop.callbacks=[tests.training.test_bad_input:{which}]") == 7
    told = capsys.readouterr().err
    assert "OutOfMemory: the run does not fit into memory" in told
    assert all(knob in told for knob in KNOBS)
    assert whole(out) == [1]
    assert bestiary(place, out, "loop.steps=6") == 0
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_memory_that_ends_while_the_model_is_loaded_says_the_same(place, tmp_path, capsys, monkeypatch):
    def refused(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(runs.AutoDecoder, "from_pretrained", refused)
    assert bestiary(place, tmp_path / "run") == 7
    assert "OutOfMemory: the run does not fit into memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
