"""The gradient of a tied embedding on two ranks, where shares of a gradient travel between backward hooks."""

import pytest
import torch
from torch import Tensor

from ..child import Child
from .tied_gradient_rank import FAMILIES, IDS, WORLD, WRAPPERS, run
from .tiny import tiny

OTHER = "from tests.models.tied_gradient_rank import main; main(sys.argv[1])"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """What rank 0, this process, has after each step; rank 1 is a process of its own."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    with Child(OTHER, store) as other:
        results = run(0, store)
        code, errors = other.ended()
    assert code == 0, errors
    return results


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_gradients_of_one(family: str, wrapper: str, found: dict[str, dict[str, Tensor]]) -> None:
    """Of every parameter in float64, the mean over the ranks, of two micro-batches; the embedding's has both shares."""
    model = tiny(family)
    for row in IDS.split(1):
        (model(row, labels=row).loss / WORLD).backward()
    ours = found[f"{family} {wrapper}"]
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == expected.keys()
    assert expected["model.embed_tokens.weight"].norm() > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-11, atol=1e-13)
