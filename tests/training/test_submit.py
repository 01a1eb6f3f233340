"""`bestiary submit` and `bestiary jobs` on a cluster of two nodes, through Ray's Jobs API on loopback."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray.dashboard
import torch

from bestiary.models import AutoDecoder
from bestiary.tools import chaos, cli, submit_commands
from bestiary.training import jobs as jobs_module
from bestiary.training.config import load_run_config
from bestiary.training.errors import InvalidRun
from bestiary.training.jobs import ENDED, Job, Jobs, Submission, local_cluster
from bestiary.training.launch import Placement
from bestiary.training.rl import grpo
from bestiary.training.rl.config import load_grpo_config
from bestiary.training.run import run

from .test_run import figures
from .test_run import place as place  # the fixture

STEPS = 6
# A callback that travels with the job: it notes where each process stands, and where asked to, waits to be stopped.
MODULE = """
import json, os, pathlib, time
import ray

class Watch:
    def on_step(self, trainer, values):
        folder, rank = pathlib.Path(os.environ["NOTES"]), os.environ["RANK"]
        (folder / f"node-{rank}").write_text(ray.get_runtime_context().get_node_id())
        if "HOLD" in os.environ and trainer.progress.step == 3:
            print("holding at step 3", flush=True)
            while trainer.interruption.by is None:
                time.sleep(0.05)

class Where:
    def on_end(self, controller):
        groups = {"policy": controller.roles.policy.group, "rollout": controller.roles.sampler.engine.group}
        text = json.dumps({role: group.nodes for role, group in groups.items()})
        pathlib.Path(os.environ["NOTES"], "nodes.json").write_text(text)
