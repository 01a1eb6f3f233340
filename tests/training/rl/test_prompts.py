"""Prompts from the data pillar: names, columns, what is too long, and a state that leads back to any of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bestiary.training.data.errors import CorruptRow, InvalidPlan, OverflowRefused, StateMismatch
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.rl.prompts import Prompts, count_prompts


def encoded(row):
    """Letters as ids; what stands behind a bar is the answer."""
    ids = np.array([ord(letter) for letter in row["text"]], np.int32)
    labels = np.full(len(ids), IGNORED, np.int32)
    bar = row["text"].find("|")
    if bar >= 0:
        labels[bar:] = ids[bar:]
    return Tokens(ids, labels)


def written(folder, name, rows):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(name=name, files=str(file), encode=encoded)


@pytest.fixture
def sources(tmp_path):
    first = [{"text": f"sum {number}", "answer": str(2 * number), "more": [number]} for number in range(7)]
    second = [{"text": f"talk {number}|and more"} for number in range(4)]
    return written(tmp_path, "sums", first), written(tmp_path, "talks", second)


def plan(sources, **changes):
    return Plan(sources=tuple(sources), pack_length=64, pad_id=0, seed=5, **changes)


def test_a_prompt_is_what_stands_before_the_answer_and_its_columns_come_with_it(sources):
    found = Prompts(plan(sources, epochs=1), 20).next(100)
    assert len(found) == 11
    by_text = {"".join(map(chr, one.ids)): one for one in found}
    assert set(by_text) == {*(f"sum {number}" for number in range(7)), *(f"talk {number}" for number in range(4))}
    one = by_text["sum 3"]
    assert one.prompt_id == "sums/0/0/3"
    assert one.row == {"text": "sum 3", "answer": "6", "more": [3]}


def test_names_are_unique_over_epochs_and_the_order_is_the_seeds(sources):
    found = Prompts(plan(sources, epochs=3), 20).next(100)
    assert len({one.prompt_id for one in found}) == len(found) == 33
    assert [one.prompt_id for one in Prompts(plan(sources, epochs=3), 20).next(100)] == [one.prompt_id for one in found]
    assert count_prompts(plan(sources, epochs=3), 20) == 33


@pytest.mark.parametrize("by", ["document", "token"])
def test_a_state_leads_to_the_prompts_behind_it(sources, by):
    whole = Prompts(plan(sources, epochs=2, mix_by=by), 20).next(100)
    for taken in range(len(whole) + 1):
        first = Prompts(plan(sources, epochs=2, mix_by=by), 20)
        given = first.next(taken)
        state = json.loads(json.dumps(first.state()))
        second = Prompts(plan(sources, epochs=2, mix_by=by), 20)
        second.next(3)
        second.load_state(state)
        assert given + second.next(100) == whole


def test_a_state_of_other_data_is_refused(sources):
    state = Prompts(plan(sources), 20).state()
    with pytest.raises(StateMismatch, match="seed was 5 and is 6"):
        Prompts(replace(plan(sources), seed=6), 20).load_state(state)
    with pytest.raises(StateMismatch, match="longest was 20 and is 10"):
        Prompts(plan(sources), 10).load_state(state)


def test_a_prompt_longer_than_the_window_is_named_or_left_out(sources):
    with pytest.raises(OverflowRefused, match=r"source talks: a prompt has 6 tokens, and 5 leave room") as caught:
        Prompts(plan(sources, epochs=1), 5).next(100)
    assert "row" in caught.value.read_from
    left = Prompts(plan(sources, epochs=1, overflow="drop"), 5)
    assert len(left.next(100)) == 7
    assert left.left_out == 4
    with pytest.raises(InvalidPlan, match=r"a whole epoch gave no prompt \(\d+ longer than 2 tokens"):
        Prompts(plan(sources, overflow="drop"), 2).next(1)
    with pytest.raises(InvalidPlan, match="a part of a prompt is no prompt"):
        Prompts(plan(sources, overflow="truncate"), 5)


def test_a_column_that_is_no_json_is_named(tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"text": "a", "score": NaN}\n')
    odd = Source(name="odd", files=str(file), encode=encoded)
    with pytest.raises(CorruptRow, match="column 'score' is no JSON value"):
        Prompts(plan([odd], epochs=1), 5).next(1)
