"""Answers that are wanted or not: KTO, whose KL estimate is one number for the whole step, and APO-zero unpaired."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch

from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.batch import document_values
from bestiary.training.data.packing import Candidate, Pack, assemble
from bestiary.training.data.samples import Kind
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.errors import InvalidRun
from bestiary.training.losses_preference import UNPAIRED, kl_estimate
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import (
    check_positive,
    document_batch,
    model_inputs,
    on,
    router_term,
    scoring_pass,
)
from bestiary.training.recipes.names import known
from bestiary.training.recipes.reference import Reference, Stored

Turn = tuple[bytes, bytes]  # prompt and answer, int32 ids


class KTO:
    """Args:
    reference: `Live` or `AdaptersOff`; `Stored` for losses without z.
    loss: kto, apo_zero_unpaired; see `losses_preference`.
    beta: how dear distance from the reference is.
    desirable_weight, undesirable_weight: of the two kinds of documents. The paper asks that weight times number of
        documents be within 1 : 1 and 4 : 3 between them.

    KL estimate: z = max(0, mean of log π − log π_ref over prompts with answers to other prompts), without a graph, as
    in TRL. TRL pairs a prompt with the answer before it and takes the mean over a micro-batch; here the pairs come from
    all documents of an optimiser step, of all processes, ordered by a digest of their tokens, each prompt with the next
    answer to another prompt. So packing, accumulation and world size change nothing. It costs a pass of both models
    without gradients (`prepare`).

    Raises:
        InvalidRun: an unknown loss, a number outside its range, stored sums for a loss with z.
    """

    name = "kto"
    unit: Literal["tokens", "sequences"] = "sequences"
    kinds: frozenset[Kind] = frozenset({"unpaired"})
    losses: ClassVar[tuple[str, ...]] = tuple(UNPAIRED)
    slices: Literal[True] = True

    def __init__(
        self,
        reference: Reference,
        loss: str = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        self.reference, self._loss, self.beta = reference, UNPAIRED[known(loss, UNPAIRED, "loss.name")], beta
        check_positive(beta, "loss.beta")
        self.weights = (desirable_weight, undesirable_weight)
        for option, value in zip(("desirable_weight", "undesirable_weight"), self.weights, strict=True):
            if value < 0:
                raise InvalidRun(f"loss.options.{option} = {value:g}.", remedy="a number from 0 on")
        self.estimates = loss == "kto"
        if self.estimates and isinstance(reference, Stored):
            raise InvalidRun(
                "loss.name = kto with a stored reference: its KL estimate is over answers to other prompts, which "
                "change from step to step.",
                remedy="loss.reference = adapters_off or a checkpoint, or loss.name = apo_zero_unpaired",
            )

    def batch(self, pack: Pack) -> Batch:
        """`document_batch` with `wanted` and `counts` (documents,) bool, `turns`, and `z`, which `prepare` sets.

        Raises:
            SampleRefused: a document without a label.
        """
        found = document_batch(pack)
        found["wanted"] = document_values(pack) > 0.5
        found["counts"] = found["targets"] > 0
        found["turns"] = turns(pack) if self.estimates else []
        found["z"] = None if self.estimates else 0.0
        self.reference.extend(found, pack)
        return found

    def count(self, batch: Batch) -> int:
        """Documents."""
        return int(batch["counts"].sum())

    def prepare(
        self, model: Decoder, batches: Sequence[Batch], control: Control, rank: int = 0, ranks: int = 1
    ) -> None:
        """Set z of a step's batches; every process of the run calls it at once.

        Args:
            batches: all that this process has of the step.   rank, ranks: among the processes with different data.
        """
        if not self.estimates or not batches:
            return
        own = [turn for batch in batches for turn in batch["turns"]]
        heard = control.gathered((own, max(batch["input_ids"].shape[1] for batch in batches)))
        every = {turn for theirs, _ in heard for turn in theirs}
        length = max(longest for _, longest in heard)  # one for all: processes must agree in the rows
        rows = mismatched(every, length)
        total, pairs = 0.0, 0.0
        # Sharded models run together: a process whose rows are over takes one of padding.
        for turn in range(-(-len(rows) // ranks)):
            place = turn * ranks + rank
            found = document_batch(packed(rows[place] if place < len(rows) else [], length))
            found |= {name: batches[0][name] for name in {"context"} & batches[0].keys()}
            with scoring_pass(model):
                log_probs = model(**model_inputs(found, model, "shift_labels")).log_probs
                ratios = self.reference.ratios(model, log_probs, found)
            total += float(ratios.double().sum())
            pairs += float(found["documents"])
        sums = control.sums({"total": total, "pairs": pairs})
        z = kl_estimate(sums["total"], sums["pairs"])
        for batch in batches:
            batch["z"] = z

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Sum over the documents.

        Metrics: reward_wanted, reward_unwanted (β times the log-ratios, over documents of that kind, per document of
        any), wanted (their share), kl (z).

        Raises:
            InvalidRun: `prepare` has not set z.
        """
        if batch["z"] is None:
            raise InvalidRun(
                "a batch of kto without its KL estimate.", remedy="recipe.prepare(model, batches, control) before loss"
            )
        found = model(**model_inputs(batch, model, "shift_labels"))
        ratios = self.reference.ratios(model, found.log_probs, batch)
        wanted, counts = (on(batch[name], ratios.device) for name in ("wanted", "counts"))
        desirable, undesirable = (ratios.new_tensor(one) for one in self.weights)
        weight = torch.where(wanted, desirable, undesirable)
        values = weight * self._loss(ratios, wanted, self.beta, batch["z"])
        total = torch.where(counts, values, 0.0).sum() + router_term(model, found, self.count(batch))
        rewards = self.beta * ratios.detach()
        return LossSum(
            total,
            {
                "reward_wanted": torch.where(counts & wanted, rewards, 0.0).sum(),
                "reward_unwanted": torch.where(counts & ~wanted, rewards, 0.0).sum(),
                "wanted": (counts & wanted).sum(),
                "kl": counts.sum() * float(batch["z"]),
            },
        )


