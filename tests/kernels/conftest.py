"""Fixtures of the kernels' tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bestiary.kernels.dispatch import force

from .naive_head import in_small_pieces


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that `torch.empty` returns is full of NaN, and operations without a fixed order are errors."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["chunked", "chunked in small pieces", "reference", "reference in small pieces"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test on every torch implementation of the log-prob core, on poisoned memory; gives its name."""
    name, *pieces = request.param.split(" in ")
    if pieces:
        in_small_pieces(monkeypatch)
    with force(log_prob=name), poisoned():
        yield name
