"""`bestiary submit` and `bestiary jobs`: runs on a Ray cluster, or on one of this machine. Heavy imports wait."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import USAGE_ERROR, at_least
from bestiary.tools.train_commands import RECIPES

if TYPE_CHECKING:
    from bestiary.training.config import RecipeName
    from bestiary.training.jobs import Job, Jobs, Submission

Say = Callable[[str], None]
RECORD = "job.json"  # in `out`, while a cluster of this machine trains in it

SUBMIT = """\
examples:
  bestiary submit run.yaml                                      on a cluster of this machine, ended with the run
  bestiary submit run.yaml --nodes 2 --processes-per-node 4 data.streams=8
  RAY_ADDRESS=http://head:8265 bestiary submit run.yaml --nodes 4 --gpus-per-node 8 data.streams=32
  bestiary submit run.yaml --address http://head:8265 --nodes 2 --gpus-per-node 8 --detach
  bestiary submit run.yaml --module my_losses.py loss.name=my_losses:Scaled

The file says what runs (recipe: sft, dpo, …) and is checked here. Its configuration travels with the job, and modules;
data, weights and out lie where every node finds them. Output is shown as it comes. Submitted again with the same out,
the run goes on from its newest resume point. Ctrl-C stops a run on this machine's own cluster behind its step, with a
checkpoint; on another cluster the run goes on: bestiary jobs logs, bestiary jobs stop.
exit codes: those of the command that runs (0 done or stopped, 1 diverged, 4 refused), 7 usage or cluster"""

JOBS = """\
examples:
  bestiary jobs list
  bestiary jobs status runs/first
  bestiary jobs logs runs/first --follow
  bestiary jobs stop runs/first

