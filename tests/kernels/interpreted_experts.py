"""Triton's rows of routed experts in the interpreter (fp32) against the plain loop and formulas in float64.

Run by test_triton_interpreter.py in a process where TRITON_INTERPRET=1.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bestiary.kernels import triton_experts
from bestiary.kernels.dispatch import force, record
from bestiary.kernels.expert_linear import ExpertLinear
from bestiary.kernels.experts import experts_mlp
from bestiary.kernels.experts_sorted import Routing
from bestiary.kernels.triton_experts import combine_rows, gather_rows

TOLERANCE = 1e-6  # of the largest value
EXPERTS, HIDDEN, RANK = 5, 20, 4
OPTIONS = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "tanh gelu": {"activation": "gelu_pytorch_tanh"},
    "relu2, which stays in torch": {"activation": "relu2"},
    "clamped": {"clamp": (1.7, 0.6)},
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choices(tokens: int, top_k: int, experts: int = EXPERTS) -> Tensor:
    """(N, K) different experts a token."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :top_k]


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    error = float((ours.detach().double() - exact.detach().double()).abs().max())
    assert error <= TOLERANCE * float(exact.abs().max()), error


def linear(out: int, into: int, seed: int) -> ExpertLinear:
    return ExpertLinear(
        normal(EXPERTS, out, into, seed=seed) * into**-0.5,
        normal(EXPERTS, out, seed=seed + 1),
        normal(EXPERTS, RANK, into, seed=seed + 2) * into**-0.5,
        normal(EXPERTS, out, RANK, seed=seed + 3),
        0.5,
    )


@pytest.mark.parametrize(
    ("name", "block", "experts"),
    [
        *(("silu", block, experts) for block in (1024, 16) for experts in (EXPERTS, EXPERTS + 2)),
        *((name, 16, EXPERTS + 2) for name in OPTIONS if name != "silu"),
        ("clamped", 1024, EXPERTS),
    ],
)
def test_experts(name: str, block: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient, one block of columns and two; with choices of experts that are elsewhere."""
    monkeypatch.setattr(triton_experts, "BLOCK", block)
    width = 24
    indices = choices(13, 3, experts)
    leaves = [normal(13, HIDDEN, seed=0), normal(13, 3, seed=1).abs()]
    linears = linear(2 * width, HIDDEN, 10), linear(HIDDEN, width, 20)
    pull, results = normal(13, HIDDEN, seed=9), []
    for dtype, implementation in ((torch.float64, "loop"), (torch.float32, "grouped")):
        tensors = [t.to(dtype).requires_grad_() for t in leaves]
        own = [[t.to(dtype).requires_grad_() for t in one.tensors if t is not None] for one in linears]
        gate_up, down = (ExpertLinear(*given, scaling=0.5) for given in own)
        with force(experts=implementation), record() as ran:
            out = experts_mlp(tensors[0], indices, tensors[1], gate_up, down, **OPTIONS[name])
            results.append([out, *torch.autograd.grad(out, [*tensors, *own[0], *own[1]], pull.to(dtype))])
    assert ("expert_rows", "triton") in ran
    for exact, ours in zip(*results, strict=True):
        assert_near(ours, exact)


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1), (7, 4, 129), (3, 2, 1025), (0, 2, 8)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_go_out_and_come_back(tokens: int, top_k: int, width: int, weighted: bool) -> None:
    """A gather from strided rows, and the sum of what came; rows of no expert count as 0 even where they are NaN."""
    indices = choices(tokens, top_k, EXPERTS + 1)
    routing = Routing.of(indices, EXPERTS)
    x = torch.cat((normal(tokens, width, seed=0), torch.full((tokens, 1), torch.nan)), -1)[:, :width]
    rows = gather_rows(x, routing.order, top_k)
    assert torch.equal(rows, x[routing.order // top_k])
    rows[int(routing.ends[-1]) :] = torch.nan
    weights = normal(tokens, top_k, seed=1)
    share = (weights if weighted else torch.ones_like(weights)).masked_fill(indices >= EXPERTS, 0)
    out = combine_rows(rows, weights if weighted else None, routing.order.argsort(), routing.ends, top_k)
    expected = share.sum(1, keepdim=True).double() * x.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_experts_have_no_gradient() -> None:
    """Adapters alone train."""
    gate_up, down = linear(48, HIDDEN, 10), linear(HIDDEN, 24, 20)
    down = replace(down, lora_A=down.lora_A.requires_grad_(), lora_B=down.lora_B.requires_grad_())
    with force(experts="grouped"):
        experts_mlp(normal(6, HIDDEN, seed=0), choices(6, 2), normal(6, 2, seed=1), gate_up, down).sum().backward()
    assert down.weight.grad is None
    assert down.lora_A.grad.abs().sum() > 0
    assert down.lora_B.grad.abs().sum() > 0
