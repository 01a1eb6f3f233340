"""The likeliest items, by search, are those of all items by their probability."""

import numpy as np
import pytest
import torch

from bestiary.training.beams import likeliest_items
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.semantic_ids import SemanticIds
from bestiary.training.errors import InvalidRun

from ..models.tiny import VOCAB, tiny

IDS = SemanticIds(levels=3, codebook_size=6, first_id=20)
CODES = np.unique(np.random.default_rng(0).integers(0, 6, (40, 3)), axis=0)
CATALOGUE = Catalogue(IDS, CODES)
PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6], [8, 8, 1]]


def by_hand(model, prompt):
    """log p of every item: a softmax over what the trie allows at each level, in one pass an item."""
    found = []
    for item in range(len(CATALOGUE)):
        words, total = CATALOGUE.tokens(item), 0.0
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *words.tolist()]])).logits[0]
        for level, word in enumerate(words.tolist()):
            barred = torch.ones(VOCAB, dtype=torch.bool)
            barred[torch.from_numpy(CATALOGUE.allowed(words[:level])).long()] = False
            said = logits[len(prompt) - 1 + level].masked_fill(barred, -torch.inf).log_softmax(-1)
            total += float(said[word])
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_with_beams_enough_the_order_is_that_of_all_items(family):
    """Prompts of several lengths, one longer than a window; and a catalogue with fewer items than beams."""
    model = tiny(family)
    found = likeliest_items(model, CATALOGUE, PROMPTS, 100, rows=1)
    for prompt, items in zip(PROMPTS, found, strict=True):
        assert items == np.argsort(-by_hand(model, prompt), kind="stable").tolist()


def test_fewer_beams_give_as_many_items_and_the_rows_beside_change_nothing():
    model = tiny("qwen3")
    every = likeliest_items(model, CATALOGUE, PROMPTS, 100)
    some = likeliest_items(model, CATALOGUE, PROMPTS, 12)
    assert [len(items) for items in some] == [12] * 4
    assert all(items[0] == whole[0] for items, whole in zip(some, every, strict=True))
    assert likeliest_items(model, CATALOGUE, PROMPTS[3:], 12) == some[3:]


def test_an_empty_prompt_is_named():
    with pytest.raises(InvalidRun, match="prompt 1 of 2 is empty"):
        likeliest_items(tiny("qwen3"), CATALOGUE, [[1], []], 5)
