"""A model over two processes has the loss and the gradients of one process, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ..child import Child
from .parallel_rank import BOUND, CASES, Case, gradients, run, scored, step, stepped, units

pytestmark = pytest.mark.slow

OTHER = "from tests.training.parallel_rank import main; main(sys.argv[1])"
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0, this process, has after each step; rank 1 is a process of its own."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    with Child(OTHER, store) as other:
        results = run(0, store)
        code, errors = other.ended()
    assert code == 0, errors
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_step_as_one(case: Case, found: dict[str, dict[str, Any]]) -> None:
    """Loss, every gradient and the norm of all, before and after clipping."""
    model, ours = case.model(eager=True), found[str(case)]
    expected = step(model, slice(None), 1 / units())
    torch.testing.assert_close(ours["loss"], expected["loss"], **EXACT)
    same(ours["gradients"], gradients(model))
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], BOUND)
    assert norm > BOUND
    torch.testing.assert_close(ours["norm"], norm, **EXACT)
    same(ours["clipped"], gradients(model))
    if case.mesh == "tensor":  # logits, and gradients through each token's log-probability
        model.zero_grad()
        torch.testing.assert_close(ours["scored"], scored(model, slice(None)), **EXACT)
        same(ours["of_scored"], gradients(model))


@pytest.mark.parametrize("mesh", ["sharded", "tensor"])
def test_states_of_eight_bits_step_parts_as_wholes(mesh: str, found: dict[str, dict[str, Any]]) -> None:
    """The first step of AdamW, whose states are rounded behind it; torchao computes it in fp32."""
    ours, expected = found["stepped"][mesh], stepped(None, "adamw")
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_states_of_eight_bits_are_saved_where_a_process_holds_none(found: dict[str, dict[str, Any]]) -> None:
    """Each process's own, under its own name."""
    names = found["uneven"]["names"].split()
    assert {name for name in names if "exp_avg." in name} == {"0.exp_avg.codes.0-of-2", "0.exp_avg.scale.0-of-2"}


REFUSED = {
    "a mesh of 4 on 2 processes": "shard = 4 does not fill 2 process(es)",
    "a tensor size that is no divisor": "tensor = 3",
    "3 heads": "attention.num_heads = 3 cannot be given out evenly to parallel.tensor = 2",
    "an odd vocabulary": "vocab_size = 203",
    "an odd MLP": "model.layers.0.mlp.gate_proj.weight has a dimension of 77",
    "9 experts": "moe.num_experts = 9",
    "experts of a dense model": "parallel.expert = 2 for a model without experts",
    "twice": "that is spread already",
    "not ours": "parallelize() of a Linear",
    "a module without a style": "no style is known for model.layers.1.extra",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_spread_is_refused(what: str, found: dict[str, dict[str, Any]]) -> None:
    """The field, its value and what to do."""
    message = found["refused"][what]
    assert REFUSED[what] in message
    assert "remedy" in message


def same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All of them, by name."""
    assert ours.keys() == expected.keys()
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
