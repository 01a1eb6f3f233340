"""Checkpoints go straight to a mesh of four processes and come back whole; so do steps there."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.bridges.registry import get_bridge
from bestiary.models import AutoDecoder, Decoder
from bestiary.verify.weights import perturb
from tests.bridges.checkpoints import FAMILIES, tiny_config

from ..child import Child
from .parallel_loading_rank import CASES, LORA, WORLD, run
from .parallel_rank import BOUND, Case, gradients, step, units

pytestmark = pytest.mark.slow

OTHER = "from tests.training.parallel_loading_rank import main; main(*sys.argv[1:])"
SLACK = 3 * 2**20  # bytes: threads, headers, what the allocator rounds up to
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and adapters of the families, and a large one in bf16."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        save(root / family, family, torch.float64, vocab_size=206)
        adapted = load(root / family, lora=LORA)
        perturb(adapted, seed=1)  # B is not zero any more
        adapted.save_pretrained(root / f"{family}-adapter")
    save(root / "large", "qwen3", torch.bfloat16, vocab_size=24_000, hidden_size=384, intermediate_size=1536)
    return root


def save(path: Path, family: str, dtype: torch.dtype, **changes: Any) -> None:
    """A checkpoint of random weights."""
    bridge = get_bridge(family)
    model = bridge.decoder(bridge.parse(tiny_config(family, **changes).to_dict()).decoder, dtype=dtype)
    perturb(model, seed=0)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have, this process first; of the others, memory and failures."""
    with ExitStack() as stack:
        others = [stack.enter_context(Child(OTHER, folder, rank)) for rank in range(1, WORLD)]
        first = run(0, folder)
        ended = [other.ended() for other in others]
    assert not any(code for code, _ in ended), ended
    return [first, *(torch.load(folder / f"rank{rank}.pt") for rank in range(1, WORLD))]


def test_no_rank_needs_more_than_its_part_and_the_largest_slice(found: list[dict[str, Any]]) -> None:
    """Growth of each process while it loads a model of about 100 MiB, a cast on the way."""
    for rank in found:
        memory = rank["memory"]
        assert memory["own"] < 0.26 * memory["all"]
        assert memory["grown"] <= memory["own"] + memory["largest"] + SLACK, memory
    for rank in found[1:]:  # the first process has memory that it used before
        assert rank["memory"]["grown"] > 0.9 * rank["memory"]["own"]


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_onto_a_mesh_gives_the_same_values(family: str, folder: Path, found: list[dict[str, Any]]) -> None:
    """Bit for bit, with adapters from a folder and with fresh ones."""
    ours = found[0]["loaded"][family]
    expected = dict(load(folder / family).named_parameters())
    same(ours["values"], expected)
    assert ours["own"] < sum(parameter.nbytes for parameter in expected.values())
    adapted = load(folder / family, lora=folder / f"{family}-adapter")
    same(ours["adapted"], dict(adapted.named_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_adapters_do_not_depend_on_the_mesh(family: str, folder: Path, found: list[dict[str, Any]]) -> None:
    """One seed, one start, on one process and on four."""
    torch.manual_seed(5)
    same(found[0]["loaded"][family]["fresh"], dict(load(folder / family, lora=LORA).named_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["full", "adapter", "merged"])
def test_a_spread_model_is_saved_as_one_in_one_process(
    family: str, what: str, folder: Path, found: list[dict[str, Any]]
) -> None:
    """Whatever its mesh: full, as an adapter, merged."""
    assert found
    adapted = load(folder / family, lora=folder / f"{family}-adapter")
    saved: dict[str, Callable[[], tuple[Decoder, Decoder]]] = {
        "full": lambda: (load(folder / f"{family}-out"), load(folder / family)),
        "adapter": lambda: (load(folder / family, lora=folder / f"{family}-adapter-out"), adapted),
        "merged": lambda: (load(folder / f"{family}-merged-out"), adapted),
    }
    ours, expected = saved[what]()
    if what == "merged":
        expected.merge_lora()
    same(dict(ours.named_parameters()), dict(expected.named_parameters()))


def test_a_failed_save_is_told_to_all_and_leaves_nothing(folder: Path, found: list[dict[str, Any]]) -> None:
    """The first process raises what it met, the others learn of it; nobody waits for ever."""
    assert found[0]["failures"]["taken"].startswith("FolderNotEmpty")
    assert found[0]["failures"]["full disk"].startswith("OSError")
    for rank in found[1:]:
        assert "is not empty" in rank["failures"]["taken"]
        assert "no space left" in rank["failures"]["full disk"]
    assert not list(folder.glob("*never*"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_four_processes_step_as_one(case: Case, found: list[dict[str, Any]]) -> None:
    """Loss, every gradient and the norm of all, on meshes of two dimensions."""
    model, ours = case.model(), found[0]["steps"][str(case)]
    expected = step(model, slice(None), 1 / units())
    torch.testing.assert_close(ours["loss"], expected["loss"], **EXACT)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours["gradients"][name], gradient, **EXACT)
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], BOUND)
    torch.testing.assert_close(ours["norm"], norm, **EXACT)


def load(path: Path, **options: Any) -> Decoder:
    """On this process alone."""
    return AutoDecoder.from_pretrained(path, **options)


def same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal bits, by name."""
    assert ours.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(ours[name], parameter), name
