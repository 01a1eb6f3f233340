"""What a forward pass returns."""

from collections.abc import Iterable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from bestiary.kernels.divergence import TeacherHead
from bestiary.models.cache import Cache

FIELDS = (
    "loss",
    "logits",
    "log_probs",
    "entropy",
    "scores",
    "aux_loss",
    "router_logits",
    "past_key_values",
    "hidden_states",
    "divergence",
    "teacher",
)


class DecoderOutput(dict[str, Any]):
    """A dict with attributes; None fields are absent. `output[0]` is the first field present, as trainers expect.

    loss: ().   logits: (B, T, V).   log_probs: (B, T), log p(target at t), 0 where ignored.   aux_loss: ().
    entropy: (B, T), of the distribution of the token at each target, 0 where ignored.
    scores: (documents, num_labels) of a score head, and `logits` is the same tensor, as transformers calls it.
    router_logits: one (B·T, E) a routed layer.   past_key_values: `Cache`.   hidden_states: (B, T, H), after the norm.
    divergence: (B, T), from a teacher, 0 where ignored.   teacher: this model as a teacher, without a graph.
    """

    loss: Tensor | None
    logits: Tensor | None
    log_probs: Tensor | None
    entropy: Tensor | None
    scores: Tensor | None
    aux_loss: Tensor | None
    router_logits: tuple[Tensor, ...] | None
    past_key_values: Cache | None
    hidden_states: Tensor | None
    divergence: Tensor | None
    teacher: TeacherHead | None

    def __init__(self, fields: Any = (), **named: Any) -> None:
        given = {**dict(fields), **named}
        super().__init__({name: given[name] for name in FIELDS if given.get(name) is not None})

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return self.get(name)
        raise AttributeError(f"DecoderOutput has no field {name!r}; it has {', '.join(FIELDS)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            super().__setattr__(name, value)
        elif value is None:
            self.pop(name, None)
        else:
            self[name] = value

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are present, in order."""
        return tuple(self.values())


def _flatten(output: DecoderOutput) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output.keys())


def _unflatten(values: Iterable[Any], names: list[str]) -> DecoderOutput:
    return DecoderOutput(zip(names, values, strict=True))


pytree.register_pytree_node(
    DecoderOutput, _flatten, _unflatten, serialized_type_name="bestiary.models.output.DecoderOutput"
)
