"""Runs in processes of their own: killed and resumed, with other numbers of workers and ranks."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bestiary.training.data.loader import PackLoader
from bestiary.training.data.workers import NICE

from .rows import key, mixed, unchanged

TRAINER, STREAMS = Path(__file__).with_name("trainer.py"), 4
KILLS = (1, 6, 2, 7, 3)  # packs after the last start: in the middle and at the end of global steps


def digests(folder: Path) -> list[str]:
    """Of the uninterrupted run in this process."""
    loader = PackLoader(mixed(folder, epochs=2, streams=STREAMS), workers=0, make=unchanged)
    return [hashlib.sha256(repr(key(pack)).encode()).hexdigest() for pack in loader]


@pytest.fixture(scope="module")
def trainers() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as served:
        yield served
        served.kill()


def run(trainers: "subprocess.Popen[str]", folder: Path, *runs: tuple[int, ...]) -> list[int]:
    """Exit codes of trainers that run together: workers, rank, world, kill_at and stop_at of each."""
    for old in folder.glob("meeting.*"):  # where ranks of an earlier run met: their addresses are dead
        old.unlink()
    assert trainers.stdin is not None
    assert trainers.stdout is not None
    trainers.stdin.write(json.dumps([[str(folder), *arguments] for arguments in runs]) + "\n")
    trainers.stdin.flush()
    return json.loads(trainers.stdout.readline())


def log(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"log.{rank}").read_text().split()


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self"), reason="needs fork and /proc")
@pytest.mark.parametrize("workers", [0, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_and_resumed(trainers: "subprocess.Popen[str]", tmp_path: Path, workers: int) -> None:
    """By SIGKILL, five times, with packs made ahead; no producer outlives its trainer."""
    expected, producers = digests(tmp_path), []
    for kill_at in KILLS:
        assert run(trainers, tmp_path, (workers, 0, 1, kill_at, 0)) == [-9]
        started = (tmp_path / "producers").read_text().split()
        assert len(started) == workers
        producers += map(int, started)
    assert run(trainers, tmp_path, (workers, 0, 1, 0, 0)) == [0]
    assert log(tmp_path) == expected
    deadline = time.monotonic() + 10
    while any(map(alive, producers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, producers))


@pytest.mark.slow
def test_world_size_one_two_one(trainers: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """The global steps stay what they are, though a rank has a producer and the other none."""
    expected, each = digests(tmp_path), STREAMS // 2
    assert run(trainers, tmp_path, (1, 0, 1, 0, STREAMS * 2)) == [0]
    got = log(tmp_path)
    (tmp_path / "log.0").unlink()
    assert run(trainers, tmp_path, (0, 0, 2, 0, each * 2), (1, 1, 2, 0, each * 2)) == [0, 0]
    first, second = log(tmp_path), log(tmp_path, 1)
    for step in range(2):
        for micro in range(step * each, (step + 1) * each):
            got += [first[micro], second[micro]]
    (tmp_path / "log.0").unlink()
    assert run(trainers, tmp_path, (0, 0, 1, 0, 0)) == [0]
    assert got + log(tmp_path) == expected


def test_ranks_of_unequal_data_stop_together(trainers: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """To the end of two epochs on two ranks: as many packs on each, and every pack of the run on one of them."""
    expected = digests(tmp_path)
    assert run(trainers, tmp_path, (0, 0, 2, 0, 0), (0, 1, 2, 0, 0)) == [0, 0]
    logs = [log(tmp_path, rank) for rank in range(2)]
    assert len(logs[0]) == len(logs[1]) == len(expected) / 2
    assert sorted(logs[0] + logs[1]) == sorted(expected)


def test_packs_change_ranks_for_equal_work(trainers: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """The packs of every step are the same ones, and its dearest rank is no dearer; the state is that of the step."""
    expected, each = digests(tmp_path), STREAMS // 2
    found = []
    for balanced in (0, 1):
        for file in tmp_path.glob("*.[01]"):
            file.unlink()
        (tmp_path / "state.json").unlink(missing_ok=True)
        for stop_at in (each * 3, 0):
            assert run(trainers, tmp_path, *((0, rank, 2, 0, stop_at, balanced) for rank in range(2))) == [0, 0]
            if stop_at:
                costs = [json.loads((tmp_path / f"cost.{rank}").read_text()) for rank in range(2)]
        logs = [log(tmp_path, rank) for rank in range(2)]
        for step in range(len(expected) // STREAMS):
            together = [digest for one in logs for digest in one[step * each : (step + 1) * each]]
            assert sorted(together) == sorted(expected[step * STREAMS : (step + 1) * STREAMS])
        steps = range(0, each * 3, each)
        found.append([max(sum(cost[at : at + each]) for cost in costs) for at in steps])
    assert all(after <= before for before, after in zip(*found, strict=True))
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "nice"), reason="this system has no niceness")
def test_producers_step_back_for_the_trainer(tmp_path: Path) -> None:
    """A producer works ahead: where both want a core, the trainer's threads go first."""
    loader = PackLoader(mixed(tmp_path, epochs=1, streams=1), workers=1, make=unchanged)
    with closing(loader):
        next(iter(loader))
        (producer,) = [child for child in multiprocessing.active_children() if child.name.startswith("data-")]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, producer.pid) == min(own + NICE, 19)
