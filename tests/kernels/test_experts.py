"""Experts: the plain loop is the formula; sorted products and grouped matmuls are the loop."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels import experts_sorted
from bestiary.kernels.dispatch import force, record
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.experts import ExpertLinear, experts_mlp

from .conftest import poisoned

EXPERTS, HIDDEN, WIDTH, RANK, SCALING = 5, 16, 24, 8, 0.7
CLAMP = (1.5, 0.6)
VARIANTS = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "tanh gelu": {"activation": "gelu_pytorch_tanh"},
    "bias": {"bias": True},
    "clamp and bias": {"bias": True, "clamp": CLAMP},
    "lora": {"lora": True},
    "lora, clamp and bias": {"bias": True, "clamp": CLAMP, "lora": True},
    "squared relu": {"activation": "relu2"},
}
Inputs = tuple[Tensor, Tensor, Tensor]


def projection(
    generator: torch.Generator, out: int, into: int, dtype: torch.dtype, bias: bool, lora: bool
) -> ExpertLinear:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    linear = ExpertLinear(draw(EXPERTS, out, into) * into**-0.5, draw(EXPERTS, out) if bias else None)
    if not lora:
        return linear
    return replace(
        linear, lora_A=draw(EXPERTS, RANK, into) * into**-0.5, lora_B=draw(EXPERTS, out, RANK), scaling=SCALING
    )


def setting(
    dtype: torch.dtype, tokens: int = 11, top_k: int = 2, bias: bool = False, lora: bool = False, used: int = EXPERTS
) -> tuple[Inputs, ExpertLinear, ExpertLinear]:
    """Tokens with `top_k` different experts each, out of the first `used`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    indices = torch.rand(tokens, used, generator=generator).argsort(-1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype)
    gate_up = projection(generator, 2 * WIDTH, HIDDEN, dtype, bias, lora)
    return (x, indices, weights), gate_up, projection(generator, HIDDEN, WIDTH, dtype, bias, lora)


def one_token(x: Tensor, expert: int, linear: ExpertLinear) -> Tensor:
    y = linear.weight[expert] @ x
    if linear.bias is not None:
        y = y + linear.bias[expert]
    if linear.lora_A is not None and linear.lora_B is not None:
        y = y + linear.scaling * linear.lora_B[expert] @ (linear.lora_A[expert] @ x)
    return y


def oracle(
    inputs: Inputs,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: str = "silu",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """The formula, a token and an expert at a time."""
    x, indices, weights = inputs
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda g: g / (1 + (-g).exp()),
        "gelu": lambda g: g * 0.5 * (1 + torch.erf(g / 2**0.5)),
        "relu2": lambda g: g.clamp(min=0) ** 2,
        "gelu_pytorch_tanh": lambda g: 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))),
    }
    out = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for k in range(indices.shape[1]):
            expert = int(indices[n, k])
            both = one_token(x[n], expert, gate_up)
            gate, up = both[:WIDTH], both[WIDTH:]
            if clamp is None:
                inner = functions[activation](gate) * up
            else:
                alpha, limit = clamp
                gate = torch.minimum(gate, torch.tensor(limit, dtype=gate.dtype))
                inner = gate / (1 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1)
            out[n] += weights[n, k] * one_token(inner, expert, down)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@given(tokens=st.integers(0, 9), top_k=st.integers(1, EXPERTS))
def test_loop_equals_one_token_at_a_time(variant: str, tokens: int, top_k: int) -> None:
    """In float64, every activation, biases and adapters."""
    options = dict(VARIANTS[variant])
    kind = {"bias": options.pop("bias", False), "lora": options.pop("lora", False)}
    inputs, gate_up, down = setting(torch.float64, tokens, top_k, **kind)
    ours = experts_mlp(*inputs, gate_up, down, **options)
    torch.testing.assert_close(ours, oracle(inputs, gate_up, down, **options), rtol=1e-13, atol=1e-13)