A job is named by its id or by the run's folder. The cluster is --address, RAY_ADDRESS, or the one of this machine that
trains in the folder."""


# ---------------------------------------------------------------------- what can be submitted


class NotSubmitted(BestiaryError):
    """A run that names nothing to run, or a cluster that nobody named.

    Remedy: put `recipe` into the file or give `--recipe`; give `--address` or set RAY_ADDRESS.
    """


@dataclass(frozen=True)
class Command:
    """A command of `bestiary` that runs as a job: it takes CONFIG, `--ray`, `--nodes`, `--gpus` and `--cores`.

    Attributes:
        load: checks (file, changes, name of the command), returns its configuration, which has `out`.
        check: refuses what this many processes cannot do with it.
        alone: it takes CONFIG alone, and is one process.
        actors: that a configuration has it start by itself, a core each; None: none.
    """

    load: Callable[[Path, Sequence[str], str], Any]
    check: Callable[[Any, int], None]
    alone: bool = False
    actors: Callable[[Any], int] | None = None


def _load(file: Path, changes: Sequence[str], name: str) -> Any:
    from bestiary.training.config import load_run_config

    return load_run_config(file, changes, recipe=cast("RecipeName", name))


def _check(config: Any, processes: int) -> None:
    from bestiary.training.run import check_processes

    check_processes(config, processes)


def _load_grpo(file: Path, changes: Sequence[str], name: str) -> Any:
    from bestiary.training.rl.config import load_grpo_config

    return load_grpo_config(file, changes)


def _check_alone(config: Any, processes: int) -> None:
    if processes > 1 and not _placed(config):
        raise NotSubmitted(f"{config.recipe} in {processes} processes.", remedy="--nodes 1 and one process on it")


def _placed(config: Any) -> int:
    return 0 if config.placement is None else int(config.placement.cpus or config.placement.processes)


COMMANDS = dict.fromkeys(RECIPES, Command(_load, _check)) | {
    "grpo": Command(_load_grpo, _check_alone, alone=True, actors=_placed)
}


# ---------------------------------------------------------------------- bestiary submit


def add_submit(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `submit` and `jobs` to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    submit = add(commands, "submit", "a run on a Ray cluster, or on a cluster of this machine", SUBMIT)
    submit.add_argument("config", metavar="CONFIG", type=Path, help="the run's file (YAML or JSON)")
    submit.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="of the file, dotted: optim.lr=1e-5")
    submit.add_argument("--nodes", metavar="N", type=at_least(1), default=1, help="machines; default: 1")
    share = submit.add_mutually_exclusive_group()
    share.add_argument("--gpus-per-node", metavar="M", type=at_least(1), help="a process for each of them")
    share.add_argument("--processes-per-node", metavar="P", type=at_least(1), help="on CPUs; default: 1")
    submit.add_argument(
        "--cores", metavar="C", type=at_least(1), default=1, help="CPU cores of each process; default: 1"
    )
    submit.add_argument("--recipe", choices=tuple(COMMANDS), help="where the file names none")
    submit.add_argument("--address", help="of a Ray cluster's dashboard, http://HEAD:8265; default: RAY_ADDRESS")
    submit.add_argument(
        "--module",
        metavar="PATH",
        action="append",
        type=Path,
        default=[],
        help="code to bring along; of a folder nothing hidden (.git, .env)",
    )
    submit.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="variable of every process; the cluster shows it",
    )
    submit.add_argument("--detach", action="store_true", help="return once it is submitted")
    submit.set_defaults(run=_submit)

    jobs = commands.add_parser(
        "jobs",
        help="runs on a Ray cluster: list, status, logs, stop",
        description="Runs on a Ray cluster.",
        epilog=JOBS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = jobs.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, what, run in (
        ("list", "the runs that the cluster knows, the newest first", _list),
        ("status", "how one of them stands", _status),
        ("logs", "what it has printed", _logs),
        ("stop", "end it behind its step, with a checkpoint", _stop),
    ):
        action = add(actions, name, what, JOBS)
        action.add_argument("--address", help="of the cluster; default: RAY_ADDRESS")
        if name != "list":
            action.add_argument("job", metavar="RUN", help="id of the job, or the run's folder")
        if name == "logs":
            action.add_argument("--follow", action="store_true", help="until it ends")
        action.set_defaults(run=run)


def _submit(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.training.jobs import Jobs, Submission, jobs_sdk, local_cluster
    from bestiary.training.launch import Placement

    jobs_sdk()
    name = args.recipe or _recipe(args.config, args.changes)
    command = COMMANDS[name]
    config = command.load(args.config.absolute(), args.changes, name)
    config = config.model_copy(update={"out": config.out.absolute()})
    share = args.gpus_per_node or args.processes_per_node or 1
    place = Placement(args.nodes * share, args.nodes, int(args.gpus_per_node is not None), args.cores)
    command.check(config, place.processes)
    actors = 0 if command.actors is None else command.actors(config)
    run = Submission(
        command=name,
        config=config.model_dump(mode="json"),
        out=config.out,
        place=place,
        modules=args.module,
        environment=_variables(args.env),
        alone=command.alone,
        reserves=not actors,
    )
    quiet = args.json == "-"
    address = _given(args.address)
    if address is not None:
        return _run(Jobs(address), run, quiet=quiet, detach=args.detach, ours=False)
    if args.detach:
        raise NotSubmitted(
            "--detach without a cluster's address: the cluster of this machine ends with this command.",
            remedy="--address or RAY_ADDRESS of a cluster (ray start --head makes one), or leave --detach out",
        )
    _say(f"no cluster is named: {args.nodes} node(s) on this machine, until the run ends", quiet)
    cores = max(share * args.cores, -(-actors // args.nodes))
    with (
        local_cluster(args.nodes, cores, share if args.gpus_per_node else 0) as here,
        _noted(run.out, here),
    ):
        return _run(Jobs(here), run, quiet=quiet, detach=False, ours=True)


def _run(jobs: Jobs, run: Submission, *, quiet: bool, detach: bool, ours: bool) -> dict[str, Any]:
    """Submit and follow; the payload of the command."""
    identity = jobs.submit(run)
    _say(f"{run.command} as {identity} on {jobs.address} · {run.out}", quiet)
    if detach:
        _say(f"bestiary jobs logs {identity} --follow; bestiary jobs stop {identity}", quiet)
        return _payload(jobs, jobs.find(identity))
    return _followed(jobs, identity, quiet=quiet, ours=ours)


def _followed(jobs: Jobs, identity: str, *, quiet: bool, ours: bool = False) -> dict[str, Any]:
    """Show a job to its end; its exit code becomes the command's."""
    job = jobs.follow(identity, _nothing if quiet else _write, stops=ours)
    code = 0
    if job.status == "failed":
        code = job.exit_code or USAGE_ERROR
        if job.exit_code is None:
            _say(f"{job.id} did not start: {job.message.strip()[-2000:]}", quiet)
    _say(f"{job.id} {job.status}" + ("" if code == 0 else f", exit code {code}"), quiet)
    return {**_payload(jobs, job), "exit_code": code}


