"""Optimisers and learning-rate schedules, torch's own and torchao's, over the parameters of a decoder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bestiary.training.config import OptimSection
from bestiary.training.errors import InvalidRun
from bestiary.training.optim_8bit import AdamW8bit

DECAY_SHARE = 0.2  # of the steps of "wsd" in which the rate falls (arXiv:2404.06395 has a tenth to a fifth)


class Optimisers:
    """One or two torch optimisers stepped as one: `muon` takes the matrices of the blocks and leaves the rest to AdamW.

    Args:
        model: its trainable parameters.
        section: names and numbers.   lr: at the top of the schedule.
    Raises:
        InvalidRun: nothing trains; adamw8bit without torchao.
    """

    def __init__(self, model: nn.Module, section: OptimSection, lr: float) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise InvalidRun("no parameter of the model is trained.", remedy="a section lora, or requires_grad_(True)")
        self.parts = _built(named, section, lr)
        self._lr = lr

    def step(self) -> None:
        """One update of every parameter."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self, named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Every tensor that the optimisers hold, as `parameter.state`, made now where no step was yet.

        Args:
            named: the parameters by name.
        """
        found: dict[str, torch.Tensor] = {}
        for part in self.parts:
            _prepared(part)
            for name, parameter in named.items():
                states = part.state.get(parameter, {})
                found |= {f"{name}.{key}": value for key, value in states.items() if isinstance(value, torch.Tensor)}
        return found

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step, in every group."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr


def _prepared(part: torch.optim.Optimizer) -> None:
    """Make the states of an optimiser that has not stepped, by a step of no length."""
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    if part.state or any(parameter.grad is not None for parameter in parameters):
        return
    rates = [group["lr"] for group in part.param_groups]
    before = [parameter.detach().clone() for parameter in parameters]
    for group in part.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    part.step()
    part.zero_grad(set_to_none=True)
    for group, rate in zip(part.param_groups, rates, strict=True):
        group["lr"] = rate
    for states in part.state.values():
        if "step" in states:
            states["step"].zero_()  # AdamW would correct its first true step as its second
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)  # a step of no length turns −0 into 0


def decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay means this parameter: a matrix that is neither embedding nor head."""
    if name.endswith("bias"):  # those of experts are as many rows
        return False
    return parameter.ndim >= 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "score.weight"))


def _built(named: Mapping[str, nn.Parameter], section: OptimSection, lr: float) -> list[torch.optim.Optimizer]:
    if section.name == "sgd":
        groups = _groups(named.items(), section.weight_decay)
        return [torch.optim.SGD(groups, lr=lr, momentum=section.momentum)]
    muon = {
        name: parameter
        for name, parameter in named.items()
        if section.name == "muon" and parameter.ndim == 2 and decayed(name, parameter)
    }
    parts: list[torch.optim.Optimizer] = []
    if muon:
        # The update has the size that AdamW's has, so that both take one learning rate (arXiv:2502.16982, section 2.2).
        parts.append(
            torch.optim.Muon(
                list(muon.items()),
                lr=lr,
                momentum=section.momentum,
                weight_decay=section.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    rest = [(name, parameter) for name, parameter in named.items() if name not in muon]
    if rest:
        # One fused pass over all parameters; on the CPU it is as exact as the loop.
        groups = _groups(rest, section.weight_decay)
        if section.name == "adamw8bit":
            return [AdamW8bit(groups, lr=lr, betas=section.betas, eps=section.eps)]
        parts.append(torch.optim.AdamW(groups, lr=lr, betas=section.betas, eps=section.eps, fused=True))
    return parts


def _groups(named: Iterable[tuple[str, nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay; no group is empty."""
    split: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, parameter in named:
        split[decayed(name, parameter)].append((name, parameter))
    return [
        {"params": split[with_], "weight_decay": decay if with_ else 0.0} for with_ in (True, False) if split[with_]
    ]


def schedule(section: OptimSection, lr: float, step: int, steps: int) -> float:
    """The learning rate of step `step`, from 0, of `steps`.

    The warm-up rises in a line and reaches `lr` at its last step; a pure function of the step, so that nothing of it is
    stored in a checkpoint.
    """
    warmup = round(section.warmup * steps) if section.warmup < 1 else int(section.warmup)
    if step < warmup:
        return lr * (step + 1) / warmup
    if section.schedule == "constant":
        return lr
    whole = max(1, steps - warmup)
    done = min(1.0, (step - warmup) / whole)
    if section.schedule == "wsd":
        done = max(0.0, 1.0 - (1.0 - done) / DECAY_SHARE)
    left = 0.5 * (1 + math.cos(math.pi * done)) if section.schedule == "cosine" else 1.0 - done
    return lr * (section.final + (1 - section.final) * left)
