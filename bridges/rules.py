"""The rules of a bridge: which hub tensors a parameter is made of, as expressions that are read in both directions.

    rename("model.layers.*.self_attn.{q,k,v,o}_proj.weight")            the same name and shape on both sides
    stack(concat("….experts.*.gate_proj.weight", "….experts.*.up_proj.weight"))
    fused("….mlp.{gate,up}_proj.weight", "….mlp.gate_up_proj.weight")
    deinterleave(transpose("….experts.gate_up_proj"), axis=1)

An expression says how the parameter comes out of hub tensors; its inverse is the same pieces read backwards. `*` is a
layer or expert number, `{a,b}` alternatives. Layouts are chosen by which names a checkpoint holds, never by a shape.

    op            parameter of ours from hub tensors        back
    rename        the tensor                                the tensor
    transpose     last two axes swapped                     swapped again
    concat        parts one after the other on axis 0       cut into equal parts
    stack         tensor e becomes row e, e an integer      row e becomes tensor e
    deinterleave  [k::parts] of an axis become block k      blocks woven together again
    fused         its rows of a tensor of several           those several one after the other
    mxfp4         4-bit blocks and scales expanded          not written: the bfloat16 layout of the same rule is
    tie           the embedding, stored again or not        not written
    ignore        nothing, for a stated reason              not written
    ignore_layers nothing: layers counted behind the last   not written
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

from bestiary.bridges.errors import InvalidRules
from bestiary.bridges.pieces import HubTensor, Piece, Shape

Captures = tuple[int, ...]
_LEAVES = ("gate_proj", "up_proj", "down_proj")


# ---------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Expression:
    """How a parameter comes out of hub tensors: an op on the expressions in `inner`."""

    inner: tuple[Expression, ...]
    stacks: ClassVar[int] = 0  # numbers that the op adds to the names below it

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """The pieces that make a parameter of `shape` from the hub tensors whose `*` are `captures`."""
        raise InvalidRules(f"{type(self).__name__} says nothing about its pieces.", remedy="define `pieces`")

    def sized(self, parameters: Mapping[str, Shape], captures: Captures) -> Expression:
        """The expression for a model with `parameters`, where the sizes of others matter to it."""
        return replace(self, inner=tuple(part.sized(parameters, captures) for part in self.inner))

    def leaves(self, depth: int = 0) -> Iterator[tuple[Hub, int]]:
        """The hub tensors of the expression, each with the number of stacks around it."""
        for part in self.inner:
            yield from part.leaves(depth + self.stacks)

    def alternative(self, index: int) -> Expression:
        """The expression with the `index`-th alternative of every `{…}`."""
        return replace(self, inner=tuple(part.alternative(index) for part in self.inner))


@dataclass(frozen=True)
class Hub(Expression):
    """A hub tensor by its name pattern; with `packed`, an MXFP4 pair `…_blocks`, `…_scales`."""

    inner: tuple[Expression, ...] = ()
    pattern: str = ""
    packed: bool = False

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """The tensor itself."""
        yield Piece.whole(HubTensor(fill(self.pattern, captures), shape, self.packed))

    def leaves(self, depth: int = 0) -> Iterator[tuple[Hub, int]]:
        """Itself."""
        yield self, depth

    def alternative(self, index: int) -> Hub:
        """The pattern's `index`-th alternative, or the pattern if it has none."""
        choices = alternatives(self.pattern)
        return replace(self, pattern=choices[index if len(choices) > 1 else 0])


@dataclass(frozen=True)
class Transpose(Expression):
    """Last two axes swapped."""

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """Those of the swapped shape, `dest` swapped back."""
        swapped = (*shape[:-2], shape[-1], shape[-2])
        for piece in self.inner[0].pieces(swapped, captures):
            *front, rows, columns = piece.dest
            if isinstance(rows, int) or isinstance(columns, int):
                raise InvalidRules(f"{piece.hub.name} has no two axes to swap.", remedy="transpose before stacking")
            yield replace(piece, dest=(*front, columns, rows), transposed=not piece.transposed)