def outputs_and_gradients(
    dtype: torch.dtype, rounded_to: torch.dtype, implementation: str, variant: str
) -> list[Tensor]:
    """Output, then the gradient of every leaf, in float64; inputs rounded to `rounded_to` first."""
    options = dict(VARIANTS[variant])
    kind = {"bias": options.pop("bias", False), "lora": options.pop("lora", False)}
    (x, indices, weights), gate_up, down = setting(rounded_to, tokens=40, used=3, **kind)
    x, weights = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
    leaves, linears = [x, weights], []
    for linear in (gate_up, down):
        tensors = {n: t.to(dtype).requires_grad_() for n, t in vars(linear).items() if isinstance(t, Tensor)}
        leaves += tensors.values()
        linears.append(replace(linear, **tensors))
    with force(experts=implementation):
        out = experts_mlp(x, indices, weights, *linears, **options)
    assert out.dtype == dtype
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype))
    assert linears[0].weight.grad[3:].abs().max() == 0, "experts that no token chose"
    return [out.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sorted", "grouped"])
def test_tokens_in_order_are_as_exact_as_the_loop(variant: str, dtype: torch.dtype, implementation: str) -> None:
    """Against float64 on the same rounded inputs: twice the loop's error forward, three times backward."""
    exact = outputs_and_gradients(torch.float64, dtype, "loop", variant)
    with poisoned():
        loop, ours = (outputs_and_gradients(dtype, dtype, name, variant) for name in ("loop", implementation))
    for index, (reference, a, b) in enumerate(zip(exact, loop, ours, strict=True)):
        assert (a - reference).norm() <= 8 * torch.finfo(dtype).eps * reference.norm()
        floor = 8 * torch.finfo(torch.float32).eps * reference.norm()
        assert (b - reference).norm() <= max((3 if index else 2) * (a - reference).norm(), floor)


@pytest.mark.parametrize("implementation", ["loop", "sorted"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_function(variant: str, implementation: str) -> None:
    """gradcheck in float64, with respect to everything that can train."""
    options = dict(VARIANTS[variant])
    kind = {"bias": options.pop("bias", False), "lora": options.pop("lora", False)}
    (x, indices, weights), gate_up, down = setting(torch.float64, 6, **kind)
    names = [name for name in ("weight", "bias", "lora_A", "lora_B") if getattr(gate_up, name) is not None]

    def run(x: Tensor, weights: Tensor, *tensors: Tensor) -> Tensor:
        half = len(names)
        first = replace(gate_up, **dict(zip(names, tensors[:half], strict=True)))
        second = replace(down, **dict(zip(names, tensors[half:], strict=True)))
        with force(experts=implementation):
            return experts_mlp(x, indices, weights, first, second, **options)

    leaves = [x, weights, *(getattr(linear, name) for linear in (gate_up, down) for name in names)]
    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_give_no_output_and_keep_the_graph(dtype: torch.dtype) -> None:
    """A rank without tokens still takes part in the backward pass."""
    (x, indices, weights), gate_up, down = setting(dtype, tokens=0)
    gate_up.weight.requires_grad_()
    out = experts_mlp(x, indices, weights, gate_up, down)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert torch.equal(gate_up.weight.grad, torch.zeros_like(gate_up.weight))


def test_wide_routing_weights_multiply_before_the_cast() -> None:
    """fp32 weights on a bf16 model: the product is rounded once."""
    (x, indices, _), gate_up, down = setting(torch.bfloat16, tokens=1, top_k=1)
    third = torch.full((1, 1), 1 / 3)
    for implementation in ("loop", "sorted", "grouped"):
        with force(experts=implementation):
            whole = experts_mlp(x, indices, torch.ones_like(third), gate_up, down)
            part = experts_mlp(x, indices, third, gate_up, down)
        assert torch.equal(part, (whole.float() / 3).bfloat16())


def test_each_runs_where_it_can_and_says_why_where_it_cannot() -> None:
    """Rows stay in order by themselves, the loop is what float64 and weights of another dtype get."""

    def reason(implementation: str, inputs: Inputs, gate_up: ExpertLinear, down: ExpertLinear) -> str:
        with force(experts=implementation), pytest.raises(UnsupportedDispatch) as caught:
            experts_mlp(*inputs, gate_up, down)
        assert caught.value.remedy
        return str(caught.value)

    inputs, gate_up, down = setting(torch.float32)
    for case, expected in ((setting(torch.float32), "sorted"), (setting(torch.float64), "loop")):
        with record() as ran:
            experts_mlp(*case[0], *case[1:])
        assert ("experts", expected) in ran
    assert "no torch.float64" in reason("grouped", *setting(torch.float64))
    assert "no tokens" in reason("grouped", *setting(torch.float32, tokens=0))
    ragged = replace(gate_up, lora_A=torch.randn(EXPERTS, 3, HIDDEN), lora_B=torch.randn(EXPERTS, 2 * WIDTH, 3))
    assert "multiples of 16 bytes" in reason("grouped", inputs, ragged, down)
    narrow = replace(gate_up, weight=gate_up.weight.bfloat16())
    for implementation in ("sorted", "grouped"):
        assert "weights are torch.bfloat16" in reason(implementation, inputs, narrow, down)
    with force(experts="grouppe"), pytest.raises(UnsupportedDispatch, match="one of sorted, grouped, loop"):
        experts_mlp(*inputs, gate_up, down)


@pytest.mark.parametrize("implementation", ["sorted", "grouped"])
def test_choices_of_experts_elsewhere_add_nothing(implementation: str) -> None:
    """Indices from E on: rows behind the last expert are never read, whatever the memory holds."""
    results = []
    for dtype, name in ((torch.float64, "loop"), (torch.float32, implementation)):
        (x, indices, weights), gate_up, down = setting(torch.float32, tokens=12, bias=True, lora=True)
        indices = torch.where(indices == 1, EXPERTS + 3, indices)
        leaves = [x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()]
        linears = [ExpertLinear(*(t.to(dtype).requires_grad_() for t in one.tensors)) for one in (gate_up, down)]
        with force(experts=name), poisoned():
            out = experts_mlp(leaves[0], indices, leaves[1], *linears, clamp=CLAMP)
            out.sum().backward()  # an expanded gradient
        leaves += [tensor for linear in linears for tensor in linear.tensors]
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert (results[0][2][indices >= EXPERTS] == 0).all()
    for exact, ours in zip(*results, strict=True):
        assert (ours.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_frozen_experts_get_no_gradient_and_no_room_for_one() -> None:
    """Adapters on frozen experts: the gradients that exist are theirs and the input's."""
    (x, indices, weights), gate_up, down = setting(torch.float32, bias=True, lora=True)
    trained = [x, gate_up.lora_A, gate_up.lora_B, down.lora_A, down.lora_B]
    sizes: list[int] = []
    for tensor in trained:
        tensor.requires_grad_()
    with force(experts="sorted"):
        out = experts_mlp(x, indices, weights, gate_up, down)
    out.grad_fn.register_hook(lambda gradients, _: sizes.extend(g.numel() for g in gradients if g is not None))
    out.sum().backward()
    assert sorted(sizes) == sorted(tensor.numel() for tensor in trained)


@pytest.mark.parametrize("variant", ["bias", "lora, clamp and bias"])
def test_blocks_of_rows_add_up(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of more rows than a block."""
    whole = outputs_and_gradients(torch.float64, torch.float64, "sorted", variant)
    monkeypatch.setattr(experts_sorted, "BLOCK", 4)
    for a, b in zip(whole, outputs_and_gradients(torch.float64, torch.float64, "sorted", variant), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_forced_choices_nest() -> None:
    """The inner block wins, the outer one holds again behind it, an error included."""
    inputs, gate_up, down = setting(torch.float64)
    with force(experts="loop"):
        with pytest.raises(UnsupportedDispatch), force(experts="grouped"):
            experts_mlp(*inputs, gate_up, down)
        experts_mlp(*inputs, gate_up, down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(0, 1, 7, 63, 65), (65, 0, 63, 1, 7), (7, 65, 1, 63, 0)])
def test_any_number_of_tokens_an_expert_is_exact(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """None, one, odd, and one below and above 64, the empty expert first, between and last; gradients of all leaves."""
    expert = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    indices = expert[torch.randperm(len(expert), generator=torch.Generator().manual_seed(1))][:, None]
    (x, _, weights), *linears = setting(dtype, tokens=len(expert), top_k=1, bias=True, lora=True)
    found = []
    for implementation, wide in (("grouped", dtype), ("loop", torch.float64)):
        leaves = [t.to(wide, copy=True).requires_grad_() for t in (x, weights)]
        copies = []
        for linear in linears:
            given_tensors = {n: t for n, t in vars(linear).items() if isinstance(t, Tensor)}
            tensors = {n: t.to(wide, copy=True).requires_grad_() for n, t in given_tensors.items()}
            leaves += tensors.values()
            copies.append(replace(linear, **tensors))
        with force(experts=implementation):
            out = experts_mlp(leaves[0], indices, leaves[1], *copies)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype).to(wide))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for leaf in leaves[2:]:
            assert leaf.grad.shape == leaf.shape
            assert not leaf.grad[counts.index(0)].any()
            assert all(leaf.grad[e].any() for e in range(EXPERTS) if counts[e])
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= 32 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("layout", ["every other column", "rows of an odd width", "an odd offset", "transposed"])
def test_weights_of_any_strides(layout: str) -> None:
    """torch's grouped matmul refuses numbers that are apart and rows that are not at multiples of 16 bytes."""
    inputs, gate_up, down = setting(torch.float32, lora=True)

    def strided(tensor: Tensor) -> Tensor:
        if layout == "every other column":
            return tensor.repeat_interleave(2, -1)[..., ::2]
        if layout == "rows of an odd width":
            return torch.cat((tensor, tensor[..., :1]), -1)[..., :-1]
        if layout == "an odd offset":
            return torch.cat((torch.zeros(1), tensor.flatten()))[1:].view_as(tensor)
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    moved = [
        replace(linear, **{n: strided(t) for n, t in vars(linear).items() if isinstance(t, Tensor) and t.dim() == 3})
        for linear in (gate_up, down)
    ]
    expected = experts_mlp(*inputs, gate_up, down)
    torch.testing.assert_close(experts_mlp(*inputs, *moved), expected)
    with force(experts="grouped"):
        if layout == "transposed":  # columns of adjacent numbers are as good
            torch.testing.assert_close(experts_mlp(*inputs, *moved), expected)
        else:
            with pytest.raises(UnsupportedDispatch, match="off the borders of 16 bytes"):
                experts_mlp(*inputs, *moved)
