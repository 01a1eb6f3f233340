"""Prompts spread over several players: whole groups, and what is complete outlives the fault of one of them."""

import time

import pytest

from bestiary.training.errors import EnvironmentFailed, InvalidRun, RoleLost
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.remote import SpreadSampler, balanced
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Sampling

from .scripted import CONTEXT, STOP, ScriptedEngine

SAMPLING = Sampling(max_tokens=4, stop_ids=(STOP,), n=3, seed=7)
PROMPTS = [Prompt(prompt_id=f"p{place}", ids=(9, place + 10)) for place in range(6)]
LOST = RoleLost("process 1 of 2 of role rollout died.", role="rollout")


def sampler(*engines):
    return SpreadSampler(ScriptedEngine(), [Episodes(engine, context=CONTEXT) for engine in engines])


def taken(made, count):
    found = {}
    while len(found) < count:
        for group in made.take(1):
            found[group[0].prompt_id] = [one.ids.tolist() for one in group]
    return found


def test_groups_are_those_of_one_player_and_each_is_played_by_one():
    engines = [ScriptedEngine() for _ in range(3)]
    made, alone = sampler(*engines), Episodes(ScriptedEngine(), context=CONTEXT)
    for one in (made, alone):
        one.put(PROMPTS, SAMPLING)
    assert sorted(made.in_flight) == [one.prompt_id for one in PROMPTS]
    assert taken(made, 6) == taken(alone, 6)
    assert made.in_flight == ()
    asked = [{prompt for call in engine.calls for prompt in call} for engine in engines]
    assert [len(one) for one in asked] == [2, 2, 2]
    assert len(set.union(*asked)) == 6
    with pytest.raises(InvalidRun, match="1 groups are asked for and 0 are in flight"):
        made.take(1)
    made.close()
    alone.close()


def test_a_fault_is_told_behind_what_is_complete_and_nothing_of_it_is_lost():
    """Two prompts of one player are complete, those of the other go on after `resume`, with the same words."""
    good, bad = ScriptedEngine(), ScriptedEngine(faults={1: LOST})
    made, whole = sampler(good, bad), sampler(ScriptedEngine(), ScriptedEngine())
    for one in (made, whole):
        one.put(PROMPTS[:4], SAMPLING)
    expected = taken(whole, 4)
    first = taken(made, 2)
    assert first.items() < expected.items()
    with pytest.raises(RoleLost) as caught:
        made.take(1)
    assert caught.value.role == "rollout"
    assert len(made.in_flight) == 2
    made.resume()
    assert first | taken(made, 2) == expected
    made.put(PROMPTS[4:], SAMPLING)
    made.pause()
    made.resume()
    assert len(taken(made, 2)) == 2
    made.close()
    whole.close()


def test_what_was_complete_when_another_player_failed_waits_for_the_next_call():
    good, bad = ScriptedEngine(), ScriptedEngine(faults={1: LOST})
    made = sampler(good, bad)
    made.put(PROMPTS[:2], SAMPLING)
    with pytest.raises(RoleLost):
        made.take(2)
    assert sorted(made.in_flight) == ["p0", "p1"]
    made.resume()
    assert len(made.take(2)) == 2
    made.close()


def test_a_fault_beside_groups_enough_is_told_by_the_next_call_whatever_went_on_between():
    good, bad = ScriptedEngine(), ScriptedEngine(faults={1: EnvironmentFailed("environments failed too often.")})
    made = sampler(good, bad)
    made.put(PROMPTS[:3], SAMPLING)
    while not (good.calls and bad.calls):
        time.sleep(0.001)
    made.pause()
    assert len(made.take(1)) == 2
    made.resume()
    with pytest.raises(EnvironmentFailed, match="failed too often"):
        made.take(1)
    made.close()


def test_shares_are_alike_and_in_order():
    sizes = [5, 1, 1, 9, 2, 2, 6]
    parts = balanced(sizes, 3)
    assert sorted(place for part in parts for place in part) == [*range(7)]
    assert all(part == sorted(part) for part in parts)
    assert max(sum(sizes[place] for place in part) for part in parts) <= 10
    assert balanced([], 2) == [[], []]
