"""Settings shared by all tests."""

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from torch import Tensor

MODULES = 50  # imported since: their objects are worth setting aside
LARGE = 2 * 2**30  # bytes, of which a worker with all imports and tokenizers has a good half
# A first call may load a library or compile: how long one example takes says nothing about the property.
settings.register_profile("bestiary", deadline=None)
settings.load_profile("bestiary")
# Compiled code on disk is found by the graph alone: it would outlive a change of what our operators promise.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Processes that tests start read byte code, and need not compile some hundred modules each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Beside other workers (`pytest -n`) each has its share of the cores; set before torch is imported, and inherited.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast`: of each test function one case, as `make test-fast` asks."""
    parser.addoption("--fast", action="store_true", help="one case of each parametrised test, and none that is slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--fast` does without."""
    if not config.getoption("--fast"):
        return
    seen: set[str] = set()
    kept, left_out = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        fast = function not in seen and item.get_closest_marker("slow") is None
        (kept if fast else left_out).append(item)
        seen |= {function} if fast else set()
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Behind all imports of test modules."""
    set_aside()


def pytest_unconfigure() -> None:
    """Libraries look at what is left of them when the interpreter ends."""
    gc.unfreeze()


known = 0


def set_aside() -> None:
    """Takes what was imported out of the collector's sight: a full collection among millions of objects takes a second.

    Runs, trainers and engines ask for one each, some hundreds in all. Garbage goes first, or it would stay for ever.
    """
    global known
    if len(sys.modules) >= known + MODULES:
        known = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """Behind a module: compiled graphs, garbage and free heap pages of a process that has grown large."""
    yield
    set_aside()
    if "torch" not in sys.modules:
        return
    from bestiary.tools.bench import process

    if process.resident() < LARGE:
        return
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    process.settle()


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
