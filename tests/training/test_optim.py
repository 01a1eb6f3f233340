"""Optimisers and schedules."""

import sys
from itertools import pairwise

import pytest
import torch
import torchao.optim
from hypothesis import given
from hypothesis import strategies as st

from bestiary.models import LoRAConfig
from bestiary.training.config import OptimSection
from bestiary.training.errors import InvalidRun
from bestiary.training.optim import Optimisers, schedule

from ..models.tiny import tiny, tokens

IDS = tokens(2, 9)


def stepped(section, **changes):
    model = tiny("gpt_oss", torch.float32, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = Optimisers(model, section, 1e-3)
    model(IDS, labels=IDS).loss.backward()
    optimiser.step()
    return model, before, optimiser


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "sgd"])
def test_every_trained_parameter_moves_and_no_other(name):
    model, before, _ = stepped(OptimSection(name=name), lora=LoRAConfig(r=2, alpha=4.0, targets=("*_proj",)))
    for key, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[key])
        assert moved == parameter.requires_grad, key


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "sgd"])
def test_weight_decay_is_for_matrices_of_the_blocks(name):
    """Without a gradient's size, decay alone pulls on a weight: lr × decay × weight."""
    with_, _, _ = stepped(OptimSection(name=name, weight_decay=0.5))
    without, before, _ = stepped(OptimSection(name=name, weight_decay=0.0))
    others = dict(without.named_parameters())
    for key, parameter in with_.named_parameters():
        matrix = parameter.ndim >= 2 and not any(part in key for part in ("embed_tokens", "lm_head", "bias"))
        expected = others[key] - 1e-3 * 0.5 * before[key] * matrix
        torch.testing.assert_close(parameter.data, expected.data, rtol=0, atol=2e-7, msg=key)


def test_biases_of_experts_are_no_matrices_to_muon():
    """They are rows (experts, width), and an orthogonal update would mix the experts."""
    model, _, optimiser = stepped(OptimSection(name="muon"))
    taken = {parameter for group in optimiser.parts[0].param_groups for parameter in group["params"]}
    names = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter in taken}
    assert names == {"weight"}
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("proj_bias")]
    assert biases
    assert not taken.intersection(biases)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "sgd"])
def test_states_that_are_looked_at_before_the_first_step_do_not_change_it(name):
    """As a checkpoint does, of a run whose steps were all left out so far."""
    expected, _, _ = stepped(OptimSection(name=name))
    model = tiny("gpt_oss", torch.float32)
    optimiser = Optimisers(model, OptimSection(name=name), 1e-3)
    assert optimiser.tensors(dict(model.named_parameters()))
    model(IDS, labels=IDS).loss.backward()
    optimiser.step()
    for (key, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), key


def test_the_rate_of_every_group_is_set():
    _, _, optimiser = stepped(OptimSection(name="muon"))
    optimiser.set_lr(0.25)
    assert {group["lr"] for part in optimiser.parts for group in part.param_groups} == {0.25}
    assert [type(part).__name__ for part in optimiser.parts] == ["Muon", "AdamW"]


def test_states_of_eight_bits_are_small_and_step_as_those_of_torchao():
    """Of large weights a byte a value and a scale for 256 of them."""
    model, theirs = tiny("qwen3", torch.float32), tiny("qwen3", torch.float32)
    optimiser = Optimisers(model, OptimSection(name="adamw8bit"), 1e-3)
    peer = torchao.optim.AdamW8bit(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(4):
        for made in (model, theirs):
            made.zero_grad()
            made(IDS, labels=IDS).loss.backward()
        optimiser.step()
        with torch.compiler.set_stance("force_eager"):
            peer.step()
    named = dict(model.named_parameters())
    states = optimiser.tensors(named)
    for (key, parameter), weight in zip(named.items(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, weight), key
        size = sum(state.nbytes for name, state in states.items() if name.startswith(f"{key}.exp_avg"))
        coded = parameter.numel() >= 4096 and parameter.numel() % 256 == 0
        assert size == 2 * (parameter.numel() * 65 // 64 if coded else parameter.nbytes), key
    assert any("codes" in name for name in states)


def test_a_missing_torchao_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(InvalidRun, match="torchao is not installed") as caught:
        stepped(OptimSection(name="adamw8bit"))
    assert "bestiary[torchao]" in caught.value.remedy


def test_a_model_that_does_not_train_is_refused():
    with pytest.raises(InvalidRun, match="no parameter of the model is trained"):
        Optimisers(tiny("qwen3").requires_grad_(False), OptimSection(), 1e-3)


@given(
    name=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    steps=st.integers(1, 500),
    warmup=st.one_of(st.integers(0, 50), st.floats(0, 0.5)),
    final=st.floats(0, 1),
)
def test_a_schedule_rises_to_its_top_and_falls_to_its_end(name, steps, warmup, final):
    section = OptimSection(schedule=name, warmup=warmup, final=final)
    rates = [schedule(section, 2.0, step, steps) for step in range(steps + 1)]
    risen = round(warmup * steps) if warmup < 1 else int(warmup)
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert all(a <= b for a, b in pairwise(rates[:risen]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[risen:]))
    if risen < steps:
        assert rates[risen] == pytest.approx(2.0)
        assert rates[steps] == pytest.approx(2.0 if name == "constant" else 2.0 * final)


def test_the_wsd_rate_stays_until_its_last_fifth():
    section = OptimSection(schedule="wsd", warmup=0, final=0.0)
    rates = [schedule(section, 1.0, step, 100) for step in range(101)]
    assert rates[:81] == pytest.approx([1.0] * 81)
    assert rates[90] == pytest.approx(0.5)
