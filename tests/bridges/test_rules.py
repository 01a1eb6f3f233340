"""The algebra of rules: every op against torch, every op against its inverse, and rules that must be refused."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bestiary.bridges import get_bridge
from bestiary.bridges.errors import InvalidRules
from bestiary.bridges.pieces import Box, Piece, extent
from bestiary.bridges.plan import plan_export, plan_import
from bestiary.bridges.rules import (
    Expression,
    RuleSet,
    alternatives,
    concat,
    deinterleave,
    fused,
    ignore,
    ignore_layers,
    layouts,
    mxfp4,
    rename,
    stack,
    tie,
    transpose,
)
from bestiary.bridges.storage import TensorInfo

from .checkpoints import FAMILIES

Tensors = dict[str, Tensor]
# op, its parameter from hub tensors by torch alone, and the least multiple that axis 1 must be
OPS: dict[str, tuple[Expression, Callable[[Tensors, int], Tensor]]] = {
    "rename": (layouts("w", hub="w").written, lambda hub, n: hub["w"]),
    "transpose": (transpose("w"), lambda hub, n: hub["w"].transpose(-1, -2)),
    "deinterleave": (
        deinterleave("w", axis=1),
        lambda hub, n: torch.cat((hub["w"][:, 0::2], hub["w"][:, 1::2]), 1),
    ),
    "deinterleave of transpose": (
        deinterleave(transpose("w"), axis=1),
        lambda hub, n: torch.cat((hub["w"][..., 0::2].mT, hub["w"][..., 1::2].mT), 1),
    ),
    "stack": (stack("w.*"), lambda hub, n: torch.stack([hub[f"w.{e}"] for e in range(n)])),
    "stack of concat": (
        stack(concat("a.*", "b.*")),
        lambda hub, n: torch.stack([torch.cat((hub[f"a.{e}"], hub[f"b.{e}"])) for e in range(n)]),
    ),
    "stack of transpose": (stack(transpose("w.*")), lambda hub, n: torch.stack([hub[f"w.{e}"].T for e in range(n)])),
}
shapes = st.tuples(st.integers(1, 13), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 5))


def filled(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)


def to_hub(pieces: list[Piece], parameter: Tensor) -> Tensors:
    hub = {piece.hub.name: torch.zeros(piece.hub.shape, dtype=parameter.dtype) for piece in pieces}
    for piece in pieces:
        piece.write(hub[piece.hub.name], parameter)
    return hub


@pytest.mark.parametrize("name", OPS)
@given(shape=shapes)
def test_an_op_does_what_torch_does_and_back(name: str, shape: tuple[int, ...]) -> None:
    expression, oracle = OPS[name]
    parameter = filled(shape)
    pieces = list(expression.pieces(shape, ()))
    hub = to_hub(pieces, parameter)
    assert torch.equal(oracle(hub, shape[0]), parameter)
    again = torch.zeros_like(parameter)
    for piece in pieces:
        piece.read(hub[piece.hub.name], again)
    assert torch.equal(again, parameter)


@pytest.mark.parametrize("name", OPS)
@given(shape=shapes)
def test_every_element_is_carried_once_on_both_sides(name: str, shape: tuple[int, ...]) -> None:
    pieces = list(OPS[name][0].pieces(shape, ()))
    ours = torch.zeros(shape, dtype=torch.int32)
    theirs = {piece.hub.name: torch.zeros(piece.hub.shape, dtype=torch.int32) for piece in pieces}
    for piece in pieces:
        ours[piece.dest] += 1
        theirs[piece.hub.name][piece.source] += 1
    assert bool((ours == 1).all())
    assert all(bool((count == 1).all()) for count in theirs.values())
    assert extent(pieces) == ours.numel()


@pytest.mark.parametrize("name", OPS)
@given(shape=shapes, data=st.data())
def test_a_rank_reads_its_slice_alone(name: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box: Box = tuple(slice(low, high) for low, high in bounds)
    parameter = filled(shape)
    pieces = list(OPS[name][0].pieces(shape, ()))
    hub = to_hub(pieces, parameter)
    local = torch.zeros_like(parameter[box])
    inside = [part for piece in pieces if (part := piece.within(box)) is not None]
    for part in inside:
        part.read(hub[part.hub.name], local)
    assert torch.equal(local, parameter[box])
    assert extent(inside) == local.numel()


@pytest.mark.parametrize("name", OPS)
@given(shape=shapes, step=st.integers(1, 5))
def test_reading_in_chunks_of_rows_gives_the_whole(name: str, shape: tuple[int, ...], step: int) -> None:
    parameter = filled(shape)
    pieces = list(OPS[name][0].pieces(shape, ()))
    hub = to_hub(pieces, parameter)
    again, count = torch.zeros_like(parameter), 0
    for piece in pieces:
        tensor = hub[piece.hub.name]
        for start in range(0, tensor.shape[0], step):
            part = piece.rows(start, min(start + step, tensor.shape[0]))
            if part is not None:
                part.read(tensor[start : start + step], again)
                count += part.numel
    assert torch.equal(again, parameter)
    assert count == parameter.numel()


def test_experts_are_ordered_as_integers() -> None:
    names = [piece.hub.name for piece in stack("w.*").pieces((12, 2, 2), ())]
    assert names == [f"w.{e}" for e in range(12)]


def test_a_square_tensor_is_still_transposed() -> None:
    hub = filled((1, 3, 3))
    parameter = torch.zeros_like(hub)
    for piece in transpose("w").pieces((1, 3, 3), ()):
        piece.read(hub, parameter)
    assert torch.equal(parameter, hub.mT)


def test_fused_parameters_are_rows_of_one_tensor() -> None:
    rules = RuleSet((rename("model.embed_tokens.weight"), fused("m.*.{q,k,v}.w", "m.*.qkv.w")))
    shapes = {"model.embed_tokens.weight": (5, 3), "m.7.q.w": (6, 3), "m.7.k.w": (2, 3), "m.7.v.w": (2, 3)}
    parameters = {name: filled(shape) * (1 + i) for i, (name, shape) in enumerate(shapes.items())}
    exported = plan_export(rules, shapes)
    hub = {t.hub.name: torch.zeros(t.hub.shape, dtype=torch.int64) for t in exported.transfers}
    assert hub.keys() == {"model.embed_tokens.weight", "m.7.qkv.w"}
    for transfer in exported.transfers:
        for native, piece in transfer.pieces:
            piece.write(hub[transfer.hub.name], parameters[native])
    assert torch.equal(hub["m.7.qkv.w"], torch.cat([parameters[f"m.7.{leaf}.w"] for leaf in "qkv"]))
    again = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    infos = {name: TensorInfo(tuple(tensor.shape), torch.float32) for name, tensor in hub.items()}
    for transfer in plan_import(rules, shapes, infos).transfers:
        for native, piece in transfer.pieces:
            piece.read(hub[transfer.hub.name], again[native])
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)


@given(st.lists(st.sampled_from(["{a,b}", "{x,y,z}", "c", "."]), min_size=1, max_size=4))
def test_braces_stand_for_every_combination(parts: list[str]) -> None:
    found = alternatives("".join(parts))
    sizes = [part.count(",") + 1 for part in parts]
    assert len(found) == torch.Size(sizes).numel()
    assert not any("{" in text or "}" in text for text in found)


CONFLICTS = {
    "one parameter twice": (rename("a.*.w"), rename("a.*.w", "b.*.w")),
    "one hub name for two parameters": (rename("a.w"), rename("b.w", "a.w")),
    "one hub name in two layouts": (layouts("a.*", x=stack("w.*.*"), y=stack(transpose("w.*.*"))),),
    "one hub name twice in a layout": (layouts("a", x=concat("w", "w")),),
    "read and ignored": (rename("a.w"), ignore("a.**", reason="…")),
    "a number in a pattern": (rename("a.0.w"),),
    "a star inside a part": (rename("a.w*"),),
    "a layer number lost": (rename("a.*.w", "a.w"),),
    "a stack without a number": (layouts("a.*.w", x=stack("b.*.w")),),
    "written as MXFP4": (layouts("a", x=mxfp4("a")),),
    "a fused tensor read alone too": (fused("a.{q,k}", "w"), rename("b", "w")),
    "the head twice": (tie("lm_head.weight", to="e.weight"), rename("lm_head.weight")),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_rules_that_are_not_one_to_one_are_refused(name: str) -> None:
    with pytest.raises(InvalidRules) as caught:
        RuleSet(CONFLICTS[name])
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        (concat("a", "b"), (3, 2)),
        (deinterleave("a", axis=0), (3, 2)),
        (deinterleave(concat("a", "b"), axis=0), (4, 2)),
        (transpose(stack("a.*")), (4, 2)),
        (fused("a.{q,k}", "w").written, (4, 2)),  # of what size is the other?
    ],
)
def test_an_op_that_does_not_fit_a_shape_says_so(expression: Expression, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRules):
        list(expression.pieces(shape, ()))


@pytest.mark.parametrize("model_type", FAMILIES)
@settings(deadline=None)
@given(layer=st.integers(0, 99))
def test_a_familys_rules_know_their_own_names(model_type: str, layer: int) -> None:
    rules = get_bridge(model_type).rule_set
    for native, rule in rules.by_native.items():
        found, captures = rules.rule(native.replace("*", str(layer)))
        assert found == rule
        assert captures == (layer,) * native.count("*")


def test_layers_behind_the_last_one_are_ignored_where_their_mark_is() -> None:
    """A layer the model has is not, whatever it holds; nor one of the usual kind that the config does not count."""
    names = [f"model.layers.{layer}.{leaf}" for layer in (1, 2, 3, 23) for leaf in ("a.weight", "mark.weight")]
    names += ["model.layers.4.a.weight", "model.norm.weight"]
    found = ignore_layers("model.layers.*.mark.weight", reason="of another kind").inside(names, layers=3)
    assert list(found) == [name for name in names if ".3." in name or ".23." in name]
    assert set(found.values()) == {"of another kind"}
