"""`DecoderOutput` is a dict, a tuple where trainers index it, and a tree where torch walks it."""

import pickle
from copy import deepcopy

import pytest
import torch
import torch.utils._pytree as pytree

from bestiary.models import DecoderOutput


def output() -> DecoderOutput:
    return DecoderOutput(
        log_probs=torch.zeros(2), loss=torch.tensor(1.5), router_logits=(torch.ones(3), torch.ones(4)), aux_loss=None
    )


def test_fields_that_are_none_are_absent() -> None:
    """As keys; as attributes they are None."""
    out = output()
    assert list(out) == ["loss", "log_probs", "router_logits"]
    assert out.aux_loss is None
    assert "aux_loss" not in out
    with pytest.raises(KeyError):
        out["aux_loss"]
    with pytest.raises(AttributeError, match="no field 'attentions'"):
        out.attentions  # noqa: B018


def test_indexed_by_number_and_slice_as_trainers_do() -> None:
    """The loss first, then what follows in order."""
    out = output()
    assert out[0] is out.loss is out["loss"]
    assert out[1:] == out.to_tuple()[1:] == (out.log_probs, out.router_logits)


def test_built_from_a_mapping_as_accelerate_rebuilds_it() -> None:
    """From a dict, from pairs, from another output."""
    out = output()
    for again in (
        type(out)(dict(out)),
        type(out)(out.items()),
        type(out)((name, out[name]) for name in out),
        deepcopy(out),
    ):
        assert isinstance(again, DecoderOutput)
        assert list(again) == list(out)
    assert pickle.loads(pickle.dumps(out)).loss == 1.5


def test_a_tree_of_tensors_for_torch() -> None:
    """tree_map reaches every tensor and gives the class back."""
    doubled = pytree.tree_map(lambda tensor: tensor * 2, output())
    assert isinstance(doubled, DecoderOutput)
    assert doubled.loss == 3.0
    assert [float(t.sum()) for t in doubled.router_logits] == [6.0, 8.0]
    leaves, spec = pytree.tree_flatten(output())
    assert len(leaves) == 4
    assert pytree.treespec_dumps(spec)


def test_attributes_and_keys_are_one_thing() -> None:
    """A trainer that replaces the loss replaces it for everybody."""
    out = output()
    out.loss = torch.tensor(9.0)
    assert out["loss"] == out[0] == 9.0
    out["loss"] = torch.tensor(7.0)
    assert out.loss == 7.0
    out.log_probs = None
    assert list(out) == ["loss", "router_logits"]
