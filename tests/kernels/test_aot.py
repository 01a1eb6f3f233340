"""The ahead-of-time harness on one kernel, and that its list misses none."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

import bestiary.kernels
from bestiary.kernels import aot, triton_matrix
from bestiary.kernels.aot import Record, compile_one, main, mma_family, source_of
from bestiary.kernels.errors import UnsupportedDispatch
from bestiary.kernels.triton_matrix import TARGETS, Compilation, compilations

ONE = "mxfp4_expand"


@triton.jit
def product(a, b, out):
    """A matrix product, which no kernel of ours holds."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    tl.store(out + i * 64 + j, tl.dot(tl.load(a + i * 64 + j), tl.load(b + i * 64 + j)))


@triton.jit
def hungry(x, WIDTH: tl.constexpr):
    """Loads twice what the registers of one warp hold before it stores any of it."""
    place = tl.arange(0, WIDTH)
    first, second = tl.load(x + place), tl.load(x + WIDTH + place)
    total = tl.sum(first * second, 0)
    tl.store(x + place, first * total)
    tl.store(x + WIDTH + place, second * total)


def a_product() -> Compilation:
    return Compilation(product, "64", {"a": "*bf16", "b": "*bf16", "out": "*fp32"}, {}, 4)


def record(**changed: object) -> Record:
    good = Record("k", 90, 4, registers=32, spills=0, shared=1024, mma="none", fp_fusion=True, seconds=0.1)
    return dataclasses.replace(good, **changed)