def turns(pack: Pack) -> list[Turn]:
    """Prompt and answer of each document that has both: an answer begins with the first trained token."""
    found = []
    borders = pack.borders[: pack.documents + 1].tolist()
    for start, end in pairwise(borders):
        trained = np.flatnonzero(pack.labels[start:end] != IGNORED)
        if len(trained):
            border = start + int(trained[0])
            found.append((pack.input_ids[start:border].tobytes(), pack.input_ids[border:end].tobytes()))
    return found


def mismatched(every: set[Turn], length: int) -> list[list[Turn]]:
    """Each prompt with an answer to another one, by rows of `length` tokens, or of one pair that is longer.

    The order is that of digests of the tokens, so which pairs there are depends on the set alone.
    """
    ordered = sorted(every, key=lambda turn: hashlib.blake2b(b"%d " % len(turn[0]) + b"".join(turn)).digest())
    rows: list[list[Turn]] = [[]]
    used = 0
    for place, (prompt, _) in enumerate(ordered):
        others = (ordered[(place + step) % len(ordered)] for step in range(1, len(ordered)))
        answer = next((answer for other, answer in others if other != prompt), None)
        if answer is None:
            continue
        pair = (prompt, answer)
        size = sum(map(len, pair)) // 4
        if used + size > length:
            rows.append([])
            used = 0
        rows[-1].append(pair)
        used += size
    return [row for row in rows if row]


def packed(row: Sequence[Turn], length: int) -> Pack:
    """A pack of prompts and answers, of at least `length` tokens, the answers trained; of none, padding."""
    chosen_ones = []
    for place, (prompt, answer) in enumerate(row):
        ids = np.frombuffer(prompt + answer, np.int32)
        labels = ids.copy()
        labels[: len(prompt) // 4] = IGNORED
        chosen_ones.append(Candidate(place, "mismatched", place, Cursor(), 0, (Tokens(ids, labels),)))
    return assemble(chosen_ones, max(length, sum(map(len, chosen_ones))), 0)
