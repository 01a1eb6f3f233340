"""A vocabulary split over two processes gives what one process gives, in float64."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.log_prob import linear_log_prob

from .naive_head import Case, case

WORLD, TOKENS, VOCAB = 2, 9, 203
ALL = {"entropy": True, "top1": True, "logit_mean": True}
CAPPED = {"divisor": 1.9, "softcap": 1.3, "temperature": 0.7}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def weights(count: int) -> Tensor:
    return torch.linspace(0.5, 2.0, count, dtype=torch.float64)


JOBS: dict[str, dict[str, Any]] = {
    "log-probs": {"way": "group", "function": "log_prob", "options": ALL, "sizes": [64, 139]},
    "log-probs, capped": {"way": "group", "function": "log_prob", "options": ALL | CAPPED, "sizes": [130, 73]},
    "a rank with one word": {"way": "group", "function": "log_prob", "options": ALL, "sizes": [1, 202]},
    "a rank without words": {"way": "group", "function": "log_prob", "options": ALL, "sizes": [203, 0]},
    "loss": {"way": "group", "function": "loss", "options": {}, "sizes": [102, 101]},
    "loss, capped": {"way": "group", "function": "loss", "options": CAPPED, "sizes": [102, 101]},
    "loss with every option": {
        "way": "group",
        "function": "loss",
        "options": {
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "class_weights": weights(VOCAB),
            "token_weights": weights(TOKENS),
        },
        "sizes": [60, 143],
    },
    "loss per token": {"way": "group", "function": "loss", "options": {"reduction": "none"}, "sizes": [102, 101]},
    "DTensor, log-probs": {"way": "dtensor", "function": "log_prob", "options": ALL, "placement": Replicate()},
    "DTensor, loss": {"way": "dtensor", "function": "loss", "options": {"z_loss": 0.1}, "placement": Replicate()},
    "DTensor, split tokens": {"way": "dtensor", "function": "loss", "options": {}, "placement": Shard(0)},
    "FSDP": {"way": "fsdp"},
    "refused": {"way": "refused"},
}


@pytest.fixture(scope="module")
def inputs() -> Case:
    return case(TOKENS, VOCAB)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, inputs: Case) -> list[dict[str, dict[str, Any]]]:
    """The results of every job on both ranks, from one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save([{**inputs._asdict(), **job} for job in JOBS.values()], folder / "inputs.pt")
    worker = Path(__file__).with_name("vocab_parallel_worker.py")
    common = [str(WORLD), str(folder / "store"), str(folder / "inputs.pt")]
    processes = [
        subprocess.Popen([sys.executable, str(worker), str(rank), *common, str(folder / f"{rank}.pt")])
        for rank in range(WORLD)
    ]
    codes = [process.wait(timeout=240) for process in processes]
    assert codes == [0, 0]
    outputs = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    return [dict(zip(JOBS, output, strict=True)) for output in outputs]


def alone(job: dict[str, Any], inputs: Case) -> dict[str, Tensor]:
    """The same in this process, on the whole vocabulary."""
    hidden, weight, target, bias = inputs.leaves()
    if job["function"] == "log_prob":
        out = linear_log_prob(hidden, weight, target, bias=bias, **job["options"])
        found = {name: column.detach() for name, column in out._asdict().items() if column is not None}
        mix = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
        columns = (out.log_prob, out.lse, out.entropy, out.logit_mean)
        sum(mix @ column for column in columns if column is not None).backward()
    else:
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, **job["options"])
        found = {"loss": loss.detach()}
        (loss.sum() * 0.7).backward()
    return {**found, "of_hidden": hidden.grad, "of_weight": weight.grad, "of_bias": bias.grad}


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "function" in job])
def test_two_ranks_are_one_process(name: str, ranks: list[dict[str, dict[str, Any]]], inputs: Case) -> None:
    """Loss, log-probabilities and gradients; values that both ranks have are the same bits on both."""
    expected, first, second = alone(JOBS[name], inputs), ranks[0][name], ranks[1][name]
    assert set(first) == set(second) == set(expected)
    for key, whole in expected.items():
        if key in ("of_weight", "of_bias") and "sizes" in JOBS[name]:
            got = torch.cat([first[key], second[key]])
        else:
            got = first[key]
            assert torch.equal(first[key], second[key]), f"{key} differs between ranks"
        torch.testing.assert_close(got, whole, **EXACT, msg=lambda text, key=key: f"{key}: {text}")


def test_fsdp_gathers_the_weight_and_each_rank_has_its_own_tokens(
    ranks: list[dict[str, dict[str, Any]]], inputs: Case
) -> None:
    """The losses of both add up to that of all tokens, and so do the gradients."""
    weight = inputs.weight.clone().requires_grad_()
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.target)
    loss.backward()
    for rank in ranks:
        torch.testing.assert_close(rank["FSDP"]["loss"], loss.detach(), **EXACT)
        torch.testing.assert_close(rank["FSDP"]["of_weight"], weight.grad, **EXACT)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("plain hidden states", "weight is split over ranks and hidden is not a DTensor"),
        ("split columns", "weight is placed"),
        ("plain bias", "with a bias"),
        ("split tokens", "hidden is placed"),
    ],
)
def test_what_cannot_mean_one_thing_is_refused(call: str, named: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    """FSDP's shards and a split vocabulary look alike: nobody guesses."""
    for rank in ranks:
        assert rank["refused"][call].startswith("InvalidArgument")
        assert named in rank["refused"][call]
