"""Engines in processes of their own for a model that trains in this one: distillation on the student's own answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from bestiary.models import Decoder
from bestiary.training.errors import RoleLost
from bestiary.training.rl.groups import Group
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.weight_sync import sync

LOGGER = logging.getLogger(__name__)
_RESTARTS = 3  # in one call


class StudentEngines:
    """A `RolloutEngine` over a group of engines on Ray, synced with a model of this process before it samples.

    Processes are asked for by the first call. One that dies is started again, synced, and asked again: answers are
    functions of weights, prompts and seeds.

    Args:
        model: that trains.
        group: starts the processes, or returns them; whoever does ends them.

    Attributes:
        version: of the model's weights; whoever steps it says so, and the next call syncs.
    """

    def __init__(self, model: Decoder, group: Callable[[], Group]) -> None:
        self.version = 0
        self._model, self._group = model, group
        self._engine: RolloutGroup | None = None
        self._held: int | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            RoleLost: engines died more often than is borne in one call.
            SyncFailed, StaleWeights, …: see `weight_sync.sync`.
        """
        engine = self._engine = self._engine or RolloutGroup(self._group())
        deaths = 0
        while True:
            try:
                if self._held != self.version:
                    self._held = None
                    sync(self._model, engine, self.version)
                    self._held = self.version
                return engine.generate(prompts, sampling, keys=keys)
            except RoleLost as lost:
                deaths += 1
                if deaths > _RESTARTS:
                    raise
                LOGGER.warning("%s; restarting it", lost.what)
                engine.restart()
                self._held = None

    def close(self) -> None:
        """Let go of the processes."""
        self._engine = None


def student_engine(folder: str, dtype: torch.dtype | None, rows: int) -> StandaloneEngine:
    """In a process of its own: an engine whose weights are nobody's before the first sync.

    Args:
        dtype: that it computes in; None: the checkpoint's.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return StandaloneEngine(folder, version=None, dtype=dtype, device=device, rows=rows)
