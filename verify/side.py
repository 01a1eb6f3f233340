"""What a mutation may change: the two sides of a comparison before they are built.

`run(…, mutate_ours=f)` calls `f(side)` with an `OurSide`, `mutate_reference` with a `TheirSide`. A mutation registers
changes of the bridge, the config or the built model, or replaces an attribute for the length of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from bestiary.bridges import Bridge, MemorySource, Plan, fill, fill_parameters
from bestiary.bridges.pieces import Shape
from bestiary.models import Decoder, DecoderConfig
from bestiary.verify.foreign import Foreign
from bestiary.verify.placing import CPU, moved, placed
from bestiary.verify.tiny import Raw

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def _home(owner: Any) -> str:
    """The module of a module, a class or an object."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return (owner if isinstance(owner, type) else type(owner)).__module__


class _Side(Generic[M]):
    def __init__(self) -> None:
        self._model_changes: list[Callable[[M], None]] = []
        self._patches: list[tuple[Any, str, Any]] = []
        self.mutated = False

    def model(self, change: Callable[[M], None]) -> None:
        """Registers a change of every model, once its weights are set."""
        self.mutated = True
        self._model_changes.append(change)

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Registers `owner.name = value` for the length of the run; `owner` is a class, module or object."""
        self.mutated = True
        self._patches.append((owner, name, value))

    @property
    def reaches_out(self) -> bool:
        """Whether a replacement lies outside bestiary, where the other side may meet it."""
        return any(_home(owner).partition(".")[0] != "bestiary" for owner, _, _ in self._patches)

    def finish(self, model: M) -> None:
        """Applies every registered change to `model`."""
        for change in self._model_changes:
            change(model)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The registered replacements in force; undone at the end, in reverse."""
        missing = object()
        undo: list[tuple[Any, str, Any]] = []
        try:
            for owner, name, value in self._patches:
                undo.append((owner, name, vars(owner).get(name, missing)))
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, before in reversed(undo):
                if before is missing:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


class OurSide(_Side[Decoder]):
    """Our model and the bridge that makes it; also how the verifier builds both.

    Args:
        foreign: an implementation of somebody else's in place of the bridge's decoder.
        device: where the models compute; their answers come back to the CPU.
    """

    def __init__(self, bridge: Bridge, foreign: Foreign | None = None, device: torch.device = CPU) -> None:
        super().__init__()
        self.foreign, self.device = foreign, device
        self.current = bridge if foreign is None else replace(bridge, decoder=cast(type[Decoder], foreign))

    def bridge(self, change: Callable[[Bridge], Bridge]) -> None:
        """Replaces the bridge (its rules, its adapter, its decoder class) by `change(bridge)`."""
        self.mutated = True
        self.current = change(self.current)

    def config(self, change: Callable[[DecoderConfig], DecoderConfig]) -> None:
        """Changes what the bridge's adapter makes of every config."""
        before = self.current.config_from_hf
        self.bridge(lambda bridge: replace(bridge, config_from_hf=lambda hf: change(before(hf))))

    def decoder_config(self, raw: Raw) -> DecoderConfig:
        """The architecture our bridge reads from a config.json."""
        return self.current.parse(raw, source="config.json").decoder

    def plan(self, raw: Raw, hub: Mapping[str, Tensor]) -> Plan:
        """Which tensor of `hub` goes where."""
        return self._plan(raw, hub)

    def _plan(self, raw: Raw, hub: Mapping[str, Tensor], shapes: Mapping[str, Shape] | None = None) -> Plan:
        parsed = self.current.parse(raw, source="config.json")
        return self.current.plan_import(
            parsed.decoder,
            MemorySource(hub).infos,
            quantization=parsed.quantization,
            read_from="Hugging Face",
            parameters=shapes,
        )

    def build(self, raw: Raw, hub: Mapping[str, Tensor], dtype: torch.dtype) -> Decoder:
        """Our model of a config.json with the weights of a state dict, in eval mode; NaN where nothing was written."""
        hub = moved(dict(hub), CPU)
        model = self.current.decoder(self.decoder_config(raw), dtype=dtype, device="meta")
        plan = self._plan(raw, hub, {name: tuple(p.shape) for name, p in model.named_parameters()})
        if self.foreign is None:
            model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        if self.foreign is None:
            fill(model, MemorySource(hub), plan)
        else:
            named = {name: parameter.detach() for name, parameter in model.named_parameters()}
            fill_parameters(named, MemorySource(hub), plan)
        self.finish(model.eval())
        placed(model, self.device)
        return model

    def load(self, folder: Path, dtype: torch.dtype | None = None) -> Decoder:
        """Our model of a checkpoint folder."""
        model = self.current.load(folder, dtype=dtype)
        self.finish(model)
        return model

    def native(self, raw: Raw, hub: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under hub names (weights, or gradients of them) as the parameters they belong to."""
        hub = moved(dict(hub), CPU)
        shapes = self.current.parameters(self.decoder_config(raw))
        dtype = next(iter(hub.values())).dtype
        made = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}
        for transfer in self._plan(raw, hub, shapes).transfers:
            for name, piece in transfer.pieces:
                piece.read(hub[transfer.hub.name], made[name])
        return made


class TheirSide(_Side[nn.Module]):
    """Hugging Face's model and its config."""

    def __init__(self) -> None:
        super().__init__()
        self._raw_changes: list[Callable[[Raw], Raw]] = []

    def raw(self, change: Callable[[Raw], Raw]) -> None:
        """Registers a change of the config.json that only Hugging Face sees."""
        self.mutated = True
        self._raw_changes.append(change)

    def changed(self, raw: Raw) -> Raw:
        """`raw` with every registered change applied."""
        for change in self._raw_changes:
            raw = change(raw)
        return raw


MutateOurs = Callable[[OurSide], None]
MutateTheirs = Callable[[TheirSide], None]