"""


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2, 2) as address:
        yield address


@pytest.fixture(scope="module")
def watch(place):
    (place / "watching.py").write_text(MODULE)
    return place / "watching.py"


def submitted(place, watch, out, address, *more):
    """The command line of a run in two processes, one a node."""
    out.mkdir(exist_ok=True)
    given = ["precision.parameters=float64", "loop.timeout_s=60", "loop.callbacks=[watching:Watch]", f"out={out}"]
    where = ["--recipe", "sft", "--address", address, "--nodes", "2", "--module", str(watch)]
    return [
        "submit",
        str(place / "run.json"),
        *given,
        *where,
        "--env",
        f"NOTES={out}",
        "--env",
        "PYTHONSAFEPATH=1",
        *more,
    ]


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does_also_where_the_job_was_stopped_and_submitted_again(
    place, watch, tmp_path, cluster, capfd
):
    run(load_run_config(place / "run.json", ["precision.parameters=float64", f"out={tmp_path / 'one'}"], recipe="sft"))
    one, out, jobs = figures(tmp_path / "one"), tmp_path / "two", Jobs(cluster)
    assert cli.main(submitted(place, watch, out, cluster, "--env", "HOLD=1", "--detach")) == 0
    identity = jobs.find(out).id
    until(lambda: "holding at step 3" in jobs.logs(identity) or jobs.find(identity).status in ENDED)
    assert jobs.find(identity).status not in ENDED, f"{jobs.find(identity)}: {jobs.logs(identity)}"
    with pytest.raises(InvalidRun, match="is in the hands of") as refused:
        jobs.submit(Submission("sft", {}, out, Placement(2, 2)))
    assert identity in refused.value.remedy
    capfd.readouterr()
    assert cli.main(["jobs", "stop", str(out), "--address", cluster]) == 0
    assert "· sft · stopped ·" in capfd.readouterr().out
    stopped = figures(out)
    assert 3 <= stopped[-1]["step"] < STEPS

    assert cli.main(submitted(place, watch, out, cluster, "--json", str(tmp_path / "two.json"))) == 0
    shown = capfd.readouterr().out
    assert f"step {STEPS}/{STEPS}" in shown, shown
    told = json.loads((tmp_path / "two.json").read_text())
    assert (told["status"], told["exit_code"], told["step"]) == ("succeeded", 0, STEPS)
    assert len({(out / f"node-{rank}").read_text() for rank in range(2)}) == 2
    assert figures(out)[: len(stopped)] == stopped
    for found, expected in zip(figures(out), one, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)

    capfd.readouterr()
    assert cli.main(["jobs", "list", "--address", cluster]) == 0
    assert [line.split(" · ")[2] for line in capfd.readouterr().out.splitlines()] == ["succeeded", "stopped"]
    assert cli.main(["jobs", "logs", identity, "--address", cluster]) == 0
    assert "holding at step 3" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "processes", "words"),
    [
        (3, 3, "3 nodes with 1 CPU cores .* 2 of the cluster's 2"),
        (2, 6, "2 nodes with 3 CPU cores .* 0 of the cluster's 2"),
    ],
)
def test_what_the_cluster_has_no_room_for_is_refused_before_it_is_submitted(cluster, tmp_path, nodes, processes, words):
    with pytest.raises(InvalidRun, match=words):
        Jobs(cluster).submit(Submission("sft", {}, tmp_path, Placement(processes, nodes)))
    assert not [job for job in Jobs(cluster).listed() if job.out == str(tmp_path)]


@pytest.mark.slow
def test_a_second_cluster_of_this_machine_has_a_dashboard_of_its_own(cluster):
    with local_cluster(1, 1) as other:
        assert other != cluster
        assert Jobs(other).listed() == []


@pytest.mark.slow
def test_a_job_that_is_not_there_is_named_with_those_that_are(cluster):
    with pytest.raises(InvalidRun, match="no job 'nobody'"):
        Jobs(cluster).find("nobody")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_policy_over_two_nodes_with_an_engine_on_each_is_the_run_of_one_process(place, watch, tmp_path, cluster):
    """`placement.nodes` = 2 of `grpo`; weights in float64 to 1e-9."""
    placement = {"policy": 2, "rollout": 2, "reward": 0, "together": ["rollout"], "nodes": 2, "timeout_s": 120}
    rest = {"environment": None, "algorithm": {}, "checkpoint": {"every": None}}
    file = chaos.write_run(tmp_path, 2, placement=placement, **rest)
    grpo.run(load_grpo_config(file, ["placement=null", f"out={tmp_path / 'one'}"]))
    given = submitted(place, watch, tmp_path / "two", cluster)[2:]
    given = [one for one in given if not one.startswith(("precision.", "loop.")) and one != "sft"]
    given.insert(given.index("--recipe") + 1, "grpo")
    assert cli.main(["submit", str(file), "loop.callbacks=[watching:Where]", *given]) == 0
    nodes = json.loads((tmp_path / "two" / "nodes.json").read_text())
    assert set(nodes["policy"]) == set(nodes["rollout"])
    assert len(set(nodes["policy"])) == 2
    found, expected = (AutoDecoder.from_pretrained(tmp_path / name / "export") for name in ("two", "one"))
    for (name, ours), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)


# ---------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (["optim.lr=fast"], [], "optim.lr = 'fast'"),
        (["recipe=dpo"], ["--recipe", "sft"], "recipe = 'dpo' and the command is sft"),
        ([], ["--recipe", "sft", "--processes-per-node", "3"], "data.streams = 2 packs a step over 3 processes"),
        (["parallel.tensor=2"], ["--recipe", "sft"], "does not fill 1 process"),
        ([], [], "the file names no recipe"),
        (["recipe=mine"], [], "has recipe = 'mine'"),
        ([], ["--recipe", "sft", "--detach"], "--detach without a cluster's address"),
        ([], ["--recipe", "sft", "--env", "NAME"], "--env 'NAME' has no value"),
    ],
)
def test_a_wrong_run_is_found_before_anything_is_started(place, monkeypatch, capsys, changes, options, words):
    for name in jobs_module.ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jobs_module, "local_cluster", lambda *_: pytest.fail("a cluster was started"))
    file = str(place / "run.json")
    recipe = ["recipe=sft"] if changes == ["optim.lr=fast"] else []
    assert cli.main(["submit", file, *recipe, *changes, f"out={place / 'none'}", *options]) == 7
    assert words in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_named_with_ways_to_one(monkeypatch):
    with pytest.raises(InvalidRun, match=r"answers at http://127\.0\.0\.1:9") as caught:
        Jobs("http://127.0.0.1:9")
    assert "ray start --head" in caught.value.remedy
    assert "RAY_ADDRESS" in caught.value.remedy


def test_jobs_without_a_cluster_ask_for_one(monkeypatch, capsys):
    for name in jobs_module.ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["jobs", "list"]) == 7
    assert "no Ray cluster is named" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["ray", "ray.dashboard.optional_deps"])
def test_a_missing_ray_or_dashboard_is_named_with_its_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "ray":
        monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    else:
        monkeypatch.delattr(ray.dashboard, "optional_deps", raising=False)
    with pytest.raises(InvalidRun, match=r"not installed|without its dashboard") as caught:
        jobs_module.jobs_sdk()
    assert "bestiary[ray]" in caught.value.remedy


def test_modules_too_large_to_travel_are_refused_with_the_largest_file(tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    (package / "weights.bin").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(jobs_module, "MODULES_MIB", 2)
    target = tmp_path / "packed"
    target.mkdir()
    run = Submission("sft", {"recipe": "sft"}, tmp_path, Placement(1), modules=[package])
    with pytest.raises(InvalidRun, match=r"weights\.bin"):
        jobs_module._pack(target, run)
    (package / "weights.bin").unlink()
    jobs_module._pack(target, run)
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*.*")) == ["mine/code.py", "run.json"]


def test_of_a_package_nothing_hidden_travels_but_what_ray_heeds(tmp_path):
    """Secrets, history and byte code stay here; links are followed, also one that leads above itself."""
    package, target = tmp_path / ".work" / "mine", tmp_path / "packed"
    given = (".env", ".git/config", "__pycache__/code.pyc", "code.py", "data/.gitignore", "data/.netrc", "data/x.json")
    for name in given:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "more.py").write_text("")
    (package / "more").symlink_to(tmp_path / "linked")
    (package / "loop").symlink_to(package)
    (package / "gone.py").symlink_to(tmp_path / "nothing")
    target.mkdir()
    jobs_module._pack(target, Submission("sft", {}, tmp_path, Placement(1), modules=[package]))
    packed = target / "mine"
    found = sorted(path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file())
    assert found == ["code.py", "data/.gitignore", "data/x.json", "more/more.py"]


def test_a_signal_stops_the_job_of_this_machine_s_cluster_and_leaves_any_other(monkeypatch):
    """The job ends once it is stopped; the other one is left as it runs."""
    for stops in (True, False):
        jobs, stopped = Jobs.__new__(Jobs), []

        def details(identity, stopped=stopped):
            return SimpleNamespace(status="stopped" if stopped else "running")

        async def tail(identity, write, details=details):
            import asyncio

            os.kill(os.getpid(), 15)
            while (job := details(identity)).status not in ENDED:
                await asyncio.sleep(0.01)
            return job

        monkeypatch.setattr(jobs, "_details", details)
        monkeypatch.setattr(jobs, "_tail", tail)
        monkeypatch.setattr(jobs, "stop", stopped.append)
        job = jobs.follow("it", print, stops=stops)
        assert (job.status, stopped) == (("stopped", ["it"]) if stops else ("running", []))


@pytest.mark.parametrize(
    ("status", "code", "expected"), [("succeeded", 0, 0), ("stopped", None, 0), ("failed", 4, 4), ("failed", None, 7)]
)
def test_the_exit_code_is_that_of_the_command_in_the_job(tmp_path, capsys, status, code, expected):
    """One that did not start is an error of the environment, shown in the cluster's words."""
    job = Job("it", "sft", str(tmp_path), status, code, "no such file", None, None)
    jobs = SimpleNamespace(address="there", follow=lambda *_, **__: job)
    assert submit_commands._followed(jobs, "it", quiet=False)["exit_code"] == expected
    assert ("no such file" in capsys.readouterr().out) == (status == "failed" and code is None)


