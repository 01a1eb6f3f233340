"""One engine for all ranks of a policy: the first talks to it, the others hear what it said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.weight_sync import Answered, Checksums, Shapes, WeightReceiver, checksum_of

T = TypeVar("T")


class SharedEngine:
    """A `WeightReceiver` that all ranks call alike, as `weight_sync.sync` on a model in parts does.

    Every rank iterates the tensors, for they are gathered on the way; those of the first one are sent. What the engine
    answers, its errors included, is the same on every rank, so that none is left waiting in a collective.

    Args:
        engine: the first rank's; the others read nothing of theirs but shapes, dtype and what was answered.
    """

    def __init__(self, engine: WeightReceiver) -> None:
        self._engine = engine
        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self._first = not self._several or dist.get_rank() == 0
        self.shapes: Shapes = engine.shapes
        self.dtype: torch.dtype = engine.dtype
        self.context: int = engine.context
        self.answered: Answered | None = engine.answered

    @property
    def version(self) -> int:
        """Of the engine."""
        return self._told(lambda: self._engine.version)

    @version.setter
    def version(self, value: int) -> None:
        def tell() -> None:
            self._engine.version = value

        self._told(tell)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`."""
        return self._told(lambda: self._engine.generate(prompts, sampling, keys=keys))

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See `WeightReceiver`."""
        return self._told(lambda: self._engine.probe(prompts, sampling))

    def receive(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """See `WeightReceiver`."""

        def send() -> list[str]:
            try:
                return self._engine.receive(tensors)
            finally:
                _exhaust(tensors)  # of an engine that gave up early: the others go on to the end

        if not self._first:
            _exhaust(tensors)
        return self._told(send)

    def held(self, name: str) -> Tensor | None:
        """See `WeightReceiver`."""
        return self._told(lambda: self._engine.held(name))

    def checksums(self) -> Mapping[str, int]:
        """See `weight_sync.Checksums`."""

        def read() -> Mapping[str, int]:
            engine = self._engine
            if isinstance(engine, Checksums):
                return engine.checksums()
            found = {name: engine.held(name) for name in self.shapes}
            return {name: checksum_of(tensor, self.dtype) for name, tensor in found.items() if tensor is not None}

        return self._told(read)

    def accept(self, version: int) -> None:
        """See `WeightReceiver`."""
        self._told(lambda: self._engine.accept(version))

    def close(self) -> None:
        """Nothing: whoever made the engine closes it."""

    def _told(self, ask: Callable[[], T]) -> T:
        """What the first rank's call gives, on every rank."""
        answer: T | None = None
        raised: Exception | None = None
        if self._first:
            try:
                answer = ask()
            except Exception as error:
                if not self._several:
                    raise
                raised = error
        if self._several:
            told = [(answer, raised)]
            dist.broadcast_object_list(told, src=0)
            answer, raised = told[0]
        if raised is not None:
            raise raised
        return answer  # type: ignore[return-value]


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass
