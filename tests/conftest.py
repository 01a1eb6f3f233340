"""Settings shared by all tests."""

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from torch import Tensor

# A first call may load a library or compile: how long one example takes says nothing about the property.
settings.register_profile("bestiary", deadline=None)
settings.load_profile("bestiary")
# Compiled code on disk is found by the graph alone: it would outlive a change of what our operators promise.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Beside other workers (`pytest -n`) each has its share of the cores; set before torch is imported, and inherited.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder with real configs, shard indexes and tensor listings of published checkpoints."""
    folder = os.environ.get("BESTIARY_REFERENCE_DATA")
    if folder:
        return Path(folder).resolve()
    if os.environ.get("CI") == "true":
        pytest.fail("CI=true and BESTIARY_REFERENCE_DATA is unset: the checks against published checkpoints must run")
    pytest.skip("BESTIARY_REFERENCE_DATA names no folder with configs and tensor listings of published checkpoints")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> "list[weakref.ref[Tensor]]":
    """Grows by one with every weight that is packed."""
    from bestiary.kernels import packed

    made: list[weakref.ref[Tensor]] = []
    pack = packed._pack

    def noted(weight: "Tensor") -> "Tensor":
        copy = pack(weight)
        made.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(packed, "_pack", noted)
    return made