def test_a_job_s_command_survives_the_names_of_folders(tmp_path, monkeypatch):
    """Blanks, quotes and what a shell would read: it works where it was submitted from, in this Python."""
    folder, uploaded = tmp_path / "it's a $(date) \"folder", tmp_path / "job dir"
    uploaded.mkdir()
    folder.mkdir()
    (folder / "py thon").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    (folder / "py thon").chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "py thon"))
    command = jobs_module._entry(Submission("sft", {}, folder, Placement(4, 2, 0, 3)))
    done = subprocess.run(["/bin/sh", "-c", command], cwd=uploaded, capture_output=True, text=True, check=True)
    options = ["--ray", "4", "--nodes", "2", "--cores", "3", "--gpus", "0"]
    told = ["-P", "-m", "bestiary.tools.cli", "sft", str(uploaded / "run.json"), *options]
    assert done.stdout.splitlines() == [str(folder), *told]


@pytest.mark.parametrize(
    ("content", "step"),
    [('{"step": 3}\n{"step": 4, "lo', "step 3"), ('{"step": 3}\n{"step": 4}\n', "step 4"), ("lost\n{}\n", "")],
)
def test_a_run_is_listed_whatever_its_metrics_have_come_to(tmp_path, content, step):
    """A line that is being written is none yet; of what is damaged nothing is said, and other runs are listed."""
    (tmp_path / "metrics.jsonl").write_text(content)
    row = submit_commands._row(Job("it", "sft", str(tmp_path), "running", None, "", None, None))
    assert row == " · ".join(filter(None, ("it", "sft", "running", step, str(tmp_path))))


