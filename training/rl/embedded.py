"""The engine that needs nothing: the model that trains, with its own cached generator and its weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.models import Decoder
from bestiary.models.sharding import gathered
from bestiary.training.data.randomness import key_of
from bestiary.training.recipes.documents import frozen_pass
from bestiary.training.rl.rollout import Finish, Rollout, Sampling, Tracks, check_prompts, seed_of

Agree = Callable[[int], int]


class EmbeddedEngine:
    """A `RolloutEngine` on a model in this process; adapters are on, dropout is off.

    A prompt is computed once for all its answers that are sampled together. Prompts of unequal lengths are padded on
    the left, the longest together. Weights need no sync: they are the trainer's, so `version` is what the trainer says.

    Args:
        model: of the policy; what lies in parts on several processes is gathered while it answers.
        rows: answers that are sampled together, at most: memory of the cache.
        agree: a number of each process to the largest of them, for a model in parts whose processes have different
            prompts: they take as many forward passes each, and all call `generate` equally often. None: there is one.

    Attributes:
        version: optimiser steps behind the weights.
    """

    def __init__(self, model: Decoder, *, rows: int = 64, agree: Agree | None = None) -> None:
        self.model, self.version = model, 0
        self._rows, self._agree = rows, agree

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, keys: Sequence[object] | None = None
    ) -> list[Rollout]:
        """See `RolloutEngine`."""
        check_prompts(prompts, sampling, context=self.model.decoder_config.max_position_embeddings)
        names: Sequence[object] = range(len(prompts)) if keys is None else keys
        asked = [(place, answer) for place in range(len(prompts)) for answer in range(sampling.n)]
        seeds = [seed_of(sampling.seed, names[place], answer) for place, answer in asked]
        longest = sorted(range(len(asked)), key=lambda one: -len(prompts[asked[one][0]]))
        parts = [longest[start : start + self._rows] for start in range(0, len(longest), self._rows)]
        rounds = len(parts) if self._agree is None else self._agree(len(parts))
        found: dict[int, Rollout] = {}
        with frozen_pass(self.model), gathered(self.model):
            for part in [*parts, *[list[int]()] * (rounds - len(parts))]:
                rows = [(asked[one][0], prompts[asked[one][0]], seeds[one]) for one in part]
                found |= zip(part, self._answers(rows, sampling), strict=True)
        return [found[place] for place in range(len(asked))]

    def close(self) -> None:
        """Nothing: the model is the trainer's."""

    def _answers(self, rows: Sequence[tuple[int, Sequence[int], int]], sampling: Sampling) -> list[Rollout]:
        """One answer to each (place, prompt, seed); with none, a row that only keeps the others company."""
        device = next(self.model.parameters()).device
        prompts = {place: prompt for place, prompt, _ in rows}
        line = {place: number for number, place in enumerate(prompts)}
        ids, mask = _left_padded([*prompts.values()] or [[0]])
        drawn = _drawn([seed for _, _, seed in rows], sampling.max_tokens)
        numbers = drawn if rows else np.zeros((1, sampling.max_tokens))
        tracks = None if sampling.constraint is None else Tracks(sampling.constraint, sampling.stop_ids)
        sequence, log_probs = self.model.generate(
            ids.to(device),
            None if mask is None else mask.to(device),
            max_new_tokens=sampling.max_tokens,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            stop_token_ids=sampling.stop_ids,
            pad_token_id=0,
            uniforms=torch.from_numpy(numbers).to(device),
            prompt_of=torch.tensor([line[place] for place, _, _ in rows], device=device) if rows else None,
            finished=None if self._agree is None else partial(self._finished, self._agree, not rows),
            allowed=None if tracks is None else partial(self._allowed, tracks),
            return_log_probs=True,
        )
        said, told = sequence[:, ids.shape[1] :].cpu().numpy(), log_probs.cpu().numpy()
        ends = np.isin(said, sampling.stop_ids)
        if tracks is not None:
            ends |= tracks.ends()
        lengths = np.where(ends.any(1), ends.argmax(1) + 1, sampling.max_tokens).tolist()
        finishes: list[Finish] = np.where(ends.any(1), "stop", "length").tolist()
        words, made = said.astype(np.int32), []
        for row, ((place, _, _), length, finish) in enumerate(zip(rows, lengths, finishes, strict=bool(rows))):
            allowed = None if tracks is None else tracks.of(row, length)
            made.append(Rollout(place, words[row, :length], told[row, :length], finish, self.version, allowed))
        return made

    @staticmethod
    def _allowed(tracks: Tracks, said: Tensor) -> Tensor:
        return torch.from_numpy(tracks.next(said.cpu().numpy())).to(said.device)

    @staticmethod
    def _finished(agree: Agree, company: bool, done: bool) -> bool:
        return agree(int(not (done or company))) == 0


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """(count,) numbers in [0, 1), a function of the seed alone."""
    return _drawn([seed], count)[0]


def _drawn(seeds: Sequence[int], count: int) -> NDArray[np.float64]:
    """(seeds, count): `uniforms` of each; one generator is put to the beginning of each, for making one takes long."""
    generator = np.random.Philox(key=np.zeros(2, np.uint64))
    beginning = generator.state
    words = np.empty((len(seeds), count), np.uint64)
    for row, seed in zip(words, seeds, strict=True):
        generator.state = beginning | {"state": beginning["state"] | {"key": key_of("answer", seed)}}
        row[:] = generator.random_raw(count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """(B, T) int64, and (B, T) 0 on the padding where there is any."""
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.zeros(len(prompts), longest)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor([int(token) for token in prompt])
        mask[row, longest - len(prompt) :] = 1
    return ids, None if bool(mask.all()) else mask.long()
