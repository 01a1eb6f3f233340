"""Ranks get as many packs each and about equal work."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bestiary.training.data.balance import Cost, assign
from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.packing import Pack
from bestiary.training.data.ranks import _flat, _unflat, _width
from bestiary.training.data.tokens import TeacherWords

from .rows import key


def pack(*lengths: int) -> Pack:
    size = sum(lengths)
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    return Pack(np.zeros(size, np.int32), np.zeros(size, np.int32), borders, len(lengths))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_pack_has_one_rank_and_every_rank_as_many(ranks: int, each: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0, 100), min_size=ranks * each, max_size=ranks * each))
    taken = assign(costs, ranks)
    assert sorted(itertools.chain(*taken)) == list(range(ranks * each))
    assert {len(own) for own in taken} == {each}
    assert taken == assign(costs, ranks)


@given(st.lists(st.integers(1, 1000), min_size=6, max_size=6))
def test_the_dearest_rank_is_near_the_best_that_there_is(costs: list[int]) -> None:
    """Against every assignment of six packs to two ranks: within a tenth."""
    best = min(max(sum(own), sum(costs) - sum(own)) for own in itertools.combinations(costs, 3))
    assert max(sum(costs[index] for index in own) for own in assign(costs, 2)) <= 1.1 * best


def test_long_documents_are_spread() -> None:
    """Equal tokens, unequal work: the two packs of one document each do not meet on a rank."""
    packs = [pack(4096), pack(4096), pack(*[64] * 64), pack(*[64] * 64)]
    costs = [Cost(linear=100.0)(one) for one in packs]
    assert {tuple(sorted(index < 2 for index in own)) for own in assign(costs, 2)} == {(False, True)}
    assert costs[0] == 100 * 4096 + 4096**2


def test_costs_of_a_model_balance_where_they_should() -> None:
    """6·N a token, 6·layers·width a pair of tokens: for a 7B model of 32 layers and width 4096 equal at 53 000."""
    cost = Cost.of_model(parameters=7_000_000_000, layers=32, attention_width=4096)
    assert round(cost.linear / cost.quadratic, -3) == 53_000


def test_packs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="5 packs for 2 ranks"):
        assign([1.0] * 5, 2)


@pytest.mark.parametrize("values", [None, np.array([0.1, np.nan, -3.0, 1.0], np.float32)])
@pytest.mark.parametrize("borders", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 6]])
@pytest.mark.parametrize("precise", [None, np.float32, np.float64])
def test_a_pack_arrives_as_it_was_sent(
    borders: list[int], values: NDArray[np.float32] | None, precise: type[np.floating[Any]] | None
) -> None:
    ids = np.arange(borders[-1], dtype=np.int32)
    words = np.arange(3 * len(ids), dtype=np.int32).reshape(-1, 3)
    teacher = None if precise is None else TeacherWords(words, (-words / 7).astype(precise))
    sent = Pack(ids, -ids, np.array(borders, np.int32), 4, values, teacher)
    arrived = _unflat(_flat(sent), _width(sent))
    assert key(arrived) == key(sent)
    assert arrived.teacher is None or arrived.teacher.log_probs.dtype == precise
