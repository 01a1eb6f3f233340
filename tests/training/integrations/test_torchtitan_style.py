"""The loop in torchtitan's shape trains our model as transformers', packed, and goes on where it stopped."""

from pathlib import Path

import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.training.integrations.example import Steps
from bestiary.training.integrations.torchtitan_style import JobConfig, build, main, train
from bestiary.training.parallel import build_mesh
from bestiary.training.processes import processes
from bestiary.verify.reference import promoted

from .sides import LORA, checkpoint, first_gradients, moved, reloads, rows, same, theirs, written


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("torchtitan") / "base")


def job(src: Path, lora: bool, **changes: object) -> JobConfig:
    return JobConfig(str(src), lora=LORA.r if lora else None, dtype=torch.float64, **changes)  # type: ignore[arg-type]


def steps(total: int, accumulate: int = 2) -> Steps:
    return Steps(rows(), 8 // accumulate, accumulate, total)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trains_as_transformers_model(lora: bool, src: Path, tmp_path: Path) -> None:
    """Losses of three steps and the first gradients; also alike for 1, 2 and 4 micro-batches of a step."""
    first = None
    asked = job(src, lora, recompute=True)
    with processes(60):
        for accumulate in (1, 2, 4):
            mesh = build_mesh()
            mine = build(asked, mesh)
            moved(mine)
            hf = theirs(src, mine.save_pretrained(tmp_path / f"start-{accumulate}") if lora else None)
            with first_gradients(mine) as found:
                losses = train(mine, mesh, steps(3, accumulate), tmp_path / f"mine-{accumulate}", asked)
            with first_gradients(hf) as expected, promoted():
                other = train(hf, mesh, steps(3, accumulate), tmp_path / f"theirs-{accumulate}", asked)
            assert losses == pytest.approx(other, rel=1e-9)
            same(found, expected)
            same(found, first or found)
            first = found


@pytest.mark.parametrize("lora", [False, True])
def test_resumes_as_if_never_stopped(lora: bool, src: Path, tmp_path: Path) -> None:
    """Bit for bit, from torch's distributed checkpoint."""
    asked = job(src, lora)
    with processes(60):
        mesh = build_mesh()
        whole, early, late = (build(asked, mesh) for _ in range(3))
        for model in (whole, early):
            moved(model)
        losses = train(whole, mesh, steps(5), tmp_path / "whole", asked)
        parts = train(early, mesh, steps(2), tmp_path / "parts", asked)
        parts += train(late, mesh, steps(5), tmp_path / "parts", asked, resume=True)
        assert parts == losses
        for expected, found in zip(whole.parameters(), late.parameters(), strict=True):
            assert torch.equal(found.to_local(), expected.to_local())  # type: ignore[attr-defined]
        del whole, early, late


@pytest.mark.parametrize("lora", [[], ["--lora", "2"]], ids=["full", "lora"])
def test_the_command_exports(lora: list[str], src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves loads in transformers, with adapters in PEFT."""
    out = tmp_path / "out"
    main([str(src), str(written(tmp_path)), "--out", str(out), "--steps", "2", *lora])
    assert capsys.readouterr().out.startswith("loss ")
    folder = out / "hf"
    model = AutoDecoder.from_pretrained(src, lora=folder) if lora else AutoDecoder.from_pretrained(folder)
    reloads(folder, model.to(torch.float64), src if lora else None)
