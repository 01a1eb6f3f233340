"""Whom a preference loss compares the policy with: another model, the policy without its adapters, or stored sums."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bestiary.kernels.dispatch import as_trained
from bestiary.models import Decoder
from bestiary.models.lora import adapters_off
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import digest_of
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import Batch
from bestiary.training.recipes.documents import document_batch, document_sums, frozen_pass, model_inputs, on


class Reference(Protocol):
    """The other side of a log-ratio."""

    def extend(self, batch: Batch, pack: Pack) -> None:
        """Add to a batch what `ratios` needs of its pack."""

    def ratios(self, model: Decoder, log_probs: Tensor, batch: Batch) -> Tensor:
        """log π − log π_ref of each document, (documents,), with the graph of `log_probs` (1, T)."""


class Live:
    """Another model, which is frozen here and computes in every step; of the policy's sharding or not.

    The difference is taken token by token: with the same weights and operations it is 0, not the rounding of two sums.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model.requires_grad_(False).eval()

    def extend(self, batch: Batch, pack: Pack) -> None:
        """Nothing."""

    def ratios(self, model: Decoder, log_probs: Tensor, batch: Batch) -> Tensor:
        """See `Reference`.

        Raises:
            InvalidRun: it is the policy.
        """
        if self.model is model:
            raise InvalidRun("the reference is the policy itself.", remedy="a copy, or loss.reference = adapters_off")
        return document_sums(log_probs - token_log_probs(self.model, batch).to(log_probs), batch)


class AdaptersOff:
    """The policy itself, its adapters weighed by 0: no second model in memory."""

    def extend(self, batch: Batch, pack: Pack) -> None:
        """Nothing."""

    def ratios(self, model: Decoder, log_probs: Tensor, batch: Batch) -> Tensor:
        """See `Reference`.

        Raises:
            InvalidConfig: the policy has no adapters.
        """
        with adapters_off(model):
            theirs = token_log_probs(model, batch)
        return document_sums(log_probs - theirs, batch)


class Stored:
    """Sums computed before the run, by the document's tokens: packing, order and resuming do not matter to them.

    Args:
        sums: log π_ref of a document's trained tokens by `digests` of it.
    """

    def __init__(self, sums: Mapping[str, float]) -> None:
        self.sums = dict(sums)

    @classmethod
    def of(cls, model: Decoder, packs: Iterable[Pack]) -> Stored:
        """Sums under a model, for every document of some packs."""
        sums: dict[str, float] = {}
        for pack in packs:
            found = document_batch(pack)
            values = document_sums(token_log_probs(model, found), found).double().tolist()
            sums.update(zip(digests(pack), values, strict=True))
        return cls(sums)

    @classmethod
    def load(cls, file: Path) -> Stored:
        """What `save` wrote; nothing in the file is unpickled.

        Raises:
            InvalidRun: it is something else.
        """
        try:
            with np.load(file, allow_pickle=False) as stored:
                return cls(dict(zip(stored["digests"].tolist(), stored["sums"].tolist(), strict=True)))
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidRun(
                f"{file} holds no sums of a reference: {error}.", read_from=str(file), remedy="compute it again"
            ) from error

    def save(self, file: Path) -> None:
        """As an .npz of two columns, digests and sums."""
        with file.open("wb") as opened:
            np.savez(opened, digests=np.array([*self.sums]), sums=np.array([*self.sums.values()], np.float64))

    def extend(self, batch: Batch, pack: Pack) -> None:
        """Adds reference (documents,) float64.

        Raises:
            InvalidRun: a document that nothing was computed for.
        """
        names = digests(pack)
        missing = [place for place, name in enumerate(names) if name not in self.sums]
        if missing:
            raise InvalidRun(
                f"document {missing[0]} of a pack ({len(missing)} of {len(names)}) has no stored reference.",
                remedy="compute it again: other data, another tokenizer, template or truncation than it was made with",
            )
        batch["reference"] = torch.tensor([self.sums[name] for name in names], dtype=torch.float64)

    def ratios(self, model: Decoder, log_probs: Tensor, batch: Batch) -> Tensor:
        """See `Reference`; the difference of two sums."""
        return document_sums(log_probs, batch) - on(batch["reference"], log_probs.device).to(log_probs.dtype)


def token_log_probs(model: Decoder, batch: Batch) -> Tensor:
    """(1, T) under a model, without a graph and without dropout."""
    with frozen_pass(model) if model.training else nullcontext(), torch.no_grad(), as_trained():
        found: Tensor = model(**model_inputs(batch, model, "shift_labels")).log_probs
    return found


def digests(pack: Pack) -> list[str]:
    """A name for each document, from its tokens and labels."""
    borders = pack.borders[: pack.documents + 1].tolist()
    return [digest_of(pack.input_ids[start:end], pack.labels[start:end]) for start, end in pairwise(borders)]
