"""PEFT's adapters train on our model as on transformers', and the folder fits both."""

from pathlib import Path

import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.training.integrations.example import Steps
from bestiary.training.integrations.peft_on_top import export, main, train, wrapped
from bestiary.verify.reference import promoted

from .sides import CLOSE, checkpoint, first_gradients, ours, reloads, rows, same, theirs, written


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("peft") / "base")


def steps(total: int = 4, accumulate: int = 2) -> Steps:
    return Steps(rows(), 8 // accumulate, accumulate, total)


@pytest.fixture(scope="module")
def start(src: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that do something, made on transformers' model."""
    model = wrapped(theirs(src), rank=3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_trains_as_on_transformers_model(src: Path, start: Path, tmp_path: Path) -> None:
    """Losses of three steps and the first gradients; also alike for 1, 2 and 4 micro-batches of a step."""
    first = None
    for accumulate in (1, 2, 4):
        mine, hf = wrapped(ours(src), resume=start), wrapped(theirs(src), resume=start)
        with first_gradients(mine) as found:
            losses = train(mine, steps(3, accumulate), tmp_path / "mine")
        with first_gradients(hf) as expected, promoted():
            assert losses == pytest.approx(train(hf, steps(3, accumulate), tmp_path / "theirs"), rel=1e-9)
        assert all("lora_" in name for name in found)
        same(found, expected)
        same(found, first or found)
        first = found


def test_resumes_as_if_never_stopped(src: Path, start: Path, tmp_path: Path) -> None:
    """Adapters and optimiser, bit for bit."""
    whole = wrapped(ours(src), resume=start)
    losses = train(whole, steps(5), tmp_path / "whole")
    early = train(wrapped(ours(src), resume=start), steps(2), tmp_path / "parts")
    late = wrapped(ours(src), resume=tmp_path / "parts")
    assert early + train(late, steps(5), tmp_path / "parts", resume=True) == losses
    for expected, found in zip(whole.parameters(), late.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_the_adapter_gives_its_logits_on_transformers_model(src: Path, start: Path, tmp_path: Path) -> None:
    """PEFT's folder, as saved around our model; and read into our own adapters."""
    model = wrapped(ours(src), resume=start)
    train(model, steps(2), tmp_path / "out")
    reloads(tmp_path / "out", model, src)
    reloads(tmp_path / "out", AutoDecoder.from_pretrained(src, lora=tmp_path / "out"), src)
    ids = torch.tensor([rows(1)[0]["input_ids"]])
    with torch.no_grad():
        before = model(ids).logits
        export(model, tmp_path)
        after = AutoDecoder.from_pretrained(tmp_path / "hf")(ids).logits
    torch.testing.assert_close(after, before, **CLOSE)


def test_the_command_exports(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged model loads in transformers; run again with --resume it goes on."""
    command = [str(src), str(written(tmp_path)), "--out", str(tmp_path / "out"), "--lora", "2"]
    main([*command, "--steps", "1"])
    main([*command, "--steps", "3", "--resume"])
    first, second = capsys.readouterr().out.splitlines()
    assert (len(first.split()), len(second.split())) == (2, 3)
    folder = tmp_path / "out" / "hf"
    reloads(folder, AutoDecoder.from_pretrained(folder, dtype=torch.float64))
