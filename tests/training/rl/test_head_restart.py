"""The head of the cluster is killed under a run: one message, and the same command on a new head goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

import psutil
import pytest

from bestiary.tools import chaos
from bestiary.training.checkpoint import saved_steps

ROUNDS = 10


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def own():
    """Environment of head and run: a folder for Ray alone, whose sockets need a short path, and no token of the user's.

    In the usual folder `ray start` leaves an address that every other program on the machine would connect to.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"}


@contextmanager
def head(port, environment):
    """A cluster of one node, all of which is killed at the end, workers included."""
    command = ["start", "--head", f"--port={port}", "--num-cpus=4", "--include-dashboard=false", "--block"]
    ports = [f"--ray-client-server-port={free_port()}", "--disable-usage-stats"]
    started = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *command, *ports],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        waited(lambda: answers(port), 90)
        yield
    finally:
        tree = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
        for one in tree:
            with_no_more(one)
        started.wait(30)


def with_no_more(process):
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False


def waited(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def started(folder, port, environment):
    environment = {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    command = [sys.executable, "-m", "bestiary.tools.cli", "grpo", str(folder / "run.json"), "--json", "-"]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_says_that_its_head_is_gone_and_goes_on_with_a_new_one(own, tmp_path):
    placement = {"policy": 1, "rollout": 1, "reward": 0}
    plain = {"environment": None, "algorithm": {"entropy": False}}
    chaos.write_run(tmp_path, ROUNDS, placement=placement, **plain)
    port = free_port()
    with head(port, own):
        run = started(tmp_path, port, own)
        try:
            waited(lambda: run.poll() is not None or len(saved_steps(tmp_path / "out" / "checkpoints")) > 1, 240)
        except BaseException:
            run.kill()
            raise
        assert run.poll() is None, run.stderr.read()[-2000:]
    said, told = run.communicate(timeout=240)
    assert run.returncode == 7
    assert told.count("the head of the Ray cluster") == 1
    assert "goes on from the newest resume point" in told
    step = saved_steps(tmp_path / "out" / "checkpoints")[-1]
    assert step < ROUNDS
    with head(port, own):
        run = started(tmp_path, port, own)
        said, told = run.communicate(timeout=240)
    assert run.returncode == 0, told[-2000:]
    found = json.loads(said)
    assert (found["round"], found["stopped"]) == (ROUNDS, None)
    assert found["resumed"] >= step
    counts = chaos.trained(tmp_path / "out")
    assert (set(counts.values()), len(counts)) == ({1}, ROUNDS * chaos.PROMPTS)
