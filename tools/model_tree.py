"""A model as a tree of modules with the shapes and names of their parameters, layers that are alike drawn once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from bestiary.models import Decoder
from bestiary.models.config import DecoderConfig


@dataclass(frozen=True)
class Node:
    """One module of the tree.

    Attributes:
        name: last part of its name; of layers that are alike the numbers, e.g. "0, 1, 2, 3, 4, 6, …".
        kind: name of its class.   count: modules that it stands for.   note: what a layer's attention sees.
        parameters: name → shape of those that are its own; a tied head names the embedding's.
        children: in the order of the forward pass.
    """

    name: str
    kind: str
    count: int
    note: str
    parameters: dict[str, tuple[int, ...]]
    children: tuple[Node, ...]

    def as_json(self) -> dict[str, Any]:
        """The node and all below it as plain JSON values."""
        shapes = {name: list(shape) for name, shape in self.parameters.items()}
        below = [child.as_json() for child in self.children]
        return {"name": self.name, "kind": self.kind, "count": self.count, "note": self.note} | {
            "parameters": shapes,
            "children": below,
        }


def tree(model: Decoder) -> Node:
    """The tree of a model, on the meta device as well."""
    return _node("", model, model.decoder_config)


def lines(root: Node) -> Iterator[str]:
    """The tree for a terminal: name, class, own parameters with their shapes."""
    rows = list(_rows(root, 0))
    name, kind = (max(len(row[i]) for row in rows) for i in (0, 1))
    for row in rows:
        yield f"{row[0]:<{name}}  {row[1]:<{kind}}  {row[2]}".rstrip()


def _rows(node: Node, depth: int) -> Iterator[tuple[str, str, str]]:
    shapes = "  ".join(f"{name} {_shape(shape)}" for name, shape in node.parameters.items())
    kind = node.kind if node.count == 1 else f"{node.kind} × {node.count}"
    if depth:
        yield "  " * (depth - 1) + node.name, kind, shapes or node.note
    for child in node.children:
        yield from _rows(child, depth + 1)


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _node(name: str, module: nn.Module, config: DecoderConfig) -> Node:
    own = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
    note = "tied: model.embed_tokens.weight" if name == "lm_head" and config.tie_word_embeddings else ""
    children: tuple[Node, ...] = tuple(
        _layers(child, config) if isinstance(child, nn.ModuleList) and key == "layers" else _node(key, child, config)
        for key, child in module.named_children()
    )
    return Node(name, type(module).__name__, 1, note, own, children)


def _layers(layers: nn.ModuleList, config: DecoderConfig) -> Node:
    """Layers that have the same modules, shapes and attention are one node."""
    made = []
    for index, layer in enumerate(layers):
        node, window = _node("", layer, config), config.window(index)
        made.append((index, Node("", node.kind, 1, _note(config, index, window), node.parameters, node.children)))
    alike: dict[str, list[tuple[int, Node]]] = {}
    for index, node in made:
        alike.setdefault(repr(node), []).append((index, node))
    groups = [
        Node(_numbers([index for index, _ in some]), node.kind, len(some), node.note, node.parameters, node.children)
        for some in alike.values()
        for node in [some[0][1]]
    ]
    return Node("layers", type(layers).__name__, 1, "", {}, tuple(groups))


def _note(config: DecoderConfig, index: int, window: int | None) -> str:
    sees = "full attention" if window is None else f"window of {window} tokens"
    rope = config.rope_of(index)
    return f"{sees}, no RoPE" if rope is None else f"{sees}, RoPE theta {rope.theta:,.0f}"


def _numbers(indices: list[int]) -> str:
    """1, 2, 3, 5 → "1-3, 5"; a pattern with many gaps is cut."""
    runs = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs[:4]) + (", …" if len(runs) > 4 else "")
