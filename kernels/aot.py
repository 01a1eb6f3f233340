"""Compiles every Triton kernel for NVIDIA targets without a GPU and reports what the code needs.

For each compilation of `triton_matrix` and each target: registers and spilled bytes (cuobjdump), shared memory, the
family of matrix instructions (PTX). Fails on a spill, on more shared memory than the target has, on a wrong family.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError, InvalidArgument, UnsupportedDispatch
from bestiary.kernels.triton_runtime import INSTALLED, INTERPRETED

if TYPE_CHECKING:
    from bestiary.kernels.triton_matrix import Compilation

SHARED_KB = {80: 163, 90: 227, 100: 227}  # of one program; CUDA programming guide, technical specifications
FAMILIES = (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma", "mma.sync"))
EXAMPLE = """example:
  python -m bestiary.kernels.aot                                  # all kernels, sm_80, sm_90, sm_100
  python -m bestiary.kernels.aot --select rms_norm --target 90 --json out/aot.json
"""


@dataclass(frozen=True)
class Record:
    """What one compilation needs on one target; `spills` and `shared` in bytes, `seconds` when it was compiled."""

    name: str
    target: int
    warps: int
    registers: int
    spills: int
    shared: int
    mma: str
    fp_fusion: bool
    seconds: float

    def problems(self, expected_mma: str, accepted: str | None) -> list[str]:
        """Why it fails; `accepted`: the reason for which a spill or too much shared memory is tolerated."""
        found = []
        if self.spills:
            found.append(f"spills {self.spills} bytes")
        if self.shared > SHARED_KB[self.target] * 1024:
            found.append(f"{self.shared} bytes of shared memory, sm_{self.target} has {SHARED_KB[self.target]} KB")
        if accepted is not None:
            found = [] if found else ["is a listed exception and needs none"]
        if self.mma != expected_mma:
            found.append(f"matrix instructions {self.mma}, expected {expected_mma}")
        return found


def compile_one(compilation: "Compilation", target: int, cache: Path) -> Record:
    """Compiles, or reads what an earlier run found for the same source, types, constants, target and compiler.

    Args:
        cache: folder of records and of Triton's own cache; made if missing.
    Raises:
        UnsupportedDispatch: triton is missing or interpreted.
    """
    _require_compiler()
    import triton
    from triton.backends.compiler import GPUTarget

    source = source_of(compilation)
    fusion = os.environ["TRITON_DEFAULT_FP_FUSION"]
    what = (compilation.name, source.hash(), target, compilation.warps, fusion, triton.__version__)
    record_file = cache / f"{hashlib.sha256(repr(what).encode()).hexdigest()}.json"
    if record_file.exists():
        return Record(**json.loads(record_file.read_text(encoding="utf-8")))
    start = time.perf_counter()
    options = {"num_warps": compilation.warps}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache / "triton")
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spills = resource_usage(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    record = Record(
        name=compilation.name,
        target=target,
        warps=compilation.warps,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        mma=mma_family(compiled.asm["ptx"]),
        fp_fusion=compiled.metadata.enable_fp_fusion,
        seconds=round(time.perf_counter() - start, 2),
    )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=cache, delete=False) as file:
        json.dump(asdict(record), file)
    os.replace(file.name, record_file)
    return record


def source_of(compilation: "Compilation") -> Any:
    """The kernel with its types, constants and alignments, as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    names = compilation.kernel.arg_names
    divisible = [name for name, kind in compilation.types.items() if kind[0] == "*" or name in compilation.aligned]
    return ASTSource(
        fn=compilation.kernel,
        signature={name: compilation.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in compilation.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )


def mma_family(ptx: str) -> str:
    """The newest family of matrix instructions in the code, or none."""
    return next((name for name, instruction in FAMILIES if instruction in ptx), "none")


def resource_usage(cubin: bytes, cuobjdump: str) -> tuple[int, int]:
    """Registers a thread, and bytes of stack and local memory a thread: what did not fit in them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    if set(found) != {"REG", "STACK", "LOCAL"}:
        raise InvalidArgument(
            f"cuobjdump printed no resource usage: {done.stdout[:200]!r}.", remedy="check the version of triton"
        )
    return found["REG"], found["STACK"] + found["LOCAL"]


def _require_compiler() -> None:
    obstacle = "triton is not installed" if not INSTALLED else "TRITON_INTERPRET is set" if INTERPRETED else None
    if obstacle is not None:
        raise UnsupportedDispatch(
            f"Nothing can be compiled: {obstacle}.", remedy="pip install 'bestiary[triton]'; unset TRITON_INTERPRET"
        )


def _task(index: int, target: int, cache: Path) -> Record:
    """In a worker: compilations hold functions, which do not travel, so they go by their place in the list."""
    from bestiary.kernels.triton_matrix import compilations

    return compile_one(compilations()[index], target, cache)


def run_matrix(
    targets: Sequence[int], select: str, jobs: int, cache: Path
) -> tuple[list[Record], dict[str, list[str]]]:
    """Records of the selected compilations, and the problems of each that has some.

    Raises:
        InvalidArgument: nothing is selected, or more than the matrix may hold.
    """
    _require_compiler()
    from bestiary.kernels.triton_matrix import EXCEPTIONS, MOST, compilations

    matrix = compilations()
    tasks = [(i, target) for i, one in enumerate(matrix) if select in one.name for target in targets]
    if not 0 < len(tasks) <= MOST:
        raise InvalidArgument(
            f"{len(tasks)} compilations are selected by {select!r} of {len(matrix)} for {len(targets)} targets.",
            remedy=f"select between 1 and {MOST}; `--list` prints the names",
        )
    if jobs == 1:
        records = [_task(i, target, cache) for i, target in tasks]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            records = list(pool.map(_task, *zip(*tasks, strict=True), [cache] * len(tasks)))
    problems = {}
    for (i, target), record in zip(tasks, records, strict=True):
        found = record.problems(matrix[i].mma(target), EXCEPTIONS.get((record.name, target)))
        if found:
            problems[f"{record.name} sm_{target}"] = found
    return records, problems


def table(records: Sequence[Record]) -> str:
    """One line a record."""
    width = max(len(record.name) for record in records)
    lines = [f"{'kernel':{width}} target warps registers spills   shared     mma seconds"]
    lines += [
        f"{r.name:{width}} sm_{r.target:<4}{r.warps:>5}{r.registers:>10}{r.spills:>7}{r.shared:>9}{r.mma:>8}"
        f"{r.seconds:>8.2f}"
        for r in records
    ]
    return "\n".join(lines)


def default_cache() -> Path:
    """The user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bestiary" / "aot"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if everything compiles within its limits, 1 if not, 7 if nothing could be compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m bestiary.kernels.aot",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", type=int, nargs="+", choices=sorted(SHARED_KB), default=sorted(SHARED_KB))
    parser.add_argument("--select", default="", metavar="TEXT", help="compilations whose name holds TEXT")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes (default: %(default)s)"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the records; - is standard output")
    parser.add_argument("--list", action="store_true", help="print the names of the compilations and stop")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        if options.list:
            _require_compiler()
            from bestiary.kernels.triton_matrix import compilations

            print("\n".join(one.name for one in compilations()))
            return 0
        records, problems = run_matrix(options.target, options.select, options.jobs, options.cache.resolve())
    except BestiaryError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    seconds = time.perf_counter() - start
    if options.json:
        result: dict[str, Any] = {"records": [asdict(record) for record in records], "problems": problems}
        text = json.dumps(result, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    out = sys.stderr if options.json == "-" else sys.stdout
    print(table(records), file=out)
    for name, found in problems.items():
        print(f"FAIL {name}: {'; '.join(found)}", file=out)
    print(f"aot: {len(records)} compilations, {len(problems)} failed, {seconds:.1f} s", file=out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
