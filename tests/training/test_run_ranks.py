"""`bestiary sft` in two processes: one curve on any number of them, and one clear end when one of them dies."""

import signal
import socket
import time

import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.training.checkpoint import saved_steps
from bestiary.training.config import load_run_config
from bestiary.training.run import run

from ..child import Child
from .test_run import COMMAND, metrics
from .test_run import place as place  # the fixture

pytestmark = pytest.mark.slow


def start(file, out, *changes, world=2, recipe="sft"):
    """The processes of a run, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        Child(
            *(COMMAND, recipe, file, f"out={out}", *changes),
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]


def ended(processes):
    """Exit codes and errors."""
    codes, told = zip(*(process.ended() for process in processes), strict=True)
    return list(codes), told


class Once:
    """Asks the run to stop after its first step."""

    def on_step(self, trainer, values):
        trainer.interruption.by = "the test"


def curve(out, name="loss"):
    return [row[name] for row in metrics(out) if name in row]


def test_two_processes_then_one_then_two_train_as_one_does(place, tmp_path):
    """In float64: two share each row until one is killed, one goes on, then two have rows of their own; one curve."""
    exact = ["precision.parameters=float64", "loop.timeout_s=60"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = [*exact, f"out={whole}"]
    run(load_run_config(place / "run.json", config, recipe="sft"))

    slow = "loop.callbacks=[tests.training.test_run:Slow]"
    processes = start(place / "run.json", parts, *exact, "parallel.context=2", slow)
    while len(saved_steps(parts / "checkpoints")) < 2 and all(process.poll() is None for process in processes):
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    codes, told = ended(processes)
    assert codes == [7, -signal.SIGKILL], told
    assert "RankLost: another process of the run died" in told[0]
    reached = saved_steps(parts / "checkpoints")[-1]
    assert 2 <= reached < 6

    changes = [*exact, f"out={parts}", "loop.callbacks=[tests.training.test_run_ranks:Once]"]
    outcome = run(load_run_config(place / "run.json", changes, recipe="sft"))
    assert (outcome.resumed, outcome.step) == (reached, min(6, reached + 2))  # heard before the step that follows

    codes, told = ended(start(place / "run.json", parts, *exact))
    assert codes == [0, 0], told
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-9)
    assert curve(parts, "grad_norm") == pytest.approx(curve(whole, "grad_norm"), rel=1e-9)
    assert curve(parts, "eval/loss") == pytest.approx(curve(whole, "eval/loss"), rel=1e-9)
    assert [row["step"] for row in metrics(parts) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    ours, theirs = (AutoDecoder.from_pretrained(folder / "export").state_dict() for folder in (parts, whole))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-9, msg=name)


def test_two_processes_sample_the_answers_of_one_and_train_as_it_does(place, tmp_path):
    """In float64, each with half of the model and prompts of its own, some of which it does not answer itself."""
    teacher = AutoDecoder.from_pretrained(place / "model")
    with torch.no_grad():
        teacher.model.norm.weight.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")
    given = ["precision.parameters=float64", "loop.timeout_s=60", "loop.steps=3", "data.overflow=drop"]
    given += ["rollouts.max_tokens=12", "rollouts.share=0.7", f"loss.teacher={tmp_path / 'teacher'}", "optim.lr=1e-2"]
    one, two = tmp_path / "one", tmp_path / "two"
    run(load_run_config(place / "run.json", [*given, f"out={one}"], recipe="distill"))
    codes, told = ended(start(place / "run.json", two, *given, recipe="distill"))
    assert codes == [0, 0], told
    assert curve(two, "rl/answers") == curve(one, "rl/answers")
    assert curve(two, "rl/answer_tokens") == curve(one, "rl/answer_tokens")
    assert curve(two) == pytest.approx(curve(one), rel=1e-9)
    assert curve(two, "grad_norm") == pytest.approx(curve(one, "grad_norm"), rel=1e-9)
