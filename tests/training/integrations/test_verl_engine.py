"""verl's FSDP engine trains our model on a CPU: real steps, its own losses and checkpoints, weights for a rollout."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.utils.losses import sft_loss

from bestiary.kernels.dispatch import record
from bestiary.models import AutoDecoder
from bestiary.models.sharding import whole
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.example import Steps, targets
from bestiary.training.integrations.verl_engine import BestiaryEngine, engine, main, packed, train
from bestiary.training.processes import processes
from bestiary.verify.reference import promoted

from .sides import CLOSE, checkpoint, first_gradients, moved, reloads, rows, same, theirs, written


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("verl") / "base")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with processes(60):
        yield


def made(src: Path, lora: bool = False) -> Any:
    found = engine(str(src), lora=3 if lora else None, dtype="fp64", steps=8)
    assert isinstance(found, BestiaryEngine)
    moved(found.module)
    return found


def steps(total: int = 3, accumulate: int = 2) -> Steps:
    return Steps(rows(), 8 // accumulate, accumulate, total)


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_has_transformers_loss_and_gradients(lora: bool, src: Path, tmp_path: Path) -> None:
    """Of verl's SFT loss, for 1, 2 and 4 micro-batches."""
    first = None
    for accumulate in (1, 2, 4):
        mine = made(src, lora)
        adapter = mine.module.save_pretrained(tmp_path / f"start-{accumulate}") if lora else None
        batches = steps(1, accumulate)[0]
        with mine.train_mode(), first_gradients(mine.module) as found:
            out = mine.train_batch(packed(batches), partial(sft_loss, None))
        hf, items = theirs(src, adapter), targets(batches)
        with promoted(), first_gradients(hf) as expected:
            loss = torch.stack([hf(**batch, num_items_in_batch=items).loss for batch in batches]).sum()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
            torch.optim.SGD(hf.parameters()).step()
        assert sum(out["loss"]) == pytest.approx(float(loss.detach()), rel=1e-9)
        assert out["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        same(found, expected)
        same(found, first or found)
        first = found


def test_the_packed_forward_gives_log_probs_and_entropy(src: Path) -> None:
    """verl's fused contract, at a temperature: (1, tokens) of each row of the batch as if it stood alone."""
    mine, data = made(src), packed(steps(1, 1)[0])
    tensordict_utils.assign_non_tensor(data, temperature=0.7, calculate_entropy=True)
    with mine.eval_mode():
        out = mine.infer_batch(data)["model_output"]
    hf = theirs(src)
    for ids, log_probs, entropy in zip(
        data["input_ids"].unbind(), out["log_probs"].unbind(), out["entropy"].unbind(), strict=True
    ):
        with torch.no_grad(), promoted():
            expected = torch.distributions.Categorical(logits=hf(ids[None]).logits[0] / 0.7)
        torch.testing.assert_close(entropy, expected.entropy(), **CLOSE)
        torch.testing.assert_close(log_probs[:-1], expected.logits[:-1].gather(1, ids[1:, None])[:, 0], **CLOSE)


def test_a_short_row_is_scored_with_what_trains_it(src: Path) -> None:
    """Old log-probabilities and the reference's: otherwise the first ratio in bfloat16 is not 1."""
    mine, data = made(src), packed([{name: row[:1, :7] for name, row in steps(1, 1)[0][0].items()}])
    with mine.train_mode(), record() as trained:
        mine.train_batch(data, partial(sft_loss, None))
    with mine.eval_mode(), record() as scored:
        mine.infer_batch(data)
    add_otherwise = ("attention", "linear")  # what else differs without gradients only keeps less
    assert {one for one in scored if one[0] in add_otherwise} == {one for one in trained if one[0] in add_otherwise}


@pytest.mark.parametrize("lora", [False, True])
def test_a_rollout_engine_gets_hub_names_and_merged_weights(lora: bool, src: Path, tmp_path: Path) -> None:
    """`get_per_tensor_param` is what the export holds, and changes with a step."""
    mine = made(src, lora)
    before = exported(mine)
    train(mine, steps(1), tmp_path / "run")
    after = exported(mine)
    expected = theirs(mine.module.save_pretrained(tmp_path / "hf", **({"merge": True} if lora else {})))
    state = {name: value for name, value in expected.state_dict().items() if name != "lm_head.weight"}
    same(after, state)
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
    if lora:
        with mine.disable_adapter():
            assert torch.equal(logits(mine.module), logits(AutoDecoder.from_pretrained(src)))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_resumes_as_if_never_stopped(lora: bool, src: Path, tmp_path: Path) -> None:
    """From verl's own checkpoint, bit for bit."""
    through, early, late = (made(src, lora) for _ in range(3))
    losses = train(through, steps(5), tmp_path / "whole")
    parts = train(early, steps(2), tmp_path / "parts")
    assert parts + train(late, steps(5), tmp_path / "parts", resume=True) == losses
    for expected, found in zip(through.module.parameters(), late.module.parameters(), strict=True):
        assert torch.equal(whole(found), whole(expected))


def test_the_command_exports(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves loads in transformers."""
    out = tmp_path / "out"
    main([str(src), str(written(tmp_path)), "--out", str(out), "--steps", "2", "--accumulate", "2"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("loss ")
    reloads(out / "hf", AutoDecoder.from_pretrained(out / "hf", dtype=torch.float64))


def test_what_a_rollout_could_not_read_is_refused(src: Path) -> None:
    """Shards by our names, and merged weights to an engine that waits for adapters."""
    mine = made(src, lora=True)
    for send in (mine.prime_delta_snapshots, mine.get_per_tensor_param_delta_shard):
        with pytest.raises(InvalidRun, match="naive or nccl"):
            send()
    mine.model_config.lora["merge"] = False
    with pytest.raises(InvalidRun, match=r"model\.lora\.merge=True"):
        mine.get_per_tensor_param()


def exported(mine: Any) -> dict[str, Tensor]:
    stream, adapter = mine.get_per_tensor_param()
    assert adapter is None
    return {name: tensor.clone() for name, tensor in stream}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([rows(1)[0]["input_ids"]])).logits
    return found
