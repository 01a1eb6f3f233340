"""Dropout of attention and branches, jitter of experts' inputs: in training transformers' draws, otherwise nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.bridges import get_bridge
from bestiary.kernels.dispatch import force
from bestiary.models import Decoder
from bestiary.models.config import Attention, MoE, Router, RouterKind
from bestiary.models.errors import InvalidConfig
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import build, promoted
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_config
from bestiary.verify.weights import perturb
from tests.models.test_blocks import CASES, pair
from tests.models.tiny import FAMILIES, tiny, tokens

MODEL_TYPES = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "seed_oss")  # the last drops branches, too
GATE = 1e-10


def gradients(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in train mode from one seed."""
    model.train()
    torch.manual_seed(4)
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_training_step_equals_that_of_transformers(model_type: str) -> None:
    """Loss and every gradient in float64, from one seed; in eval mode the logits are those without dropout."""
    bridge = get_bridge(model_type)
    raw = {**tiny_config(bridge.reference, "base"), "attention_dropout": 0.3}
    reference = build(bridge.reference, raw)
    perturb(reference, seed=0)
    side = OurSide(bridge)
    model = side.build(raw, dict(reference.state_dict()), torch.float64)
    ids = tokens(2, 40)
    with promoted(), torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        assert max_over_std(model(ids).logits, expected) <= GATE
    with promoted():
        loss, theirs = gradients(reference, ids)
    with force(attention="eager"):
        mine, ours = gradients(model, ids)
    assert mine == pytest.approx(loss, rel=GATE)
    for name, expected in side.native(raw, theirs).items():
        if name in ours:
            assert max_over_std(ours[name], expected) <= 1e-9, name


def test_jitter_draws_what_mixtral_draws() -> None:
    """Loss and every gradient in float64, from one seed; nothing in eval mode."""
    case = CASES["mixtral, renormalised softmax"]
    assert case.ours.moe is not None
    noisy = case.ours.with_(moe=replace(case.ours.moe, input_jitter=0.2))
    reference, model = pair(replace(case, hf={**case.hf, "router_jitter_noise": 0.2}, ours=noisy))
    still, ids = pair(case)[1], tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, still(ids).logits)
    with promoted():
        loss, theirs = gradients(reference, ids)
    with force(attention="eager"):
        mine, ours = gradients(model, ids)
        assert gradients(still, ids)[0] != mine
    assert mine == pytest.approx(loss, rel=GATE)
    assert max(max_over_std(ours[name], expected) for name, expected in theirs.items()) <= 1e-9


@pytest.mark.parametrize("jitter", [-0.1, float("nan")])
def test_jitter_that_is_no_share_is_refused(jitter: float) -> None:
    router = Router(kind=RouterKind.SOFTMAX_TOPK, top_k=1)
    with pytest.raises(InvalidConfig, match=r"moe\.input_jitter"):
        MoE(num_experts=2, intermediate_size=8, router=router, input_jitter=jitter)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_draw_again_what_they_drew(family: str) -> None:
    """The same gradients with and without keeping activations."""
    heads = tiny(family).decoder_config.attention
    found = []
    for kept in (True, False):
        dropped = {"attention": replace(heads, dropout=0.3), "residual_dropout": 0.2}
        model = tiny(family, **dropped, activation_checkpointing=not kept)
        found.append(gradients(model, tokens(2, 20)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_two_steps_drop_different_weights() -> None:
    """And none without dropout."""

    def losses(model: Decoder) -> list[Tensor]:
        model.train()
        return [model(tokens(2, 20), labels=tokens(2, 20)).loss.detach() for _ in range(2)]

    heads = tiny("qwen3").decoder_config.attention
    first, second = losses(tiny("qwen3", attention=replace(heads, dropout=0.1)))
    assert first != second
    first, second = losses(tiny("qwen3", residual_dropout=0.1))
    assert first != second
    first, second = losses(tiny("qwen3"))
    assert first == second


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_that_is_no_probability_is_refused(share: float) -> None:
    with pytest.raises(InvalidConfig, match=r"attention\.dropout"):
        Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, dropout=share)
