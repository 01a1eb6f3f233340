"""Semantic ids: one token a code, rows that begin sensibly, and a search that never leaves the catalogue."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bestiary.training.data import semantic_ids
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.errors import SampleRefused, TokenizerRefused
from bestiary.training.data.ranking import (
    coverage,
    leave_one_out,
    mean_reciprocal_rank,
    ndcg_at,
    ndcg_of_lists,
    ranks_by_score,
    ranks_in_lists,
    recall_at,
)
from bestiary.training.data.samples import Events
from bestiary.training.data.semantic_ids import SemanticIds, add_semantic_ids, distinct, residual_codes
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED

IDS = SemanticIds(levels=3, codebook_size=4, first_id=10)


@pytest.fixture
def fresh(tokenizer_folder):
    """A tokenizer that may be changed."""
    return BaseHFModelTokenizer(AutoTokenizer.from_pretrained(tokenizer_folder("smollm")))


def test_every_code_is_one_contiguous_token_also_inside_text(fresh):
    before, old = len(fresh), fresh.fingerprint
    ids = add_semantic_ids(fresh, levels=3, codebook_size=256, begin=True)
    assert (ids.begin_id, ids.first_id, len(fresh)) == (before, before + 1, before + 1 + 768)
    text = "She saw <|sid_begin|><|sid_0_7|><|sid_1_0|><|sid_2_255|> and liked it."
    encoded = fresh.encode_text(text)
    shown = [index for index in encoded.tolist() if index >= before]
    assert shown == [ids.begin_id, *ids.ids_of([7, 0, 255]).tolist()]
    assert fresh.decode(encoded) == text
    assert "vocabulary" in " ".join(fresh.fingerprint.differences(old))


def test_codes_twice_under_one_name_are_refused(fresh):
    add_semantic_ids(fresh, levels=1, codebook_size=2)
    with pytest.raises(TokenizerRefused, match="is a token already"):
        add_semantic_ids(fresh, levels=1, codebook_size=2)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=8))
def test_ids_and_codes_are_inverse(codes):
    assert IDS.codes_of(IDS.ids_of(codes)).tolist() == [list(code) for code in codes]


def test_codes_outside_the_codebook_are_refused():
    with pytest.raises(SampleRefused, match="codes run from 0 to 4"):
        IDS.ids_of([0, 4, 1])
    with pytest.raises(SampleRefused, match="expected"):
        IDS.ids_of([0, 1])
    with pytest.raises(SampleRefused, match="no semantic ids of their level"):
        IDS.codes_of(np.array([10, 10, 10]))


def test_of_a_history_the_codes_behind_the_first_item_are_trained():
    bracketed = SemanticIds(levels=2, codebook_size=4, first_id=10, begin_id=9)
    tokens = bracketed.encode(Events(codes=((0, 1), (2, 3))))
    assert tokens.input_ids.tolist() == [9, 10, 15, 9, 12, 17]
    assert tokens.labels.tolist() == [IGNORED] * 4 + [12, 17]
    with pytest.raises(SampleRefused, match="raw items"):
        bracketed.encode(Events(items=(1,)))


def test_rows_begin_where_they_are_told(tokenizer_of):
    torch.manual_seed(0)
    old = torch.randn(64, 16) + 3
    near = semantic_ids.mean_rows(old, 5, noise=0.01)
    assert torch.allclose(near, old.mean(0).expand(5, -1), atol=0.1)
    assert not torch.equal(near[0], near[1])
    tokenizer = tokenizer_of("smollm")
    wide = torch.randn(len(tokenizer), 8)
    ids = torch.from_numpy(tokenizer.encode_text("a red shoe")).long()
    described = semantic_ids.described_rows(wide, tokenizer, ["a red shoe"])
    assert torch.allclose(described[0], wide[ids].mean(0))


def test_codebook_rows_keep_the_codebook_s_geometry():
    torch.manual_seed(0)
    old, codebooks = torch.randn(64, 16, dtype=torch.float64), torch.randn(2, 6, 4, dtype=torch.float64)
    rows = semantic_ids.codebook_rows(old, codebooks).view(2, 6, 16)
    for level in range(2):
        ratio = torch.pdist(rows[level]) / torch.pdist(codebooks[level])
        assert torch.allclose(ratio, ratio[:1].expand_as(ratio))


def test_rows_are_put_and_trained_alone():
    weight = torch.zeros(6, 2, requires_grad=True)
    semantic_ids.put_rows(weight, torch.ones(2, 2), 4)
    semantic_ids.train_only_rows(weight, 4, 2)
    (weight.sum() * 3).backward()
    assert weight.grad.tolist() == [[0, 0]] * 4 + [[3, 3]] * 2
    with pytest.raises(TokenizerRefused, match="do not fit"):
        semantic_ids.put_rows(weight, torch.ones(2, 2), 5)


def test_residual_codes_come_closer_level_by_level_and_are_made_distinct():
    vectors = np.random.default_rng(0).normal(size=(60, 5))
    codes, codebooks = residual_codes(vectors, levels=3, codebook_size=8)
    guess, errors = np.zeros_like(vectors), []
    for level in range(3):
        guess += codebooks[level][codes[:, level]]
        errors.append(((vectors - guess) ** 2).sum())
    assert all(later < earlier for earlier, later in pairwise(errors))
    told = distinct(np.concatenate([codes, codes[:3]]), 8)
    assert len(set(map(tuple, told.tolist()))) == 63
    with pytest.raises(SampleRefused, match="have the codes of another"):
        distinct(np.zeros((2, 3), int), 8, policy="refuse")


CODES = st.sets(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=20).map(sorted)


@given(codes=CODES, seed=st.integers(0, 100), beams=st.integers(1, 6))
def test_a_beam_search_returns_only_valid_items(codes, seed, beams):
    catalogue = Catalogue(IDS, np.array(codes))
    random = np.random.default_rng(seed)
    items, totals = catalogue.beam_search(lambda rows: random.normal(size=(len(rows), 30)), beams)
    assert len(set(items.tolist())) == len(items) == len(totals) <= beams
    assert all(0 <= item < len(codes) for item in items)


@given(codes=CODES, seed=st.integers(0, 100))
def test_wide_beams_find_the_likeliest_items_in_order(codes, seed):
    """With room for every beginning, the search is the ranking of all items by their summed log-probabilities."""
    catalogue = Catalogue(IDS, np.array(codes))
    table = np.random.default_rng(seed).normal(size=(3, 30))
    items, totals = catalogue.beam_search(lambda rows: np.tile(table[rows.shape[1]], (len(rows), 1)), 100)
    every = np.array([sum(table[level, token] for level, token in enumerate(row)) for row in IDS.ids_of(codes)])
    assert np.allclose(np.sort(every)[::-1], totals)
    assert np.allclose(every[items], totals)


@given(CODES)
def test_allowed_tokens_are_those_of_some_item(codes):
    catalogue = Catalogue(IDS, np.array(codes))
    tokens = IDS.ids_of(codes)
    assert catalogue.allowed([]).tolist() == sorted(set(tokens[:, 0].tolist()))
    for number, row in enumerate(tokens):
        assert row[2] in catalogue.allowed(row[:2])
        assert catalogue.item(row) == number
        assert catalogue.item([*row, 0]) is None
    assert catalogue.allowed([0]).size == 0


def test_equal_items_have_no_trie():
    with pytest.raises(SampleRefused, match="two items have the same codes"):
        Catalogue(IDS, np.zeros((2, 3), int))


def test_metrics_of_one_right_item():
    scores = np.array([[0.1, 0.9, 0.5], [0.2, 0.2, 0.2], [3.0, 2.0, 1.0]])
    ranks = ranks_by_score(scores, np.array([1, 0, 2]))
    assert ranks.tolist() == [1, 3, 3]  # a constant score ranks the item last
    lost = np.array([[np.nan, 1.0, np.nan], [np.nan, 2.0, 1.0]])
    assert ranks_by_score(lost, np.array([1, 0])).tolist() == [3, 3]  # what is no number gains nothing either
    assert recall_at(ranks, 1) == pytest.approx(1 / 3)
    assert ndcg_at(ranks, 3) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert mean_reciprocal_rank(ranks) == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)
    lists = [[4, 2], [1, 0]]
    assert ranks_in_lists(lists, [2, 5]).tolist() == [2, 0]
    assert recall_at(ranks_in_lists(lists, [2, 5]), 2) == 0.5
    assert ndcg_at(ranks_in_lists(lists, [2, 5]), 2) == pytest.approx(1 / np.log2(3) / 2)
    assert ndcg_of_lists(lists, [{2}, {5}], 2).mean() == pytest.approx(ndcg_at(ranks_in_lists(lists, [2, 5]), 2))
    several = ndcg_of_lists([[4, 1, 2], [1]], [{1, 2, 7}, {1, 9}], 3)
    gained = 1 + 1 / np.log2(3)
    assert several.tolist() == pytest.approx([(gained - 1 + 0.5) / (gained + 0.5), 1 / gained])
    graded = ndcg_of_lists([[4, 1, 2], [2]], [{1: 3.0, 7: 1.0}, {1: 3.0, 2: 1.0}], 2)
    assert graded.tolist() == pytest.approx([3 / np.log2(3) / (3 + 1 / np.log2(3)), 1 / (3 + 1 / np.log2(3))])
    assert coverage(lists, 8) == 0.5


def test_leaving_one_out_keeps_the_future_out_of_the_past():
    split = leave_one_out({"a": [1, 2, 3, 4], "b": [5, 6]})
    assert split.training == {"a": [1, 2], "b": [5, 6]}
    assert split.validation == {"a": ([1, 2], 3)}
    assert split.test == {"a": ([1, 2, 3], 4)}
    with pytest.raises(SampleRefused, match="user 'c' has no events"):
        leave_one_out({"c": []})
