"""A reward model as a scorer: a canonical decoder with a score head that reads the very ids the policy sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bestiary.bridges.hub import split_revision
from bestiary.models import AutoDecoder, Decoder
from bestiary.models.config import HeadKind
from bestiary.training.data.packing import Candidate, assemble
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import Tokens
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.documents import document_batch, frozen_pass, model_inputs
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.rewards import check_names
from bestiary.training.rl.verdicts import Accounts, Failure, verdict


class RewardModel:
    """A `Scorer`: the score of the last token of a conversation, its prompt included.

    An answer longer than the model's positions, and a score that is not finite, are failures; see `Accounts`. Episodes
    that an environment's error ended have None.

    Args:
        model: with a score head of one label.
        name: of its reward.
        pack_tokens: computed at one time, about; a longer conversation is computed alone.
        pad_id: fills packs.
        max_errors, window: see `Allowance`.

    Raises:
        InvalidRun: another head.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        name: str = "reward_model",
        pack_tokens: int = 8192,
        pad_id: int = 0,
        max_errors: float = 0.05,
        window: int = 256,
    ) -> None:
        config = model.decoder_config
        if config.head is not HeadKind.SCORE or config.num_labels != 1:
            raise InvalidRun(
                f"a reward model with head = {config.head.value} and num_labels = {config.num_labels}.",
                remedy="a checkpoint with a score head of one label: what `bestiary reward` trains",
            )
        self.model = model.eval()
        self._name, self._pack_tokens, self._pad_id = name, pack_tokens, pad_id
        self._accounts = Accounts([name], max_errors, window)

    @classmethod
    def from_pretrained(
        cls,
        src: str | Path,
        policy: BaseHFModelTokenizer,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        name: str = "reward_model",
        pack_tokens: int = 8192,
        max_errors: float = 0.05,
        window: int = 256,
    ) -> RewardModel:
        """From a checkpoint folder or hub id, with its revision behind an @; the head is the checkpoint's, never fresh.

        Args:
            policy: the policy's tokenizer.   Others as the constructor's, and as `AutoDecoder.from_pretrained`'s.
        Raises:
            InvalidRun: a language model's checkpoint, or another tokenizer than the policy's.
        """
        place, revision = split_revision(str(src))
        own = BaseHFModelTokenizer.from_pretrained(place, revision=revision).fingerprint
        if (own.probes, own.vocabulary) != (policy.fingerprint.probes, policy.fingerprint.vocabulary):
            raise InvalidRun(
                f"the reward model {src} has another tokenizer than the policy: the ids of an answer mean other words.",
                remedy="a reward model of the policy's family, or one behind an endpoint that takes texts",
            )
        return cls(
            AutoDecoder.from_pretrained(place, revision=revision, dtype=dtype, device=device),
            name=name,
            pack_tokens=pack_tokens,
            pad_id=policy.pad_id,
            max_errors=max_errors,
            window=window,
        )

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Scorer`.

        Raises:
            RewardFailed: more failures than allowed.
            InvalidRun: a reward of that name is there already.
        """
        check_names([self._name], trajectories)
        start = time.perf_counter()
        longest = self.model.decoder_config.max_position_embeddings
        judged = [place for place, one in enumerate(trajectories) if "failed" not in one.extra]
        rewards: list[float | None] = [None] * len(trajectories)
        for place in judged:
            if len(trajectories[place]) > longest:
                told = f"{len(trajectories[place])} tokens, and the reward model has {longest} positions"
                rewards[place] = self._accounts.book(self._name, trajectories[place].name, Failure("error", told))
        fitting = [place for place in judged if len(trajectories[place]) <= longest]
        with frozen_pass(self.model):
            for places in self._packs(fitting, trajectories):
                scores = self._scores([trajectories[place] for place in places])
                for place, value in zip(places, scores, strict=True):
                    rewards[place] = self._accounts.book(self._name, trajectories[place].name, verdict(value))
        self._accounts.spend(time.perf_counter() - start)
        return [
            replace(one, rewards={**one.rewards, self._name: value})
            for one, value in zip(trajectories, rewards, strict=True)
        ]

    def figures(self) -> dict[str, float]:
        """See `Scorer` and `Accounts.figures`."""
        return self._accounts.figures()

    def _packs(self, places: Sequence[int], trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Places of conversations that are computed together, in the order given."""
        packs: list[list[int]] = []
        used = self._pack_tokens
        for place in places:
            length = len(trajectories[place])
            if used + length > self._pack_tokens:
                packs.append([])
                used = 0
            packs[-1].append(place)
            used += length
        return packs

    def _scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        documents = [Tokens(one.ids, one.ids) for one in trajectories]
        pack = assemble(
            [Candidate(place, "answer", place, Cursor(), 0, (one,)) for place, one in enumerate(documents)],
            sum(map(len, documents)),
            self._pad_id,
        )
        found = self.model(**model_inputs(document_batch(pack), self.model)).scores[: len(trajectories), 0]
        return np.asarray(found.double().cpu()).tolist()
