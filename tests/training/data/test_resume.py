"""A state leads behind the last batch taken: at every step, with any number of processes, however often."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bestiary.training.data.loader import PackLoader
from bestiary.training.data.packing import Overflow
from bestiary.training.data.plan import Plan

from .rows import ids_of, key, mixed, unchanged

WORKERS = (0, 1, 4)


def loader(plan: Plan, workers: int = 0, **changes: Any) -> PackLoader:
    return PackLoader(plan, workers=workers, make=unchanged, **changes)


def uninterrupted(plan: Plan) -> tuple[list[Any], list[dict[str, Any]]]:
    """Every pack, and the state before the first and after each, as a checkpoint file would hold it."""
    whole = loader(plan)
    packs, states = [], [json.dumps(whole.state_dict())]
    for pack in whole:
        packs.append(key(pack))
        states.append(json.dumps(whole.state_dict()))
    return packs, [json.loads(state) for state in states]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two epochs of two sources, packed into four streams."""
    return mixed(tmp_path_factory.mktemp("mixed"), epochs=2, streams=4)


@pytest.fixture(scope="module")
def run(plan: Plan) -> tuple[list[Any], list[dict[str, Any]]]:
    return uninterrupted(plan)


@pytest.fixture(scope="module", params=WORKERS)
def resumed(plan: Plan, request: pytest.FixtureRequest) -> Iterator[PackLoader]:
    """A loader that keeps its processes from one resume to the next."""
    made = loader(plan, request.param, ahead=3)
    yield made
    made.close()


def test_two_epochs_hold_every_row_twice(plan: Plan) -> None:
    whole = loader(plan)
    counted = Counter(row for pack in whole for row in ids_of(pack))
    assert counted == dict.fromkeys([*range(51), *range(1000, 1030)], 2)
    counts = whole.counts()
    assert [(name, counts[name]["epoch"], counts[name]["documents"]) for name in counts] == [
        ("web", 2, 102),
        ("code", 2, 60),
    ]


def test_resume_at_every_step(resumed: PackLoader, run: tuple[list[Any], list[dict[str, Any]]]) -> None:
    """Also in the middle of a global step, at the ends of epochs, and behind the last pack."""
    packs, states = run
    for step, state in enumerate(states):
        resumed.load_state_dict(state)
        assert [key(pack) for pack in resumed] == packs[step:], f"resumed at step {step} of {len(packs)}"


def test_resume_twice_in_a_row(resumed: PackLoader, run: tuple[list[Any], list[dict[str, Any]]]) -> None:
    """The state of a resumed run is the state of the uninterrupted one, though other packs were made ahead."""
    packs, states = run
    state = states[0]
    for step in range(0, len(packs) - 2, 3):
        resumed.load_state_dict(state)
        assert [key(pack) for pack in islice(iter(resumed), 3)] == packs[step : step + 3]
        state = json.loads(json.dumps(resumed.state_dict()))
        assert state == states[step + 3]


def test_a_state_is_small_and_holds_no_tensor(run: tuple[list[Any], list[dict[str, Any]]]) -> None:
    assert max(len(json.dumps(state)) for state in run[1]) < 4096


def test_a_second_iteration_goes_on(plan: Plan, run: tuple[list[Any], list[dict[str, Any]]]) -> None:
    packs, _ = run
    ours = loader(plan)
    first = [key(pack) for pack in islice(iter(ours), 5)]
    assert first + [key(pack) for pack in ours] == packs
    assert list(ours) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    streams=st.integers(1, 3),
    look_ahead=st.integers(1, 9),
    mix_by=st.sampled_from(["document", "token"]),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
    pack_length=st.integers(6, 40),
    seed=st.integers(0, 5),
    cut=st.integers(0, 60),
)
def test_any_plan_resumes(
    tmp_path: Path,
    streams: int,
    look_ahead: int,
    mix_by: Any,
    overflow: Overflow,
    pack_length: int,
    seed: int,
    cut: int,
) -> None:
    """Documents longer than a pack among them, and no end: the state in a run that never stops."""
    plan = mixed(
        tmp_path,
        streams=streams,
        look_ahead=look_ahead,
        mix_by=mix_by,
        overflow=overflow,
        pack_length=pack_length,
        seed=seed,
    )
    whole = loader(plan)
    stream = iter(whole)
    for _ in islice(stream, cut):
        pass
    again = loader(plan)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [key(pack) for pack in islice(stream, 12)] == [key(pack) for pack in islice(iter(again), 12)]
