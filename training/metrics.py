"""Speed of a run: tokens a second, utilisation of the device, time spent waiting for data, memory.

`Throughput` gives the keys of metrics.jsonl that say how fast a step was. MFU and HFU are shares of `training.peaks`
under the convention of `training.flops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bestiary.training.data.packing import Pack
from bestiary.training.flops import CONVENTION, FlopReport, StepFlops, step_flops, visible_pairs
from bestiary.training.memory import GIB, PeakMemory
from bestiary.training.peaks import Peak, device_peak, measured_peak

__all__ = [
    "CONVENTION",
    "FlopReport",
    "Peak",
    "PeakMemory",
    "StepFlops",
    "Throughput",
    "device_peak",
    "measured_peak",
    "step_flops",
    "visible_pairs",
]

Made = TypeVar("Made")
Sums = Callable[[Mapping[str, float]], Mapping[str, float]]


def _alone(values: Mapping[str, float]) -> Mapping[str, float]:
    return values


class Throughput:
    """Books what this process computes, and says after each step how fast all of them were.

    Args:
        flops: of the model that trains, and of those that a recipe asks beside it (reference, teacher).
        peak: of one device.
        devices: of the whole run.
        sums: values of this process to those of all that take different data, e.g. `Control.sums`.
        memory: made before the model was loaded; None: made now, for a CPU.
    """

    def __init__(
        self,
        flops: Sequence[StepFlops],
        peak: Peak,
        *,
        devices: int = 1,
        sums: Sums = _alone,
        memory: PeakMemory | None = None,
    ) -> None:
        self._flops, self.peak, self._devices, self._sums = tuple(flops), peak, devices, sums
        self._memory = PeakMemory(torch.device("cpu")) if memory is None else memory
        self._model = self._hardware = 0

    def watching(self, make: Callable[[Pack], Made]) -> Callable[[Pack], Made]:
        """`make` of a `PackLoader` (`recipe.batch`) that also books each pack as computed in this step."""

        def made(pack: Pack) -> Made:
            borders = pack.borders[: pack.documents + 1]
            self.book((borders[1:] - borders[:-1]).tolist(), pack.loss_tokens, pack.repeated)
            return make(pack)

        return made

    def book(self, lengths: Sequence[int], targets: int, repeated: Sequence[int] = ()) -> None:
        """A micro-batch: lengths of its documents, positions with a label, beginnings that are not computed again."""
        for flops in self._flops:
            total = flops.totals(lengths, len(lengths) if flops.scores_documents else targets)
            again = flops.totals(repeated, 0)
            self._model += total.model - again.model
            self._hardware += total.hardware - again.hardware

    def read(
        self, *, seconds: float, tokens: int, useful_tokens: int, loss_tokens: int, data_wait_s: float
    ) -> dict[str, float]:
        """Figures of the step that is over, in the keys of metrics.jsonl; a collective where `sums` is one.

        Args:
            seconds: of the step.
            tokens, useful_tokens, loss_tokens: of all processes: slots, those without padding, those with a label.
            data_wait_s: that this process stood still for data.
        """
        counted = self._sums({"model": float(self._model), "hardware": float(self._hardware)})
        self._model = self._hardware = 0
        possible = self.peak.flops * self._devices * seconds
        return {
            "tokens": tokens,
            "useful_tokens": useful_tokens,
            "loss_tokens": loss_tokens,
            "tokens_per_s": tokens / seconds,
            "useful_tokens_per_s": useful_tokens / seconds,
            "loss_tokens_per_s": loss_tokens / seconds,
            "mfu": counted["model"] / possible,
            "hfu": counted["hardware"] / possible,
            "step_s": seconds,
            "data_wait_s": data_wait_s,
            "mem_gib": self._memory.read() / GIB,
        }

    def describe(self) -> dict[str, Any]:
        """What the utilisation is a share of, and how it is counted; to print once and to keep with a run."""
        return {
            "peak_flops": self.peak.flops,
            "peak_source": self.peak.source,
            "devices": self._devices,
            "convention": CONVENTION,
        }
