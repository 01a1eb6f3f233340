"""`make test-fast`: one case of each test that is not slow, and something of every package."""

from types import SimpleNamespace

from ..conftest import pytest_collection_modifyitems


def test_fast_keeps_the_first_case_of_each_function_and_nothing_slow():
    """What is left out is reported as deselected; without the option all stay."""
    names = ["a.py::one[x]", "a.py::one[y]", "a.py::two", "a.py::slow[x]", "b.py::one[x]"]
    items = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _, slow="slow" in name: "mark" if slow else None)
        for name in names
    ]
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(item.nodeid for item in items))
    for fast, kept in ((False, names), (True, ["a.py::one[x]", "a.py::two", "b.py::one[x]"])):
        left = list(items)
        pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _, fast=fast: fast, hook=hook), left)
        assert [item.nodeid for item in left] == kept
    assert told == ["a.py::one[y]", "a.py::slow[x]"]
