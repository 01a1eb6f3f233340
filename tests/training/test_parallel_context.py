"""How the ranks of a context group share a row, and who refuses to."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bestiary.training.errors import InvalidRun, ParallelRefused
from bestiary.training.parallel_context import Context, _places
from bestiary.training.recipes.context import InContext
from bestiary.training.recipes.reward import Reward
from bestiary.training.run import check_sliced

from ..models.tiny import tiny

CPU = torch.device("cpu")


def of(rank: int, size: int) -> Context:
    """A rank that sends nothing."""
    return Context(rank, size, cast(Any, None))


@pytest.mark.slow
@given(size=st.integers(2, 5), data=st.data())
def test_every_token_is_computed_once_with_about_equal_work(size: int, data: st.DataObject) -> None:
    """And lies where the gather looks for it; causal pairs differ by no more than what uneven pieces make."""
    length = data.draw(st.integers(2 * size, 200))
    slices = [of(rank, size).slice_of(length, CPU) for rank in range(size)]
    row = torch.arange(length)
    own = [one.cut(row, 0) for one in slices]
    assert torch.cat(own).sort().values.equal(row)
    places, rows = _places(length, size)
    gathered = torch.cat([torch.nn.functional.pad(tokens, (0, rows - len(tokens)), value=-1) for tokens in own])
    assert gathered[places].equal(row)
    pairs = [int((tokens + 1).sum()) for tokens in own]
    assert max(pairs) - min(pairs) <= 2 * length


def test_rows_shorter_than_the_pieces_are_refused() -> None:
    with pytest.raises(ParallelRefused, match=r"rows of 5 tokens in 2 · parallel\.context = 6 pieces"):
        of(0, 3).slice_of(5, CPU)


def test_a_recipe_that_needs_whole_rows_is_refused() -> None:
    with pytest.raises(InvalidRun, match=r"parallel\.context = 2 with the recipe reward"):
        InContext(Reward(), of(0, 2))


def test_the_router_s_loss_is_refused() -> None:
    check_sliced(2, tiny("qwen3_moe"))
    with pytest.raises(InvalidRun, match=r"parallel\.context = 2 with output_router_logits = true"):
        check_sliced(2, tiny("qwen3_moe"), tiny("qwen3_moe", output_router_logits=True))
