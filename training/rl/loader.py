"""Batches whose answers the policy samples when they are taken: prompts of a data plan in, packs to train on out.

Nothing here has a state of its own. A pack of prompts has a stream and a number, of which the seeds are made; so the
state of the data is the state of the rollouts, a resumed run asks for the same answers with the same weights, and the
number of processes changes neither prompts nor seeds nor which prompts are answered together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from bestiary.training.data.loader import PackLoader, Slots, Waits
from bestiary.training.data.packing import Candidate, Pack, assemble
from bestiary.training.data.ranks import State
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokens import IGNORED, Tokens, prompt_length
from bestiary.training.rl.rollout import Rollout, RolloutEngine, Sampling, seed_of

_WHOLE = 64  # packs are as long as their documents, up to a multiple of this
_SEEDS = 2**63


class RolloutLoader:
    """A `Batches` over packs of prompts; a document is its prompt and what an engine answered, which is trained.

    Where a pack's document has an answer of its own, that one stands unless the policy is to write: `share` of them it
    does (λ of GKD, drawn for each document; GKD draws for a batch), and always where there is none. The prompt of a
    document is what stands before its last trained tokens in a row.

    Args:
        packs: with `make=unchanged`, of a plan that leaves room for answers (`Wanted.answer`).
        engine: is told the version of its weights before every call: the number of steps taken.
        sampling: its seed is that of the run; one answer a prompt.
        share: of documents with an answer, those that the policy answers all the same.
        make: a pack to what is yielded.
        pad_id: fills a pack's tail.
        ranks: that take different data, over which `rl/rollout_s` is a mean.

    Attributes:
        waits: for prompts.   given: slots and tokens of what was yielded, and in `more` rl/answers, rl/answer_tokens,
        rl/truncated (answers cut off at max_tokens), rl/rollout_s (seconds of sampling).
    """

    def __init__(
        self,
        packs: PackLoader,
        engine: RolloutEngine,
        sampling: Sampling,
        *,
        make: Callable[[Pack], Any],
        pad_id: int,
        share: float = 1.0,
        ranks: int = 1,
    ) -> None:
        self._packs, self._engine, self._sampling = packs, engine, sampling
        self._share, self._make, self._pad_id, self._ranks = share, make, pad_id, ranks
        more = dict.fromkeys(("rl/answers", "rl/answer_tokens", "rl/truncated", "rl/rollout_s"), 0.0)
        self.given = Slots(more=more)

    @property
    def waits(self) -> Waits:
        """Of the packs of prompts."""
        return self._packs.waits

    def __iter__(self) -> Iterator[Any]:
        for prompts in self._packs:
            answered = self.answered(prompts)
            self.given.book(answered)
            yield self._make(answered)

    def answered(self, pack: Pack) -> Pack:
        """A pack with the policy's answers, no longer than its documents make it."""
        documents = [
            Tokens(pack.input_ids[start:end], pack.labels[start:end])
            for start, end in pairwise(pack.borders[: pack.documents + 1].tolist())
        ]
        places = [place for place, one in enumerate(documents) if self._answers(pack, place, one)]
        prompts = [documents[place].input_ids[: prompt_length(documents[place].labels)].tolist() for place in places]
        sampling = replace(self._sampling, seed=seed_of(self._sampling.seed, pack.number))
        self._engine.version = pack.number
        start = time.perf_counter()
        found = self._engine.generate(prompts, sampling, keys=[(pack.stream, place) for place in places])
        self._book(found, time.perf_counter() - start)
        for place, prompt, answer in zip(places, prompts, found, strict=True):
            ids = np.array([*prompt, *answer.ids.tolist()], np.int32)
            labels = np.full(len(ids), IGNORED, np.int32)
            labels[len(prompt) :] = answer.ids
            documents[place] = Tokens(ids, labels)
        chosen = [Candidate(place, "", place, Cursor(), 0, (one,)) for place, one in enumerate(documents)]
        length = max(1, -(-sum(map(len, chosen)) // _WHOLE)) * _WHOLE
        return replace(assemble(chosen, length, self._pad_id), stream=pack.stream, number=pack.number)

    def _answers(self, pack: Pack, place: int, document: Tokens) -> bool:
        """Whether the policy answers a document."""
        if (document.labels == IGNORED).all():
            return True
        return seed_of(self._sampling.seed, "share", pack.number, pack.stream, place) < self._share * _SEEDS

    def _book(self, found: list[Rollout], seconds: float) -> None:
        more = self.given.more
        more["rl/answers"] += len(found)
        more["rl/answer_tokens"] += sum(map(len, found))
        more["rl/truncated"] += sum(one.finish == "length" for one in found)
        more["rl/rollout_s"] += seconds / self._ranks

    def global_state(self) -> State:
        """See `PackLoader`."""
        return self._packs.global_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PackLoader`."""
        self._packs.load_state_dict(state)

    def close(self) -> None:
        """Stop the producers of prompts and the engine."""
        self._packs.close()
        self._engine.close()
