"""The likeliest items of a catalogue under a model: what a recommender shows when it does not sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.models import Decoder
from bestiary.models.cache import Cache
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.documents import frozen_pass


def likeliest_items(
    model: Decoder, catalogue: Catalogue, prompts: Sequence[Sequence[int]], count: int, *, rows: int = 64
) -> list[list[int]]:
    """Items by their probability behind each prompt, by beam search in the catalogue's trie.

    The probability is the one that constrained sampling has (`rollout.Constraint`): at every level a softmax over what
    the catalogue allows. Keys and values of a prompt are computed once.

    Args:
        count: of beams, and so of items; fewer where the catalogue has no more.
        rows: prompts that are searched together, at most.
    Returns:
        the likeliest first, of each prompt.
    Raises:
        InvalidRun: an empty prompt.
    """
    if empty := [place for place, prompt in enumerate(prompts) if not len(prompt)]:
        raise InvalidRun(f"prompt {empty[0]} of {len(prompts)} is empty.", remedy="a prompt has at least one token")
    found: dict[int, list[int]] = {}
    with frozen_pass(model):
        for places in _alike(prompts, rows):
            ids = np.array([prompts[place] for place in places], np.int64)
            found |= zip(places, _search(model, catalogue, torch.from_numpy(ids), count), strict=True)
    return [found[place] for place in range(len(prompts))]


def _alike(prompts: Sequence[Sequence[int]], rows: int) -> Iterator[list[int]]:
    """Places of prompts of one length, so many at a time."""
    lengths: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(place)
    for places in lengths.values():
        yield from (places[start : start + rows] for start in range(0, len(places), rows))


def _search(model: Decoder, catalogue: Catalogue, ids: Tensor, count: int) -> list[list[int]]:
    device, prompts = next(model.parameters()).device, len(ids)
    cache = Cache(model.decoder_config)
    begun = torch.zeros(prompts, 1, 0, dtype=torch.int64)
    totals = torch.zeros(prompts, 1, dtype=torch.float64)
    unseen = ids
    for level in range(catalogue.ids.levels):
        logits = model(unseen.to(device), past_key_values=cache, logits_to_keep=1).logits[:, -1].double().cpu()
        beams = begun.shape[1]
        barred = ~torch.from_numpy(_open(catalogue, begun.flatten(0, 1).numpy(), logits.shape[1]))
        # A beam that ran out of items has nothing to go on with: −∞ − (−∞) is no number.
        log_probs = logits.masked_fill(barred, -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        values = (totals[..., None] + log_probs.view(prompts, beams, -1)).flatten(1)
        # No more than begin an item: with beams for all of them, most of the vocabulary would go along for nothing.
        best = values.topk(min(count, int(values.isfinite().sum(1).max())))
        beam, token = best.indices // logits.shape[1], best.indices % logits.shape[1]
        begun = torch.cat([begun.gather(1, beam[..., None].expand(-1, -1, level)), token[..., None]], -1)
        totals, unseen = best.values, token.reshape(-1, 1)
        if level + 1 < catalogue.ids.levels:
            cache.reorder((torch.arange(prompts)[:, None] * beams + beam).flatten().to(device))
    known: dict[bytes, int] = {}
    return [
        [_named(catalogue, words, known) for words, value in zip(of, worth, strict=True) if value > -torch.inf]
        for of, worth in zip(begun.int().numpy(), totals.tolist(), strict=True)
    ]


def _open(catalogue: Catalogue, beginnings: NDArray[np.int64], vocabulary: int) -> NDArray[np.bool_]:
    """`Catalogue.mask`, asked once for each distinct beginning."""
    if not beginnings.shape[1]:
        return np.repeat(catalogue.mask(beginnings[:1].astype(np.int32), vocabulary), len(beginnings), 0)
    known, place = np.unique(beginnings, axis=0, return_inverse=True)
    return catalogue.mask(known.astype(np.int32), vocabulary)[place.reshape(-1)]


def _named(catalogue: Catalogue, words: NDArray[np.int32], known: dict[bytes, int]) -> int:
    """The trie is asked once for each item: where beams are for all, asking it always outlasts the model."""
    key = words.tobytes()
    if key not in known:
        item = catalogue.item(words)
        assert item is not None  # every level was one that the catalogue allows
        known[key] = item
    return known[key]
