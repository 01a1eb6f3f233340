"""Constraints in vLLM: what may not follow an answer's beginning becomes impossible before a token is drawn.

vLLM asks classes that are named when it starts about every row of logits that it samples from (its V1 model runner, in
this process). They come before the temperature, and `processed_logprobs` are those of what they leave. A request names
its constraint by a number in `extra_args`; the constraint itself stays here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.rollout import Remembered, Sampling, padded

_KEY = "bestiary_constraint"
_numbers = itertools.count()


class Constrained:
    """The constraint of one call, as vLLM asks it about a row.

    Args:
        sampling: has one.   vocabulary: ids of the model.
    Raises:
        InvalidRun: it lets nothing come first.
    """

    def __init__(self, sampling: Sampling, vocabulary: int) -> None:
        assert sampling.constraint is not None
        self._after, self._stops = Remembered(sampling.constraint), sampling.stop_ids
        self._name, self._vocabulary = type(sampling.constraint).__name__, vocabulary
        self._number = next(_numbers)
        if not len(self.after([])):
            raise InvalidRun(
                f"sampling.constraint, a {self._name}, has no id that may come first.",
                remedy="a catalogue with items, a grammar with sentences",
            )
        _calls[self._number] = self

    @property
    def named(self) -> dict[str, int]:
        """What a request has as `extra_args`."""
        return {_KEY: self._number}

    def after(self, said: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids that may follow, ascending.

        Raises:
            InvalidRun: one that the model does not know.
        """
        found = self._after(np.asarray(said, np.int32))
        if len(found) and not 0 <= found[0] <= found[-1] < self._vocabulary:
            wrong = int(found[0] if found[0] < 0 else found[-1])
            raise InvalidRun(
                f"sampling.constraint, a {self._name}, allows id {wrong}, the vocabulary {self._vocabulary}.",
                remedy="ids of this model's tokenizer",
            )
        return found

    def length(self, ids: NDArray[np.int32]) -> int | None:
        """Of an answer that is whole after so many of these tokens; None: something may follow all of them."""
        for place in range(1, len(ids) + 1):
            if int(ids[place - 1]) in self._stops or not len(self.after(ids[:place])):
                return place
        return None

    def allowed(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(n, k): see `Rollout.allowed`."""
        return padded([self.after(ids[:place]) for place in range(len(ids))])

    def __call__(self, said: list[int], logits: Tensor) -> Tensor:
        """Logits (V,) of what comes next, in place; of an answer that is whole, those of a stop id, else all."""
        if said and said[-1] in self._stops:
            return logits
        words: Sequence[int] | NDArray[np.int32] = self.after(said)
        if not len(words):
            words = self._stops[:1]
        if len(words):
            kept = torch.as_tensor(np.asarray(words, np.int64), device=logits.device)
            values = logits[kept]
            logits.fill_(-torch.inf)
            logits[kept] = values
        return logits


_calls: WeakValueDictionary[int, Constrained] = WeakValueDictionary()


class Constraints(AdapterLogitsProcessor, LogitsProcessor):
    """What vLLM is started with. Its V2 model runner takes it, and asks another way: constraints are refused there."""

    def __init__(self, vllm_config: Any, *state: Any) -> None:
        if len(state) == 2:  # of the V1 model runner: device and is_pin_memory
            AdapterLogitsProcessor.__init__(self, vllm_config, *state)

    def is_argmax_invariant(self) -> bool:
        """See vLLM: it may change which word is the likeliest."""
        return False

    def new_req_logits_processor(self, params: Any) -> Constrained | None:
        """See vLLM: of a request that came with a constraint."""
        number = (params.extra_args or {}).get(_KEY)
        return None if number is None else _calls[number]

    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        """See vLLM."""
        return logits if context is not None else AdapterLogitsProcessor.apply(self, logits)
