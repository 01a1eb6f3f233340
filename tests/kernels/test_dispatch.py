"""Dispatch: the table of operations is complete, and a log says what ran and what could have run."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import bestiary.bridges
import bestiary.kernels
import bestiary.models
from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.dispatch import OPERATIONS, as_trained, choose, force, record
from bestiary.kernels.linear import linear


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


def test_as_trained_chooses_without_gradients_what_runs_with_them():
    """Of few tokens, where speed alone would choose otherwise; until the end of the block, and in this thread."""
    heads, x = torch.ones(2, 2, 7, 8), torch.ones(7, 96)
    spec = MaskSpec(7, 7, key_valid=torch.arange(7)[None] < torch.tensor([[6], [7]]))

    def chosen():
        with record() as log:
            attention(heads, heads, heads, spec, scale=1.0)
            linear(x, x)
        return list(log)

    def chosen_elsewhere():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(chosen)).result()

    trained = chosen()
    with torch.no_grad():
        fastest = chosen()
        with as_trained():
            assert chosen() == trained
            assert chosen_elsewhere() == fastest
        assert chosen() == fastest
    assert fastest[0] == ("attention", "sdpa") != trained[0]
