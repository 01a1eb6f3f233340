"""How long a user waits before anything happens: importing the models against importing torch, and `--help`.

    models          `import bestiary.models` against `import torch`
    bestiary, verify-bridge     `--help` of the two commands, in seconds

Each sample is the fastest of several fresh processes, whole, from start to end: what else a machine does makes a start
slower and never faster. Arms alternate, both sides in one run. Byte code is written before the first of them, whatever
PYTHONDONTWRITEBYTECODE says: an installed package has it. The control arm is a process that only counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure
from bestiary.tools.bench.process import WorkerFailed

IMPORT_LIMIT = 1.2  # × `import torch`
HELP_LIMIT = 0.5  # seconds
MAIN = "import sys; from bestiary.{}.cli import main; sys.exit(main(['--help']))"
ARMS = {
    "models": "import bestiary.models",
    "torch": "import torch",
    "bestiary": MAIN.format("tools"),
    "verify-bridge": MAIN.format("verify"),
    "control": "sum(range(2 * 10**7))",
}

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.startup
  python -m bestiary.tools.bench.startup --rounds 5 --starts 10 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = Parser("bestiary.tools.bench.startup", __doc__, EXAMPLE)
    parser.add_argument("--rounds", type=at_least(2), default=3, help="at least 2 (default 3)")
    parser.add_argument("--starts", type=at_least(1), default=4, help="of each arm a round (default 4)")
    args = parser.parse_args(argv)
    try:
        for code in ARMS.values():
            _start(code)
        samples = measure.alternate({arm: _sampler(code, args.starts) for arm, code in ARMS.items()}, args.rounds)
    except WorkerFailed as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    payload = judge(samples)
    if args.json != "-":
        _print(payload, samples)
    write_json(args.json, payload)
    return int(payload["exit_code"])


def judge(samples: dict[str, list[measure.Sample]]) -> dict[str, Any]:
    """The result of a run, from the samples of its arms."""
    summaries = measure.summarise(samples)
    seconds = {arm: rows["seconds"] for arm, rows in summaries.items()}
    ratios = [
        ours["seconds"] / other["seconds"] for ours, other in zip(samples["models"], samples["torch"], strict=True)
    ]
    goals = [
        measure.Goal(
            name="import bestiary.models / import torch",
            figure=seconds["models"].median / seconds["torch"].median,
            limit=IMPORT_LIMIT,
            low=min(ratios),
            high=max(ratios),
        )
    ]
    goals += [
        measure.Goal(
            name=f"{command} --help, seconds",
            figure=seconds[command].median,
            limit=HELP_LIMIT,
            low=seconds[command].low,
            high=seconds[command].high,
        )
        for command in ("bestiary", "verify-bridge")
    ]
    code = measure.exit_code(goals, seconds["control"])
    versions = measure.versions("torch", "bestiary")
    return measure.report("startup", summaries, goals, code, versions=versions, samples=samples)


def _sampler(code: str, starts: int) -> Any:
    return lambda: {"seconds": min(_start(code) for _ in range(starts))}


def _start(code: str) -> float:
    """Seconds of a process that runs `code`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-P", "-c", code]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise WorkerFailed(f"{code!r} ended with {done.returncode}.\n{done.stderr[-2000:]}", remedy="run it alone")
    return seconds


def _print(payload: dict[str, Any], samples: dict[str, list[measure.Sample]]) -> None:
    print(", ".join(f"{name} {number}" for name, number in payload["versions"].items()))
    for arm, taken in samples.items():
        print(f"  {arm:<16}" + "".join(f"{sample['seconds']:8.3f}" for sample in taken) + " s")
    goals = [
        measure.Goal(**{name: goal[name] for name in measure.Goal.__dataclass_fields__}) for goal in payload["goals"]
    ]
    control = measure.Summary(**payload["arms"]["control"]["seconds"])
    measure.print_goals(goals, control, int(payload["exit_code"]))


if __name__ == "__main__":
    sys.exit(main())
