"""Engines in processes of their own for a model that trains in this one: distillation on the student's own answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from bestiary.bridges.hub import resolve
from bestiary.models import Decoder
from bestiary.training.errors import RoleLost
from bestiary.training.rl.cluster import session
from bestiary.training.rl.groups import Group, Pool
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.rollout_check import computed_in
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.weight_sync import sync
from bestiary.training.rl.workers import RolloutWorker

LOGGER = logging.getLogger(__name__)
_RESTARTS = 3  # in one call


class StudentEngines:
    """A `RolloutEngine` over a group of engines on Ray, synced with a model of this process before it samples.

    Processes are started by the first call. One that dies is started again, synced, and asked again: answers are
    functions of weights, prompts and seeds.

    Args:
        model: that trains.   src, revision: the checkpoint that it began with.
        count: engines, each with a copy.   rows: answers that one of them samples together.
        timeout_s: after which an engine that does not answer is started anew.

    Attributes:
        version: of the model's weights; whoever steps it says so, and the next call syncs.
    """

    def __init__(
        self,
        model: Decoder,
        src: str,
        count: int,
        *,
        revision: str | None = None,
        rows: int = 64,
        timeout_s: float = 600.0,
    ) -> None:
        self.version = 0
        self._model, self._count, self._timeout_s = model, count, timeout_s
        self._make = partial(student_engine, str(resolve(src, revision=revision)), computed_in(model), rows)
        self._stack = ExitStack()
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
        engine = self._engine or self._start()
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
        """End the processes."""
        self._engine = None
        self._stack.close()

    def _start(self) -> RolloutGroup:
        stack = self._stack
        stack.enter_context(session(max(self._count, os.cpu_count() or 1)))
        pool = Pool(self._count, roles=1, timeout_s=self._timeout_s)
        stack.callback(pool.close)
        group = Group(
            "rollout", RolloutWorker, self._make, size=self._count, pool=pool, threads=4, timeout_s=self._timeout_s
        )
        stack.callback(group.close)
        self._engine = RolloutGroup(group)
        return self._engine


def student_engine(folder: str, dtype: torch.dtype, rows: int) -> StandaloneEngine:
    """In a process of its own: an engine whose weights are nobody's before the first sync."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return StandaloneEngine(folder, version=None, dtype=dtype, device=device, rows=rows)
