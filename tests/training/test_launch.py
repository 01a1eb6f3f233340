"""A run started by accelerate, and as actors of Ray: the curve of one process, stopped, killed and resumed."""

import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import ray
from torch.distributed import TCPStore

from bestiary.training import launch as launching
from bestiary.training.config import load_run_config
from bestiary.training.errors import InvalidRun, RankLost
from bestiary.training.launch import launch
from bestiary.training.processes import processes
from bestiary.training.run import run

from .ray_session import session as session  # the fixture
from .test_run import metrics
from .test_run import place as place  # the fixture

EXACT = ["precision.parameters=float64", "loop.timeout_s=60", "loop.steps=12"]


def config(place, out, *changes):
    return load_run_config(place / "run.json", [*EXACT, f"out={out}", *changes], recipe="sft")


def curves(out):
    """Losses, norms and evaluations by step."""
    rows = metrics(out)
    return {name: [row[name] for row in rows if name in row] for name in ("step", "loss", "grad_norm", "eval/loss")}


@pytest.fixture(scope="module")
def whole(place):
    """One process."""
    run(config(place, place / "whole"))
    return curves(place / "whole")


def same(found, expected):
    assert found["step"] == expected["step"]
    for name in ("loss", "grad_norm", "eval/loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name


@pytest.mark.slow
def test_accelerate_launch_trains_as_one_process_does(place, tmp_path, whole):
    """`--multi_gpu` makes it start several processes, on CPUs too."""
    with socket.socket() as free:
        free.bind(("", 0))  # on every address, as torch listens on all of them
        port = str(free.getsockname()[1])
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options = ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
    command = [sys.executable, *launcher, *options, "-m", "bestiary.tools.cli", "sft", str(place / "run.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *EXACT, f"out={tmp_path / 'run'}"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    same(curves(tmp_path / "run"), whole)


def test_an_accelerate_that_started_one_process_of_several_is_named(monkeypatch):
    """On CPUs it does so unless it is asked for --multi_gpu; each would train alone on the same data."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(InvalidRun, match="accelerate launch") as caught, processes(60):
        pass
    assert "--multi_gpu" in caught.value.remedy


# ---------------------------------------------------------------------- Ray


def test_figures_that_come_late_are_not_lost():
    """What was asked for and not answered in time is waited for again, and asked once."""
    late = ray.exceptions.GetTimeoutError
    answers, asked, seen = [late(), [("log", (1, {"loss": 2.0}))]], [], []

    def get(reference, timeout):
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    member = SimpleNamespace(events=SimpleNamespace(remote=lambda: asked.append(1) or len(asked)))
    tracker = SimpleNamespace(log=lambda *arguments: seen.append(arguments))
    told = launching._Told(SimpleNamespace(get=get, exceptions=ray.exceptions), member, [tracker])
    told.relay(0.1)
    assert seen == []
    told.relay(0.1)
    assert (seen, len(asked)) == ([(1, {"loss": 2.0})], 1)


class At:
    """A tracker that does something once it hears of the third step: a checkpoint is there by then."""

    def __init__(self, action=None):
        self.action, self.steps, self.calls = action, [], []

    def start(self, info):
        self.calls.append(("start", info.step))

    def log(self, step, values):
        self.steps.append(step)
        if self.action is not None and step >= 3:
            action, self.action = self.action, None
            action()

    def close(self):
        self.calls.append(("close", None))


def kill_an_actor():
    found = [one for one in psutil.Process().children(recursive=True) if "ray::Member" in " ".join(one.cmdline())]
    assert len(found) == 2
    found[1].kill()


@pytest.mark.slow
def test_two_actors_killed_and_resumed_train_as_one_process_does(place, tmp_path, whole, session):
    """An actor's death ends all with one error; the driver hears of steps; data comes from a process of its own."""
    with pytest.raises(RankLost, match=r"^actor \d of the run died") as caught:
        launch(config(place, tmp_path / "run"), 2, also=(At(kill_an_actor),))
    assert "newest checkpoint" in caught.value.remedy

    heard = At()
    outcome = launch(config(place, tmp_path / "run", "loop.workers=1"), 2, also=(heard,))
    assert outcome.resumed is not None
    assert (outcome.step, outcome.stopped) == (12, None)
    assert outcome.export is not None
    assert heard.calls == [("start", outcome.resumed), ("close", None)]
    assert heard.steps[-1] == 12
    same(curves(tmp_path / "run"), whole)


def test_the_port_of_a_run_is_free_on_every_address_and_nobody_else_is_given_it():
    """torch's store listens on all addresses, seconds after the port was chosen; another program has one of them."""
    member = launching.Member()
    host, port = member.address()
    for address in (host, "127.0.0.1", ""):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    for libuv in (True, False):
        assert TCPStore(host, port, 1, True, timedelta(seconds=5), use_libuv=libuv).port == port


def test_a_signal_to_the_driver_asks_every_actor_to_stop():
    """Once; a second one ends the driver at once."""
    told = []
    actors = [SimpleNamespace(stop=SimpleNamespace(remote=told.append)) for _ in range(2)]
    with launching._stopping(actors):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == ["SIGTERM", "SIGTERM"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    member = launching.Member()
    member.stop("SIGTERM")
    assert member._interruption.by == "SIGTERM"


def test_what_ray_has_no_room_for_is_refused(place, tmp_path, session):
    with pytest.raises(InvalidRun, match="9 processes on Ray, which has 8 CPU cores"):
        launch(config(place, tmp_path / "run"), 9)


@pytest.mark.slow
def test_a_missing_ray_is_named_with_its_extra(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRun, match="ray is not installed") as caught:
        launching.launch(config(place, tmp_path / "run"), 2)
    assert "bestiary[ray]" in caught.value.remedy
