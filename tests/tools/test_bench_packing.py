"""The packing benchmark counts what it says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bestiary.tools.bench import packing, packing_arms, producer_memory
from bestiary.training.data.tokens import IGNORED, Tokens


def documents(*lengths: int) -> list[Tokens]:
    return [Tokens(np.full(n, 1 + place, np.int32), np.full(n, 1 + place, np.int32)) for place, n in enumerate(lengths)]


def test_a_global_step_lasts_as_long_as_its_slowest_rank() -> None:
    """The last, incomplete one too."""
    seconds = [1.0, 3.0, 2.0, 2.0, 5.0]
    works = [SimpleNamespace(useful=10, arguments={"input_ids": torch.zeros(1, 20)}) for _ in seconds]
    waiting = iter(seconds)
    found = packing._run(lambda _work: next(waiting), works, ranks=2)
    assert found["useful_per_s"] == pytest.approx(50 / (2 * 3 + 2 * 2 + 5), rel=1e-3)
    assert found["slot_efficiency"] == 0.5


def test_every_arm_trains_the_same_tokens() -> None:
    """Padded, sorted, flattened, packed by TRL and by us: each document once, its labels with it."""
    made = documents(5, 9, 3, 8)
    arms = {
        "padded": packing_arms.in_order(made, 2),
        "sorted": packing_arms.by_length(made, 2, 2),
        "flattened": packing_arms.flattened(made, 2),
        "trl": packing_arms.trl_bfd(made, 9),
        "alone": packing_arms.alone(made),
        "ours": packing_arms.packed(made),
    }
    for name, works in arms.items():
        assert sum(work.useful for work in works) == 25, name
        labels = torch.cat([work.arguments["labels"].flatten() for work in works])
        # The first label of a document has nothing before it: some arms hide it, none can train it.
        counts = torch.bincount(labels[labels != IGNORED], minlength=5)[1:].tolist()
        assert all(n - 1 <= count <= n for count, n in zip(counts, (5, 9, 3, 8), strict=True)), name


def test_an_epoch_counts_the_time_to_the_first_step() -> None:
    samples = {"ours": [{"useful_per_s": 100.0}], "sorted": [{"useful_per_s": 50.0}]}
    assert packing._goal(samples, "sorted", 1.0, {}, 1000).figure == 2.0
    assert packing._goal(samples, "sorted", 1.0, {"ours": 10.0, "sorted": 20.0}, 1000).figure == 2.0
    assert packing._goal(samples, "sorted", 1.0, {"sorted": 20.0}, 1000).figure == 4.0


def test_memory_is_compared_behind_the_start() -> None:
    """What caches take in the first fifth is no growth, and is in what is held."""
    filled = [100, *range(200, 1200, 50), *[1200] * 70, *[1203] * 10]
    watched = producer_memory.Watched(tuple(filled), 1, 1.0)
    assert (watched.growth, watched.held) == (103, 1103)