@dataclass(frozen=True)
class Concat(Expression):
    """Equal parts one after the other on axis 0."""

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """Those of each part, moved down by the parts before it."""
        size, rest = divmod(shape[0], len(self.inner))
        if rest:
            raise InvalidRules(
                f"a parameter of {shape[0]} rows is not made of {len(self.inner)} equal parts.",
                remedy="use the op that matches the layout",
            )
        for position, part in enumerate(self.inner):
            for piece in part.pieces((size, *shape[1:]), captures):
                rows, moved = piece.dest[0], position * size
                first = rows + moved if isinstance(rows, int) else slice(rows.start + moved, rows.stop + moved, 1)
                yield replace(piece, dest=(first, *piece.dest[1:]))


@dataclass(frozen=True)
class Stack(Expression):
    """One hub tensor per index of axis 0, numbered by the last `*` of its name, in the order of integers."""

    stacks: ClassVar[int] = 1

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """Those of each number, in its row."""
        for number in range(shape[0]):
            for piece in self.inner[0].pieces(shape[1:], (*captures, number)):
                yield replace(piece, dest=(number, *piece.dest))


@dataclass(frozen=True)
class Deinterleave(Expression):
    """On `axis`, elements k, k + parts, k + 2·parts … of the hub become the k-th block of the parameter."""

    axis: int = 0
    parts: int = 2

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """Each piece cut into `parts` combs."""
        total = shape[self.axis]
        size, rest = divmod(total, self.parts)
        for piece in self.inner[0].pieces(shape, captures):
            if rest or piece.dest[self.axis] != slice(0, total, 1):
                raise InvalidRules(
                    f"axis {self.axis} of {piece.hub.name} is not {self.parts} equal parts woven together.",
                    remedy="deinterleave an axis that no op below it cuts",
                )
            source_axis = piece.source_axis(self.axis)
            for part in range(self.parts):
                source, dest = list(piece.source), list(piece.dest)
                source[source_axis] = slice(part, total - self.parts + part + 1, self.parts)
                dest[self.axis] = slice(part * size, (part + 1) * size, 1)
                yield replace(piece, source=tuple(source), dest=tuple(dest))


@dataclass(frozen=True)
class Rows(Expression):
    """The rows of one of several parameters that a hub tensor holds one after the other on axis 0.

    Attributes:
        together: patterns of those parameters, in order.   part: which of them this is.
        sizes: rows of each, once a model is known.
    """

    together: tuple[str, ...] = ()
    part: int = 0
    sizes: tuple[int, ...] = ()

    def alternative(self, index: int) -> Expression:
        """The `index`-th parameter's rows."""
        return replace(self, part=index)

    def sized(self, parameters: Mapping[str, Shape], captures: Captures) -> Expression:
        """With the rows of every part."""
        names = [fill(pattern, captures) for pattern in self.together]
        return replace(self, sizes=tuple(parameters[name][0] for name in names))

    def pieces(self, shape: Shape, captures: Captures) -> Iterator[Piece]:
        """The tensor's rows from the end of the parts before."""
        if not self.sizes or self.sizes[self.part] != shape[0]:
            raise InvalidRules(
                f"{self.together[self.part]} is a part of a fused tensor whose other parts are not known.",
                remedy="ask for the pieces of `sized(parameters, captures)`",
            )
        start, whole = sum(self.sizes[: self.part]), (sum(self.sizes), *shape[1:])
        for piece in self.inner[0].pieces(whole, captures):
            yield replace(
                piece,
                source=(slice(start, start + shape[0], 1), *piece.source[1:]),
                dest=(slice(0, shape[0], 1), *piece.dest[1:]),
            )


def _expressions(*values: Expression | str) -> tuple[Expression, ...]:
    return tuple(Hub(pattern=value) if isinstance(value, str) else value for value in values)


def transpose(inner: Expression | str) -> Transpose:
    """The last two axes of `inner` swapped; its own inverse."""
    return Transpose(_expressions(inner))


def concat(*parts: Expression | str) -> Concat:
    """`parts`, of equal shape, one after the other on axis 0; back: cut."""
    return Concat(_expressions(*parts))


def stack(inner: Expression | str) -> Stack:
    """Tensors numbered by the last `*` of `inner`'s names become axis 0; back: one tensor per index."""
    return Stack(_expressions(inner))


def deinterleave(inner: Expression | str, *, axis: int, parts: int = 2) -> Deinterleave:
    """Every `parts`-th element of `axis` becomes a block; back: woven together. `axis` counts from the front."""
    return Deinterleave(_expressions(inner), axis, parts)


