"""Triton in its interpreter: the `interpreted_*.py` in a process that has TRITON_INTERPRET=1 from the start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bestiary.kernels.triton_runtime import obstacle

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.slow
def test_agrees_with_the_reference() -> None:
    """Every test of the files passes, in each there is one, and none is skipped."""
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", *map(str, FILES)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len(FILES) >= 3
    for path in FILES:
        assert f"{path.name}::" in done.stdout
    summary = done.stdout.splitlines()[-1]
    assert re.match(r"=+ \d+ passed", summary), summary
    assert "skipped" not in summary
    assert "deselected" not in summary


@pytest.mark.slow
def test_kernels_import_without_triton() -> None:
    """The package is optional: everything but the Triton files imports, and the choice says what to install."""
    code = """
import importlib, pathlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
importlib.util.find_spec, found = lambda *given: None, importlib.util.find_spec
from bestiary.kernels import triton_runtime
importlib.util.find_spec = found
import bestiary.kernels
for path in sorted(pathlib.Path(bestiary.kernels.__path__[0]).glob("*.py")):
    if not path.stem.startswith("triton_") or path.stem == "triton_runtime":
        importlib.import_module(f"bestiary.kernels.{path.stem}")
assert "bestiary[triton]" in triton_runtime.obstacle()
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_a_gpu_triton_says_so() -> None:
    """On a machine like this one the torch implementation runs, and a direct call has a reason."""
    if torch.cuda.is_available():
        assert obstacle(torch.zeros(2, device="cuda")) is None
    assert "CUDA" in str(obstacle(torch.zeros(2)))
