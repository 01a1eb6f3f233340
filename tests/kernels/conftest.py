"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest

from bestiary.kernels.dispatch import force

from .naive_head import in_small_pieces


@pytest.fixture(params=["chunked", "chunked in small pieces", "reference", "reference in small pieces"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test on every torch implementation of the log-prob core; gives its name."""
    name, *pieces = request.param.split(" in ")
    if pieces:
        in_small_pieces(monkeypatch)
    with force(log_prob=name):
        yield name
