"""AdamW whose two states take a byte each, by torchao, on the parts of parameters that a process holds."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bestiary.training.errors import InvalidRun


class AdamW8bit(torch.optim.Optimizer):
    """torchao's AdamW8bit: states in blocks of 256 values with one scale each (arXiv:2110.02861).

    A process steps what it holds of every parameter, as a plain tensor, so any mesh will do. Parts below 4096 values or
    not of whole blocks keep states in the parameter's dtype, which one process may and another may not. So the states
    of a split parameter are stored as each process's own, and a checkpoint goes on on the mesh that wrote it.

    Args:
        groups: as of any optimiser.
    Raises:
        InvalidRun: torchao is not installed.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        try:
            from torchao.optim import AdamW8bit as Stepping
        except ImportError as error:
            raise InvalidRun(
                "optim.name = adamw8bit, and torchao is not installed.", remedy="pip install 'bestiary[torchao]'"
            ) from error
        super().__init__(groups, {"lr": lr})
        self._parts = {
            parameter: nn.Parameter(_local(parameter.detach()), requires_grad=False)
            for group in self.param_groups
            for parameter in group["params"]
        }
        parts = [
            {"params": [self._parts[one] for one in group["params"]], "weight_decay": group["weight_decay"]}
            for group in self.param_groups
        ]
        self._stepping: torch.optim.Optimizer = Stepping(parts, lr=lr, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for parameter, part in self._parts.items():
            part.data = _local(parameter.detach())  # FSDP2 may have moved it
            part.grad = None if parameter.grad is None else _local(parameter.grad)
        for group, inner in zip(self.param_groups, self._stepping.param_groups, strict=True):
            inner["lr"].fill_(group["lr"])
        with ExitStack() as stack:
            if all(part.device.type == "cpu" for part in self._parts.values()):
                # torchao compiles a step for each shape, which takes a CPU's compiler 20 seconds a shape.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stepping.step()
        for parameter, part in self._parts.items():
            part.grad = None
            if parameter not in self.state and part in self._stepping.state:
                self.state[parameter] = _as_stored(parameter, self._stepping.state[part])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_stored(parameter: Tensor, states: dict[str, Any]) -> dict[str, Tensor]:
    """The memory of the states under names of a checkpoint, those of a split parameter under this process's own."""
    own = f".{dist.get_rank()}-of-{dist.get_world_size()}" if isinstance(parameter, DTensor) else ""
    found: dict[str, Tensor] = {}
    for name, value in states.items():
        if hasattr(value, "codes"):
            found[f"{name}.codes{own}"], found[f"{name}.scale{own}"] = value.codes, value.scale
        elif not value.ndim:
            found[name] = value
        elif value.numel():  # a process may hold nothing of a small parameter
            found[f"{name}{own}"] = value
    return found
