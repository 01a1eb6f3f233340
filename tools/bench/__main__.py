"""All benchmarks one after the other, as `make bench` runs them: bench.json, bench.md, and the worst exit code.

Each is a command of its own (python -m bestiary.tools.bench.NAME). Without --full: T = 1024 and the blocks, within 25
minutes on two cores; --full adds T = 2048. A case that misses a goal is profiled.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.arguments import Parser, write_json
from bestiary.tools.bench import measure
from bestiary.tools.bench.compare import planned_minutes, worst
from bestiary.tools.bench.plan import SECONDS

COMPARISONS = ("attention", "moe", "generate", "log_prob", "step", "loop")
BENCHES = ("startup", "load", "head", *COMPARISONS)
# Fewer than they take by default, so that the whole ends within 25 minutes.
ROUNDS = {"startup": 2, "load": 2, "head": 3} | dict.fromkeys(COMPARISONS, 2)

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench
  python -m bestiary.tools.bench --select attention,moe --out out
  python -m bestiary.tools.bench --full

exit codes: 0 all goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; returns the worst exit code."""
    parser = Parser("bestiary.tools.bench", __doc__, EXAMPLE)
    parser.add_argument("--select", default=",".join(BENCHES), help=f"of {','.join(BENCHES)}")
    parser.add_argument("--full", action="store_true", help="T = 2048 too")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: it runs, no more (not startup, load and head)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of bench.json and bench.md (default out)")
    args = parser.parse_args(argv)
    selected = args.select.split(",")
    if unknown := sorted(set(selected) - set(BENCHES)):
        parser.error(f"--select {unknown[0]}: one of {', '.join(BENCHES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    profile = args.out / "bench-profile.txt"
    profile.unlink(missing_ok=True)

    start = time.monotonic()
    plan = {name: planned(name, args.full) for name in selected}
    if not args.quick:
        minutes = ", ".join(f"{name} {minutes:.1f}" for name, minutes in plan.items())
        print(f"planned minutes on two cores: {minutes}; {sum(plan.values()):.1f} in all", file=sys.stderr, flush=True)
    results = {name: _run(name, args.out, profile, args.full, args.quick) for name in selected}
    seconds = time.monotonic() - start
    code = worst([result["exit_code"] for result in results.values()])
    payload = {
        "schema": "bestiary.bench/1",
        "exit_code": code,
        "seconds": seconds,
        "planned_minutes": plan,
        "benches": results,
    }
    write_json(str(args.out / "bench.json"), payload)
    table = markdown(results)
    (args.out / "bench.md").write_text(table, encoding="utf-8")
    if args.json != str(args.out / "bench.json"):
        write_json(args.json, payload)
    if args.json != "-":
        print(f"\n{table}")
        print(summary(payload, profile))
    return code


def planned(name: str, full: bool) -> float:
    """Minutes that a benchmark takes on two cores, by what its arms took before; installed peers alone."""
    if name in SECONDS:
        return SECONDS[name] / 60
    bench = importlib.import_module(f"bestiary.tools.bench.{name}").BENCH
    return planned_minutes(name, bench.cases(False, full, Path("not read")), ROUNDS[name])


def _run(name: str, out: Path, profile: Path, full: bool, quick: bool) -> dict[str, Any]:
    """One benchmark in a process of its own; its JSON, or what stands for it where there is none."""
    target = out / f"bench-{name}.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bestiary.tools.bench.{name}", "--json", str(target)]
    command += ["--rounds", str(ROUNDS[name])]
    if name in COMPARISONS:
        command += ["--profile", str(profile)] + ["--full"] * full + ["--quick"] * quick
    print(f"\n== {name}", file=sys.stderr, flush=True)
    start = time.monotonic()
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    seconds = time.monotonic() - start
    if not target.exists():
        return {"exit_code": done.returncode or 7, "seconds": seconds, "cases": []}
    return {**json.loads(target.read_text(encoding="utf-8")), "seconds": seconds}


def cases_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What holds goals in the JSON of any benchmark here: cases, shapes, or the whole."""
    found: list[Mapping[str, Any]] = result.get("cases") or result.get("shapes") or [result]
    return found


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a line a goal."""
    lines = ["| bench | goal | figure | limit | rounds | |", "|---|---|---|---|---|---|"]
    for bench, result in results.items():
        for case in cases_of(result):
            noisy = " (too noisy)" if case.get("exit_code") == measure.TOO_NOISY else ""
            for goal in case.get("goals", []):
                sign = "≥" if goal["at_least"] else "≤"
                rounds = "" if goal["low"] is None else f"{goal['low']:.3f}–{goal['high']:.3f}"
                verdict = "holds" if goal["holds"] else f"**missed by {goal['missed_by']:.1%}**"
                lines.append(
                    f"| {bench} | {goal['name']} | {goal['figure']:.3f} | {sign} {goal['limit']:g} | {rounds} "
                    f"| {verdict}{noisy} |"
                )
            for goal in case.get("unmeasured", []):
                lines.append(f"| {bench} | {goal['name']} | – | {goal['limit']:g} | | not measured: {goal['why']} |")
        if not any("goals" in case for case in cases_of(result)):
            lines.append(f"| {bench} | – | – | – | | did not run: exit {result['exit_code']} |")
    versions: Mapping[str, str] = next((result["versions"] for result in results.values() if "versions" in result), {})
    return "\n".join(lines) + "\n\n" + ", ".join(f"{name} {number}" for name, number in versions.items()) + "\n"


def summary(payload: Mapping[str, Any], profile: Path) -> str:
    """The last line: how many goals hold, how long it took, where the profile lies."""
    cases = [case for result in payload["benches"].values() for case in cases_of(result)]
    goals = [goal for case in cases for goal in case.get("goals", [])]
    left_out = sum(len(case.get("unmeasured", [])) for case in cases)
    code = payload["exit_code"]
    words = measure.in_words(code) if code in {0, 1, 5} else "a benchmark did not run"
    attached = f"; profile of what missed: {profile}" if profile.exists() else ""
    took = f"{payload['seconds'] / 60:.1f} min of {sum(payload['planned_minutes'].values()):.1f} planned"
    return (
        f"bench: {sum(goal['holds'] for goal in goals)} of {len(goals)} goals hold, {left_out} not measured, "
        f"{took}; {words}, exit {code}{attached}"
    )


if __name__ == "__main__":
    sys.exit(main())