def _kernels_in_source() -> set[str]:
    """Functions under @triton.jit in any file of kernels/; a leading underscore marks parts of others."""
    found = set()
    for path in Path(bestiary.kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(re.match(r"(triton\.)?(jit|autotune|heuristics)\b", name) for name in decorators):
                    found.add(node.name)
    return found


def test_every_kernel_is_in_the_matrix() -> None:
    """A program of the wrappers that is not listed would go unseen."""
    assert _kernels_in_source() == {one.kernel.__name__ for one in compilations()}


def test_the_matrix_is_small_and_its_names_are_apart() -> None:
    """At most 150 compilations for all targets."""
    names = [one.name for one in compilations()]
    assert len(set(names)) == len(names)
    assert len(names) * len(TARGETS) <= triton_matrix.MOST
    assert set(TARGETS) == set(aot.SHARED_KB)


def test_every_argument_has_a_type_or_a_value() -> None:
    """And numbers that the compiler may take for multiples of 16 are arguments."""
    for one in compilations():
        assert set(one.types) | set(one.constants) == set(one.kernel.arg_names), one.name
        assert not set(one.types) & set(one.constants), one.name
        assert one.aligned <= set(one.types), one.name


@pytest.mark.slow
def test_one_kernel_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, measured, written as JSON, and the second time read from the cache."""
    target, file = ["--select", ONE, "--target", "80", "90", "--jobs", "1"], tmp_path / "aot.json"
    assert main([*target, "--cache", str(tmp_path / "cache"), "--json", str(file)]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert [found["target"] for found in written["records"]] == [80, 90]
    assert all(found["registers"] > 0 and found["fp_fusion"] for found in written["records"])
    assert written["problems"] == {}
    assert "2 compilations, 0 failed" in capsys.readouterr().out
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.json")}
    assert main([*target, "--cache", str(tmp_path / "cache"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == written
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.json")} == kept


@pytest.mark.parametrize(("target", "family"), [(80, "mma"), (90, "wgmma"), (100, "tcgen05")])
def test_family_of_matrix_instructions(target: int, family: str, tmp_path: Path) -> None:
    """Read from real code of each generation; where none is expected, it fails."""
    found = compile_one(a_product(), target, tmp_path)
    assert found.mma == family
    assert found.problems("none", None) == [f"matrix instructions {family}, expected none"]
    assert mma_family("ld.global.b32") == "none"


@pytest.mark.slow
def test_a_spill_is_seen(tmp_path: Path) -> None:
    """A kernel that cannot fit fails, unless a reason is listed."""
    found = compile_one(Compilation(hungry, "16384", {"x": "*fp32"}, {"WIDTH": 16384}, 1), 90, tmp_path)
    assert found.spills > 0
    assert found.problems("none", None) == [f"spills {found.spills} bytes"]
    assert found.problems("none", "runs once a step") == []


def test_limits_of_shared_memory_are_those_of_the_target() -> None:
    """200 KB fit on an H100 and not on an A100."""
    assert record(shared=200 * 1024).problems("none", None) == []
    assert "163 KB" in record(shared=200 * 1024, target=80).problems("none", None)[0]


def test_an_exception_that_nothing_needs_fails() -> None:
    """The list shrinks with its reasons."""
    assert "needs none" in record().problems("none", "it spilled once")[0]


def test_a_problem_is_printed_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, with a kernel that does what is not expected of it."""
    monkeypatch.setattr(triton_matrix, "compilations", lambda: [a_product()])
    assert main(["--target", "90", "--jobs", "1", "--cache", str(tmp_path)]) == 1
    assert "FAIL product 64 sm_90: matrix instructions wgmma" in capsys.readouterr().out


def test_nothing_selected_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Green because nothing ran would be a lie."""
    assert main(["--select", "no such kernel"]) == 7
    assert "0 compilations" in capsys.readouterr().err


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels defined under it are Python functions."""
    monkeypatch.setattr(aot, "INTERPRETED", True)
    with pytest.raises(UnsupportedDispatch, match="TRITON_INTERPRET"):
        compile_one(a_product(), 90, tmp_path)


@pytest.mark.slow
def test_help_has_an_example() -> None:
    """In a process of its own, as a person runs it."""
    command = [sys.executable, "-m", "bestiary.kernels.aot", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "example" in done.stdout


def test_contraction_is_pinned() -> None:
    """Whatever default the installed triton has."""
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] in {"0", "1"}


def _one_of_each() -> list[Compilation]:
    return list({one.kernel.__name__: one for one in compilations()}.values())


def narrow_row_offsets(one: Compilation, folder: Path) -> list[str]:
    """Lines of the code in which a pointer moves by 32 bits that a program's row went into.

    Rows are counted along the first axis of the grid; 32 bits are enough within a row, where columns are counted.
    """
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        code = triton.compile(source_of(one), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    names = re.compile(r"%[\w#]+")
    made_from: dict[str, list[str]] = {}
    rows, moves = set(), []
    for line in code.splitlines():
        made, _, rest = line.partition(" = ")
        if not rest or not made.lstrip().startswith("%"):
            continue
        result = made.strip().split(":")[0]
        made_from[result] = names.findall(rest)
        if rest.startswith("scf.for"):  # what it counts and carries comes from its bounds and first values
            inner = re.findall(r"(%[\w#]+) = ", rest)
            made_from |= {name: [other for other in names.findall(rest) if other not in inner] for name in inner}
        if "tt.get_program_id x" in rest:
            rows.add(result)
        if "tt.addptr" in rest:
            moves.append((line.strip(), names.findall(rest)[1], rest.rpartition(", ")[2]))
    assert rows, "the grid is read"
    assert moves, "pointers move"

    def sources(name: str) -> set[str]:
        seen, todo = set(), [name]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += made_from.get(one, [])
        return seen

    return [line for line, offset, kind in moves if "i64" not in kind and sources(offset) & rows]


@pytest.mark.parametrize("one", _one_of_each(), ids=lambda one: one.kernel.__name__)
def test_row_offsets_are_64_bit(one: Compilation, tmp_path: Path) -> None:
    """N · V passes 2^31: no pointer moves by a 32-bit product of a row."""
    assert narrow_row_offsets(one, tmp_path) == []


@triton.jit
def narrow(x, out, stride):
    """Rows that are counted in 32 bits."""
    row, column = tl.program_id(0), tl.arange(0, 64)
    tl.store(out + row.to(tl.int64) * 64 + column, tl.load(x + row * stride + column))


def test_a_32_bit_row_offset_is_seen(tmp_path: Path) -> None:
    """Of the two, the load's."""
    one = Compilation(narrow, "64", {"x": "*fp32", "out": "*fp32", "stride": "i32"}, {}, 1)
    assert len(narrow_row_offsets(one, tmp_path)) >= 1
