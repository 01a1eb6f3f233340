"""Factors travel as their product does: through any rule, adapting the hub tensors is adapting the parameter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bestiary.bridges import get_bridge, registered_bridges
from bestiary.bridges.errors import InvalidRules
from bestiary.bridges.low_rank import (
    Factors,
    factors_from_hub,
    factors_to_hub,
    hub_names,
    is_transposed,
    tensor_in_module,
)
from bestiary.bridges.rules import Expression, Hub, Rows, concat, deinterleave, mxfp4, stack, transpose

E, OUT, IN, R = 3, 12, 18, 2


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(factors: Factors) -> Tensor:
    return factors.B @ factors.A


def assembled(expression: Expression, hub: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The parameter that the rule makes of hub tensors."""
    parameter = torch.full(shape, torch.nan, dtype=torch.float64)
    for piece in expression.pieces(shape, ()):
        piece.read(hub[piece.hub.name], parameter)
    return parameter


# An op on each axis at most once, with transposes anywhere between.
OPS = st.lists(st.sampled_from(["t", "rows", "columns"]), max_size=5).filter(
    lambda ops: all(ops.count(op) <= 1 for op in ("rows", "columns"))
)


@settings(max_examples=80)
@given(ops=OPS, parts=st.sampled_from([2, 3]), experts=st.booleans())
def test_rearranging_the_factors_is_rearranging_the_product(ops: list[str], parts: int, experts: bool) -> None:
    expression: Expression = Hub(pattern="w")
    turned = False
    for op in ops:
        if op == "t":
            expression, turned = transpose(expression), not turned
        else:  # rows and columns of the stored tensor, wherever the transposes below have put them
            expression = deinterleave(expression, axis=int(experts) + ((op == "columns") != turned), parts=parts)
    leading, shape = ((E,), (E, OUT, IN)) if experts else ((), (OUT, IN))
    hub = Factors(drawn(*leading, R, IN, seed=0), drawn(*leading, OUT, R, seed=1))
    stored = product(hub).mT if is_transposed(expression) else product(hub)
    ours = factors_from_hub(expression, (), {"w": hub}.get, experts=E, ndim=len(shape))
    assert ours is not None
    assert torch.allclose(product(ours), assembled(expression, {"w": stored}, shape), rtol=0, atol=1e-12)
    back = factors_to_hub(expression, ours)
    assert torch.equal(back.A, hub.A)
    assert torch.equal(back.B, hub.B)


@pytest.mark.parametrize("adapted", [("a", "b"), ("a",), ("b",)], ids="+".join)
def test_ranks_add_up_where_weights_are_joined(adapted: tuple[str, ...]) -> None:
    expression = stack(concat("x.*.a", "x.*.b"))
    ranks = {"a": 2, "b": 3}
    hub, stored = {}, {}
    for e in range(E):
        for number, kind in enumerate("ab"):
            low, high = drawn(ranks[kind], IN, seed=10 * e + number), drawn(OUT // 2, ranks[kind], seed=50 + e)
            stored[f"x.{e}.{kind}"] = torch.zeros(OUT // 2, IN, dtype=torch.float64)
            if kind in adapted:
                hub[f"x.{e}.{kind}"], stored[f"x.{e}.{kind}"] = Factors(low, high), high @ low
    ours = factors_from_hub(expression, (), hub.get, experts=E, ndim=3)
    assert ours is not None
    assert ours.rank == sum(ranks[kind] for kind in adapted)
    assert torch.allclose(product(ours), assembled(expression, stored, (E, OUT, IN)), rtol=0, atol=1e-12)


def test_names_come_in_the_order_of_integers() -> None:
    names = hub_names(stack(concat("l.*.e.*.a", "l.*.e.*.b")), (4,), experts=11)
    assert names == [f"l.4.e.{e}.{kind}" for e in range(11) for kind in "ab"]


def test_no_factors_means_none() -> None:
    expression = stack(concat("x.*.a", "x.*.b"))
    assert factors_from_hub(expression, (), {}.get, experts=E, ndim=3) is None
    assert factors_from_hub(deinterleave(transpose("w"), axis=1), (), {}.get, experts=E, ndim=3) is None


@pytest.mark.parametrize("expression", [deinterleave("w", axis=0), concat("w", "v")], ids=["experts", "concat of 3-D"])
def test_an_op_on_the_expert_axis_is_refused(expression: Expression) -> None:
    factors = Factors(drawn(E, R, IN, seed=0), drawn(E, OUT, R, seed=1))
    with pytest.raises(InvalidRules, match="axis that the factors of an adapter do not have"):
        factors_from_hub(expression, (), lambda name: factors, experts=E, ndim=3)


def test_what_is_packed_or_several_tensors_is_not_one_in_the_module() -> None:
    for expression in (mxfp4("w"), stack("w.*"), concat("v", "w"), deinterleave(mxfp4("w"), axis=1)):
        assert tensor_in_module(expression) is None
    leaf = tensor_in_module(deinterleave(transpose("w"), axis=1))
    assert leaf is not None
    assert leaf.pattern == "w"


def test_every_family_states_where_its_adapted_weights_lie() -> None:
    """Rows of a fused tensor apart: adapters of such a module are refused by name."""
    for bridge in registered_bridges().values():
        for native, rule in bridge.rule_set.by_native.items():
            if native.endswith(("_proj", "_proj.weight")):
                layouts = rule.layouts.values()
                assert any(isinstance(one, Rows) or tensor_in_module(one) for one in layouts), native
    layouts = get_bridge("gpt_oss").rule_set.by_native["model.layers.*.mlp.experts.gate_up_proj"].layouts
    assert [is_transposed(layout) for layout in layouts.values()] == [True, False]