def mxfp4(pattern: str) -> Hub:
    """The float tensor held as `pattern_blocks` and `pattern_scales`; read only."""
    return Hub(pattern=pattern, packed=True)


# ---------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """A parameter pattern and the layouts it is found in on the hub; the first one is what exports write."""

    native: str
    layouts: Mapping[str, Expression] = field(hash=False)
    tied_to: str | None = None

    @property
    def written(self) -> Expression:
        """The layout of exports."""
        return next(iter(self.layouts.values()))

    def expanded(self) -> Iterator[Rule]:
        """One rule for each alternative of `{…}`."""
        for index, native in enumerate(alternatives(self.native)):
            layouts = {name: source.alternative(index) for name, source in self.layouts.items()}
            yield replace(self, native=native, layouts=layouts)


@dataclass(frozen=True)
class Ignore:
    """Hub names that are read by nobody, and why. A trailing `**` means everything below."""

    pattern: str
    reason: str

    def matches(self, name: str) -> bool:
        """Whether it covers a hub name."""
        if self.pattern.endswith("**"):
            return name.startswith(self.pattern[:-2])
        return canonical(name)[0] == self.pattern


@dataclass(frozen=True)
class IgnoreLayers:
    """Layers of another kind that a checkpoint counts on behind the model's own, told by a tensor only they have.

    Attributes:
        mark: name of that tensor, its layer number as `*`: "model.layers.*.eh_proj.weight".
        reason: why nobody reads them.
    """

    mark: str
    reason: str

    def inside(self, names: Iterable[str], layers: int) -> dict[str, str]:
        """Those of `names` that lie in such a layer, numbered from `layers` on, and the reason."""
        stem, _, leaf = self.mark.partition("*")
        kept = list(names)
        marked = {name.removeprefix(stem).removesuffix(leaf) for name in kept if canonical(name)[0] == self.mark}
        prefixes = tuple(f"{stem}{number}." for number in marked if int(number) >= layers)
        return {name: self.reason for name in kept if name.startswith(prefixes)}


def rename(native: str, hub: str | None = None) -> Rule:
    """One tensor on each side, of equal shape; `hub` None: under the same name."""
    return layouts(native, hub=native if hub is None else hub)


def layouts(native: str, **sources: Expression | str) -> Rule:
    """Several ways to store one parameter, by name; a checkpoint uses the one whose tensors it holds.

    The first is the one that exports write.
    """
    return Rule(native, dict(zip(sources, _expressions(*sources.values()), strict=True)))


def fused(natives: str, hub: str) -> Rule:
    """The parameters that `natives` stands for, which the hub stores as one tensor, one below the other in that order.

    Each has a rule of its own and its own rows; back: all are written into the one tensor.
    """
    return Rule(natives, {"hub": Rows((Hub(pattern=hub),), together=tuple(alternatives(natives)))})


def experts(native: str, *, hub: str | None = None, leaves: tuple[str, str, str] = _LEAVES) -> tuple[Rule, Rule]:
    """Routed experts: a tensor an expert on the hub, all of them in one as the modules of transformers 5 hold them.

    Args:
        native: name pattern of the experts, in transformers' modules too.
        hub: theirs on the hub; None: the same.
        leaves: the hub's names of gate, up and down.
    """
    gate, up, down = (f"{hub or native}.*.{leaf}.weight" for leaf in leaves)
    return (
        layouts(f"{native}.gate_up_proj", per_expert=stack(concat(gate, up)), fused=f"{native}.gate_up_proj"),
        layouts(f"{native}.down_proj", per_expert=stack(down), fused=f"{native}.down_proj"),
    )


def tie(head: str, *, to: str) -> Rule:
    """The output head: a parameter of its own, or with a tied config the one of `to`, stored again or left out."""
    return replace(rename(head), tied_to=to)


def ignore_layers(mark: str, *, reason: str) -> IgnoreLayers:
    """Layers behind the last one of the config that hold the tensor `mark`."""
    return IgnoreLayers(mark, reason)


def ignore(pattern: str, *, reason: str) -> Ignore:
    """Hub tensors that no parameter needs."""
    return Ignore(pattern, reason)


# ---------------------------------------------------------------------------------------------------- names


