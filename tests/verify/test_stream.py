"""V8 streamed: one layer in memory, each layer answers for itself, a killed run goes on and says the same."""

import gc
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bestiary.verify import checkpoint_bench
from bestiary.verify.checkpoint import run_checkpoint
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.run import BadUsage
from bestiary.verify.stream_state import Progress, StateFile, default_work
from bestiary.verify.streamed_models import StreamedDecoder, StreamedModel, StreamedReference
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Exit
from tests.child import Child
from tests.verify.families import REFERENCES


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(tmp_path: Path, family: str, case: str = "base", **changes) -> Path:
    raw = {**tiny_config(REFERENCES[family], case), **changes}
    model = Reference(REFERENCES[family], raw, 0, dtype=torch.float32).model.to(torch.bfloat16)
    with quiet():
        model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _levels(verdict) -> list:
    return [level.model_dump(exclude={"seconds"}) for level in verdict.levels]


def _layers_run(lines: list[str]) -> list[int]:
    return [int(line.split(" layer ")[1].split()[0]) for line in lines if " layer " in line]


# ------------------------------------------------------------------ memory


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_never_more_than_one_layer_of_one_side_is_in_memory(family, tmp_path, monkeypatch):
    """Counted over every Parameter alive in the process, whoever holds it."""
    folder = _saved(tmp_path, family)
    held: list[int] = []
    largest: list[int] = []
    step = StreamedModel.step

    def measured(self, name, index, x):
        alive = [item for item in gc.get_objects() if type(item) is nn.Parameter]
        held.append(sum(item.numel() for item in alive if not item.is_meta))
        largest.append(max(sum(p.numel() for p in layer.parameters()) for layer in self.layers))
        return step(self, name, index, x)

    monkeypatch.setattr(StreamedModel, "step", measured)
    gc.collect()
    gc.freeze()  # what was there before is in no later list of objects, which would take long to look through
    try:
        assert run_checkpoint(folder).exit_code == Exit.PASS
    finally:
        gc.unfreeze()
    assert len(held) > 12
    assert min(held) > 0
    assert max(held) <= max(largest)


def test_after_the_run_nothing_is_left_in_the_work_folder(tmp_path):
    assert run_checkpoint(_saved(tmp_path, "qwen3", "square")).exit_code == Exit.PASS
    assert list(default_work().iterdir()) == []


# ------------------------------------------------------------------ what the figures say


def test_a_layer_that_is_wrong_is_the_only_one_that_fails_teacher_forced(tmp_path, monkeypatch):
    load = StreamedDecoder._load

    def wrong(self, layer):
        load(self, layer)
        if layer == 1:
            self.model.get_submodule("model.layers.1.self_attn.o_proj").weight.data.mul_(1.001)

    monkeypatch.setattr(StreamedDecoder, "_load", wrong)
    verdict = run_checkpoint(_saved(tmp_path, "qwen3"))
    assert verdict.exit_code == Exit.NUMERIC
    parts = [finding.check for finding in verdict.levels[2].findings if "/layer" in finding.check]
    assert parts == ["text/layer1", "offset/layer1"]
    assert not any(finding.check.endswith("/head") for finding in verdict.levels[2].findings)
    layers = next(one for one in verdict.profiles if one.case == "text, teacher-forced").layers
    worst = max(layers, key=lambda error: error.figure or 0.0)
    assert (worst.layer, worst.module) == (1, "model.layers.1")


def test_streamed_reference_gives_the_logits_of_the_whole_model(tmp_path):
    folder = _saved(tmp_path, "gemma3_text")
    ids = torch.arange(60)[None]
    with quiet(), torch.no_grad():
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        expected = whole(ids).logits[0]
    from bestiary.verify.inputs import Inputs

    streamed = StreamedReference(REFERENCES["gemma3_text"], folder)
    with streamed.outside():
        x = streamed.embed("text", Inputs(ids))
    for index in range(len(streamed.layers)):
        with streamed.layer(index):
            x = streamed.step("text", index, x)
    with streamed.outside():
        assert torch.equal(streamed.logits(Inputs(ids), x), expected)
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


