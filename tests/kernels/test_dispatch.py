"""Dispatch: the table of operations is complete, and a log says what ran and what could have run."""

import ast
from pathlib import Path

import pytest

import bestiary.bridges
import bestiary.kernels
import bestiary.models
from bestiary.kernels.dispatch import OPERATIONS, choose, force, record


def _chosen_operations():
    """The first argument of every call of `choose` in the layers that have kernels, with its file."""
    found = []
    for package in (bestiary.kernels, bestiary.models, bestiary.bridges):
        for file in sorted(path for folder in package.__path__ for path in Path(folder).glob("**/*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "choose":
                    assert isinstance(node.args[0], ast.Constant), f"{file.name}: the operation is no literal"
                    found.append((node.args[0].value, file.name))
    return found


def test_the_table_lists_exactly_the_operations_that_are_chosen():
    found = _chosen_operations()
    assert {name for name, _ in found} == set(OPERATIONS), found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_reference_is_not_among_the_optimised_and_every_implementation_has_a_device(name):
    operation = OPERATIONS[name]
    assert operation.reference not in operation.optimised
    assert all(devices and set(devices) <= {"cpu", "cuda"} for devices in operation.optimised.values())


def test_a_log_says_what_ran_what_could_have_run_and_what_kept_the_rest():
    with record() as log:
        choose("norm", {"triton": "no GPU", "lean": "no gradient", "torch": None})
        with force(norm="torch"):
            choose("norm", {"triton": "still none", "lean": None, "torch": None})
        choose("norm", {"triton": "still none", "lean": "no gradient", "torch": None})
    assert log == [("norm", "torch")] * 3
    assert log.free == [("torch",), ("lean", "torch"), ("torch",)]
    assert log.obstacles == {("norm", "triton"): "still none", ("norm", "lean"): None, ("norm", "torch"): None}
