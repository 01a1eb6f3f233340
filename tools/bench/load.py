"""Loading a safetensors folder: ours against transformers, in time and peak memory, both touched to the last element.

Fresh process per measurement, arms alternating, page cache warm. What a process does: imports; loads a tiny checkpoint,
so that lazy imports are done; notes resident memory; then, timed, loads the real one and reads and writes back every
element of every parameter. The write matters: a lazily mapped file costs its time and memory only when it is touched.
The control arm reads the same bytes with plain `read` into memory and touches them, tensor by tensor: the floor.

Goals (ours): peak resident memory above the level before loading ≤ 1.15 × the model in bf16; median time at most
transformers'; the same values; the file unchanged; and, in one more process, the file truncated and deleted after
loading without harm.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure, process
from bestiary.tools.bench.checkpoints import write_random
from bestiary.tools.bench.process import WorkerFailed

PEAK_LIMIT = 1.15
ARMS = ("ours", "transformers", "control")
SIZES: dict[str, dict[str, int]] = {
    # the figures of the published Qwen3 sizes; "tiny" only proves that the benchmark runs
    "0.6b": {"hidden": 1024, "mlp": 3072, "layers": 28, "heads": 16, "kv": 8, "head_dim": 128, "vocab": 151936},
    "1.7b": {"hidden": 2048, "mlp": 6144, "layers": 28, "heads": 16, "kv": 8, "head_dim": 128, "vocab": 151936},
    "tiny": {"hidden": 64, "mlp": 96, "layers": 2, "heads": 4, "kv": 2, "head_dim": 16, "vocab": 1003},
}

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.load                        a synthetic Qwen3 0.6B in bf16 (1.2 GB, temporary)
  python -m bestiary.tools.bench.load --rounds 5 --json -
  python -m bestiary.tools.bench.load --folder ./checkpoint  a checkpoint of yours

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    args = _parser().parse_args(argv)
    if args.worker:
        print(json.dumps(_work(args.worker, Path(args.folder), Path(args.warmup))))
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="bestiary-bench-load-") as temporary:
            return _run(args, Path(temporary))
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def write_checkpoint(folder: Path, size: str, seed: int = 0) -> None:
    """Writes a random tied Qwen3 checkpoint in bf16, config included.

    Args:
        folder: created.
        size: a key of `SIZES`.
        seed: of the weights.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    write_random(folder, config, Qwen3ForCausalLM, seed)


def _parser() -> Parser:
    parser = Parser("bestiary.tools.bench.load", __doc__, EXAMPLE)
    parser.add_argument("--size", choices=SIZES, default="0.6b", help="of the synthetic checkpoint (default 0.6b)")
    parser.add_argument("--folder", help="measure this checkpoint instead of a synthetic one")
    parser.add_argument("--rounds", type=at_least(2), default=4, help="at least 2 (default 4)")
    parser.add_argument("--worker", choices=(*ARMS, "deleted"), help=argparse.SUPPRESS)
    parser.add_argument("--warmup", help=argparse.SUPPRESS)
    return parser


def _run(args: argparse.Namespace, temporary: Path) -> int:
    _say(f"writing checkpoints under {temporary}")
    warmup = temporary / "warmup"
    write_checkpoint(warmup, "tiny")
    if args.folder:
        folder = Path(args.folder)
    else:
        folder = temporary / args.size
        write_checkpoint(folder, args.size)
        os.sync()  # no write-back while the arms run
    before = _sha256(folder)  # also warms the page cache

    def progress(index: int, arm: str, sample: measure.Sample) -> None:
        peak = sample["peak_bytes"] / 1e6
        _say(f"round {index + 1}/{args.rounds} {arm:<12} {sample['seconds']:6.2f} s  peak {peak:7.0f} MB")

    arms = {arm: lambda arm=arm: _measure(arm, folder, warmup) for arm in ARMS}
    samples = measure.alternate(arms, args.rounds, progress)
    unchanged = _sha256(folder) == before
    _say("one more process: the file is truncated and deleted after loading")
    private = temporary / "private"
    shutil.copytree(folder, private)
    survivor = _measure("deleted", private, warmup)

    summaries = measure.summarise(samples)
    size = samples["ours"][0]["bf16_bytes"]
    checksums = {sample["checksum"] for arm in ("ours", "transformers") for sample in [*samples[arm], survivor]}
    goals = [
        measure.Goal(
            name="peak memory above imports / model in bf16",
            figure=max(sample["peak_bytes"] for sample in samples["ours"]) / size,
            limit=PEAK_LIMIT,
        ),
        measure.Goal(
            name="median time, touch included / transformers'",
            figure=summaries["ours"]["seconds"].median / summaries["transformers"]["seconds"].median,
            limit=1.0,
        ),
        measure.Goal(
            name="sides or processes that disagree on the values", figure=float(len(checksums) - 1), limit=0.0
        ),
        measure.Goal(name="files changed by loading and writing in place", figure=float(not unchanged), limit=0.0),
    ]
    code = measure.exit_code(goals, summaries["control"]["seconds"])
    versions = measure.versions("torch", "transformers", "safetensors", "bestiary")
    if args.json != "-":
        _print_table(summaries, size, versions)
        measure.print_goals(goals, summaries["control"]["seconds"], code)
    payload = measure.report(
        "load",
        summaries,
        goals,
        code,
        versions=versions,
        bf16_bytes=size,
        checkpoint=args.folder or args.size,
        samples=samples,
    )
    write_json(args.json, payload)
    return code


