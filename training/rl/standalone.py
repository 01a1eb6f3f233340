"""A rollout engine with weights of its own and nothing to install: our cached generator on a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bestiary.bridges.errors import KeyMismatch
from bestiary.models import AutoDecoder
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.versioned import Versioned
from bestiary.training.rl.weight_sync import Answered, Shapes, SyncFailed, checksum_of


class StandaloneEngine(Versioned):
    """A `RolloutEngine` and `WeightReceiver`, as `EmbeddedEngine` samples, whose weights come by `weight_sync.sync`.

    Every value can be read back, so a sync is verified to the last bit.

    Args:
        folder: a checkpoint, adapters merged; its weights are read once, then synced.
        version: optimiser steps behind them; None: they are of nobody, and the first sync brings some.
        dtype: that it computes in; None: the checkpoint's.
        rows: answers that are sampled together, at most.

    Attributes:
        shapes, dtype, answered: see `WeightReceiver`.   context: positions of a prompt and its answer.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        version: int | None = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: int = 64,
    ) -> None:
        self._model = AutoDecoder.from_pretrained(folder, dtype=dtype, device=device)
        self._engine = EmbeddedEngine(self._model, rows=rows)
        super().__init__(version)
        self.dtype: torch.dtype = next(self._model.parameters()).dtype
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in self._model.named_hf_tensors()}
        self.answered: Answered | None = None
        self.context = self._model.decoder_config.max_position_embeddings

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            SyncFailed: the last sync failed.
        """
        self._engine.version = self.version
        return self._engine.generate(prompts, sampling, keys=keys)

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See `WeightReceiver`; these answers have version −1."""
        self._engine.version = -1
        return self._engine.generate(prompts, sampling)

    def receive(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """See `WeightReceiver`."""
        self._version = None
        try:
            return self._model.load_hf_tensors(tensors)
        except KeyMismatch as error:
            raise SyncFailed(f"the engine has no place for what it was sent: {error.what}") from error

    def held(self, name: str) -> Tensor | None:
        """See `WeightReceiver`."""
        return next((tensor for known, tensor in self._model.named_hf_tensors() if known == name), None)

    def checksums(self) -> Mapping[str, int]:
        """See `weight_sync.Checksums`."""
        return {name: checksum_of(tensor, self.dtype) for name, tensor in self._model.named_hf_tensors()}

    def accept(self, version: int) -> None:
        """See `WeightReceiver`."""
        self._version = version

    def close(self) -> None:
        """Forget the weights."""
        self._version = None
