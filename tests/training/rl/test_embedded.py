"""The embedded engine: what it samples is what the model says, whoever stands beside it in the call."""

import numpy as np
import pytest
import torch

from bestiary.models import LoRAConfig
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.embedded import EmbeddedEngine, uniforms
from bestiary.training.rl.rollout import Sampling
from bestiary.verify.weights import perturb

from ...models.tiny import VOCAB, tiny

PROMPTS = [[5, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8, 8]]
SAMPLING = Sampling(max_tokens=12, temperature=1.4, stop_ids=(3, 17, 40, 90, 150), n=2, seed=4)


def engine(family="qwen3", dtype=torch.float64, **options):
    model = tiny(family, dtype, tie_word_embeddings=False, lora=LoRAConfig(r=2, alpha=4.0, targets=("*_proj",)))
    perturb(model, seed=2)
    return EmbeddedEngine(model.train(), **options)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_an_answer_and_its_log_probabilities_depend_on_nothing_beside_it(family):
    """Alone, in any company, some rows at a time; log-probabilities are those of one forward pass at temperature."""
    made = engine(family, rows=3)
    made.version = 7
    found = made.generate(PROMPTS, SAMPLING, keys=list("abcd"))
    assert [one.prompt for one in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(one.version == 7 for one in found)
    assert made.model.training
    assert any(module.training for module in made.model.model.layers)
    for place, (prompt, key) in enumerate(zip(PROMPTS, "abcd", strict=True)):
        for pair in zip(found[2 * place :], made.generate([prompt], SAMPLING, keys=[key]), strict=False):
            assert np.array_equal(pair[0].ids, pair[1].ids)
            np.testing.assert_allclose(pair[0].log_probs, pair[1].log_probs, rtol=1e-9)
    made.model.eval()
    for one in found:
        whole = torch.tensor([[*PROMPTS[one.prompt], *one.ids.tolist()]])
        with torch.no_grad():
            said = (made.model(whole).logits[0] / SAMPLING.temperature).log_softmax(-1)
        expected = said[-len(one) - 1 : -1].gather(-1, whole[0, -len(one) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(one.log_probs), expected, rtol=1e-9, atol=1e-9)


def test_an_answer_ends_with_its_first_stop_token_or_is_cut_off():
    found = engine().generate(PROMPTS, Sampling(max_tokens=20, stop_ids=tuple(range(0, VOCAB, 9)), n=6))
    assert {one.finish for one in found} == {"stop", "length"}
    for one in found:
        stops = [place for place, word in enumerate(one.ids) if word % 9 == 0]
        assert stops == ([len(one) - 1] if one.finish == "stop" else [])
        assert one.finish == "stop" or len(one) == 20
    endless = engine().generate([[1]], Sampling(max_tokens=5))
    assert [(len(one), one.finish) for one in endless] == [(5, "length")]


def test_a_prompt_is_computed_once_for_its_answers():
    made, shapes = engine(), []
    made.model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    made.generate(PROMPTS, Sampling(max_tokens=3, n=5))
    assert shapes == [(4, 10), (20, 1), (20, 1)]


def test_seeds_keys_and_answers_each_give_other_words():
    made = engine()
    every = made.generate([[5, 9]] * 2, SAMPLING) + made.generate(
        [[5, 9]], Sampling(max_tokens=12, temperature=1.4, n=2, seed=5), keys=["a"]
    )
    assert len({one.ids.tobytes() for one in every}) == len(every)
    assert np.array_equal(made.generate([[5, 9]], SAMPLING, keys=[1])[0].ids, every[2].ids)


def test_words_come_as_often_as_the_model_says():
    """Numbers of a seed of their own for each answer, looked up in the cumulative distribution at temperature."""
    made = engine(dtype=torch.float32, rows=4096)
    found = made.generate([[5, 9, 2]], Sampling(max_tokens=1, temperature=0.7, n=4096))
    seen = np.bincount([one.ids[0] for one in found], minlength=VOCAB) / len(found)
    made.model.eval()
    with torch.no_grad():
        said = (made.model(torch.tensor([[5, 9, 2]])).logits[0, -1] / 0.7).softmax(-1)
    assert np.abs(seen - said.numpy()).sum() / 2 < 0.1  # by chance 0.06
    assert abs(float(np.mean([uniforms(seed, 8) for seed in range(500)])) - 0.5) < 0.02


def test_processes_of_a_spread_model_take_as_many_passes_each():
    """Without prompts of its own a process keeps the others company until the last of them is done."""
    passes = []
    for mine, others in ((PROMPTS, [0, 0]), ([], [2, 9])):
        told = iter([others[0], *[1] * others[1], *[0] * 99])
        made = engine(rows=4, agree=lambda number, told=told: max(number, next(told)))
        passes.append(0)
        made.model.register_forward_pre_hook(lambda *_: passes.__setitem__(-1, passes[-1] + 1))
        assert len(made.generate(mine, SAMPLING)) == 2 * len(mine)
    assert passes[1] == 9 + 1 + 1  # nine times told to go on, once to end, and a round that ends at once
    assert passes[0] > 2


def test_a_prompt_beyond_the_context_is_refused():
    context = engine().model.decoder_config.max_position_embeddings
    with pytest.raises(InvalidRun, match=rf"prompt 1 of 2 has {context} tokens"):
        engine().generate([[1], [1] * context], SAMPLING)
