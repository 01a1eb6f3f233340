"""A state fits its plan or says what differs; changes of the mixture are asked for by name."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import CorruptRow, InvalidPlan, StateMismatch, WorkerFailed
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.plan import Plan
from bestiary.training.data.ranks import merge_states
from bestiary.training.data.source import Source

from .rows import ids_of, key, lengths, mixed, rows_of, unchanged, write


def loader(plan: Plan, **changes: Any) -> PackLoader:
    return PackLoader(plan, **({"workers": 0, "make": unchanged} | changes))


def after(plan: Plan, packs: int, **changes: Any) -> dict[str, Any]:
    made = loader(plan, **changes)
    for _ in islice(iter(made), packs):
        pass
    return json.loads(json.dumps(made.state_dict()))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return mixed(tmp_path, tokenizer="qwen3:abc")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer": "qwen3:abd"}, "tokenizer was 'qwen3:abc' and is 'qwen3:abd'"),
        ({"pack_length": 64}, "pack_length was 32 and is 64"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"streams": 2}, "streams was 1 and is 2"),
        ({"look_ahead": 7}, "look_ahead was 6 and is 7"),
        ({"overflow": "drop"}, "overflow was 'error' and is 'drop'"),
        ({"mix_by": "token"}, "mix_by was 'document' and is 'token'"),
        ({"epochs": 3}, "epochs was None and is 3"),
    ],
)
def test_another_plan_is_refused(plan: Plan, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StateMismatch, match=named):
        loader(replace(plan, **changes)).load_state_dict(after(plan, 3))


def test_everything_that_changed_is_listed(plan: Plan, tmp_path: Path) -> None:
    """Files by name: edited at equal length, gone, and new; a weight; the order of a source."""
    state = after(plan, 3)
    edited = tmp_path / "web1.jsonl"
    edited.write_text(edited.read_text().replace("[18,", "[19,", 1))
    write(tmp_path / "web3.jsonl", rows_of([4], 90))
    web, code = plan.sources
    files = [str(tmp_path / f"web{i}.jsonl") for i in (1, 2, 3)]
    changed = replace(plan, sources=(replace(web, files=files, weight=3.0), replace(code, block_rows=9)))
    with pytest.raises(StateMismatch) as caught:
        loader(changed).load_state_dict(state)
    text = str(caught.value)
    for line in (
        "weights was [[0, {'code': 1.0, 'web': 2.0}, False]] and is [[0, {'code': 1.0, 'web': 3.0}, False]]",
        "source 'web': file web0.jsonl is gone",
        "source 'web': file web3.jsonl is new",
        "source 'web': file web1.jsonl was",
        "source 'code': block_rows was 8 and is 9",
    ):
        assert line in text
    assert "code.jsonl.gz" not in text


def test_a_data_set_that_moved_is_the_same(plan: Plan, tmp_path: Path) -> None:
    state = after(plan, 3)
    (tmp_path / "moved").mkdir()
    moved = mixed(tmp_path / "moved", tokenizer="qwen3:abc")
    resumed = loader(moved)
    resumed.load_state_dict(state)
    assert [key(pack) for pack in islice(iter(resumed), 5)] == [key(p) for p in islice(iter(loader(plan)), 3, 8)]


def test_sources_come_and_go_when_named(plan: Plan, tmp_path: Path) -> None:
    """What stays goes on where it was: no row of it is repeated or lost."""
    new = Source(name="maths", files=write(tmp_path / "m.jsonl", rows_of(lengths(20, 5, 20), 5000)), encode=encoded)
    changed = replace(plan, sources=(plan.sources[0], new))
    first = loader(plan)
    seen = [row for pack in islice(iter(first), 4) for row in ids_of(pack)]
    state = json.loads(json.dumps(first.state_dict()))
    with pytest.raises(StateMismatch, match=r"source 'maths' is new\n.*source 'code' is gone"):
        loader(changed).load_state_dict(state)
    with pytest.raises(StateMismatch, match="'web' is said to be added and is in the state"):
        loader(changed).load_state_dict(state, added={"maths", "web"}, removed={"code"})
    resumed = loader(changed)
    resumed.load_state_dict(state, added={"maths"}, removed={"code"})
    later = [row for pack in islice(iter(resumed), 40) for row in ids_of(pack)]
    assert not any(1000 <= row < 5000 for row in later)
    assert any(row >= 5000 for row in later)
    web = [row for row in seen + later if row < 1000][:51]
    assert len(set(web)) > 45, "an epoch of the source that stayed is (but for those that wait) each row once"
    again = loader(changed)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert [key(p) for p in islice(iter(again), 3)] == [key(p) for p in islice(iter(resumed), 3)]


def test_new_weights_hold_when_asked_for(plan: Plan) -> None:
    web, code = plan.sources
    changed = replace(plan, sources=(web, replace(code, weight=0.0)))
    resumed = loader(changed)
    resumed.load_state_dict(after(plan, 2), reweighted=True)
    assert all(row < 1000 for pack in islice(iter(resumed), 10, 20) for row in ids_of(pack))


def test_a_state_of_other_ranks_is_refused_until_merged(plan: Plan) -> None:
    plan = replace(plan, streams=4)
    halves = [after(plan, 4, rank=rank, world_size=2) for rank in range(2)]
    with pytest.raises(StateMismatch, match=r"holds streams 0, 2 and this rank needs \[1, 3\]"):
        loader(plan).load_state_dict(halves[0])
    with pytest.raises(StateMismatch, match="two of the ranks' states hold stream 0"):
        merge_states([halves[0], halves[0]])
    whole = loader(plan)
    whole.load_state_dict(merge_states(halves))
    assert [key(pack) for pack in islice(iter(whole), 6)] == [key(p) for p in islice(iter(loader(plan)), 8, 14)]
    broken = merge_states([halves[0], after(plan, 3, rank=1, world_size=2)])
    with pytest.raises(StateMismatch, match="in the middle of step 1"):
        loader(plan, rank=1, world_size=4).load_state_dict(broken)


def test_an_iterator_is_of_no_use_after_loading(plan: Plan) -> None:
    """It would go on from another place than the loader says."""
    made = loader(plan)
    old = iter(made)
    next(old)
    made.load_state_dict(after(plan, 5))
    with pytest.raises(StateMismatch, match="of an earlier position"):
        next(old)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchdata_can_hold_a_loader(plan: Plan, workers: int) -> None:
    """In its process and in one worker of its own, with batches that it made ahead."""
    expected = [pack["input_ids"] for pack in islice(PackLoader(plan, workers=0), 9)]

    def held() -> StatefulDataLoader:
        return StatefulDataLoader(PackLoader(plan, workers=0), batch_size=None, num_workers=workers)

    first = held()
    taken = [pack["input_ids"] for pack in islice(iter(first), 4)]
    state = first.state_dict()
    second = held()
    second.load_state_dict(state)
    taken += [pack["input_ids"] for pack in islice(iter(second), 5)]
    assert all(torch.equal(one, other) for one, other in zip(taken, expected, strict=True))


def test_two_workers_of_another_loader_are_refused(plan: Plan) -> None:
    twice = torch.utils.data.DataLoader(PackLoader(plan, workers=0), batch_size=None, num_workers=2)
    with pytest.raises(InvalidPlan, match="in 2 workers of another loader"):
        next(iter(twice))


@pytest.mark.slow
def test_errors_of_a_producer_arrive(plan: Plan, tmp_path: Path) -> None:
    """Its own with the row, and its death with the signal; the loader works again afterwards."""
    bad = write(tmp_path / "bad.jsonl", [{"input_ids": [1, 2]}, {"text": "no ids"}])
    source = Source(name="bad", files=bad, encode=encoded, shuffle=False)
    made = loader(replace(plan, sources=(source,)), workers=1)
    with pytest.raises(CorruptRow, match="KeyError") as caught:
        next(iter(made))
    assert str(caught.value.read_from).endswith("bad.jsonl row 1")
    made.close()
    made = loader(plan, workers=1, ahead=1)
    packs = iter(made)
    taken = [key(next(packs))]
    made._producer._processes[0].kill()  # type: ignore[union-attr]
    with pytest.raises(WorkerFailed, match="exit code -9"):
        taken.extend(map(key, islice(packs, 100)))  # keeps what came before the death
    count = len(taken)
    made.close()
    taken += [key(pack) for pack in islice(iter(made), 3)]
    assert taken == [key(pack) for pack in islice(iter(loader(plan)), count + 3)]
    made.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sources": ()}, "sources are named"),
        ({"pack_length": 1}, "pack_length = 1"),
        ({"streams": 0}, "streams = 0"),
        ({"epochs": 0}, "epochs = 0"),
        ({"overflow": "wrap"}, "overflow = 'wrap'"),
        ({"overflow": "split", "parts": 2}, "parts = 2"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan: Plan, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidPlan, match=named):
        replace(plan, **changes)


def test_ranks_that_do_not_divide_the_streams_are_refused(plan: Plan) -> None:
    with pytest.raises(InvalidPlan, match="streams = 1, rank 0 of 2"):
        loader(plan, world_size=2)
    with pytest.raises(InvalidPlan, match="with epochs and no group"):
        loader(replace(plan, epochs=1, streams=2), world_size=2)
