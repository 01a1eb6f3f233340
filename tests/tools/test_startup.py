"""What starts at once, and what waits until it is needed. Seconds are measured by the benchmark, not here."""

import subprocess
import sys

import pytest

from bestiary.tools.bench import measure, startup

# Each takes a tenth of `import torch` or more.
SLOW = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.flop_counter",
)
SLOW_ELSEWHERE = ("sympy", "triton", "transformers", "safetensors", "huggingface_hub", "pydantic", "numpy.testing")
DEFERRED = f"""
import sys, bestiary.models
found = [name for name in {SLOW + SLOW_ELSEWHERE} if name in sys.modules]
assert not found, found

import torch
from torch.utils import flop_counter
for operator in (torch.ops.bestiary.document_attention, torch.ops.aten.addmm_):
    assert operator in flop_counter.flop_registry, operator
from bestiary.kernels import experts
def left_alone():
    return any(getattr(cell.cell_contents, "_torchdynamo_disable", False) for cell in experts._loop.__closure__)

assert not left_alone()
import torch._dynamo
assert left_alone()
"""


@pytest.mark.slow
def test_the_models_bring_no_module_that_is_slow_to_import_and_tell_each_what_it_asks_once_it_is_there():
    """Formulas of FLOPs and functions that a compiler leaves alone are known as soon as somebody can ask."""
    done = subprocess.run([sys.executable, "-P", "-c", DEFERRED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def taken(models, torch_s=1.0, help_s=0.1, control=(1.0, 1.0)):
    arms = {"models": models, "torch": torch_s, "bestiary": help_s, "verify-bridge": help_s}
    samples = {arm: [{"seconds": seconds}] * 2 for arm, seconds in arms.items()}
    return samples | {"control": [{"seconds": seconds} for seconds in control]}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (taken(1.2), measure.GOALS_HOLD),
        (taken(1.21), measure.GOAL_MISSED),
        (taken(1.1, help_s=0.51), measure.GOAL_MISSED),
        (taken(1.1, control=(1.0, 1.2)), measure.TOO_NOISY),
    ],
)
def test_the_verdict_is_on_ratio_and_seconds(given, code):
    found = startup.judge(given)
    assert found["exit_code"] == code
    assert [goal["limit"] for goal in found["goals"]] == [1.2, 0.5, 0.5]
    assert found["goals"][0]["figure"] == given["models"][0]["seconds"]


def test_a_command_that_does_not_start_is_named(monkeypatch, capsys):
    monkeypatch.setitem(startup.ARMS, "models", "import nothing_like_it")
    assert startup.main(["--rounds", "2", "--starts", "1"]) == 7
    assert "nothing_like_it" in capsys.readouterr().err
