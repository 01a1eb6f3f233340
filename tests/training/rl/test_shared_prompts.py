"""A prompt that is computed once for all its answers: the gradients and log-probabilities of as many copies."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bestiary.models import LoRAConfig
from bestiary.models.config import DynamicScaling
from bestiary.training.flops import StepFlops
from bestiary.training.metrics import Throughput
from bestiary.training.peaks import Peak
from bestiary.training.rl.packing import pack, with_log_probs
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.records import Experience
from bestiary.training.rl.shared_prompts import shares
from bestiary.verify.weights import perturb

from ...models.tiny import FAMILIES, VOCAB, tiny
from ..recipes_case import assert_same, step
from .experiences import sampled_by, with_common_prompts


def constrained(one):
    """The same answer, of which each token was chosen among three."""
    trajectory = one.trajectory
    allowed = np.sort((trajectory.ids[:, None] + [0, 5, 50]) % VOCAB, axis=1).astype(np.int32)
    allowed[~trajectory.sampled] = -1
    return replace(one, trajectory=replace(trajectory, allowed=allowed))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_figures_are_those_of_a_copy_for_each_answer(family):
    """In one pack and in several, with adapters that go through the keys of the prompt, some answers left out."""
    model = tiny(family, lora=LoRAConfig(r=2, alpha=4.0, targets=("*_proj",))).train()
    perturb(model, seed=3)
    given = sampled_by(model, with_common_prompts())
    given[4] = replace(given[4], trained=False)
    recipe = PolicyGradient("dapo")
    loss, expected = step(recipe, model, pack(given, 160, 5))
    for length in (160, 45):
        packs = pack(given, length, 5, shares=True)
        assert packs[0].shared is not None
        assert len(packs) > 160 // length - 2
        found_loss, found = step(recipe, model, packs)
        torch.testing.assert_close(found_loss, loss, rtol=1e-9, atol=1e-9)
        assert_same(found, expected)
    (plain,), (shared,) = pack(given, 160, 5), pack(given, 160, 5, shares=True)
    figures = [recipe.loss(model, recipe.batch(each)).metrics for each in (plain, shared)]
    assert figures[0].keys() == figures[1].keys()
    for name, value in figures[0].items():
        torch.testing.assert_close(figures[1][name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("some", [lambda one: one, constrained], ids=["free", "constrained"])
def test_log_probabilities_stand_where_they_did(some):
    model = tiny("gemma3")
    given = [some(Experience.of(one)) for one in with_common_prompts()]
    plain = with_log_probs(model, given, "old_log_probs", pack_length=170, pad_id=5)
    shared = with_log_probs(model, given, "old_log_probs", pack_length=170, pad_id=5, shares=True)
    for one, other in zip(plain, shared, strict=True):
        np.testing.assert_allclose(one.old_log_probs, other.old_log_probs, rtol=1e-9, atol=1e-9)
        assert (one.old_log_probs[one.trajectory.sampled] < 0).all()


def test_what_is_computed_fits_into_a_pack_and_is_counted():
    """A group that is too large has its prompt in two packs."""
    model = tiny("qwen3")
    given = [Experience.of(one) for one in with_common_prompts(30) for _ in range(4)]
    packs = pack(given, 50, 5, shares=True)
    assert sorted(id(one) for each in packs for one in each.experiences) == sorted(map(id, given))
    assert all(each.shared is not None for each in packs)
    flops = StepFlops.of(model)
    for each in packs:
        assert each.useful_tokens <= 50
        assert each.useful_tokens <= each.slots
        assert len(each.input_ids) == each.useful_tokens + sum(each.repeated) + each.documents
        lengths = [len(one.trajectory) for one in each.experiences]
        meter = Throughput([flops], Peak(1.0, "a test"))
        meter.watching(lambda _: None)(each)
        counted = dict.fromkeys(("tokens", "useful_tokens", "loss_tokens"), 1)
        expected = flops.totals(lengths, each.loss_tokens).model - flops.totals(each.repeated, 0).model
        assert meter.read(seconds=1.0, data_wait_s=0.0, **counted)["mfu"] == expected > 0


def test_where_it_is_no_less_work_packs_are_as_ever():
    """Short prompts under long answers, prompts of a token, groups of one."""
    single = [Experience.of(one) for one in with_common_prompts()[::3]]
    short = [Experience.of(one) for one in with_common_prompts(4)]
    bare = [Experience.of(replace(one, sampled=np.arange(len(one)) > 0)) for one in with_common_prompts()]
    for given in (single, short, bare):
        plain, asked = pack(given, 40, 5), pack(given, 40, 5, shares=True)
        assert all(each.shared is None for each in asked)
        for one, other in zip(plain, asked, strict=True):
            assert np.array_equal(one.input_ids, other.input_ids)


def test_models_that_count_on_one_pass_are_left_alone():
    assert shares(tiny("qwen3"))
    assert not shares(tiny("qwen3", compile_blocks=True))
    assert not shares(tiny("qwen3", activation_checkpointing=True))
    assert not shares(tiny("qwen3_moe", output_router_logits=True))
    stretched = DynamicScaling(factor=2.0, original_max_position_embeddings=16)
    assert not shares(tiny("qwen3", rope=replace(tiny("qwen3").decoder_config.rope, scaling=stretched)))
