"""Items as vectors by what stands near them in histories: what semantic ids are made of where nothing else is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def item_vectors(
    histories: Iterable[Sequence[int]], items: int, *, width: int = 32, reach: int = 5, seed: int = 0
) -> NDArray[np.float64]:
    """The positive pointwise mutual information of items that stand near each other, factorised.

    Two events of a history that are `d` apart count 1 / d, up to `reach`.

    Args:
        histories: items in the order of time, numbered from 0.
    Returns:
        (items, width); items that no history has are at 0.
    """
    near = np.zeros((items, items))
    for history in map(np.asarray, histories):
        for apart in range(1, min(reach, len(history) - 1) + 1):
            np.add.at(near, (history[:-apart], history[apart:]), 1 / apart)
    near += near.T
    expected = np.outer(near.sum(0), near.sum(1)) / max(near.sum(), 1.0)
    information = np.log(np.maximum(near / np.maximum(expected, 1e-9), 1.0))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        left, values, _ = torch.svd_lowrank(torch.from_numpy(information), q=width, niter=4)
    return np.asarray((left * values.sqrt()).numpy())
