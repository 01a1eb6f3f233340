"""An engine on a copy of the model, and weights that come to it in buckets."""

import threading

import numpy as np
import pytest
import torch

from bestiary.training.rl.buckets import buckets, tensors_of
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.inflow import Inflow
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rollout_check import StaleWeights
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.weight_sync import SyncFailed, sync

from .small_checkpoint import PROMPTS, small, stored

SAMPLING = Sampling(max_tokens=6, temperature=1.3, stop_ids=(3, 40, 90), n=2, seed=4)
NORM = "model.norm.weight"


@pytest.fixture
def engine(tmp_path):
    return StandaloneEngine(stored(tmp_path / "start"), version=None)


def test_a_synced_copy_answers_as_the_policy_itself_and_is_read_back_whole(engine):
    policy = small(seed=1)
    with pytest.raises(SyncFailed, match="no weights of any version"):
        engine.generate(PROMPTS, SAMPLING)
    found = sync(policy, engine, 5)
    assert set(found.read) == set(engine.shapes)
    assert not found.unread
    said, expected = engine.generate(PROMPTS, SAMPLING), EmbeddedEngine(policy).generate(PROMPTS, SAMPLING)
    for one, other in zip(said, expected, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.log_probs, other.log_probs)
        assert one.version == 5
    with pytest.raises(StaleWeights, match="version 5 and is told 6"):
        engine.version = 6


def test_a_tensor_that_was_changed_or_dropped_on_the_way_leaves_the_engine_without_weights(engine, monkeypatch):
    policy = small(seed=1)
    receive = engine.receive
    with monkeypatch.context() as patch:
        patch.setattr(engine, "receive", lambda sent: receive((n, -t if n == NORM else t) for n, t in sent))
        with pytest.raises(SyncFailed, match=rf"tensor {NORM} of version 1 did not arrive"):
            sync(policy, engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "receive", lambda sent: receive(pair for pair in sent if pair[0] != NORM))
        with pytest.raises(SyncFailed, match=f"nothing was written to {NORM}"):
            sync(policy, engine, 1)
    with pytest.raises(SyncFailed, match="no weights of any version"):
        engine.generate(PROMPTS, SAMPLING)
    assert sync(policy, engine, 1).version == engine.version == 1


def tensors():
    return [
        ("a", torch.arange(35).view(5, 7).double()),
        ("empty", torch.zeros(0, 3)),
        ("b", torch.arange(24).view(4, 6).to(torch.bfloat16).mT),
        ("scalar", torch.tensor(3)),
    ]


@pytest.mark.parametrize("most", [1, 7, 64, 10**6])
def test_tensors_in_buckets_of_any_size_are_the_same_tensors(most):
    made = list(buckets(tensors(), most))
    assert all(0 < sum(len(parcel.data) for parcel in bucket) <= most or most == 1 for bucket in made)
    for (name, one), (other, two) in zip(tensors_of(made), tensors(), strict=True):
        assert name == other
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
        assert one.shape == two.shape


@pytest.mark.parametrize("drop", [0, 3, -1])
def test_a_bucket_that_is_missing_is_named(drop):
    made = list(buckets(tensors()[:1], 40))
    del made[drop]
    with pytest.raises(SyncFailed, match=r"of tensor a|tensor a ends after"):
        list(tensors_of(made))


class Bag:
    """An engine that keeps what it receives, and may refuse some of it."""

    def __init__(self, refused=None):
        self.held, self.refused, self.ended = {}, refused, threading.Event()

    def receive(self, stream):
        for name, tensor in stream:
            if name == self.refused:
                raise SyncFailed(f"no place for {name}")
            self.held[name] = tensor
        self.ended.set()
        return ["left"]


def test_buckets_are_taken_in_their_order_whoever_brings_them():
    bag, made = Bag(), list(buckets(tensors(), 16))
    flow = Inflow(bag, 20.0)
    threads = [threading.Thread(target=flow.put, args=pair) for pair in reversed(list(enumerate(made)))]
    for one in threads:
        one.start()
    assert flow.finish(len(made)) == ["left"]
    assert list(bag.held) == [name for name, _ in tensors()]
    assert all(torch.equal(bag.held[name], tensor) for name, tensor in tensors())


def test_a_stream_that_breaks_off_ends_for_the_engine_and_is_an_error_for_the_sender():
    """Given up for another one; too few buckets; a tensor that the engine refuses; a sender that is gone."""
    made = list(buckets(tensors(), 16))
    bag = Bag()
    flow = Inflow(bag, 20.0)
    flow.put(0, made[0])
    flow.give_up()
    with pytest.raises(SyncFailed, match="given up"):
        flow.put(1, made[1])

    flow = Inflow(Bag(), 0.2)
    flow.put(0, made[0])
    with pytest.raises(SyncFailed, match=rf"1 of {len(made)} buckets|no weights came"):
        flow.finish(len(made))

    flow = Inflow(Bag(refused="a"), 20.0)
    with pytest.raises(SyncFailed, match="no place for a"):
        [flow.put(*pair) for pair in enumerate(made)]

    bag = Bag()
    flow = Inflow(bag, 0.1)
    flow.put(0, made[0])
    flow._thread.join(10)
    with pytest.raises(SyncFailed, match=r"no weights came for 0\.1 s"):
        flow.put(1, made[1])
