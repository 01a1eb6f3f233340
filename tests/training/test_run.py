"""`bestiary sft` as a user runs it: a real checkpoint folder, a real tokenizer, killed and resumed, exported."""

import json
import signal
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from bestiary.models import AutoDecoder, Qwen3
from bestiary.tools import cli
from bestiary.training import owner
from bestiary.training.checkpoint import saved_steps
from bestiary.training.config import load_run_config
from bestiary.training.data.errors import FingerprintChanged
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import CheckpointRefused, FolderTaken, InvalidRun
from bestiary.training.owner import OWNER
from bestiary.training.parallel import build_mesh
from bestiary.training.processes import processes
from bestiary.training.recipes.sft import SFT
from bestiary.training.run import _bound, check_data, check_folder, run

from ..child import Child
from ..models.tiny import tiny_config
from .data.conftest import folder
from .test_config import written

VOCABULARY = 49152
COMMAND = "from bestiary.tools.cli import main; sys.exit(main(sys.argv[1:]))"


def _said(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny Qwen3 with SmolLM's vocabulary, talks, held-out talks and a run's file."""
    place = tmp_path_factory.mktemp("run")
    config = tiny_config("qwen3", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24)
    config = config.with_(attention=replace(config.attention, scale=config.attention.head_dim**-0.5))
    torch.manual_seed(0)
    Qwen3(config, dtype=torch.float32).save_pretrained(place / "model")
    for name, count in (("talks", 40), ("held", 6)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{n} + {n}?"},
                    {"role": "assistant", "content": f"It is {2 * n}."},
                ]
            }
            for n in range(count)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "talks", "files": "talks.jsonl", "kind": "chat"}
    held = {"name": "held", "files": "held.jsonl", "kind": "chat"}
    content = {
        "model": {"src": "model"},
        "data": {"tokenizer": {"src": str(folder("smollm"))}, "sources": [source], "pack_length": 96, "streams": 2},
        "optim": {"lr": 3e-3, "warmup": 2},
        "loop": {"steps": 6, "workers": 0, "evaluation": {"sources": [held], "every": 3, "packs": 2}},
        "checkpoint": {"every": 1},
    }
    (place / "run.json").write_text(json.dumps(content))
    return place


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def figures(out):
    """What must not depend on when the run was killed."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "eval/loss")
    return [{name: row[name] for name in names if name in row} for row in metrics(out)]


@pytest.fixture(scope="module")
def whole(place):
    """An uninterrupted run."""
    assert cli.main(["sft", str(place / "run.json"), f"out={place / 'whole'}", "--json", str(place / "out.json")]) == 0
    return place / "whole"


@pytest.mark.slow
def test_a_run_learns_evaluates_and_exports_what_transformers_loads(whole, place):
    rows = metrics(whole)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    held = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(held) == 2
    assert held[1] < held[0]
    told = json.loads((place / "out.json").read_text())
    assert (told["step"], told["stopped"], told["evaluation"]) == (6, None, pytest.approx(held[1]))
    ours, theirs = AutoDecoder.from_pretrained(whole / "export"), AutoModelForCausalLM.from_pretrained(whole / "export")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    start = AutoDecoder.from_pretrained(place / "model")
    assert (start(ids).logits - ours(ids).logits).abs().max() > 1e-2
    assert (whole / "export" / "tokenizer.json").is_file()


class Scaled(SFT):
    """A loss that is not ours."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return replace(found, total=found.total * self.scale)


def talk(row):
    """Rows of a file that is not ours."""
    return {"messages": row["said"]}


@pytest.mark.slow
def test_a_loss_and_the_rows_of_a_file_plug_in_by_their_names(whole, place, tmp_path):
    rows = [json.loads(line) for line in (place / "talks.jsonl").read_text().splitlines()]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps({"said": row["messages"]}) + "\n" for row in rows))
    content = json.loads((place / "run.json").read_text())
    content["model"]["src"] = str(place / "model")
    content["data"]["sources"][0] |= {"files": "said.jsonl", "rows": "tests.training.test_run:talk"}
    content["loss"] = {"name": "tests.training.test_run:Scaled", "options": {"scale": 2}}
    content["loop"] = {"steps": 1, "workers": 0}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert cli.main(["sft", str(tmp_path / "run.json"), f"out={tmp_path / 'out'}", "checkpoint.export=false"]) == 0
    assert metrics(tmp_path / "out")[0]["loss"] == pytest.approx(2 * metrics(whole)[0]["loss"], rel=1e-6)
    for change, told in (
        ("loss.name=tests.training.test_run:talk", "scale"),
        ("loss.name=json:JSONDecoder", "scale"),
        ("loss.name=json:nothing", "the module json has no 'nothing'"),
    ):
        with pytest.raises(InvalidRun, match=told):
            run(load_run_config(tmp_path / "run.json", [change, f"out={tmp_path / 'other'}"], recipe="sft"))
    content["loss"] = {"name": "json:JSONDecoder"}
    (tmp_path / "run.json").write_text(json.dumps(content))
    other = load_run_config(tmp_path / "run.json", [f"out={tmp_path / 'other'}"], recipe="sft")
    with pytest.raises(InvalidRun, match="makes no recipe: name, unit"):
        run(other)


@pytest.mark.slow
def test_states_of_eight_bits_bind_a_run_to_its_mesh(place):
    """And no other optimiser does."""
    model = AutoDecoder.from_pretrained(place / "model")
    tokenizer = BaseHFModelTokenizer.from_pretrained(folder("smollm"))
    with processes(60):
        mesh = build_mesh()
        bound = {
            name: _bound(
                load_run_config(place / "run.json", ["out=x", f"optim.name={name}"], recipe="sft"),
                model,
                tokenizer.fingerprint,
                3,
                mesh,
            )
            for name in ("adamw", "adamw8bit")
        }
    assert bound["adamw8bit"]["mesh"] == {"replicate": 1, "shard": 1, "expert": 1, "tensor": 1}
    assert "mesh" not in bound["adamw"]


def test_the_file_of_a_run_is_the_whole_run(whole, place):
    again = load_run_config(whole / "config.yaml")
    assert again.optim.lr == 3e-3
    assert again.data.sources[0].files == str(place / "talks.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["KILL", "TERM"])
def test_a_killed_run_goes_on_bit_for_bit(whole, place, tmp_path, how):
    """Killed at a step that no checkpoint knows of, or asked to stop; started again by the same command."""
    arguments = ["sft", str(place / "run.json"), f"out={tmp_path / 'run'}"]
    with Child(COMMAND, *arguments, "loop.callbacks=[tests.training.test_run:Slow]") as process:
        while not saved_steps(tmp_path / "run" / "checkpoints") and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(getattr(signal, f"SIG{how}"))
        code, told = process.ended()
    assert code == (-signal.SIGKILL if how == "KILL" else 0), told
    reached = saved_steps(tmp_path / "run" / "checkpoints")[-1]
    assert 1 <= reached < 6
    assert not (tmp_path / "run" / "export").exists()
    assert cli.main(arguments) == 0
    assert figures(tmp_path / "run") == figures(whole)
    files = [folder / "export" / "model.safetensors" for folder in (tmp_path / "run", whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


class Slow:
    """Time to kill it in."""

    def on_step(self, trainer, values):
        time.sleep(0.5)


class Stolen:
    """Another run takes the folder over while this one sleeps."""

    def on_step(self, trainer, values):
        (trainer.saver.folder.parent / OWNER).write_text("another")
        assert trainer.callbacks[0]._lost.wait(60)


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(place, tmp_path, monkeypatch):
    """The second is refused, and a first that was taken for dead writes no resume point more."""
    monkeypatch.setattr(owner, "GRACE_S", 0.1)
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    with owner.owned(tmp_path / "run"), pytest.raises(FolderTaken, match="in the hands of process"):
        run(load_run_config(place / "run.json", [f"out={tmp_path / 'run'}"], recipe="sft"))
    assert not (tmp_path / "run").exists()
    changes = ["loop.callbacks=[tests.training.test_run:Stolen]", "checkpoint.background=false"]
    with pytest.raises(FolderTaken, match="taken over by another run"):
        run(load_run_config(place / "run.json", [*changes, f"out={tmp_path / 'run'}"], recipe="sft"))
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1]
    assert (tmp_path / "run" / OWNER).read_text() == "another"


@pytest.mark.slow
def test_adapters_are_exported_as_adapters(place, tmp_path):
    config = load_run_config(place / "run.json", ["lora.r=4", f"out={tmp_path / 'run'}"], recipe="sft")
    outcome = run(config)
    assert outcome.export == tmp_path / "run" / "export"
    assert json.loads((outcome.export / "adapter_config.json").read_text())["r"] == 4
    tuned = AutoDecoder.from_pretrained(outcome.export)
    assert tuned.decoder_config.lora is not None


@pytest.mark.slow
def test_epochs_are_counted_into_steps(place, tmp_path):
    changes = ["loop.steps=null", "data.epochs=2", "data.pack_length=256", f"out={tmp_path / 'run'}"]
    outcome = run(load_run_config(place / "run.json", changes, recipe="sft"))
    assert outcome.step == outcome.steps
    assert outcome.stopped is None
    documents = 0
    for row in metrics(tmp_path / "run"):
        documents += row.get("tokens", 0)
    assert documents == outcome.steps * 2 * 256


@pytest.mark.slow
def test_wide_parameters_are_stepped_and_narrow_ones_computed_with(place, tmp_path):
    """float32 master weights: what is kept moves by less than bfloat16 can tell."""
    changes = ["precision.compute=bfloat16", "optim.lr=1e-6", f"out={tmp_path / 'run'}"]
    outcome = run(load_run_config(place / "run.json", changes, recipe="sft"))
    before, after = (AutoDecoder.from_pretrained(path) for path in (place / "model", outcome.export))
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert new.dtype is torch.float32
        assert not torch.equal(old, new), name
    narrow = before.model.layers[0].mlp.up_proj.weight.bfloat16()
    assert (after.model.layers[0].mlp.up_proj.weight.bfloat16() == narrow).float().mean() > 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (["loss.name=nnl"], InvalidRun, r"loss\.name = 'nnl'(.|\n)*did you mean nll"),
        (["loss.beta=0.1"], InvalidRun, r"loss\.beta = 0\.1, which sft does not have"),
        (["data.sources.0.kind=prompt"], InvalidRun, r"talks is of kind 'prompt'"),
        (["loop.callbacks=[nowhere:x]"], InvalidRun, r"loop\.callbacks = 'nowhere:x': No module"),
        (["loop.callbacks=['json:x']"], InvalidRun, r"the module json has no 'x'"),
        (["checkpoint.resume=never", "out=OUT"], InvalidRun, r"holds a run at step 6 and checkpoint\.resume = never"),
        (["data.tokenizer.pad_token=<filename>", "out=OUT"], FingerprintChanged, "pad: "),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(whole, place, tmp_path, changes, error, said):
    given = [f"out={tmp_path / 'run'}", *(change.replace("OUT", str(whole)) for change in changes)]
    before = (whole / "config.yaml").read_bytes()
    with pytest.raises(error, match=said):
        run(load_run_config(place / "run.json", given, recipe="sft"))
    assert (whole / "config.yaml").read_bytes() == before
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_compiled_blocks_need_a_compiler(place, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InvalidRun, match=r"model\.compile = true(.|\n)*apt-get install g\+\+"):
        run(load_run_config(place / "run.json", ["model.compile=true", f"out={tmp_path / 'run'}"], recipe="sft"))


def test_streams_that_the_processes_cannot_share_are_refused(place):
    config = load_run_config(place / "run.json", ["out=x"], recipe="sft")
    with pytest.raises(InvalidRun, match=r"data\.streams = 2 packs a step over 3 processes(.|\n)*a multiple of 3"):
        check_data(config.data, SFT(), 3)


@pytest.mark.slow
def test_a_changed_run_is_not_taken_for_the_same(whole, place):
    before = (whole / "config.yaml").read_bytes()
    with pytest.raises(CheckpointRefused, match=r"optim was .*0\.003.* and is .*0\.001"):
        run(load_run_config(place / "run.json", ["optim.lr=1e-3", f"out={whole}"], recipe="sft"))
    assert (whole / "config.yaml").read_bytes() == before  # what export reads of the run


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """Hours of counting steps later it would be a trace of pathlib's."""
    file = written(tmp_path)
    for out, said in ((file, "is a file"), (file / "run", "is a file")):
        with pytest.raises(InvalidRun, match=rf"out = {out}: {file} {said}\."):
            check_folder(load_run_config(file, [f"out={out}"]))
    config = load_run_config(file, [f"out={tmp_path / 'a folder' / 'run'}"])
    check_folder(config)
    monkeypatch.setattr("os.access", lambda *asked: False)
    with pytest.raises(InvalidRun, match=rf"{tmp_path} cannot be written to"):
        check_folder(config)
    assert not (tmp_path / "a folder").exists()


def test_a_dry_run_prints_the_configuration_and_writes_nothing(place, tmp_path, capsys):
    assert cli.main(["sft", str(place / "run.json"), f"out={tmp_path / 'run'}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "max_grad_norm: 1.0" in out
    assert "memory of a device" in out
    assert "TFLOP" in out
    assert not (tmp_path / "run").exists()