def _recipe(file: Path, changes: Sequence[str]) -> str:
    """The command that a file names by its key `recipe`."""
    from bestiary.training.sections import read_mapping

    found = read_mapping(file, NotSubmitted).get("recipe")
    for change in changes:
        key, _, value = change.partition("=")
        found = value if key == "recipe" else found
    if found not in COMMANDS:
        said = "names no recipe" if found is None else f"has recipe = {found!r}"
        raise NotSubmitted(f"the file {said}.", read_from=str(file), remedy=f"recipe: one of {', '.join(COMMANDS)}")
    return str(found)


def _variables(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise NotSubmitted(f"--env {name!r} has no value.", remedy="--env NAME=VALUE")
    return {name: value for name, _, value in pairs}


# ---------------------------------------------------------------------- bestiary jobs


def _list(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    jobs = _cluster(args)
    found = jobs.listed()
    for job in found:
        say(_row(job))
    if not found:
        say(f"no runs on {jobs.address}")
    return {"address": jobs.address, "jobs": [asdict(job) for job in found]}


def _status(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    jobs = _cluster(args)
    job = jobs.find(args.job)
    say(_row(job))
    if job.status == "failed":
        say(job.message.strip()[-2000:])
    return _payload(jobs, job)


def _logs(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    jobs = _cluster(args)
    job = jobs.find(args.job)
    quiet = args.json == "-"
    if args.follow:
        return _followed(jobs, job.id, quiet=quiet)
    text = jobs.logs(job.id)
    if not quiet:
        _write(text)
    return {**_payload(jobs, job), "logs": text}


def _stop(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    jobs = _cluster(args)
    job = jobs.find(args.job)
    jobs.stop(job.id)
    say(f"{job.id} stops behind its step")
    job = jobs.wait(job.id)
    say(_row(job))
    return _payload(jobs, job)


def _cluster(args: argparse.Namespace) -> Jobs:
    """The cluster that a command of `bestiary jobs` is about."""
    from bestiary.training.jobs import Jobs

    address = _given(args.address)
    if address is None and "job" in args:
        record = Path(args.job) / RECORD
        if record.is_file():
            address = json.loads(record.read_text(encoding="utf-8"))["address"]
    if address is None:
        raise NotSubmitted(
            "no Ray cluster is named.",
            remedy="--address http://HEAD:8265 or RAY_ADDRESS; --address auto for one that `ray start` made here",
        )
    return Jobs(address)


def _given(address: str | None) -> str | None:
    return address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or None


@contextmanager
def _noted(out: Path, address: str) -> Iterator[None]:
    """Where a cluster of this machine is found, for as long as it is there."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / RECORD
    record.write_text(json.dumps({"address": address}), encoding="utf-8")
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def _row(job: Job) -> str:
    took = "" if job.started is None else f" · {(job.ended or time.time()) - job.started:.0f} s"
    step = _step(Path(job.out))
    return (
        f"{job.id} · {job.command} · {job.status}{took}" + ("" if step is None else f" · step {step}") + f" · {job.out}"
    )


def _step(out: Path) -> int | None:
    """The last step in a run's metrics, where this machine sees them; None also where they are damaged."""
    from bestiary.training.tracking import METRICS, MetricsDamaged, read_metrics

    try:
        rows = read_metrics(out / METRICS)
    except (OSError, MetricsDamaged):  # of one run, and the others are to be listed
        return None
    return int(rows[-1]["step"]) if rows else None


def _payload(jobs: Jobs, job: Job) -> dict[str, Any]:
    told = asdict(job)
    return {"address": jobs.address, "job": told.pop("id"), "ended_with": told.pop("exit_code"), **told} | {
        "step": _step(Path(job.out))
    }


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, flush=True)


def _write(text: str) -> None:
    """Text as it comes, not a line at a time."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _nothing(text: str) -> None:
    return None
