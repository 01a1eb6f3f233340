"""The reference is Hugging Face in true float64: two of its own paths agree to rounding, and calls leave no trace."""

import pytest
import torch

from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.measure import max_over_std, relative_rms
from bestiary.verify.reference import Reference, ReferencePool, build, promoted, quiet
from bestiary.verify.tiny import tiny_config
from bestiary.verify.weights import perturb
from tests.verify.families import REFERENCES

FLOOR = 1e-14  # twice the 5e-15 that eager and SDPA differ by
WITH_SDPA = ("qwen3", "gemma3_text", "qwen3_moe")  # GPT-OSS has no SDPA path


def _inputs(vocab: int = 80) -> Inputs:
    return Inputs(tokens(vocab, 2, 40, 1)).with_labels()


def _gradients(model):
    model.zero_grad(set_to_none=True)
    model(**_inputs().kwargs(), use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", WITH_SDPA)
def test_under_promotion_eager_and_sdpa_agree_in_logits_and_gradients(family):
    reference = Reference(REFERENCES[family], tiny_config(REFERENCES[family], "square"), 3)
    eager = reference.logits(_inputs())
    with reference.running() as model:
        eager_gradients = _gradients(model)
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            sdpa = model(**_inputs().kwargs(), use_cache=False).logits
        sdpa_gradients = _gradients(model)
    assert eager.dtype == torch.float64
    assert 0 < max_over_std(sdpa, eager) <= FLOOR
    assert max(relative_rms(sdpa_gradients[name], grad) for name, grad in eager_gradients.items()) <= FLOOR


@pytest.mark.parametrize("family", REFERENCES)
def test_without_promotion_a_double_model_is_no_float64_reference(family):
    raw = tiny_config(REFERENCES[family], "square")
    true = Reference(REFERENCES[family], raw, 3)
    with quiet():
        plain = build(REFERENCES[family], raw, torch.float32).double()
        perturb(plain, 3)
        with torch.no_grad():
            logits = plain(**_inputs().kwargs(), use_cache=False).logits
    assert logits.dtype == torch.float64
    assert max_over_std(logits, true.logits(_inputs())) > 1e-9


def test_promotion_answers_every_spelling_and_ends_with_its_block():
    half = torch.ones(3, dtype=torch.bfloat16)
    with promoted():
        spelled = [
            half.float(),
            half.to(torch.float32),
            torch.arange(3, dtype=torch.float),
            half.softmax(0, torch.float),
        ]
        spelled.append(torch.zeros(3))
    assert [item.dtype for item in spelled] == [torch.float64] * 5
    assert half.float().dtype == torch.zeros(3).dtype == torch.float32


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_frequencies_that_depend_on_length_do_not_leak_into_later_calls(family, rope_type):
    from bestiary.verify.sweep import variants

    reference = REFERENCES[family]
    raw = next(v.raw for v in variants(reference, tiny_config(reference, "base")) if v.value == rope_type)
    long, short = (Inputs(tokens(80, 1, length, 5)) for length in (72, 24))
    first = Reference(reference, raw, 0)
    used = Reference(reference, raw, 0)
    used.logits(long)
    assert torch.equal(used.logits(short), first.logits(short))
    assert torch.equal(used.call(long, use_cache=False)["logits"], used.logits(long))


def test_weights_depend_on_name_and_seed_alone():
    reference = REFERENCES["qwen3"]
    pool = ReferencePool()
    base = pool.get(reference, tiny_config(reference, "base"), 0).state()
    raw = {**tiny_config(reference, "base"), "num_hidden_layers": 3}
    fewer = pool.get(reference, raw, 0).state()
    assert len(fewer) < len(base)
    assert all(torch.equal(base[name], tensor) for name, tensor in fewer.items())
    other = pool.get(reference, raw, 1).state()
    assert not any(torch.equal(fewer[name], tensor) for name, tensor in other.items())


def test_nothing_is_left_at_its_initial_value():
    for reference in REFERENCES.values():
        for name, tensor in Reference(reference, tiny_config(reference, "mha"), 0).state().items():
            assert tensor.std() > 0.1 * tensor.abs().mean() > 0, name


def test_a_pool_builds_once_and_a_mutated_reference_keeps_the_shared_weights_intact():
    reference, raw = REFERENCES["qwen3"], tiny_config(REFERENCES["qwen3"], "square")
    pool = ReferencePool()
    assert pool.get(reference, raw, 0) is pool.get(reference, dict(raw), 0)
    before = pool.get(reference, raw, 0).state()["model.norm.weight"].clone()

    def zero(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").zero_()

    Reference(reference, raw, 0, mutate=zero, store=pool._weights)
    assert torch.equal(pool.get(reference, raw, 0).state()["model.norm.weight"], before)
