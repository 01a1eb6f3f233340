"""The course of a benchmark: cases with their arms, each sample in a process of its own, goals, tables, one verdict.

A benchmark module gives `Case`s and a worker; this module gives it its command line. What a worker returns:

    seconds        of what is timed, the median of `reps`; cpu_seconds: what the process itself ran, over all threads
    extra_bytes    peak resident memory of it above the level before
    scratch_bytes  the same without the results that any implementation has to hold, where that is asked for
    error …        of what it computes, against float64
    check          a number that every arm has to agree on
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.kernels.system import NUMA, cxx, has_library
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure, process
from bestiary.tools.bench.goals import VLLM, Target, goals_of
from bestiary.tools.bench.plan import SECONDS

GEMM = 3072  # side of the square product that measures the machine: the fastest one on the machines seen so far
REMEDY = "make venv"  # installs every peer
COMPILER = "g++"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to do the work of a case.

    Attributes:
        job: what the worker is told, plain JSON values.
        needs: packages without which the arm is left out; `COMPILER` is the C++ compiler.
        once: measured in the first round alone: an arm many times slower than all others.
    """

    job: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        name: as in `goals.GOALS`.   arms: by name; "ours" is one of them.
        flops: of the model in one timed piece of work, without recomputation; 0 where no share is asked for.
        tokens: of one timed piece of work, for tokens/s.
        tolerance: by how much the `check` of two arms may differ, relative to its value.
        note: printed under the table.
    """

    name: str
    arms: Mapping[str, Arm]
    flops: float = 0.0
    tokens: int = 0
    tolerance: float = 1e-3
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark module.

    Attributes:
        name: of the module under `bestiary.tools.bench`.   about: its docstring.   example: after the options.
        cases: (quick, full, folder for files the arms share) → cases.
        work: (job) → sample; runs in the worker process.
        packages: whose versions are printed.
        prepare: (folder, quick) writes what the arms share.
    """

    name: str
    about: str | None
    example: str
    cases: Callable[[bool, bool, Path], Sequence[Case]]
    work: Callable[[Mapping[str, Any]], measure.Sample]
    packages: tuple[str, ...] = ("torch", "transformers", "bestiary")
    prepare: Callable[[Path, bool], None] = field(default=lambda _folder, _quick: None)

    @property
    def module(self) -> str:
        """What follows `python -m`."""
        return f"bestiary.tools.bench.{self.name}"


def planned_minutes(bench: str, cases: Sequence[Case], rounds: int) -> float:
    """Minutes for `rounds` rounds of the arms that are installed and the control arm, on two cores (`plan.SECONDS`)."""
    seconds = 0.0
    for case in cases:
        seconds += rounds * SECONDS["control"]
        for name, arm in case.arms.items():
            if all(installed(need) for need in arm.needs):
                seconds += SECONDS[f"{bench} / {case.name} / {name}"] * (1 if arm.once else rounds)
    return seconds / 60


