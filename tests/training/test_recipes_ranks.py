"""One step has one gradient: on one process and two, packed and not, whole and in micro-batches, for every recipe.

In float64, within 1e-9 of the step's largest gradient, and so are its loss and every other figure that is told. The
four anchor families, each pair of family, mesh and recipe; `make ranks` takes all families and all combinations.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.control import Control
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.losses import pairwise
from bestiary.training.parallel import DataParallel

from ..child import Child
from .recipes_case import masked, pack
from .recipes_rank import ANCHORS, BETA, EVERY, FAMILIES, PAIRS, TRIALS, Models, Step, packs, run, step_over

pytestmark = pytest.mark.slow

OTHER = "from tests.training.recipes_rank import main; main(sys.argv[1])"
BOUND = 1e-9


def alone(models: Models, name: str, own: list[Pack]) -> Step:
    """A step of one process over these packs."""
    return step_over(models, TRIALS[name], own, Control(), DataParallel(0, 1, None))


def difference(ours: Step, expected: Step) -> str | None:
    """The first that is too large, in words."""
    if ours.gradients.keys() != expected.gradients.keys() or ours.values.keys() != expected.values.keys():
        return f"other names: {sorted(ours.gradients.keys() ^ expected.gradients.keys())}, {sorted(ours.values)}"
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    if not largest > 1e-6:
        return f"the largest gradient is {largest:.1e}: nothing is compared"
    for name, gradient in expected.gradients.items():
        error = float((ours.gradients[name] - gradient).abs().max()) / largest
        if not error <= BOUND:
            return f"the gradient of {name} differs by {error:.1e} of the largest"
    for name, value in expected.values.items():
        if not abs(ours.values[name] - value) <= BOUND * max(1.0, abs(value)):
            return f"{name} is {ours.values[name]!r}, not {value!r}"
    return None


def test_two_processes_step_as_one(tmp_path: Path) -> None:
    """FSDP2, tensor, expert and context parallel; rank 0 is this process. Each with unequal micro-batches."""
    wrong: list[str] = []
    compared = 0
    with Child(OTHER, tmp_path / "store") as other:
        expected: dict[str, dict[str, Step]] = {}

        def seen(family: str, mesh: str, name: str, found: Step) -> None:
            nonlocal compared
            compared += 1
            if family not in expected:
                models = Models(family)
                expected[family] = {one: alone(models, one, packs(trial.groups, 1)) for one, trial in TRIALS.items()}
            told = difference(found, expected[family][name])
            if told is not None:
                wrong.append(f"{family}, {mesh}, {name}: {told}")

        run(0, tmp_path / "store", seen)
        code, errors = other.ended()
    assert code == 0, errors
    assert not wrong, "\n".join(wrong)
    assert compared >= len(TRIALS) * len(FAMILIES)


@pytest.mark.parametrize("name", TRIALS)
def test_neither_packing_nor_accumulation_nor_masked_documents_change_a_gradient(name: str) -> None:
    """One pack, 2 and 4 of them, one for each document or pair, and one with a group behind that trains nothing."""
    groups = TRIALS[name].groups
    for family in FAMILIES if EVERY else FAMILIES[list(TRIALS).index(name) % 2 :: 2]:  # a dense and a sparse one
        models = Models(family)
        expected = alone(models, name, packs(groups, 1))
        divided = {count: packs(groups, count) for count in (2, 4)}
        single = [pack([group], spare=0) for group in groups]
        behind = [pack([*groups, masked(groups[0])])]
        for what, own in {**divided, "single documents": single, "one that trains nothing": behind}.items():
            assert (told := difference(alone(models, name, own), expected)) is None, f"{family}, {what}: {told}"
        if name == "kto, live" and family in ANCHORS:
            assert expected.values["kl"] > 1e-3, f"{family}: an estimate of 0 shows nothing"


@pytest.mark.parametrize("name", ["dpo, live", "reward"])
def test_a_pair_in_a_pack_is_two_documents_alone(name: str) -> None:
    """Each in a forward pass of its own, without borders or padding; the loss is put together here."""
    for family in FAMILIES:
        models = Models(family)
        expected = alone(models, name, packs(PAIRS, 1))
        model = models.policy(TRIALS[name].policy)
        model.zero_grad()
        if name == "reward":
            scores = [[model(ids(one)).scores[0, 0] for one in pair] for pair in PAIRS]
            losses = [pairwise(better, worse, margin=0.3, centring=0.01) for better, worse in scores]
        else:
            ratios = [[log_p(model, one) - log_p(models.other, one).detach() for one in pair] for pair in PAIRS]
            losses = [-torch.nn.functional.logsigmoid(BETA * (better - worse)) for better, worse in ratios]
        loss = torch.stack(losses).mean()
        loss.backward()
        gradients = {named: p.grad for named, p in model.named_parameters() if p.grad is not None}
        expected.values = {"loss": expected.values["loss"]}
        told = difference(Step({"loss": float(loss.detach())}, gradients), expected)
        assert told is None, f"{family}: {told}"


def ids(one: Tokens) -> Tensor:
    """(1, T)."""
    return torch.from_numpy(one.input_ids).long()[None]


def log_p(model: Decoder, one: Tokens) -> Tensor:
    """Of its trained tokens, from the logits."""
    found = model(ids(one)).logits[0, :-1].log_softmax(-1).gather(1, ids(one)[0, 1:, None])[:, 0]
    return found[torch.from_numpy(one.labels[1:] != IGNORED)].sum()
