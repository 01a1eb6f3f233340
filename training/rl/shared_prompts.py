"""Answers to one prompt in a forward pass that computes the prompt once.

A pack holds every answer behind a copy of its prompt. But everything outside attention treats tokens one by one, and of
earlier tokens attention reads keys and values alone: so the prompts of a pack can be computed as rows of their own into
a `Cache`, and the answers as rows that go on from them. Gradients flow through the cache. What comes out is put where
the pack has it, so that a loss sees no difference.

    16 answers of 20 tokens to a prompt of 500        8320 tokens in a pack, 819 computed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bestiary.models import Cache, Decoder
from bestiary.models.config import DynamicScaling, HeadKind, LongRopeScaling
from bestiary.models.output import DecoderOutput
from bestiary.models.sharding import is_spread
from bestiary.training.data.tokens import IGNORED

WORTH = 0.7  # of the tokens of a pack: where more would be left, two passes and their padding are not worth it


@dataclass(frozen=True, slots=True)
class Shared:
    """Prompts and answers of a pack, as two batches.

    A prompt's last token is computed with each answer, whose first token it predicts.

    Attributes:
        prompts: (P, p) int64, without their last tokens, padded on the left.   lengths: (P,) of them, at least 1.
        which: (R,) int64, the prompt of each answer.
        answers: (R, t) int64, from the last token of the prompt to the one before the last, padded on the right.
        counts: (R,) tokens of them.   targets: (R, t) int64, what each predicts, `IGNORED` where nothing is trained.
        spots: (R, t) int64, where in the row of the pack the prediction stands; -1 in the padding.
        repeated: lengths of the rows of `prompts` that the pack has once more, as often as it has them.
    """

    prompts: Tensor
    lengths: Tensor
    which: Tensor
    answers: Tensor
    counts: Tensor
    targets: Tensor
    spots: Tensor
    repeated: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Tokens that are computed, padding included."""
        return self.prompts.numel() + self.answers.numel()

    @property
    def useful_tokens(self) -> int:
        """Those that are no padding."""
        return int(self.lengths.sum() + self.counts.sum())

    def scored(self, model: Decoder, row: int, *, allowed: Tensor | None = None, **asked: Any) -> DecoderOutput:
        """What forward gives of the pack's targets: log_probs (1, row), and entropy where it is asked for.

        Args:
            row: tokens of the pack.   allowed: (1, row, k), as of forward.   asked: temperature, return_entropy.
        """
        device = next(model.parameters()).device
        lengths, which, counts = (one.to(device) for one in (self.lengths, self.which, self.counts))
        prompts, answers, spots = (one.to(device) for one in (self.prompts, self.answers, self.spots))
        places = torch.arange(prompts.shape[1], device=device) - (prompts.shape[1] - lengths)[:, None]
        padded = None if len(set(self.lengths.tolist())) == 1 else (places >= 0).long()
        cache = Cache(model.decoder_config)
        model(
            prompts,
            attention_mask=padded,
            position_ids=places.clamp(min=0),
            past_key_values=cache,
            return_logits=False,
        )
        cache.reorder(which)
        if padded is not None:
            padded = torch.cat((padded[which], torch.ones_like(answers)), dim=1)
        # Padding has the position of its row's last token: the context of the model might end there.
        along = torch.arange(answers.shape[1], device=device).minimum(counts[:, None] - 1)
        given: dict[str, Any] = dict(asked)
        if allowed is not None:
            given["allowed"] = allowed[0, spots.clamp(min=0)].masked_fill((spots < 0)[..., None], -1)
        found = model(
            answers,
            attention_mask=padded,
            position_ids=lengths[which][:, None] + along,
            past_key_values=cache,
            shift_labels=self.targets.to(device),
            **given,
        )
        real = spots >= 0

        def placed(values: Tensor) -> Tensor:
            return values.new_zeros(row).index_copy(0, spots[real], values[real])[None]

        columns = {name: found[name] for name in ("log_probs", "entropy") if name in found}
        return DecoderOutput({name: placed(values) for name, values in columns.items()})


def share(documents: Sequence[NDArray[np.int32]], labels: Sequence[NDArray[np.int32]]) -> Shared | None:
    """The documents of a pack, one behind the other in its row, as prompts and answers; None: it is not worth it.

    Args:
        documents: ids of each.   labels: the same, `IGNORED` where nothing is trained: all before the first one that is
            not is the prompt.
    """
    starts = [int((one != IGNORED).argmax()) for one in labels]
    if not documents or min(starts) < 2:  # a prompt of one token has nothing to be computed before its answers
        return None
    known: dict[bytes, int] = {}
    prompts: list[NDArray[np.int32]] = []
    which, repeated = [], []
    for ids, start in zip(documents, starts, strict=True):
        prompt = ids[:start].tobytes()
        if prompt in known:
            repeated.append(start - 1)
        else:
            known[prompt] = len(prompts)
            prompts.append(ids[: start - 1])
        which.append(known[prompt])
    counts = [len(ids) - start for ids, start in zip(documents, starts, strict=True)]
    longest, width = max(map(len, prompts)), max(counts)
    if longest * len(prompts) + width * len(counts) > WORTH * sum(map(len, documents)):
        return None
    left = np.zeros((len(prompts), longest), np.int64)
    for row, prompt_ids in enumerate(prompts):
        left[row, longest - len(prompt_ids) :] = prompt_ids
    answers, targets, spots = (np.full((len(counts), width), fill, np.int64) for fill in (0, IGNORED, -1))
    border = 0
    for row, (ids, label, start, count) in enumerate(zip(documents, labels, starts, counts, strict=True)):
        answers[row, :count], targets[row, :count] = ids[start - 1 : -1], label[start:]
        spots[row, :count] = border + np.arange(start - 1, len(ids) - 1)
        border += len(ids)
    return Shared(
        prompts=torch.from_numpy(left),
        lengths=torch.tensor([len(one) for one in prompts]),
        which=torch.tensor(which),
        answers=torch.from_numpy(answers),
        counts=torch.tensor(counts),
        targets=torch.from_numpy(targets),
        spots=torch.from_numpy(spots),
        repeated=tuple(repeated),
    )


def scored(model: Decoder, given: Mapping[str, Any], shared: Shared | None, **asked: Any) -> DecoderOutput:
    """Log-probabilities of a pack's targets, and entropy where it is asked for: (1, T).

    Args:
        given: what forward takes of the pack.   shared: the same as prompts and answers, which are computed then.
    """
    if shared is None:
        found: DecoderOutput = model(**given, **asked)
        return found
    return shared.scored(model, given["input_ids"].shape[1], allowed=given.get("allowed"), **asked)


def shares(model: Decoder) -> bool:
    """Whether a model can compute prompts first and answers behind them, with gradients.

    Not one whose blocks are compiled, are computed again in the backward pass or are spread by FSDP2, all of which
    count on one forward pass; nor one that counts what routers do in a pass, or whose positions turn by other angles
    with the length.
    """
    config = model.decoder_config
    scalings = [rope.scaling for rope in (config.rope, config.sliding_rope) if rope is not None]
    return (
        config.head is HeadKind.LM
        and config.attention.causal
        and not config.compile_blocks
        and not config.output_router_logits
        and not model.model.checkpointing
        and not any(isinstance(scaling, DynamicScaling | LongRopeScaling) for scaling in scalings)
        and not is_spread(model.parameters())
        and not any(isinstance(module, FSDPModule) for module in model.modules())
    )
