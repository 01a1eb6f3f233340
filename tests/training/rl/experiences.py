"""Answers that a tiny model could have sampled, as records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bestiary.models import Decoder
from bestiary.training.rl.packing import with_log_probs
from bestiary.training.rl.records import Experience, Trajectory

from ...models.tiny import VOCAB

LENGTHS = ((4, 5), (2, 1), (6, 8), (3, 3), (5, 2), (2, 6))  # prompt and answer; two groups of three
TEMPERATURE = 0.7
PACK = {"pack_length": 15, "pad_id": 5}


def trajectory(place: int, **changes: Any) -> Trajectory:
    """With log-probabilities of nobody."""
    prompt, answer = LENGTHS[place]
    generator = np.random.default_rng(place)
    length = prompt + answer
    sampled = np.arange(length) >= prompt
    given: dict[str, Any] = {
        "prompt_id": f"p{place // 3}",
        "group_id": f"p{place // 3}/0",
        "sample": place % 3,
        "ids": generator.integers(0, VOCAB, length).astype(np.int32),
        "sampled": sampled,
        "rollout_log_probs": np.where(sampled, -generator.random(length), 0.0),
        "temperature": TEMPERATURE,
        "version": 3,
        "finish": "stop" if place % 2 else "length",
        "rewards": {"right": float(place % 3 == 0), "short": -0.1 * answer},
        "extra": {"turns": 1},
    }
    return Trajectory(**(given | changes))


def with_common_prompts(prompt: int = 24) -> list[Trajectory]:
    """Two groups of three whose answers have one prompt each, the second a little shorter."""
    found = []
    for place, (_, answer) in enumerate(LENGTHS):
        length = prompt - 2 * (place // 3)
        ids = np.random.default_rng(20 + place // 3).integers(0, VOCAB, length)
        whole = np.concatenate([ids, np.random.default_rng(place).integers(0, VOCAB, answer)]).astype(np.int32)
        sampled = np.arange(len(whole)) >= length
        found.append(trajectory(place, ids=whole, sampled=sampled, rollout_log_probs=np.where(sampled, -1.0, 0.0)))
    return found


def sampled_by(model: Decoder, given: Sequence[Trajectory] | None = None, **changes: Any) -> list[Experience]:
    """Whose rollout log-probabilities are the model's, moved a little, and so are those of its reference.

    Args:
        given: None: one `trajectory` of each length, with `changes`.
    """
    places = range(len(LENGTHS))
    blank = [Experience.of(one) for one in given or [trajectory(place, **changes) for place in places]]
    room = max(PACK["pack_length"], *(len(one.trajectory) for one in blank))
    scored = with_log_probs(model, blank, "old_log_probs", pack_length=room, pad_id=PACK["pad_id"])
    found = []
    for place, one in enumerate(scored):
        assert one.old_log_probs is not None
        generator = np.random.default_rng(50 + place)
        sampled = one.trajectory.sampled
        noise = -0.2 * generator.random((3, len(sampled))) * sampled
        found.append(
            replace(
                one,
                trajectory=replace(one.trajectory, rollout_log_probs=one.old_log_probs + noise[0]),
                old_log_probs=one.old_log_probs + noise[1],
                reference_log_probs=one.old_log_probs + noise[2],
                advantages=generator.normal(size=1) * sampled,
            )
        )
    return found


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    """Those of all trained parameters."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
