"""Lightning trains our model as it trains transformers', and goes on where it stopped."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.training.integrations.example import Steps
from bestiary.training.integrations.lightning_module import DecoderModule, main, train
from bestiary.verify.reference import promoted

from .sides import checkpoint, first_gradients, ours, pair, reloads, rows, same, written

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("lightning") / "base")


@pytest.fixture(autouse=True)
def _hints() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Losses(lightning.Callback):
    """Of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.found.append(float(outputs["loss"]))


def fit(model: Any, out: Path, total: int, accumulate: int = 2, **options: Any) -> list[float]:
    seen = Losses()
    module = DecoderModule(lambda mesh: model, Steps(rows(), 8 // accumulate, accumulate, total))
    train(module, out, callbacks=[seen], **options, **QUIET)
    return seen.found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trains_as_transformers_model(lora: bool, src: Path, tmp_path: Path) -> None:
    """Losses of three steps and the first gradients; also alike for 1, 2 and 4 micro-batches of a step."""
    first = None
    for accumulate in (1, 2, 4):
        mine, hf = pair(src, tmp_path / str(accumulate), lora)
        with first_gradients(mine) as found:
            losses = fit(mine, tmp_path / f"mine-{accumulate}", 3, accumulate)
        with first_gradients(hf) as expected, promoted():
            theirs = fit(hf, tmp_path / f"theirs-{accumulate}", 3, accumulate)
        assert losses == pytest.approx(theirs, rel=1e-9)
        same(found, expected)
        same(found, first or found)
        first = found


@pytest.mark.parametrize("lora", [False, True])
def test_resumes_as_if_never_stopped(lora: bool, src: Path, tmp_path: Path) -> None:
    """Bit for bit, from Lightning's own checkpoint."""
    whole, early, late = ours(src, lora), ours(src, lora), ours(src, lora)
    losses = fit(whole, tmp_path / "whole", 5)
    assert fit(early, tmp_path / "parts", 2) + fit(late, tmp_path / "parts", 5, resume=True) == losses
    for expected, found in zip(whole.parameters(), late.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("lora", [[], ["--lora", "2"]], ids=["full", "lora"])
def test_the_command_exports(lora: list[str], src: Path, tmp_path: Path) -> None:
    """What it leaves loads in transformers, with adapters in PEFT."""
    out = tmp_path / "out"
    main([str(src), str(written(tmp_path)), "--out", str(out), "--steps", "2", *lora])
    folder = out / "hf"
    model = AutoDecoder.from_pretrained(src, lora=folder) if lora else AutoDecoder.from_pretrained(folder)
    reloads(folder, model.to(torch.float64), src if lora else None)
