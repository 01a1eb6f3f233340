"""Everything that needs a GPU, in one command of under eight minutes on one H100 or H200: it builds, checks and times.

    peak        rates of a product and of a copy on this device
    check       the log-prob core, attention, norms, RoPE and activations against float64
    log_prob    8192 x 2560 x 151936 and 8192 x 2880 x 201088 against torch, Liger and TRL, where installed
    step        Qwen3 4B's shape with four layers, against transformers
    attention   FlexAttention against SDPA with a dense mask, at four lengths
    experts     grouped matmul against a loop

Each section is a process of its own, so that one that crashes costs only itself; the most important come first, and one
that does not fit into the time left is listed as not run. After each, gpu.json and gpu.md are written anew. Floors are
FLOPs at the dense bf16 rate of the data sheet (989 TFLOP/s); the measured rate is printed beside it. Without a GPU,
--dry runs the same code with tiny shapes on the CPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure, process
from bestiary.tools.bench.compare import installed

Row = dict[str, Any]

# (case, arm) → what its figure may be at most
TARGETS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("8192x2560x151936", "ours"): {"ms": 27.0, "extra_mb": 500.0},
    ("8192x2880x201088", "ours"): {"ms": 41.0, "extra_mb": 500.0},
}
# Largest relative error against float64, by the dtype that a case ends with.
ERRORS: Mapping[str, float] = {"torch.float32": 1e-5, "torch.bfloat16": 1e-2}
LOSS_APART = 2e-3  # of the step's arms, relative, in bf16

EXAMPLE = """\
examples:
  python -m pip install --no-deps --no-build-isolation -e . && python -m bestiary.tools.bench.gpu --out out
  python -m bestiary.tools.bench.gpu --dry
  python -m bestiary.tools.bench.gpu --only log_prob

exit codes: 0 every target is met and every section ran, 1 one is not, 7 usage or environment (no GPU)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit code."""
    parser = Parser("bestiary.tools.bench.gpu", __doc__, EXAMPLE)
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny shapes")
    parser.add_argument("--seconds", type=at_least(10), default=450, help="in all (default 450)")
    parser.add_argument("--only", metavar="WORD", help="sections whose name contains it")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of gpu.json and gpu.md (default out)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        print(json.dumps({"rows": _work(json.loads(args.worker))}))
        return 0
    from bestiary.tools.bench.gpu_work import SECTIONS

    sections = [name for name in SECTIONS if (args.only or "") in name]
    if not sections:
        parser.error(f"--only {args.only}: no section has that in its name")
    device = _device()
    if device is None and not args.dry:
        parser.error("torch sees no CUDA device: --dry runs tiny shapes on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    payload = _run(sections, args, {"device": "cpu" if args.dry else str(device)})
    write_json(args.json, payload)
    if args.json != "-":
        print(markdown(payload))
        print(summary(payload), flush=True)
    code: int = payload["exit_code"]
    return code


def _device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _work(job: Mapping[str, Any]) -> list[Row]:
    import torch

    from bestiary.tools.bench.gpu_work import SECTIONS, Place

    if job["dry"]:
        torch.set_num_threads(1)
    return SECTIONS[job["arm"]](Place.here(job["dry"]))


def _run(sections: Sequence[str], args: argparse.Namespace, context: Mapping[str, str]) -> dict[str, Any]:
    """All sections that the time allows; files are written after each."""
    start = time.monotonic()
    packages = ("torch", "triton", "transformers", "liger_kernel", "trl", "bestiary")
    versions = measure.versions(*(package for package in packages if installed(package)))
    rows: list[Row] = []
    problems: dict[str, str] = {}
    payload: dict[str, Any] = {}
    for name in sections:
        left = args.seconds - (time.monotonic() - start)
        print(f"{time.monotonic() - start:5.0f} s  {name}", file=sys.stderr, flush=True)
        if left < 5:
            problems[name] = "not run: no time left"
        else:
            job = {"arm": name, "dry": args.dry}
            try:
                rows += process.run_worker("bestiary.tools.bench.gpu", job, timeout=left)["rows"]
            except BestiaryError as error:
                problems[name] = str(error)[:2500]
        missed = misses(rows, timed=not args.dry)
        payload = {
            "schema": "bestiary.bench.gpu/1",
            "exit_code": measure.GOAL_MISSED if missed or problems else measure.GOALS_HOLD,
            "dry": args.dry,
            "seconds": time.monotonic() - start,
            "versions": {**context, **versions},
            "missed": missed,
            "problems": problems,
            "rows": rows,
        }
        write_json(str(args.out / "gpu.json"), payload)
        (args.out / "gpu.md").write_text(markdown(payload), encoding="utf-8")
    return payload


def misses(rows: Sequence[Row], *, timed: bool) -> list[str]:
    """One line for each target that a row misses; without `timed` errors alone count."""
    found = []
    for row in rows:
        name = f"{row['section']} {row['case']} {row['arm']}"
        targets = TARGETS.get((row["case"], row["arm"]), {}) if timed else {}
        for figure, limit in targets.items():
            if figure not in row:
                found.append(f"{name}: {figure} was not measured (limit {limit:g}): {row.get('cannot')}")
            elif row[figure] > limit:
                found.append(f"{name}: {figure} {row[figure]:.1f} > {limit:g}, by {row[figure] / limit - 1:.1%}")
        allowed = next((limit for dtype, limit in ERRORS.items() if row["case"].endswith(dtype)), None)
        if allowed is not None and row.get("error", 0.0) > allowed:
            found.append(f"{name}: error {row['error']:.1e} > {allowed:g}")
    losses = {row["arm"]: row["loss"] for row in rows if "loss" in row}
    if losses and max(losses.values()) - min(losses.values()) > LOSS_APART * max(losses.values()):
        found.append(f"step: the losses differ: {losses}")
    return found


def markdown(payload: Mapping[str, Any]) -> str:
    """Rows as a table, then what is missed and what did not run."""
    lines = [
        "| section | case | arm | ms | floor ms | floor / ms | extra MB | error | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in payload["rows"]:
        ms, floor = row.get("ms"), row.get("floor_ms")
        notes = [row["cannot"]] if "cannot" in row else []
        notes += [
            f"{row[unit]:.1f} {word}" for unit, word in (("tflops", "TFLOP/s"), ("tb_per_s", "TB/s")) if unit in row
        ]
        notes += [f"loss {row['loss']:.4f}"] if "loss" in row else []
        cells = [
            row["section"],
            row["case"],
            row["arm"],
            "" if ms is None else f"{ms:.2f}",
            "" if floor is None else f"{floor:.2f}",
            "" if ms is None or floor is None else f"{floor / ms:.0%}",
            f"{row['extra_mb']:.0f}" if "extra_mb" in row else "",
            f"{row['error']:.1e}" if "error" in row else "",
            "; ".join(notes).replace("|", "/").replace("\n", " "),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", ", ".join(f"{name} {number}" for name, number in payload["versions"].items()), ""]
    lines += [f"* missed: {line}" for line in payload["missed"]]
    lines += [f"* {name}: {problem}" for name, problem in payload["problems"].items()]
    return "\n".join(lines) + "\n"


def summary(payload: Mapping[str, Any]) -> str:
    """The last line."""
    where = "dry run on the CPU, figures mean nothing" if payload["dry"] else payload["versions"]["device"]
    return (
        f"bench gpu ({where}): {len(payload['rows'])} rows in {payload['seconds']:.0f} s, {len(payload['missed'])} "
        f"targets missed, {len(payload['problems'])} sections did not run, exit {payload['exit_code']}"
    )


if __name__ == "__main__":
    sys.exit(main())
