"""Every threshold of the verifier, in one place; flags can only tighten them.

A change of a number here is a change of `GATE_VERSION`: verdicts of different gate versions are not comparable.
The measurements behind the numbers: the promoted float64 floor is 5e-15, the smallest planted bug moves logits by
4e-5, so 1e-10 leaves five decades on each side; plain fp32 differs by 6e-7 rms and 3e-6 at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from bestiary.kernels.errors import BestiaryError

GATE_VERSION = 1

INPUTS_AGREE = 1e-12
"""Relative difference below which a module's inputs count as equal in both models (localisation)."""

MOVED = 1e-9
"""Relative change of Hugging Face's logits or loss above which a config field is live."""

CLIPPED = 0.10
"""Share of values that every soft cap and clamp must clip in the tiny configs, else the run is inconclusive."""

ROUTER_MARGIN = 1e-5
"""Gap between the last chosen and the first rejected expert that an fp32 comparison needs."""


class GateError(BestiaryError):
    """A `--tighten` that names no gate, is not a number, or would loosen one.

    Remedy: name a gate of `verify/gates.py` and a smaller number.
    """


@dataclass(frozen=True)
class Gate:
    """One threshold: `limit` and whether a figure must stay below or above it."""

    limit: float
    at_least: bool = False

    def holds(self, figure: float) -> bool:
        """Whether `figure` satisfies the gate; NaN never does."""
        return figure >= self.limit if self.at_least else figure <= self.limit

    def tighter(self, limit: float) -> bool:
        """Whether `limit` is at least as strict as this gate."""
        return limit >= self.limit if self.at_least else limit <= self.limit


OFFICIAL: Mapping[str, Gate] = MappingProxyType(
    {
        "V2": Gate(1e-10),  # max|Δ| / std, float64
        "V3": Gate(1e-10),
        "V4": Gate(1e-9),  # relative L2 of each gradient, float64
        "V5": Gate(1e-10),
        "V6.rms": Gate(2e-6),  # relative rms, float32
        "V6.max": Gate(2e-5),  # max|Δ| / std, float32
        "V7.rms": Gate(1.25),  # multiple of the rms error that Hugging Face makes in bfloat16
        "V7.max": Gate(2.0),  # multiple of its largest error
        "K.exact": Gate(1e-10),  # relative rms against our reference, float64, values and gradients
        "K.forward": Gate(2.0),  # multiple of the reference's own error in float32 or bfloat16
        "K.backward": Gate(3.0),
        "V8.layer": Gate(5e-6),  # relative rms of one layer of a real checkpoint, float32, teacher-forced
        "V8.max": Gate(1e-3),  # end logits of a real checkpoint, float32
        "V8.top1": Gate(0.999, at_least=True),  # where the reference's margin exceeds the noise
        "V8.kl": Gate(1e-6),
    }
)


@dataclass(frozen=True)
class Gates:
    """The gates of one run: the official ones, some of them tightened."""

    table: Mapping[str, Gate] = field(default_factory=lambda: OFFICIAL)

    def __getitem__(self, name: str) -> Gate:
        return self.table[name]

    def tightened(self, requests: Sequence[str]) -> Gates:
        """The gates with `LEVEL=VALUE` requests applied; a level with several gates tightens those it would tighten.

        Raises:
            GateError: an unknown level, a value that is not a number, or one looser than the official gate.
        """
        table = dict(self.table)
        for request in requests:
            level, _, text = request.partition("=")
            names = [name for name in table if name == level or name.partition(".")[0] == level]
            if not names:
                raise GateError(
                    f"--tighten {request} names no gate.", remedy=f"use one of {', '.join(sorted(table))} = value"
                )
            try:
                value = float(text)
            except ValueError:
                raise GateError(f"--tighten {request} is not LEVEL=NUMBER.", remedy="e.g. --tighten V2=1e-12") from None
            chosen = names if len(names) == 1 else [name for name in names if not table[name].at_least]
            for name in chosen:
                if not table[name].tighter(value):
                    raise GateError(
                        f"--tighten {request} would loosen {name} (official {table[name].limit:g}).",
                        remedy="gates can only be tightened; a looser gate needs a new gate version",
                    )
                table[name] = Gate(value, table[name].at_least)
        return Gates(MappingProxyType(table))
