"""Cheats: what makes a comparison agree without our model being right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig
from bestiary.verify.planted.attention import grouped, tiled
from bestiary.verify.planted.bug import PlantedBug
from bestiary.verify.planted.patching import patch
from bestiary.verify.reference import reference_class
from bestiary.verify.side import OurSide

_ATTENTION = "bestiary.models.layers.attention"


def _half_split(config: DecoderConfig) -> bool:
    return config.attention.head_dim == config.rope.rotary_dim


def _borrowed_rope(_rope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same rotation by a function of transformers."""
    from transformers.models.llama.modeling_llama import rotate_half

    def apply(x: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Tensor:
        cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(1) for table in (cos, sin))
        turned: Tensor = x * cos + rotate_half(x) * sin
        return turned

    return apply


def _both_tiled(side: OurSide) -> None:
    """Ours tiles key/value heads, and so does the reference, patched in memory."""
    patch(f"{_ATTENTION}:attention", tiled)(side)
    modelling = sys.modules[reference_class(side.current.reference).__module__]

    def repeat_kv(hidden_states: Tensor, groups: int) -> Tensor:
        return hidden_states.repeat(1, groups, 1, 1)

    side.patch(modelling, "repeat_kv", repeat_kv)


def _remembered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The first answer to each input is given for ever."""
    answers: dict[tuple[bytes, int], Any] = {}

    def run(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        labelled = kwargs.get("labels") is not None and not kwargs.get("return_logits")
        key = (b"" if input_ids is None else input_ids.numpy().tobytes(), self.decoder_config.vocab_size + labelled)
        if input_ids is None or torch.is_grad_enabled() or key not in answers:
            answers[key] = forward(self, input_ids, *args, **kwargs)
        return answers[key]

    return run


BUGS = (
    PlantedBug(
        id="X50a_transformers_computes",
        cause="our forward runs code of transformers",
        level="V2",
        applies=_half_split,
        ours=patch(f"{_ATTENTION}:apply_rope", _borrowed_rope),
        checks=("no delegation",),
    ),
    PlantedBug(
        id="X50b_reference_patched",
        cause="the reference was replaced in memory so that both sides agree",
        level="V2",
        applies=grouped,
        ours=_both_tiled,
        checks=("was replaced in memory",),
    ),
    PlantedBug(
        id="X50c_answers_remembered",
        cause="answers come from a table instead of the weights",
        level="V2",
        ours=patch("bestiary.models.decoder:Decoder.forward", _remembered),
        checks=("no counterpart", "a changed weight moves our logits by 0"),
    ),
)
