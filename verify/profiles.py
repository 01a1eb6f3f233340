"""Where the error of a comparison lies: its worst figure in each layer and at each position, small enough to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bestiary.verify.localise import Pair, layer_of
from bestiary.verify.verdict import MAX_POINTS, LayerError, Profile

CHUNK = 64  # positions compared at a time: a vocabulary is wide


def rounded(figure: float) -> float | None:
    """Three digits of a figure; None where it is not finite."""
    return float(f"{figure:.2e}") if math.isfinite(figure) else None


def layer_errors(pairs: Iterable[Pair], layer_types: Sequence[str] = ()) -> list[LayerError]:
    """The worst output of each layer, and of each module outside the layers, in the order of execution."""
    worst: dict[int | str, Pair] = {}
    for pair in pairs:
        if pair.event.side != "out":
            continue
        layer = layer_of(pair.event.module)
        key: int | str = pair.event.module if layer is None else layer
        if key not in worst or not pair.figure <= worst[key].figure:
            worst[key] = pair
    return [
        LayerError(
            layer=key if isinstance(key, int) else None,
            layer_type=layer_types[key] if isinstance(key, int) and key < len(layer_types) else None,
            module=pair.event.module,
            figure=rounded(pair.figure),
        )
        for key, pair in list(worst.items())[:MAX_POINTS]
    ]


def position_errors(ours: Tensor, reference: Tensor, *, scale: float | None = None) -> tuple[int, list[float | None]]:
    """max|ours − reference| / scale at each position of (…, T, V) logits, over all rows and the vocabulary.

    Args:
        scale: std of the reference; None: computed.
    Returns:
        Positions an entry, so that at most `MAX_POINTS` are left, and the entries; none where shapes differ.
    """
    if ours.shape != reference.shape or ours.ndim < 2:
        return 1, []
    a, b = (
        tensor.detach().flatten(0, -3) if tensor.ndim > 2 else tensor.detach()[None] for tensor in (ours, reference)
    )
    spread = float(b.double().std(correction=0)) if scale is None else scale
    gaps = [
        (x.double() - y.double()).abs().amax(-1).amax(0).cpu()
        for x, y in zip(a.split(CHUNK, 1), b.split(CHUNK, 1), strict=True)
    ]
    figures = torch.cat(gaps) / spread if spread else torch.cat(gaps)
    stride = -(-len(figures) // MAX_POINTS)
    return stride, [rounded(float(part.max())) for part in figures.split(stride)]


def record(
    profiles: list[Profile],
    level: str,
    case: str,
    gate: float,
    *,
    layers: Sequence[LayerError] = (),
    positions: tuple[int, list[float | None]] = (1, []),
) -> None:
    """Adds to the profile of a level's case, which its checks fill one after the other."""
    found = next((one for one in profiles if (one.level, one.case) == (level, case)), None)
    if found is None:
        found = Profile(level=level, case=case, gate=gate)
        profiles.append(found)
    found.layers = list(layers) or found.layers
    if positions[1]:
        found.stride, found.positions = positions
