"""Where a comparison runs: models on a device, what goes into them moved there, what comes out moved back.

The levels compute on the CPU with what both sides answer; only the models, their weights and what passes between their
modules lie on the device. With the CPU as the device nothing is moved and nothing is hooked.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from bestiary.kernels.errors import BestiaryError

CPU = torch.device("cpu")
T = TypeVar("T")


class NoDevice(BestiaryError):
    """A `--device` that is not here, or on which the levels do not run.

    Remedy: `--device cpu`, or a device that `bestiary doctor` lists.
    """

    exit_code = 7


def usable(device: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        NoDevice: it is no device, none that the levels run on, or none of this machine.
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise NoDevice(f"--device {device} is no device for the levels.", remedy="cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise NoDevice(
            f"--device {device}: no CUDA device.",
            remedy="run without --device, or on a machine with an NVIDIA GPU and a torch built for CUDA",
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise NoDevice(f"--device {device}: the machine has {torch.cuda.device_count()}.", remedy="a lower number")
    return torch.device(device)


def moved(value: T, device: torch.device) -> T:
    """`value` with every tensor in it, inside tuples, lists and dicts, on `device`; anything else is left alone."""
    return cast(T, _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def placed(model: nn.Module, device: torch.device, *, back: torch.device = CPU) -> None:
    """Moves a model to `device`; from now on its forward takes tensors from anywhere and answers with some on `back`.

    Its embedding takes tokens from anywhere too. Caches stay where they are.
    """
    if device == CPU:
        return
    model.to(device)

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return moved(args, device), moved(kwargs, device)

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, MutableMapping):
            return moved(output, back)
        for name in list(output):  # in place: an output of transformers is a class of its own
            output[name] = moved(output[name], back)
        return output

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)
    model.get_submodule("model.embed_tokens").register_forward_pre_hook(enter, with_kwargs=True)
