"""The recommender's world: lists are worth their NDCG, and items that are nearly right something."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.ranking import ndcg_of_lists
from bestiary.training.data.semantic_ids import SemanticIds
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.environments import Said
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.recommending import Lists, Recommending
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling

from ...models.tiny import tiny

IDS = SemanticIds(levels=3, codebook_size=3, first_id=10)
CATALOGUE = Catalogue(IDS, [[a, b, c] for a in range(3) for b in range(3) for c in range(2)])
ITEMS = len(CATALOGUE)


def said(item, turn=0):
    return Said(ids=tuple(CATALOGUE.tokens(item).tolist()), finish="stop", turn=turn)


def moment(*later):
    return Prompt(prompt_id="p", ids=(1, 2), row={"later": list(later)})


def played(environment, prompt, items):
    assert list(environment.reset(prompt, seed=0)) == [1, 2]
    heard = [environment.step(said(item, turn)) for turn, item in enumerate(items)]
    assert [one.done for one in heard] == [False] * (len(items) - 1) + [True]
    assert heard[-1].extra["items"] == list(items)
    return sum(one.rewards["ndcg"] for one in heard)


@given(st.permutations(range(ITEMS)), st.sets(st.integers(0, ITEMS - 1), min_size=1, max_size=6), st.integers(1, 6))
def test_a_list_is_worth_its_ndcg(order, later, shown):
    shown_items = order[:shown]
    reward = played(Recommending(CATALOGUE, shown=shown), moment(*later), shown_items)
    assert reward == pytest.approx(float(ndcg_of_lists([shown_items], [later], shown)[0]))


@given(
    st.permutations(range(ITEMS)),
    st.dictionaries(st.integers(0, ITEMS - 1), st.floats(0.01, 40), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_a_list_is_worth_its_ndcg_where_items_are_worth_more_or_less(order, later, shown):
    prompt = Prompt(prompt_id="p", ids=(1, 2), row={"later": [*later], "worth": [*later.values()]})
    reward = played(Recommending(CATALOGUE, shown=shown), prompt, order[:shown])
    assert reward == pytest.approx(float(ndcg_of_lists([order[:shown]], [later], shown)[0]))


@pytest.mark.parametrize("row", [{"later": []}, {"later": [1, 2], "worth": [1]}, {"later": [1], "worth": [0]}])
def test_items_without_a_worth_are_refused(row):
    with pytest.raises(InvalidRun, match="p: later has"):
        Recommending(CATALOGUE).reset(Prompt(prompt_id="p", ids=(1, 2), row=row), seed=0)


def test_an_item_is_worth_nothing_the_second_time():
    once, twice = (played(Recommending(CATALOGUE, shown=2), moment(4, 5), items) for items in ([4, 9], [4, 4]))
    assert once == twice < played(Recommending(CATALOGUE, shown=2), moment(4, 5), [4, 5]) == 1.0


def test_what_is_no_item_takes_its_place_and_is_worth_nothing():
    made = Recommending(CATALOGUE, shown=2)
    made.reset(moment(4), seed=0)
    assert made.step(Said(ids=(3, 3, 3), finish="length", turn=0)).rewards == {"ndcg": 0.0}
    last = made.step(said(4, 1))
    assert 0 < last.rewards["ndcg"] < 1
    assert last.extra["items"] == [None, 4]
    assert last.done


def test_what_was_seen_is_not_shown_and_not_judged():
    prompt = Prompt(prompt_id="p", ids=(1, 2), row={"later": [4, 5], "seen": [7, 9]})
    made = Recommending(CATALOGUE, shown=2)
    made.reset(prompt, seed=0)
    assert made.step(said(7)).rewards == {"ndcg": 0.0}
    last = made.step(said(4, 1))
    assert last.extra["items"] == [4]
    assert last.rewards == {"ndcg": pytest.approx(played(Recommending(CATALOGUE, shown=2), moment(4, 5), [4, 0]))}
    made.reset(prompt, seed=0)
    assert [made.step(said(item, turn)).rewards["ndcg"] for turn, item in enumerate((7, 9))] == [0.0, None]


def test_a_business_says_what_an_item_is_worth():
    """Given what the user took to and what that was worth."""

    def near(item, later):
        return max(value / (1 + abs(item - other)) for other, value in later.items())

    prompt = Prompt(prompt_id="p", ids=(1, 2), row={"later": [4, 9], "worth": [1.0, 0.5]})
    assert [played(Recommending(CATALOGUE, gain=near), prompt, [item]) for item in (4, 5, 9)] == [1.0, 0.5, 0.5]
    with pytest.raises(InvalidRun, match="shown = 0"):
        Recommending(CATALOGUE, shown=0)


def test_a_list_is_an_episode_of_constrained_turns():
    """Each turn among the items, whatever stands before it; what was allowed is recorded for every token."""
    model = tiny("qwen3")
    sampling = Sampling(max_tokens=3, n=2, seed=1, constraint=CATALOGUE)
    sampler = Episodes(
        EmbeddedEngine(model),
        context=model.decoder_config.max_position_embeddings,
        environment=partial(Recommending, CATALOGUE, shown=3),
    )
    try:
        sampler.put([moment(3, 7), Prompt(prompt_id="q", ids=(5, 5, 5), row={"later": [1]})], sampling)
        groups = sampler.take(2)
    finally:
        sampler.close()
    for one in (each for group in groups for each in group):
        items = [CATALOGUE.item(ids) for ids in one.ids[one.sampled].reshape(3, 3)]
        assert items == one.extra["items"]
        assert one.finish == "stop"
        assert one.rewards["ndcg"] == pytest.approx(
            played(Recommending(CATALOGUE, shown=3), moment(*one.extra["row"]["later"]), items)
        )
        assert ((one.allowed >= 0).any(1) == one.sampled).all()
        assert np.isfinite(one.rollout_log_probs).all()


@given(st.integers(1, ITEMS), st.integers(0, 2**16))
def test_a_list_never_names_an_item_twice_and_can_name_any_other(items, seed):
    """All of the catalogue included: then the last item is the one that is left."""
    made, random, words, listed = Lists(CATALOGUE, items), np.random.default_rng(seed), [], []
    while len(allowed := made.allowed(np.array(words, np.int32))):
        whole, begun = divmod(len(words), 3)
        left = [CATALOGUE.tokens(item) for item in range(ITEMS) if item not in listed]
        tail = words[3 * whole :]
        assert allowed.tolist() == sorted({int(one[begun]) for one in left if one[:begun].tolist() == tail})
        words.append(int(random.choice(allowed)))
        if begun == 2:
            listed.append(CATALOGUE.item(words[-3:]))
    assert len(listed) == len(set(listed)) == items


def test_lists_longer_than_the_catalogue_are_refused():
    with pytest.raises(InvalidRun, match="lists of 19 items"):
        Lists(CATALOGUE, ITEMS + 1)


def test_a_list_in_one_answer_is_worth_what_it_is_worth_item_by_item():
    model, prompt = tiny("qwen3"), moment(3, 7, 11)
    sampling = Sampling(max_tokens=12, n=3, seed=1, constraint=Lists(CATALOGUE, 4))
    sampler = Episodes(EmbeddedEngine(model), context=64, environment=partial(Recommending, CATALOGUE, shown=4))
    try:
        sampler.put([prompt], sampling)
        ((*group,),) = sampler.take(1)
    finally:
        sampler.close()
    for one in group:
        assert one.finish == "stop"
        assert len(set(one.extra["items"])) == 4
        assert one.rewards["ndcg"] == pytest.approx(
            played(Recommending(CATALOGUE, shown=4), prompt, one.extra["items"])
        )