def _print_table(summaries: Any, size: float, versions: dict[str, str]) -> None:
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"model in bf16: {size / 1e6:.0f} MB\n")
    print(f"  {'arm':<14}{'load s':>8}{'touch s':>9}{'total s':>9}{'spread':>8}{'peak MB':>9}{'/ model':>9}")
    for arm, rows in summaries.items():
        peak, total = rows["peak_bytes"].high, rows["seconds"]
        print(
            f"  {arm:<14}{rows['load_seconds'].median:8.2f}{rows['touch_seconds'].median:9.2f}{total.median:9.2f}"
            f"{total.spread:8.1%}{peak / 1e6:9.0f}{peak / size:9.2f}"
        )
    print()


def _measure(arm: str, folder: Path, warmup: Path) -> measure.Sample:
    """One measurement in a process of its own.

    Raises:
        WorkerFailed: it ended with an error or a signal (SIGBUS: a mapped file that is gone).
    """
    command = [sys.executable, "-m", "bestiary.tools.bench.load"]
    command += ["--worker", arm, "--folder", str(folder), "--warmup", str(warmup)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerFailed(
            f"the process of arm {arm!r} ended with {done.returncode}.\n{done.stderr[-2000:]}",
            remedy=f"run it alone: {' '.join(command)}",
        )
    sample: measure.Sample = json.loads(done.stdout.splitlines()[-1])
    return sample


def _work(arm: str, folder: Path, warmup: Path) -> dict[str, float]:
    """What a measuring process does; its result is one line of JSON."""
    import torch

    load = {"ours": _load_ours, "deleted": _load_ours, "transformers": _load_transformers, "control": _load_plain}[arm]
    _touch(load(warmup))
    gc.collect()
    level = process.reset_peak()
    start = time.perf_counter()
    parameters = load(folder)
    loaded = time.perf_counter()
    if arm == "deleted":  # before the first touch: a page that is still mapped raises SIGBUS, which ends the process
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 0)
        shutil.rmtree(folder)
    checksum = _touch(parameters)
    end = time.perf_counter()
    peak = process.peak() - level
    return {
        "seconds": end - start,
        "load_seconds": loaded - start,
        "touch_seconds": end - loaded,
        "peak_bytes": float(peak),
        "bf16_bytes": float(sum(parameter.numel() for parameter in parameters) * torch.bfloat16.itemsize),
        "checksum": checksum,
    }


def _load_ours(folder: Path) -> list[Any]:
    from bestiary.models import AutoDecoder

    return list(AutoDecoder.from_pretrained(folder).parameters())


def _load_transformers(folder: Path) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).parameters())


def _load_plain(folder: Path) -> list[Any]:
    """The safetensors files read into memory as they are; one piece a tensor, so that touching costs as many calls."""
    import torch

    pieces: list[Any] = []
    for file in sorted(folder.glob("*.safetensors")):
        buffer = torch.empty(file.stat().st_size, dtype=torch.uint8)
        target, done = buffer.numpy(), 0
        with file.open("rb", buffering=0) as source:
            while done < len(target) and (count := source.readinto(target.data[done:])):
                done += count
        start = 8 + int.from_bytes(target[:8].tobytes(), "little")
        header = json.loads(target[8:start].tobytes())
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        pieces += [buffer[start + first : start + last].view(torch.bfloat16) for first, last in spans]
    return pieces


def _touch(parameters: Iterable[Any]) -> int:
    """Reads every parameter once and writes it back in place, in words of 8 bytes; the sum of the words modulo 2⁶⁴."""
    import torch

    total = 0
    for parameter in parameters:
        flat = parameter.detach().view(-1)
        words = flat.numel() * flat.element_size() // 8
        for part in (
            flat[: words * 8 // flat.element_size()].view(torch.int64),
            flat[words * 8 // flat.element_size() :],
        ):
            bits = part if part.dtype == torch.int64 else part.view(torch.uint8)
            total += int(bits.sum())
            bits.add_(0)
    return total % (1 << 64)


def _sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            while block := source.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