def alternatives(pattern: str) -> list[str]:
    """All strings a pattern with `{a,b}` stands for, the last braces varying fastest."""
    pieces: list[list[str]] = []
    rest = pattern
    while rest:
        before, brace, rest = rest.partition("{")
        inside, _, rest = rest.partition("}")
        pieces += [[before], inside.split(",")] if brace else [[before]]
    return ["".join(choice) for choice in product(*pieces)]


def canonical(name: str) -> tuple[str, Captures]:
    """A name with each part that is a number replaced by `*`, and those numbers."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return ".".join("*" if part.isdecimal() else part for part in parts), numbers


def fill(pattern: str, captures: Captures) -> str:
    """`pattern` with its `*` replaced by `captures`, in order."""
    numbers = iter(captures)
    return ".".join(str(next(numbers)) if part == "*" else part for part in pattern.split("."))


class RuleSet:
    """Rules expanded and indexed by name pattern.

    Raises:
        InvalidRules: two rules for one parameter or for one hub name, a `*` that is only a part of a name, a number
            in a pattern, captures that do not correspond, or an export layout that cannot be written.
    """

    def __init__(self, rules: Iterable[Rule | Ignore | IgnoreLayers]) -> None:
        declared = tuple(rules)
        self.ignored_layers = tuple(rule for rule in declared if isinstance(rule, IgnoreLayers))
        self.ignores = tuple(rule for rule in declared if isinstance(rule, Ignore))
        self.by_native: dict[str, Rule] = {}
        self._owner: dict[str, str] = {}
        for rule in declared:
            for one in rule.expanded() if isinstance(rule, Rule) else ():
                self._add(one)

    def rule(self, parameter: str) -> tuple[Rule | None, Captures]:
        """The rule that makes `parameter`, and the numbers in its name."""
        pattern, captures = canonical(parameter)
        return self.by_native.get(pattern), captures

    def reason_to_ignore(self, hub_name: str) -> str | None:
        """Why nobody reads `hub_name`; None if some rule should."""
        return next((ignored.reason for ignored in self.ignores if ignored.matches(hub_name)), None)

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Patterns of hub tensors that exports write from several parameters, and those of the parameters."""
        written = (rule.written for rule in self.by_native.values())
        return {leaf.pattern: one.together for one in written if isinstance(one, Rows) for leaf, _ in one.leaves()}

    @property
    def packed(self) -> bool:
        """Whether some layout is MXFP4."""
        expressions = [source for rule in self.by_native.values() for source in rule.layouts.values()]
        return any(leaf.packed for source in expressions for leaf, _ in source.leaves())

    def _add(self, rule: Rule) -> None:
        if rule.native in self.by_native:
            raise InvalidRules(f"two rules make {rule.native}.", remedy="keep one")
        self.by_native[rule.native] = rule
        if any(leaf.packed for leaf, _ in rule.written.leaves()):
            raise InvalidRules(f"{rule.native} would be written as MXFP4.", remedy="put the float layout first")
        for source in rule.layouts.values():
            for leaf, depth in source.leaves():
                _check_pattern(rule.native, leaf.pattern, depth)
                for name in HubTensor(leaf.pattern, (0,), leaf.packed).stored:
                    self._claim(name, rule.native, source.together if isinstance(source, Rows) else ())

    def _claim(self, hub_name: str, native: str, together: tuple[str, ...]) -> None:
        claims = [owner for owner in (self._owner.get(hub_name),) if owner is not None and owner not in together]
        claims += [ignored.pattern for ignored in self.ignores if ignored.matches(hub_name)]
        if claims:
            raise InvalidRules(f"{hub_name} is claimed by {native} and by {claims[0]}.", remedy="keep one")
        self._owner[hub_name] = native


def _check_pattern(native: str, hub: str, depth: int) -> None:
    for text in (native, hub):
        if any(("*" in part and part != "*") or part.isdecimal() for part in text.split(".")):
            raise InvalidRules(f"{text}: `*` stands for one whole number between dots.", remedy="write it as one part")
    expected, found = native.split(".").count("*") + depth, hub.split(".").count("*")
    if found != expected:
        raise InvalidRules(
            f"{hub} has {found} `*`, and {native} with {depth} stacks gives {expected} numbers.",
            remedy="one `*` for each of the parameter's, then one for each stack",
        )
