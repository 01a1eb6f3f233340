"""Implementations that are not ours: `--ours package.module:factory` puts any `nn.Module` where our decoder stands.

`factory(config)` gets a `DecoderConfig` and returns a module whose parameters carry the names that the bridge's rules
write (`model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`, …); `model.layers.N`, `model.norm` and
`lm_head` run as modules, so that a divergence has a place. Its forward takes `input_ids` (B, T) by name and returns a
mapping with "logits" (B, T, V). What else its signature names is verified as well: `attention_mask`, `position_ids`,
`labels` (then the mapping holds "loss"), `cu_seq_lens_q`, `past_key_values`, `inputs_embeds`, `logits_to_keep`,
`num_items_in_batch`, `temperature`, as in `bestiary.models.Decoder.forward`. A config that it does not implement it
refuses with NotImplementedError.

In float64 every request for float32 inside the module gets float64, as in the reference.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.bridges.errors import UnsupportedConfig
from bestiary.kernels.errors import BestiaryError
from bestiary.models import DecoderConfig
from bestiary.verify.reference import default_dtype, promoted

OPTION = "--ours"
OWN = "a bestiary Decoder"
"""What a check needs that looks at our own classes, and at nothing that others have."""

ALWAYS = frozenset({"input_ids", "labels"})
"""Arguments that every module can be called with: without `labels` the loss is the cross entropy of its logits."""

SWITCHES = frozenset({"return_logits", "output_router_logits"})
"""Arguments that only say what to compute; a module that does not name them computes it anyway."""


class BadFactory(BestiaryError):
    """A `--ours` that cannot be imported, is not callable, or does not build a module of the contract.

    Remedy: give `package.module:factory`; the contract stands in `bestiary.verify.foreign`.
    """

    exit_code = 7


@dataclass(frozen=True)
class Foreign:
    """A factory in the place of a bridge's decoder class.

    Attributes:
        name: "package.module:factory".
        factory: gives the module of a `DecoderConfig`.
    """

    name: str
    factory: Callable[[DecoderConfig], nn.Module]

    @property
    def file(self) -> Path | None:
        """The source file of the factory's module, None without one."""
        found = vars(sys.modules[self.name.partition(":")[0]]).get("__file__")
        return Path(found) if isinstance(found, str) else None

    def __call__(
        self, config: DecoderConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> nn.Module:
        """A module on the CPU in eval mode, parameters in `dtype`, buffers as it computes them.

        Args:
            device: ignored: what a module computes while it is built would be lost on meta.
        Raises:
            UnsupportedConfig: the factory raises NotImplementedError.   BadFactory: it returns no module.
        """
        wide = dtype is torch.float64
        try:
            with promoted() if wide else default_dtype(torch.float32):
                model = self.factory(config)
        except NotImplementedError as error:
            raise UnsupportedConfig(
                OPTION, self.name, f"refuses: {error}", read_from="NotImplementedError", remedy="implement it"
            ) from error
        if not isinstance(model, nn.Module):
            raise BadFactory(f"{self.name} returns a {type(model).__name__}, no nn.Module.", remedy="return the model")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.get_default_dtype() if dtype is None else dtype)
        object.__setattr__(model, "forward", _Adapted(model, arguments(model), wide))
        return model.eval()

    def accepts(self, config: DecoderConfig) -> frozenset[str]:
        """Names of the arguments that its module can be called with."""
        return arguments(self(config))


def arguments(model: nn.Module) -> frozenset[str]:
    """Names in the signature of a module's forward, and what every module takes."""
    return ALWAYS | inspect.signature(type(model).forward).parameters.keys()


class _Adapted:
    """A module's forward, called as our decoder's is: a dict comes back, with the loss where there are labels."""

    def __init__(self, model: nn.Module, accepted: frozenset[str], wide: bool) -> None:
        self._forward = model.forward
        self._own_loss = "labels" in inspect.signature(type(model).forward).parameters
        self._accepted, self._wide = accepted, wide

    def __call__(self, input_ids: Tensor | None = None, **arguments: Any) -> dict[str, Any]:
        given = {name: value for name, value in arguments.items() if name in self._accepted or name not in SWITCHES}
        labels = None if self._own_loss else given.pop("labels", None)
        with promoted() if self._wide else nullcontext():
            output = self._forward(**({} if input_ids is None else {"input_ids": input_ids}), **given)
        if not isinstance(output, Mapping) or not isinstance(output.get("logits", output.get("loss")), Tensor):
            raise BadFactory(
                f"the forward returns a {type(output).__name__} without logits.",
                remedy='return a mapping with "logits" (B, T, V)',
            )
        if labels is None:
            return dict(output)
        targets = labels[:, 1:].flatten()
        return {**output, "loss": F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), targets, ignore_index=-100)}


def load_factory(name: str) -> Foreign:
    """The factory that "package.module:factory" names.

    Raises:
        BadFactory: there is none.
    """
    module, _, leaf = name.partition(":")
    try:
        factory = vars(importlib.import_module(module)).get(leaf) if leaf else None
    except ImportError as error:
        raise BadFactory(
            f"{OPTION} {name} cannot be imported ({error}).", remedy="give a module on the import path (PYTHONPATH)"
        ) from error
    if not callable(factory):
        raise BadFactory(
            f"{OPTION} {name} names no function.", remedy="package.module:factory, with factory(config) -> nn.Module"
        )
    return Foreign(name, factory)
