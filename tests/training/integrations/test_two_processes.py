"""Over two processes each trainer has the losses and the gradients of one process, resumes, and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bestiary.models import AutoDecoder
from bestiary.training.integrations import accelerate_loop, torchtitan_style
from bestiary.training.parallel import build_mesh
from bestiary.training.processes import processes

from ...child import Child
from .sides import checkpoint, first_gradients, reloads, rows, same
from .two_ranks import CASES, ROWS, STEPS, accelerator_of, adapted, forget, run, steps

pytestmark = pytest.mark.slow

OTHER = "from tests.training.integrations.two_ranks import main; main(sys.argv[1])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("two")
    checkpoint(made / "base")
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    """What rank 0, this process, has; rank 1 is a process of its own."""
    with Child(OTHER, folder) as other:
        results = run(0, folder)
        code, errors = other.ended()
    assert code == 0, errors[-4000:]
    return results


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and first gradients of one process; Accelerate orders rows in a way of its own."""
    known = {}
    for lora in (False, True):
        name = " lora" if lora else ""
        model = adapted(folder / "base", lora)
        with first_gradients(model) as gradients:
            options = {"steps": STEPS, "batch": ROWS // 2, "accumulate": 2}
            losses = accelerate_loop.train(accelerator_of(False), model, rows(), folder / f"alone{name}", **options)
        forget()
        known[f"accelerate{name}"] = losses, dict(gradients)
        with processes(60):
            mesh = build_mesh()
            model = adapted(folder / "base", lora, mesh)
            job = torchtitan_style.JobConfig(str(folder / "base"), dtype=torch.float64)
            with first_gradients(model) as gradients:
                losses = torchtitan_style.train(model, mesh, steps(STEPS, 1), folder / f"alone2{name}", job)
            del model
        known[f"others{name}"] = losses, dict(gradients)
    return known


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, lora: bool, found: Any, alone: Any, folder: Path) -> None:
    """Losses, gradients, a run that stopped in between, and what transformers or PEFT makes of the export."""
    case = f"{name}{' lora' if lora else ''}"
    ours = found[case]
    losses, gradients = alone[f"{'accelerate' if 'accelerate' in name else 'others'}{' lora' if lora else ''}"]
    assert ours["losses"] == pytest.approx(losses, rel=1e-9)
    same(ours["gradients"], gradients)
    assert ours["parts"] == ours["losses"]
    export, base = folder / case.replace(" ", "-") / "parts" / "hf", folder / "base"
    model = AutoDecoder.from_pretrained(base, lora=export) if lora else AutoDecoder.from_pretrained(export)
    reloads(export, model, base if lora else None)
