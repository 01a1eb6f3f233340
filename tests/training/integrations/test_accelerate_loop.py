"""Accelerate's plain loop trains our model as it trains transformers', and goes on where it stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed

from bestiary.models import AutoDecoder
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.accelerate_loop import main, train
from bestiary.verify.reference import promoted

from .sides import checkpoint, first_gradients, ours, pair, reloads, rows, same, written


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("accelerate") / "base")


@pytest.fixture(autouse=True)
def _own_state() -> Any:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator() -> Accelerator:
    set_seed(0)
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trains_as_transformers_model(lora: bool, src: Path, tmp_path: Path) -> None:
    """Losses of three steps and the first gradients; also alike for 1, 2 and 4 micro-batches of a step."""
    seen = {}
    for accumulate in (1, 2, 4):
        mine, hf = pair(src, tmp_path / str(accumulate), lora)
        options = {"steps": 3, "batch": 8 // accumulate, "accumulate": accumulate}
        with first_gradients(mine) as found:
            losses = train(accelerator(), mine, rows(), tmp_path / "mine", **options)
        with first_gradients(hf) as expected, promoted():
            theirs = train(accelerator(), hf, rows(), tmp_path / "theirs", **options)
        assert losses == pytest.approx(theirs, rel=1e-9)
        same(found, expected)
        seen[accumulate] = (losses[0], found)
    for accumulate in (2, 4):
        assert seen[accumulate][0] == pytest.approx(seen[1][0], rel=1e-12)
        same(seen[accumulate][1], seen[1][1])


@pytest.mark.parametrize("lora", [False, True])
def test_resumes_as_if_never_stopped(lora: bool, src: Path, tmp_path: Path) -> None:
    """Within an epoch and over its end, bit for bit."""
    whole = ours(src, lora)
    losses = train(accelerator(), whole, rows(), tmp_path / "whole", steps=7, batch=3, accumulate=2)
    parts = []
    for steps in (3, 7):  # an epoch has four
        model = ours(src, lora)
        parts += train(
            accelerator(), model, rows(), tmp_path / "parts", steps=steps, batch=3, accumulate=2, resume=steps > 3
        )
    assert parts == losses
    for expected, found in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("lora", [[], ["--lora", "2"]], ids=["full", "lora"])
def test_the_command_exports(lora: list[str], src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves loads in transformers, with adapters in PEFT."""
    out = tmp_path / "out"
    base = [str(src), str(written(tmp_path)), "--out", str(out), "--steps", "2", *lora]
    main(base)
    assert capsys.readouterr().out.startswith("loss ")
    folder = out / "hf"
    model = AutoDecoder.from_pretrained(src, lora=folder) if lora else AutoDecoder.from_pretrained(folder)
    reloads(folder, model.to(torch.float64), src if lora else None)


def test_one_process_of_several_is_refused(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that `accelerate launch --num_processes 2` leaves on CPUs."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidRun, match="--multi_gpu"):
        main([str(src), str(tmp_path / "unread.jsonl"), "--out", str(tmp_path)])