def test_packed_experts_are_dequantised_layer_by_layer(tmp_path):
    folder = _saved(tmp_path, "gpt_oss", hidden_size=96, intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # stored transposed
        grid = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*grid, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, grid, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    verdict = run_checkpoint(folder)
    assert verdict.exit_code == Exit.PASS, [item for level in verdict.levels for item in level.findings]


# ------------------------------------------------------------------ resumption

KILLED_AT = 4
SCRIPT = """
import os, signal, sys
from pathlib import Path
from bestiary.verify.checkpoint import run_checkpoint

def progress(line):
    if f" layer {sys.argv[3]} " in line:
        os.kill(os.getpid(), signal.SIGKILL)

run_checkpoint(sys.argv[1], work=Path(sys.argv[2]), progress=progress)
"""


def _killed(folder: Path, work: Path) -> None:
    """A process of its own that verifies and dies of SIGKILL before a layer."""
    with Child(SCRIPT, folder, work, KILLED_AT) as process:
        code, told = process.ended()
    assert code == -signal.SIGKILL, told[-2000:]
    assert len(list(work.iterdir())) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was_and_gives_the_same_verdict(tmp_path):
    folder, work = _saved(tmp_path, "qwen3"), tmp_path / "work"
    straight = run_checkpoint(folder)
    _killed(folder, work)
    lines: list[str] = []
    resumed = run_checkpoint(folder, work=work, progress=lines.append)
    assert _layers_run(lines)[0] == KILLED_AT
    assert f"resumed after {KILLED_AT - 1}" in next(line for line in lines if " layer " in line)
    assert resumed.exit_code == Exit.PASS
    assert _levels(resumed) == _levels(straight)
    assert resumed.profiles == straight.profiles
    assert list(work.iterdir()) == []


def _stopped(folder: Path, work: Path, **options) -> None:
    """An interrupted run in this process."""

    def progress(line: str) -> None:
        if f" layer {KILLED_AT} " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_checkpoint(folder, work=work, progress=progress, **options)


def _first_layer(folder: Path, work: Path, **options) -> int:
    lines: list[str] = []
    assert run_checkpoint(folder, work=work, progress=lines.append, **options).exit_code == Exit.PASS
    return _layers_run(lines)[0]


@pytest.mark.parametrize("change", ["nothing", "tokens", "weights", "config", "verifier", "damage"])
def test_a_state_is_used_only_for_what_it_was_made_of(change, tmp_path, monkeypatch):
    folder, work = _saved(tmp_path, "qwen3"), tmp_path / "work"
    options = {}
    _stopped(folder, work)
    if change == "tokens":
        options = {"seed": 1}
    elif change == "weights":
        os.utime(folder / "model.safetensors", (1, 1))
    elif change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    elif change == "verifier":
        monkeypatch.setattr(checkpoint_bench, "GATE_VERSION", 10**6)
    elif change == "damage":
        (state,) = work.iterdir()
        state.write_bytes(state.read_bytes()[:100])
    assert _first_layer(folder, work, **options) == (KILLED_AT if change == "nothing" else 1)


@pytest.mark.slow
def test_a_state_comes_back_as_it_was_written_and_only_by_its_fingerprint(tmp_path):
    written = Progress(2, {"text": torch.randn(1, 3, 4)}, {"text": torch.randn(1, 3, 4)}, {"text/layer0": 1e-7})
    file = StateFile(tmp_path / "work", tmp_path / "checkpoint[1]", "a")
    file.write(written)
    read = file.read()
    assert read is not None
    assert (read.done, read.figures) == (written.done, written.figures)
    assert torch.equal(read.theirs["text"], written.theirs["text"])
    assert torch.equal(read.ours["text"], written.ours["text"])
    assert StateFile(tmp_path / "work", tmp_path / "checkpoint[1]", "b").read() is None
    (tmp_path / "work" / f"{file.path.name}.123").write_bytes(b"left by a writer that was killed")
    file.remove()
    assert list((tmp_path / "work").iterdir()) == []


def test_a_work_folder_that_cannot_be_is_wrong_usage(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadUsage, match="--work"):
        StateFile(tmp_path / "file" / "work", tmp_path, "a")
