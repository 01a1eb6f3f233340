"""The benchmarks: their judgement on figures made up here, and one small run of each."""

import json
import subprocess
import sys

import pytest
import torch

from bestiary.tools.bench import head, load, measure
from bestiary.tools.bench.measure import Goal, Summary


def test_summary_of_repeated_figures():
    assert Summary.of([2.0, 1.0, 4.0]) == Summary(median=2.0, low=1.0, high=4.0, spread=1.5)


def test_arms_alternate_backwards_every_second_round():
    order = []
    arms = {name: lambda name=name: order.append(name) or {"seconds": float(len(order))} for name in "abc"}
    samples = measure.alternate(arms, 3)
    assert "".join(order) == "abccbaabc"
    assert [sample["seconds"] for sample in samples["c"]] == [3.0, 4.0, 9.0]


def test_one_round_is_refused():
    with pytest.raises(ValueError, match="rounds = 1"):
        measure.alternate({"a": dict}, 1)


@pytest.mark.parametrize(
    ("figures", "control", "code"),
    [
        ([0.9, 1.0], [1.0, 1.1], measure.GOALS_HOLD),
        ([0.9, 1.01], [1.0, 1.1], measure.GOAL_MISSED),
        ([0.9, 1.01], [1.0, 1.2], measure.TOO_NOISY),
        ([0.1, 0.1], [1.0, 1.2], measure.TOO_NOISY),
    ],
)
def test_exit_code(figures, control, code):
    goals = [Goal(name="g", figure=figure, limit=1.0) for figure in figures]
    assert measure.exit_code(goals, Summary.of(control)) == code


def run_load(tmp_path, *arguments):
    out = tmp_path / "load.json"
    command = [sys.executable, "-m", "bestiary.tools.bench.load", "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1, 5}, done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.slow
def test_load_runs_and_both_sides_agree(tmp_path):
    """A tiny model: its goals of time and memory mean nothing, those of the values and the file do."""
    done, result = run_load(tmp_path, "--size", "tiny", "--rounds", "2")
    assert result["schema"] == "bestiary.bench.load/1"
    assert result["exit_code"] == done.returncode
    assert set(result["arms"]) == {"ours", "transformers", "control"}
    values, files = result["goals"][2:]
    assert values["holds"]
    assert files["holds"]
    assert result["versions"]["torch"] == torch.__version__
    assert "peak memory above imports" in done.stdout


def test_load_counts_sides_that_disagree(tmp_path, monkeypatch):
    """With one bit flipped on our side the goal on the values is missed."""
    folder, warmup = tmp_path / "m", tmp_path / "w"
    load.write_checkpoint(folder, "tiny")
    load.write_checkpoint(warmup, "tiny", seed=1)
    same = load._work("ours", folder, warmup)["checksum"]
    assert same == load._work("transformers", folder, warmup)["checksum"]
    assert same != load._work("ours", warmup, folder)["checksum"]


@pytest.mark.slow
def test_a_mapping_does_not_survive_the_file(tmp_path):
    """What the last goal of the load benchmark would catch: a loader that leaves pages in the file."""
    folder, warmup = tmp_path / "m", tmp_path / "w"
    load.write_checkpoint(folder, "tiny")
    load.write_checkpoint(warmup, "tiny")
    program = (
        "import sys, torch; from pathlib import Path; from bestiary.tools.bench import load\n"
        "load._load_ours = lambda folder: [torch.from_file("
        "str(folder / 'model.safetensors'), shared=True, size=1 << 17, dtype=torch.uint8)]\n"
        "load._work('deleted', Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder), str(warmup)], capture_output=True, check=False)
    assert done.returncode < 0  # killed by SIGBUS


@pytest.mark.parametrize("vocab", [1003, 1024])
def test_ways_of_the_head_agree(vocab):
    """All ways of the head benchmark compute the same logits and gradients in float64."""
    hidden = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(vocab, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    storage = torch.zeros(-(-vocab // 64) * 64, 24, dtype=torch.float64)
    storage[:vocab] = weight.detach()
    plain = torch.nn.functional.linear(hidden, weight)
    direction = torch.randn(plain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(plain, (hidden, weight), direction)
    for logits in (head._PaddedView.apply(hidden, weight, storage), head.head_logits(hidden, weight)):
        torch.testing.assert_close(logits, plain, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(torch.autograd.grad(logits, (hidden, weight), direction), wanted, rtol=0, atol=1e-12)


def test_head_reports_every_shape(capsys):
    code = head.main(["--shape", "8x32x131", "--shape", "8x32x100", "--rounds", "2", "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == code == max(shape["exit_code"] for shape in result["shapes"])
    assert [shape["shape"] for shape in result["shapes"]] == [[8, 32, 131], [8, 32, 100]]
    assert set(result["shapes"][0]["arms"]) == {"plain", "view", "tile", "control"}


@pytest.mark.parametrize("module", [load, head])
def test_wrong_usage_exits_seven(module, capsys):
    with pytest.raises(SystemExit) as caught:
        module.main(["--rounds", "1"])
    assert caught.value.code == 7
    assert "1 is below 2" in capsys.readouterr().err
