"""Both models of a checkpoint with one layer in memory: everything on meta, filled and emptied part by part.

Each side runs its own forward for all that lies around the layers (embedding, masks, RoPE, final norm, head), with the
layers replaced: what it hands to each of them is kept, and a layer is run later, alone, on those arguments. Experts
that are stored no wider stay in bfloat16 and run in slices; all else is in float32.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bestiary.bridges import Bridge, Plan, SafetensorsSource, fill_parameters
from bestiary.bridges.errors import KeyMismatch
from bestiary.models import Decoder, DecoderConfig
from bestiary.verify.expert_slices import are_experts, sliced
from bestiary.verify.inputs import Inputs
from bestiary.verify.placing import CPU, moved
from bestiary.verify.reference import default_dtype, quiet, reference_class

IN_A_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

NARROW = frozenset({"BF16", "U8"})
"""Dtypes in a safetensors file whose values are bfloat16 numbers; bytes are packed MXFP4."""
HALVES = frozenset({torch.bfloat16, torch.uint8})
"""The same as torch calls them."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StreamedModel(ABC):
    """A model on meta. Outside of `outside()` and `layer(k)` it holds no weight.

    Args:
        model: the whole model, on meta.
        layers: its layers.
        device: where they compute; what they give comes back to the CPU.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device = CPU) -> None:
        self.model = model.eval()
        self.layers = layers
        self.device = device
        _move_buffers(model.modules(), device)
        self._arguments: dict[str, list[Arguments]] = {}

    @contextmanager
    def outside(self) -> Iterator[None]:
        """The weights beside the layers on the device, in float32, for the length of the block."""
        inside = {module for layer in self.layers for module in layer.modules()}
        parts = [module for module in self.model.modules() if module not in inside]
        self._load(None)
        _move(parts, self.device)
        try:
            yield
        finally:
            _empty(parts)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """The weights of one layer on the device for the length of the block, in float32 but for sliced experts."""
        self._load(index)
        _move(self.layers[index].modules(), self.device)
        try:
            with ExitStack() as stack:
                for module in self.layers[index].modules():
                    if are_experts(module) and next(module.parameters(recurse=False)).dtype is torch.bfloat16:
                        stack.enter_context(sliced(module))
                yield
        finally:
            _empty(self.layers[index].modules())

    def embed(self, name: str, inputs: Inputs) -> Tensor:
        """What the first layer receives (B, T, H); remembers under `name` what else each layer does. In `outside()`."""
        received: list[Tensor] = []
        arguments: list[Arguments] = []

        def keep(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            received.append(x)
            arguments.append((args, kwargs))
            return self._returned(x)

        with self._instead(keep), torch.no_grad():
            self._forward(inputs, 1)
        self._arguments[name] = arguments
        return received[0].cpu()

    def step(self, name: str, index: int, x: Tensor) -> Tensor:
        """Layer `index` on hidden states (B, T, H) of the input `name`. In `layer(index)`."""
        args, kwargs = self._arguments[name][index]
        with default_dtype(torch.float32), torch.no_grad():
            made = self.layers[index](x.to(self.device), *args, **kwargs)
        output: Tensor = made[0] if isinstance(made, tuple) else made
        return output.cpu()

    def logits(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Logits (T, V) of what the last layer gives, (1, T, H). In `outside()`."""
        given = hidden.to(self.device)
        with self._instead(lambda _x, *_args, **_kwargs: self._returned(given)), torch.no_grad():
            return self._forward(inputs, 0)[0].cpu()

    @contextmanager
    def _instead(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        """Every layer's forward replaced."""
        with ExitStack() as undo:
            for layer in self.layers:
                cast(Any, layer).forward = stand_in
                undo.callback(delattr, layer, "forward")
            with default_dtype(torch.float32):
                yield

    @abstractmethod
    def _load(self, layer: int | None) -> None:
        """Fills the parameters of one layer, or with None those beside the layers."""

    @abstractmethod
    def _forward(self, inputs: Inputs, keep: int) -> Tensor:
        """Logits (B, T, V) of the whole model, of the last `keep` positions alone unless that is 0."""

    @abstractmethod
    def _returned(self, x: Tensor) -> Any:
        """Hidden states in the form in which a layer of this model returns them."""


class StreamedReference(StreamedModel):
    """Hugging Face's model: built on meta by `from_pretrained`, each part filled by the loader that it uses.

    Attributes:
        reported: what the loader says is wrong with the parts loaded so far, by kind; parameters that a part lacks are
            an error instead.

    Raises:
        KeyMismatch: from a block, if the loader leaves a parameter of the part on meta.
    """

    def __init__(self, reference: str, folder: Path, device: torch.device = CPU) -> None:
        with quiet(), default_dtype(torch.float32):
            model, self._config, self._files = _built_only(reference_class(reference), folder)
            _compute_buffers(model)
        self.reported: dict[str, set[Any]] = {"unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": set()}
        self._stored: dict[str, Path] = {}
        for file in self._files:
            with safe_open(file, "pt") as tensors:
                self._stored.update(dict.fromkeys(tensors.keys(), file))
        super().__init__(model, list(model.model.layers), device)
        self._folder = folder
        routed = "output_router_logits" in model.config.to_dict()
        self._extra = {"output_router_logits": False} if routed else {}

    def _load(self, layer: int | None) -> None:
        names = [name for name in self._stored if _layer_of(name) == layer]
        model = cast(Any, self.model)
        with ExitStack() as files, quiet(), default_dtype(torch.float32), torch.no_grad():
            opened = {file: files.enter_context(safe_open(file, "pt")) for file in {self._stored[n] for n in names}}
            slices = {name: opened[self._stored[name]].get_slice(name) for name in names}
            self._expect(layer, {one.get_dtype() for one in slices.values()})
            told, _ = model._load_pretrained_model(model, slices, None, self._config)
            for kind, found in self.reported.items():
                found |= set(vars(told)[kind])
            if layer is None:
                model.tie_weights()
        for prefix, module in model.named_modules():
            narrow = are_experts(module)
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}"
                if _layer_of(name) != layer:
                    continue
                if parameter.is_meta:
                    raise KeyMismatch(missing=[name], read_from=str(self._folder))
                if not (narrow and parameter.dtype is torch.bfloat16):
                    parameter.data = parameter.data.float()  # dequantised tensors arrive in bfloat16

    def _expect(self, layer: int | None, stored: set[str]) -> None:
        """Parameters that are filled in bfloat16, where all that is stored is no wider: experts stay so."""
        if not stored <= NARROW:
            return
        for name, parameter in self.model.named_parameters():
            if _layer_of(name) == layer and parameter.is_meta:
                parameter.data = parameter.data.to(torch.bfloat16)

    def _forward(self, inputs: Inputs, keep: int) -> Tensor:
        with quiet():
            output = self.model(
                **moved(inputs.kwargs(), self.device), use_cache=False, logits_to_keep=keep, **self._extra
            )
        logits: Tensor = output.logits
        return logits

    def _returned(self, x: Tensor) -> Any:
        return x


