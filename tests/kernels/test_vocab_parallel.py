"""A vocabulary split over two processes gives what one process gives, in float64."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.divergence import TeacherHead

from ..child import Child, python
from .naive_head import Case, case
from .vocab_parallel_worker import run

WORLD, TOKENS, VOCAB = 2, 9, 203
WORKER = "from tests.kernels.vocab_parallel_worker import main; main()"
ALL = {"entropy": True, "top1": True, "logit_mean": True}
CAPPED = {"divisor": 1.9, "softcap": 1.3, "temperature": 0.7}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def weights(count: int) -> Tensor:
    return torch.linspace(0.5, 2.0, count, dtype=torch.float64)


EVERY: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "class_weights": weights(VOCAB),
    "token_weights": weights(TOKENS),
}
TARGET = case(TOKENS, VOCAB).target
WORDS = torch.rand(TOKENS, VOCAB, generator=torch.Generator().manual_seed(4)).argsort(-1)[:, :5].clone()
WORDS[3, 1:] = -1
TOP_K = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TOP_K = TOP_K.log_softmax(-1).gather(1, WORDS.clamp(min=0))
TEACHER = (
    torch.randn(TOKENS, 20, generator=torch.Generator().manual_seed(6), dtype=torch.float64),
    torch.randn(VOCAB, 20, generator=torch.Generator().manual_seed(7), dtype=torch.float64),
    torch.randn(VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64),
)


def split(function: str, sizes: list[int], **options: Any) -> dict[str, Any]:
    """A job on parts of the vocabulary of these sizes."""
    return {"way": "group", "function": function, "sizes": sizes, "options": options}


def distributed(function: str, placement: Any, **options: Any) -> dict[str, Any]:
    """A job on DTensors."""
    return {"way": "dtensor", "function": function, "placement": placement, "options": options}


TOP: dict[str, Any] = {"words": WORDS, "top_k": TOP_K}
JOBS: dict[str, dict[str, Any]] = {
    "log-probs": split("log_prob", [64, 139], **ALL),
    "log-probs, capped": split("log_prob", [130, 73], **ALL, **CAPPED),
    "a rank with one word": split("log_prob", [1, 202], **ALL),
    "a rank without words": split("log_prob", [203, 0], **ALL),
    "a rank without a target of its own": split("log_prob", [60, 143], **ALL) | {"target": TARGET.clamp(max=59)},
    "nothing but ignored tokens": split("log_prob", [60, 143], **ALL) | {"target": torch.full_like(TARGET, -100)},
    "loss": split("loss", [102, 101]),
    "loss, capped": split("loss", [102, 101], **CAPPED),
    "loss with every option": split("loss", [60, 143], **EVERY),
    "loss with every option, capped": split("loss", [150, 53], **EVERY, **CAPPED),
    "loss per token": split("loss", [102, 101], reduction="none"),
    "loss per token with every option": split("loss", [64, 139], reduction="none", **EVERY, **CAPPED),
    "loss, a rank without words": split("loss", [0, 203], **EVERY),
    "loss, a rank without a target": split("loss", [60, 143], **EVERY) | {"target": TARGET.clamp(max=59)},
    "loss of nothing": split("loss", [60, 143], **EVERY) | {"target": torch.full_like(TARGET, -100)},
    "loss by items": split("loss", [102, 101], num_items=11, **EVERY),
    "selected": split("selected", [102, 101]) | TOP,
    "selected, capped": split("selected", [1, 202], **CAPPED) | TOP,
    "selected, a rank without words": split("selected", [203, 0], **CAPPED) | TOP,
    "DTensor, log-probs": distributed("log_prob", Replicate(), **ALL),
    "DTensor, loss": distributed("loss", Replicate(), z_loss=0.1),
    "DTensor, loss with every option": distributed("loss", Replicate(), **EVERY, **CAPPED),
    "DTensor, split tokens": distributed("loss", Shard(0)),
    "DTensor, selected": distributed("selected", Replicate(), **CAPPED) | TOP,
    "FSDP": {"way": "fsdp"},
    "refused": {"way": "refused"},
}
for kind in ("forward_kl", "reverse_kl", "jsd"):
    for reduction in ("mean", "none"):
        JOBS[f"{kind}, {reduction}"] = split("divergence", [102, 101], kind=kind, reduction=reduction)
    JOBS[f"{kind}, capped"] = split("divergence", [64, 139], kind=kind, **CAPPED)
    JOBS[f"{kind}, a rank without words"] = split("divergence", [203, 0], kind=kind)
    JOBS[f"{kind}, top-k"] = split("divergence", [102, 101], kind=kind, **CAPPED) | TOP
    JOBS[f"{kind}, DTensor"] = distributed("divergence", Shard(0), kind=kind, **CAPPED)
    JOBS[f"{kind}, top-k, DTensor"] = distributed("divergence", Replicate(), kind=kind) | TOP


@pytest.fixture(scope="module")
def inputs() -> Case:
    return case(TOKENS, VOCAB)


def results(folder: Path, names: Iterable[str], inputs: Case, **environment: str) -> list[dict[str, dict[str, Any]]]:
    """Of some jobs on both ranks, from one pair of processes."""
    given = [{**inputs._asdict(), "teacher": TEACHER, **JOBS[name]} for name in names]
    torch.save(given, folder / "inputs.pt")
    given_to = [(rank, WORLD, folder / "store", folder / "inputs.pt", folder / f"{rank}.pt") for rank in range(WORLD)]
    if environment:  # read when bestiary is imported, which a forked process has behind it
        commands = [python(WORKER, *arguments) for arguments in given_to]
        started = [subprocess.Popen(command, env={**os.environ, **environment}) for command in commands]
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    else:
        with Child(WORKER, *given_to[0]) as first, Child(WORKER, *given_to[1]) as second:
            assert [first.wait(timeout=240), second.wait(timeout=240)] == [0, 0]
    outputs = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    return [dict(zip(names, output, strict=True)) for output in outputs]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, inputs: Case) -> list[dict[str, dict[str, Any]]]:
    return results(tmp_path_factory.mktemp("ranks"), JOBS, inputs)


IN_TRITON = (
    "log-probs, capped",
    "a rank without words",
    "a rank without a target of its own",
    "loss with every option",
    "loss with every option, capped",
    "loss, a rank without words",
    "loss per token with every option",
)


@pytest.fixture(scope="module")
def triton_ranks(tmp_path_factory: pytest.TempPathFactory, inputs: Case) -> list[dict[str, dict[str, Any]]]:
    return results(tmp_path_factory.mktemp("triton"), IN_TRITON, inputs, TRITON_INTERPRET="1")


def alone(job: dict[str, Any], inputs: Case) -> dict[str, Any]:
    """The same in this process, on the whole vocabulary."""
    hidden, weight, _, bias = inputs.leaves()
    found = run({"target": inputs.target, **job}, hidden, weight, bias, TeacherHead(*TEACHER))
    return {**found, "of_hidden": hidden.grad, "of_weight": weight.grad, "of_bias": bias.grad}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TRITON)
def test_two_ranks_in_triton_are_one_process(
    name: str, triton_ranks: list[dict[str, dict[str, Any]]], inputs: Case
) -> None:
    """In its interpreter, in fp32, against float64: 1e-6 of the largest value."""
    exact = Case(*(x.float().double() if x.is_floating_point() else x for x in inputs))
    first, second = (rank[name] for rank in triton_ranks)
    for key, whole in alone(JOBS[name], exact).items():
        got = torch.cat([first[key], second[key]]) if key in ("of_weight", "of_bias") else first[key]
        if not got.is_floating_point():
            assert torch.equal(got, whole), key
            continue
        assert got.dtype == torch.float32
        assert (got.double() - whole).abs().max() <= 1e-6 * whole.abs().max(), key


@pytest.mark.slow
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
        ("teacher in one piece", "student and teacher hold"),
        ("teacher in columns", "weight is placed"),
    ],
)
@pytest.mark.slow
def test_what_cannot_mean_one_thing_is_refused(call: str, named: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    """FSDP's shards and a split vocabulary look alike: nobody guesses."""
    for rank in ranks:
        assert rank["refused"][call].startswith("InvalidArgument")
        assert named in rank["refused"][call]
