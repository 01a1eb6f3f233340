"""Distillation on the student's own answers, sampled on Ray: the run of one process, also after a death."""

import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest

from bestiary.training.config import load_run_config
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.student_engines import StudentEngines
from bestiary.training.run import answering, dist, run

from ..ray_session import session as session  # the fixture
from ..test_run import metrics
from ..test_run import place as place  # the fixture
from ..test_run_recipes import ON_POLICY, changes
from ..test_run_recipes import files as files

EXACT = [*ON_POLICY, "precision.parameters=float64", "loop.timeout_s=200"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_on_ray_answer_as_the_student_does_and_one_that_dies_is_replaced(files, session, tmp_path, monkeypatch):
    """One is killed behind the second step: the steps are those of a run without engines and deaths."""
    given = partial(changes, "distill")
    run(load_run_config(files / "run.json", given(tmp_path / "own", *EXACT), recipe="distill"))
    generate, calls = StudentEngines.generate, []

    def killing(engines, *arguments, **more):
        calls.append(engines.version)
        if len(calls) == 3:
            os.kill(engines._engine.group.pids[1], signal.SIGKILL)
        return generate(engines, *arguments, **more)

    monkeypatch.setattr(StudentEngines, "generate", killing)
    run(load_run_config(files / "run.json", given(tmp_path / "ray", *EXACT, "rollouts.engines=2"), recipe="distill"))
    assert len(calls) >= 4
    ours, theirs = metrics(tmp_path / "ray"), metrics(tmp_path / "own")
    assert [row["rl/answer_tokens"] for row in ours] == [row["rl/answer_tokens"] for row in theirs]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-9)


def test_engines_for_a_student_in_several_processes_are_refused(files, tmp_path, monkeypatch):
    given = changes("distill", tmp_path / "two", *EXACT, "rollouts.engines=2")
    config = load_run_config(files / "run.json", given, recipe="distill")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(InvalidRun, match=r"rollouts\.engines = 2 for a student in 2 processes"):
        answering(config, config.rollouts, None, None, SimpleNamespace(stop_ids={1}), None, None)