class StreamedDecoder(StreamedModel):
    """Our model: built on meta, each part filled by the items of the bridge's plan that concern it."""

    def __init__(
        self, bridge: Bridge, config: DecoderConfig, plan: Plan, folder: Path, device: torch.device = CPU
    ) -> None:
        decoder: Decoder = bridge.decoder(config, dtype=torch.float32, device="meta")
        self._plan, self._folder, self._decoder = plan, folder, decoder
        super().__init__(decoder, list(decoder.model.layers), device)
        with SafetensorsSource(folder) as source:
            self._narrow = frozenset(
                item.native for item in plan.items if {source.infos[name].dtype for name in item.stored} <= HALVES
            )

    def _load(self, layer: int | None) -> None:
        items = tuple(item for item in self._plan.items if _layer_of(item.native) == layer)
        for item in items:
            owner, _, leaf = item.native.rpartition(".")
            module = self.model.get_submodule(owner)
            own = {f"{owner}.{other}" for other, _ in module.named_parameters(recurse=False)}
            dtype = torch.bfloat16 if are_experts(module) and own <= self._narrow else torch.float32
            empty = torch.empty_like(module.get_parameter(leaf), device="cpu", dtype=dtype)
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
        if layer is None:
            self._decoder.tie_weights()
        named = dict(self.model.named_parameters())
        targets = {item.native: named[item.native].detach() for item in items}
        with SafetensorsSource(self._folder) as source:
            fill_parameters(targets, source, replace(self._plan, items=items))

    def _forward(self, inputs: Inputs, keep: int) -> Tensor:
        logits: Tensor = self.model(
            **moved(inputs.kwargs(), self.device), output_router_logits=False, logits_to_keep=keep
        )["logits"]
        return logits

    def _returned(self, x: Tensor) -> Any:
        return x, None


def _move(modules: Iterable[nn.Module], device: torch.device) -> None:
    """The parameters that the modules themselves hold, to `device`, one by one; ties stay."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """The computed buffers that the modules themselves hold, to `device`."""
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _empty(modules: Iterable[nn.Module]) -> None:
    """Back to meta: the parameters and stored buffers that the modules themselves hold."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")


def _layer_of(name: str) -> int | None:
    """The layer a parameter or stored tensor belongs to; None: none."""
    found = IN_A_LAYER.search(name)
    return None if found is None else int(found[1])


def _built_only(cls: Any, folder: Path) -> tuple[Any, Any, list[Path]]:
    """`from_pretrained` up to where it would read weights: the model on meta, the loader's settings, the files.

    Its own code chooses config, quantiser, dtypes and conversions; only the two steps that fill are left out.
    """
    caught: list[Any] = []

    def load_nothing(_model: Any, _state: Any, files: Any, config: Any, *_rest: Any) -> tuple[Any, None]:
        caught.extend((config, files))
        return None, None

    def finish_nothing(_model: Any, _config: Any, info: Any) -> Any:
        return info

    body = {
        "_load_pretrained_model": staticmethod(load_nothing),
        "_finalize_model_loading": staticmethod(finish_nothing),
        "__module__": cls.__module__,
    }
    shell = type(cls.__name__, (cls,), body)
    model = shell.from_pretrained(  # type: ignore[attr-defined]
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.__class__ = cls
    config, files = caught
    return model, config, [Path(file) for file in files]


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Values of the buffers that no checkpoint holds (RoPE frequencies, embedding scale), by the model's own code."""
    stored = set(model.state_dict())
    for prefix, module in model.named_modules():
        absent = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and (f"{prefix}.{name}" if prefix else name) not in stored
        ]
        for name in absent:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if absent:
            model._init_weights(module)
