"""Semantic ids on real histories: a tiny Qwen3-shaped model finds more of what people watch next than popularity."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from bestiary.models import Qwen3
from bestiary.tools.movielens import interactions
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.ranking import leave_one_out, ranks_by_score, ranks_in_lists, recall_at
from bestiary.training.data.semantic_ids import SemanticIds, distinct, residual_codes
from bestiary.training.data.together import item_vectors
from bestiary.training.data.tokens import IGNORED
from bestiary.training.integrations.needs import MissingLibrary

LEVELS, CODES = 2, 64  # of what is learnt; one more level tells items with the same codes apart
WINDOW, STEP, BATCH = 24, 8, 64
BEAMS = 30  # so that ten are left when those that the user saw already are taken out


@pytest.fixture(scope="module")
def histories():
    """MovieLens-100k: user → items by time, numbered from 0, and how many items there are."""
    try:
        return interactions()
    except MissingLibrary:
        if os.environ.get("CI") == "true":
            pytest.fail("CI=true and recbole, which holds MovieLens-100k, is not installed")
        pytest.skip("recbole, which holds MovieLens-100k, is not installed (tools/requirements/demo.txt)")


def windows_of(training, tokens):
    """Stretches of histories as padded rows; what stands behind the first item is trained."""
    depth = tokens.shape[1]
    cut = [
        history[max(0, end - WINDOW) : end] for history in training.values() for end in range(len(history), 1, -STEP)
    ]
    ids = np.zeros((len(cut), WINDOW * depth), np.int64)
    labels = np.full_like(ids, IGNORED)
    for row, items in enumerate(cut):
        flat = tokens[items].reshape(-1)
        ids[row, : len(flat)] = flat
        labels[row, depth : len(flat)] = flat[depth:]
    return torch.from_numpy(ids), torch.from_numpy(labels)


def trained(ids, labels, vocabulary, epochs):
    """A Qwen3 of two layers after some epochs."""
    full = next(iter(Qwen3.sizes.values()))
    config = full.with_(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=full.layer_types[:2],
        attention=replace(full.attention, num_heads=2, num_kv_heads=2, head_dim=32),
        rope=replace(full.rope, rotary_dim=32),
    )
    model = Qwen3(config, dtype=torch.float32)
    model.init_weights(0)
    steps = epochs * (len(ids) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(ids), generator=generator).split(BATCH)[: len(ids) // BATCH]:
            optimiser.zero_grad()
            model(ids[rows], labels=labels[rows]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


@pytest.mark.slow
def test_semantic_ids_beat_popularity_over_the_full_catalogue(histories):
    """Against all items by popularity, and, harder, both without what the user has seen: nobody rates a film twice."""
    found, items, ratings = histories
    assert {user: len(one) for user, one in ratings.items()} == {user: len(one) for user, one in found.items()}
    assert {rating for one in ratings.values() for rating in one} == {1, 2, 3, 4, 5}
    split = leave_one_out(found)
    codes, _ = residual_codes(
        item_vectors(split.training.values(), items), levels=LEVELS, codebook_size=CODES, rounds=8
    )
    ids = SemanticIds(levels=LEVELS + 1, codebook_size=CODES)
    codes = distinct(codes, CODES)
    catalogue, tokens = Catalogue(ids, codes), ids.ids_of(codes)
    model = trained(*windows_of(split.training, tokens), ids.count, epochs=2)

    users = list(split.test)[::2]
    targets = np.array([split.test[user][1] for user in users])
    shown = []
    for user in users:
        history = tokens[split.test[user][0][1 - WINDOW :]].reshape(-1)

        def score(beginnings, history=history):
            rows = np.concatenate([np.tile(history, (len(beginnings), 1)), beginnings], axis=1)
            with torch.no_grad():
                logits = model(torch.from_numpy(rows).long(), logits_to_keep=1).logits[:, -1]
            return torch.log_softmax(logits.double(), -1).numpy()

        shown.append(catalogue.beam_search(score, BEAMS)[0].tolist())
    assert all(0 <= item < items for one in shown for item in one)
    assert all(len(set(one)) == BEAMS for one in shown)
    ours = recall_at(ranks_in_lists(shown, targets.tolist()), 10)
    new = [[item for item in one if item not in split.test[user][0]] for user, one in zip(users, shown, strict=True)]
    ours_new = recall_at(ranks_in_lists(new, targets.tolist()), 10)

    watched = np.bincount(np.concatenate([np.array(one) for one in split.training.values()]), minlength=items)
    scores = np.tile(watched.astype(float), (len(users), 1))
    popular = recall_at(ranks_by_score(scores, targets), 10)
    for row, user in enumerate(users):
        scores[row, split.test[user][0]] = -1.0
    popular_new = recall_at(ranks_by_score(scores, targets), 10)
    assert ours > 1.5 * popular, (ours, popular)
    assert ours_new > 1.5 * popular_new, (ours_new, popular_new)