def main(bench: Bench, argv: Sequence[str] | None = None) -> int:
    """Runs `bench` as a command; returns its exit code."""
    parser = Parser(bench.module, bench.about, bench.example)
    parser.add_argument("--rounds", type=at_least(2), default=2, help="at least 2 (default 2)")
    parser.add_argument("--reps", type=at_least(1), default=1, help="timed repetitions a process (default 1)")
    parser.add_argument("--threads", type=at_least(1), help="of each process (default 2; 1 with --quick)")
    parser.add_argument("--only", metavar="WORD", help="cases whose name contains it")
    parser.add_argument("--full", action="store_true", help="the larger cases too")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: proves that it runs, its figures mean nothing"
    )
    parser.add_argument("--profile", metavar="FILE", help="profile our arm of each case that misses a goal into FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        print(json.dumps(_work(bench, json.loads(args.worker))))
        return 0
    if args.threads is None:
        args.threads = 1 if args.quick else 2
    try:
        with tempfile.TemporaryDirectory(prefix=f"bestiary-bench-{bench.name}-") as temporary:
            folder = Path(temporary)
            cases = [case for case in bench.cases(args.quick, args.full, folder) if (args.only or "") in case.name]
            if not cases:
                parser.error(f"--only {args.only}: no case has that in its name")
            bench.prepare(folder, args.quick)
            payload = _run(bench, args, cases, folder)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    write_json(args.json, payload)
    code: int = payload["exit_code"]
    return code


def _run(bench: Bench, args: argparse.Namespace, cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    quiet = args.json == "-"
    packages = [package for package in bench.packages if installed(package)]
    versions = measure.versions(*packages) | {"threads": str(args.threads)}
    if not quiet:
        print(f"{bench.name}: " + ", ".join(f"{name} {number}" for name, number in versions.items()), flush=True)
    planned = None if args.quick else planned_minutes(bench.name, cases, args.rounds)
    if planned is not None:
        print(
            f"{bench.name}: planned {planned:.1f} min, {args.rounds} rounds on two cores", file=sys.stderr, flush=True
        )
    start = time.monotonic()
    results = []
    for case in cases:
        results.append(_run_case(bench, args, case, folder))
        if not quiet:
            print_case(case, results[-1])
    verdicts = [result["exit_code"] for result in results]
    payload: dict[str, Any] = {
        "schema": f"bestiary.bench.{bench.name}/1",
        "exit_code": worst(verdicts),
        "quick": args.quick,
        "planned_minutes": planned,
        "minutes": (time.monotonic() - start) / 60,
        "versions": versions,
        "cases": results,
    }
    if not quiet:
        print(summary_line(bench.name, payload), flush=True)
    return payload


def _run_case(bench: Bench, args: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    """All rounds of one case, and its goals."""
    absent = {name: [need for need in arm.needs if not installed(need)] for name, arm in case.arms.items()}
    shared = {"reps": args.reps, "threads": args.threads}
    environment = {"OMP_NUM_THREADS": str(args.threads), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    once: dict[str, measure.Sample] = {}

    def run(job: Mapping[str, Any]) -> measure.Sample:
        start = time.monotonic()
        sample = process.run_worker(bench.module, job, environment)
        return {**sample, "process_seconds": time.monotonic() - start}

    def measured(name: str, arm: Arm) -> measure.Sample:
        if name not in once or not arm.once:
            once[name] = run({**shared, "arm": name, **arm.job})
        return once[name]

    arms: dict[str, Callable[[], measure.Sample]] = {
        name: lambda name=name, arm=arm: measured(name, arm)  # type: ignore[misc]
        for name, arm in case.arms.items()
        if not absent[name]
    }
    control = {**shared, "arm": "control", "size": 256 if args.quick else GEMM}
    arms["control"] = lambda: run(control)

    def progress(index: int, arm: str, sample: measure.Sample) -> None:
        line = f"{time.strftime('%H:%M:%S')} {case.name} round {index + 1}/{args.rounds} {arm:<26}"
        print(f"{line} {sample['seconds']:8.3f} s", file=sys.stderr, flush=True)

    samples = measure.alternate(arms, args.rounds, progress)
    result = judge(bench.name, case, samples, {name: needs for name, needs in absent.items() if needs})
    if args.profile and result["exit_code"] == measure.GOAL_MISSED:
        job = {**shared, "arm": "ours", **case.arms["ours"].job, "profile": args.profile, "title": case.name}
        process.run_worker(bench.module, job, environment)
        result["profile"] = args.profile
    return result


def judge(
    bench: str, case: Case, samples: Mapping[str, Sequence[measure.Sample]], absent: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The goals of a case on its samples; those whose other arm did not run are listed with the reason.

    Args:
        samples: by arm, "control" among them.   absent: arms that did not run, with the packages they miss.
    """
    summaries = measure.summarise(samples)
    peak = summaries["control"]["flops"].high
    goals, unmeasured = [], []
    for target in goals_of(bench, case.name):
        if target.against is not None and target.against not in samples:
            missing = absent.get(target.against)
            why = _absence(missing) if missing else "this run has no such arm"
            unmeasured.append({"name": target.name, "limit": target.limit, "why": why})
        else:
            goals.append(_goal(target, case, samples, peak))
    checks = {arm: taken[0]["check"] for arm, taken in samples.items() if "check" in taken[0]}
    if len(checks) > 1 and "ours" in checks:
        scale = max(abs(checks["ours"]), 1e-30)
        apart = max(abs(check - checks["ours"]) / scale for check in checks.values())
        name = f"{case.name}: arms differ in what they compute"
        goals.append(measure.Goal(name=name, figure=apart, limit=case.tolerance))
    code = measure.exit_code(goals, summaries["control"]["seconds"])
    return measure.report(
        bench,
        summaries,
        goals,
        code,
        case=case.name,
        note=case.note,
        unmeasured=unmeasured,
        flops=case.flops,
        peak_flops=peak,
        samples={arm: list(taken) for arm, taken in samples.items()},
    )


def _absence(packages: Sequence[str]) -> str:
    """Why an arm did not run, and what makes it run."""
    remedy = "apt-get install g++" if COMPILER in packages else REMEDY
    return f"{' and '.join(packages)} not installed; remedy: {remedy}"


def _goal(target: Target, case: Case, samples: Mapping[str, Sequence[measure.Sample]], peak: float) -> measure.Goal:
    ours = samples[target.ours]
    other = ours if target.against is None else samples[target.against]
    figures = {
        "speedup": lambda a, b: b["seconds"] / a["seconds"],
        "time": lambda a, b: a["seconds"] / b["seconds"],
        "memory": lambda a, b: a["extra_bytes"] / max(b["extra_bytes"], 1.0),
        "scratch": lambda a, _b: a["scratch_bytes"] / 1e9,
        "overhead": lambda a, _b: a["overhead"],
        "staleness": lambda a, _b: a["staleness"],
        "share": lambda a, _b: case.flops / (peak * a["seconds"]),
    }
    figure = figures[target.figure]
    rounds = [figure(a, b) for a, b in zip(ours, other, strict=True)]
    medians = [
        {name: summary.median for name, summary in rows.items()}
        for rows in measure.summarise({"ours": ours, "other": other}).values()
    ]
    return measure.Goal(
        name=target.name,
        figure=figure(*medians),
        limit=target.limit,
        at_least=target.at_least,
        low=min(rounds),
        high=max(rounds),
    )


def worst(codes: Sequence[int]) -> int:
    """One code for several: a missed goal counts more than noise, noise more than none."""
    order = (measure.GOALS_HOLD, measure.TOO_NOISY, measure.GOAL_MISSED)
    return max(codes, key=lambda code: order.index(code) if code in order else len(order))


def print_case(case: Case, result: Mapping[str, Any]) -> None:
    """Table of the arms, then the goals."""
    print(f"\n{case.name}")
    print(f"  {'arm':<28}{'seconds':>9}{'spread':>8}{'tok/s':>8}{'extra MB':>10}{'GFLOP/s':>9}{'of peak':>9}")
    for arm, rows in result["arms"].items():
        seconds = rows["seconds"]["median"]
        cells = f"  {arm:<28}{seconds:9.3f}{rows['seconds']['spread']:8.1%}"
        timed = arm != "control"
        cells += f"{case.tokens / seconds:8.0f}" if case.tokens and timed else f"{'':>8}"
        cells += f"{rows['extra_bytes']['median'] / 1e6:10.0f}" if "extra_bytes" in rows else f"{'':>10}"
        rate = case.flops / seconds if timed else rows["flops"]["median"]
        cells += f"{rate / 1e9:9.1f}{rate / result['peak_flops']:9.1%}" if rate else ""
        print(cells)
    columns = [name for name in result["arms"]["ours"] if name.startswith("error ")]
    if columns:
        print(f"  {'error against float64':<28}" + "".join(f"{name.removeprefix('error '):>11}" for name in columns))
        for arm, rows in result["arms"].items():
            if arm != "control":
                print(f"  {arm:<28}" + "".join(f"{rows[name]['median']:11.1e}" for name in columns))
    if case.note:
        print(f"  {case.note}")
    goals = [
        measure.Goal(**{name: goal[name] for name in measure.Goal.__dataclass_fields__}) for goal in result["goals"]
    ]
    control = measure.Summary(**result["arms"]["control"]["seconds"])
    measure.print_goals(goals, control, result["exit_code"])
    for goal in result["unmeasured"]:
        print(f"  not measured  {goal['name']} (limit {goal['limit']}): {goal['why']}")


def summary_line(name: str, payload: Mapping[str, Any]) -> str:
    """The last line of a run."""
    goals = [goal for case in payload["cases"] for goal in case["goals"]]
    met = sum(goal["holds"] for goal in goals)
    left_out = sum(len(case["unmeasured"]) for case in payload["cases"])
    code = payload["exit_code"]
    return (
        f"bench {name}: {met} of {len(goals)} goals hold, {left_out} not measured; "
        f"{measure.in_words(code)}, exit {code}"
    )


def installed(package: str) -> bool:
    """Whether a distribution of that name is; for `COMPILER` and vLLM, whether the system has what it needs."""
    if package == COMPILER:
        return cxx() is not None
    if package == VLLM and not has_library(NUMA):
        return False
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


# ------------------------------------------------------------------ in the worker


def _work(bench: Bench, job: Mapping[str, Any]) -> measure.Sample:
    import torch

    torch.set_num_threads(job["threads"])
    return _control(job["size"]) if job["arm"] == "control" else bench.work(job)


def _control(size: int) -> measure.Sample:
    """Square fp32 products: neither side's code; their best rate is the machine's peak."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    out = torch.empty(size, size)
    taken = []
    torch.mm(a, b, out=out)
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        taken.append(time.perf_counter() - start)
    return {"seconds": sum(taken), "flops": 2.0 * size**3 / min(taken)}


def timed(
    work: Callable[[], Any],
    job: Mapping[str, Any],
    *,
    above: int | None = None,
    held: int = 0,
    forget: Callable[[], None] = lambda: None,
) -> measure.Sample:
    """Seconds and memory of `work`, `job["reps"]` times; warm it up before.

    Args:
        work: the thing; what it returns is dropped at once.
        above: resident bytes that extra memory is counted from; None: those before the first repetition.
        held: bytes of results that any implementation holds at the end, which `scratch_bytes` leaves out.
        forget: drops what it left behind (gradients) before the next one.
    """
    forget()
    process.settle()
    level = process.resident() if above is None else above
    process.reset_peak()
    seconds, busy = [], []
    for _ in range(job["reps"]):
        start, processor = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - processor)
        forget()
    extra = process.peak() - level
    if "profile" in job:
        _profile(work, Path(job["profile"]), job["title"])
        forget()
    return {
        "seconds": measure.Summary.of(seconds).median,
        "cpu_seconds": measure.Summary.of(busy).median,
        "extra_bytes": float(extra),
        "scratch_bytes": float(max(extra - held, 0)),
    }


def _profile(work: Callable[[], Any], target: Path, title: str) -> None:
    """Appends torch's table of the dearest operators."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    with target.open("a", encoding="utf-8") as out:
        out.write(f"{title}\n{table}\n")