def grpo_file(folder, **more):
    """A run's file of `grpo`; its checkpoint and data are never read."""
    content = {
        "recipe": "grpo",
        "model": {"src": "model"},
        "data": {
            "tokenizer": {"src": "model"},
            "sources": [{"name": "sums", "files": "sums.jsonl", "kind": "prompt"}],
        },
        "rewards": {"functions": [{"name": "right", "function": "my_rewards:right"}]},
        "loop": {"steps": 1},
        "out": str(folder / "out"),
    }
    file = folder / "run.json"
    file.write_text(json.dumps(content | more))
    return file


def test_a_command_that_is_one_process_is_submitted_without_actors(tmp_path, capsys):
    """`grpo` takes its file alone; more processes than it has are refused before anything starts."""
    file = grpo_file(tmp_path)
    assert cli.main(["submit", str(file), "--nodes", "2"]) == 7
    assert "grpo in 2 processes" in capsys.readouterr().err
    command = submit_commands.COMMANDS["grpo"]
    config = command.load(file, [], "grpo")
    assert config.data.sources[0].files == str(tmp_path / "sums.jsonl")
    run_ = Submission("grpo", config.model_dump(mode="json"), config.out, Placement(1, 1), alone=command.alone)
    assert jobs_module._entry(run_).endswith('grpo "$config" ')


@pytest.mark.slow
def test_a_run_that_starts_its_own_actors_leaves_them_the_cores(tmp_path, monkeypatch):
    """Also on more nodes than one: the job itself takes nothing, and a cluster of this machine has room for them."""
    file = grpo_file(tmp_path, placement={"policy": 2, "rollout": 2, "nodes": 2})
    made, given = [], []

    @contextmanager
    def cluster(*sizes):
        made.append(sizes)
        yield "here"

    client = SimpleNamespace(submit_job=lambda **job: given.append(job) or "it")
    jobs = SimpleNamespace(_client=client, address="here", listed=list, _check_room=lambda place: None)
    jobs._started = lambda **job: Jobs._started(jobs, **job)
    monkeypatch.setattr(jobs_module, "local_cluster", cluster)
    monkeypatch.setattr(jobs_module, "Jobs", lambda address: jobs)
    monkeypatch.setattr(submit_commands, "_run", lambda found, run, **_: {"job": Jobs.submit(found, run)})
    assert cli.main(["submit", str(file), "--nodes", "2"]) == 0
    assert made == [(2, 3, 0)]  # 6 processes at most: policy 2, rollout 2, reference and reward
    assert (given[0]["entrypoint_num_cpus"], given[0]["entrypoint_num_gpus"]) == (0, 0)
