"""Generation: what the cache says is what the whole sequence says; filters, stops and padding do what they promise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig

from bestiary.models import Cache, Decoder
from bestiary.models.config import DynamicScaling, LongRopeScaling
from bestiary.models.errors import InvalidInput
from bestiary.models.generation import Sampling

from .tiny import FAMILIES, VOCAB, WINDOW, tiny, tiny_config, tokens

PROMPTS = (5, 11, 3)  # one longer than the window
NEW = 3 * WINDOW


def left_padded(lengths: tuple[int, ...] = PROMPTS) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask; what stands under the padding is a token like any other."""
    ids = tokens(len(lengths), max(lengths))
    mask = torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids, mask.long()


def untied(family: str, **changes: Any) -> Decoder:
    """fp32; a tied head at random says the last token again, whatever the layers do."""
    return tiny(family, torch.float32, tie_word_embeddings=False, **changes)


@torch.no_grad()
def by_full_forward(model: Decoder, prompt: Tensor, new: int) -> tuple[Tensor, float]:
    """Greedy continuation of one row without padding, everything computed anew for each token; its narrowest margin."""
    sequence, margin = prompt, math.inf
    for _ in range(new):
        logits = model(sequence[None]).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        sequence = torch.cat((sequence, logits.argmax()[None]))
    return sequence[len(prompt) :], margin


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_generation_equals_full_forward_token_by_token(family: str) -> None:
    """In fp32, batch with left padding, three windows past the prompt."""
    model = untied(family)
    ids, mask = left_padded()
    cached = model.generate(ids, mask, max_new_tokens=NEW)
    assert torch.equal(cached[:, : ids.shape[1]], ids)
    assert torch.equal(cached, model.generate(ids, mask, max_new_tokens=NEW, use_cache=False))
    for row, length in enumerate(PROMPTS):
        expected, margin = by_full_forward(model, ids[row, -length:], NEW)
        assert margin > 1e-4, "a tie would decide by rounding"
        assert torch.equal(cached[row, ids.shape[1] :], expected)
        assert len(set(expected.tolist())) > 1


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(chunks=st.lists(st.integers(1, 2 * WINDOW), min_size=1, max_size=5), padding=st.integers(0, 4))
def test_any_split_of_a_sequence_gives_the_same_logits(family: str, chunks: list[int], padding: int) -> None:
    """Prefill in pieces shorter and longer than the window, with left padding, float64."""
    model, total = tiny(family), sum(chunks) + padding
    ids = tokens(2, total)
    mask = (torch.arange(total)[None] >= torch.tensor([[0], [padding]])).long()
    cache, pieces = Cache(model.decoder_config), []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        chunks = [chunks[0] + padding, *chunks[1:]]
        for piece in ids.split(chunks, dim=1):
            seen = len(cache) + piece.shape[1]
            pieces.append(model(piece, attention_mask=mask[:, :seen], past_key_values=cache).logits)
    joined = torch.cat(pieces, dim=1)
    real = mask.bool()
    assert (joined - whole)[real].abs().max() < 1e-12 * whole.std()
    assert len(cache) == cache.get_seq_length() == total


def test_use_cache_returns_a_cache_that_goes_on() -> None:
    """Also under the name `cache`."""
    model, ids = tiny("gpt_oss"), tokens(2, 9)
    with torch.no_grad():
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], cache=first.past_key_values)
        whole = model(ids)
    assert "past_key_values" not in whole
    torch.testing.assert_close(second.logits, whole.logits[:, 6:])


# ---------------------------------------------------------------------- choosing a token


def brute_force(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities after the filters, in Python floats: the top k, then the fewest of them that reach mass top_p."""
    scaled = [value / temperature for value in logits]
    ranked = sorted(range(len(scaled)), key=lambda index: -scaled[index])
    kept = ranked[:top_k] if top_k else ranked
    weights = {index: math.exp(scaled[index] - scaled[ranked[0]]) for index in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for index in kept:
        if mass >= top_p and top_p < 1:
            break
        nucleus.append(index)
        mass += weights[index] / total
    total = sum(weights[index] for index in nucleus)
    return [weights[index] / total if index in nucleus else 0.0 for index in range(len(scaled))]


@given(
    logits=st.lists(st.integers(-2000, 2000), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 15),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_filters_keep_what_they_say(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Against an independent computation."""
    values = [value / 500 for value in logits]
    sampling = Sampling(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    ours = sampling.filtered(torch.tensor([values], dtype=torch.float64) / temperature).softmax(-1)[0]
    expected = torch.tensor(brute_force(values, temperature, top_k, top_p), dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spread", [0.01, 9.0], ids=["flat", "peaked"])
def test_the_nucleus_is_found_in_a_large_vocabulary(spread: float) -> None:
    """Whether or not it lies among the tokens that are looked at first."""
    logits = spread * torch.randn(2, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    kept = Sampling(do_sample=True, top_p=0.9).filtered(logits).isfinite()
    assert bool(kept.sum() > 2 * 1024) is (spread < 1)
    for row, values in enumerate(logits.tolist()):
        expected = torch.tensor(brute_force(values, 1.0, 0, 0.9)) > 0
        assert torch.equal(kept[row], expected)


@pytest.mark.parametrize("vocab", [1, 5, 1024, 1025, 5000])
def test_a_token_is_drawn_where_the_running_sum_passes_its_number(vocab: int) -> None:
    """However many blocks the vocabulary has, and never one without mass; with its log-probability."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(64, vocab, dtype=torch.float64, generator=generator)
    logits[:, 1::3] = -torch.inf
    drawn = torch.cat((torch.zeros(1), torch.rand(62, generator=generator), torch.ones(1))).double()
    drawn[-1] = 1 - 2.0**-53
    sampling = Sampling(do_sample=True, temperature=0.7)
    found = sampling.choose(logits, None, drawn)
    whole = (logits / 0.7).softmax(-1).cumsum(-1)
    expected = torch.searchsorted(whole, drawn[:, None] * whole[:, -1:], right=True).squeeze(-1)
    assert torch.equal(found[:-1], expected[:-1])
    assert (logits.gather(-1, found[:, None]) > -torch.inf).all()
    scored = (logits / 0.7).log_softmax(-1).gather(-1, found[:, None]).squeeze(-1)
    for known in (None, sampling.unfiltered(logits)):
        torch.testing.assert_close(sampling.log_probs(logits, found, known), scored, rtol=1e-12, atol=1e-12)
        assert torch.equal(sampling.choose(logits, None, drawn, known), found)


@pytest.mark.slow
def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """The last of 50 000 tokens, each of which is rarer than a rounding of fp32 next to 1."""
    rare, each = 50_000, 4e-8
    logits = torch.zeros(1, rare + 1)
    logits[0, 1:] = math.log(each)
    generator = torch.Generator().manual_seed(4)
    chosen = torch.cat([Sampling(do_sample=True).choose(logits.expand(64, -1), generator) for _ in range(50)])
    found, share = chosen[chosen > 0], rare * each / (1 + rare * each)
    assert abs(len(found) - share * len(chosen)) < 5 * (share * len(chosen)) ** 0.5
    assert len(found) > 2
    assert chosen.max() <= rare


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8, "temperature": 1.7}], ids=str
)
def test_sampling_draws_from_the_filtered_distribution(filters: dict[str, Any]) -> None:
    """2000 draws of one token against the probabilities, and never outside them; the generator decides alone."""
    model, prompt = untied("qwen3"), tokens(1, 2)
    logits = model(prompt).logits[0, -1].tolist()
    allowed = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **filters}
    expected = torch.tensor(brute_force(logits, **allowed))

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        out = model.generate(prompt.expand(2000, -1), max_new_tokens=1, do_sample=True, generator=generator, **filters)
        return out[:, -1]

    drawn = draw(0)
    assert torch.equal(drawn, draw(0))
    assert not torch.equal(drawn, draw(1))
    frequency = torch.bincount(drawn, minlength=VOCAB) / 2000
    assert (frequency[expected == 0] == 0).all()
    assert (frequency - expected).abs().max() < 5 * (0.25 / 2000) ** 0.5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"temperature": 0.0}, "temperature = 0.0"), ({"top_k": -1}, "top_k = -1"), ({"top_p": 0.0}, "top_p = 0.0")],
)
def test_filters_that_make_no_sense_are_refused(wrong: dict[str, Any], named: str) -> None:
    """By name and value."""
    with pytest.raises(InvalidInput, match=named):
        tiny("qwen3").generate(tokens(1, 3), do_sample=True, max_new_tokens=1, **wrong)


# ---------------------------------------------------------------------- ends


def test_rows_end_at_any_of_several_stop_ids() -> None:
    """Each row at its own; behind it padding; the call ends with the last row."""
    model = untied("gemma3")
    ids, mask = left_padded()
    prompt = ids.shape[1]
    free = model.generate(ids, mask, max_new_tokens=NEW)[:, prompt:]
    stops = [int(free[0, 4]), int(free[1, 7]), int(free[2, 2])]
    ends = [next(i for i, token in enumerate(row) if token in stops) for row in free.tolist()]
    stopped = model.generate(ids, mask, max_new_tokens=NEW, stop_token_ids=stops, pad_token_id=199)[:, prompt:]
    assert stopped.shape[1] == max(ends) + 1 < NEW
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, : end + 1], free[row, : end + 1])
        assert (stopped[row, end + 1 :] == 199).all()
    one = model.generate(ids[1:2], mask[1:2], max_new_tokens=NEW, stop_token_ids=stops[1])
    assert one[0, -1] == stops[1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_answers_to_one_prompt_are_those_of_as_many_prompts(use_cache: bool) -> None:
    """Prompts are computed once, in any order of their answers, and rows that ended no further."""
    model = tiny("gemma3", tie_word_embeddings=False)
    ids, mask = left_padded()
    which = torch.tensor([2, 0, 0, 1, 2, 0, 1])
    sampled: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": True,
        "stop_token_ids": tuple(range(0, VOCAB, 9)),
        "pad_token_id": 199,
        "uniforms": torch.rand(7, NEW, generator=torch.Generator().manual_seed(5)),
        "return_log_probs": True,
        "use_cache": use_cache,
    }
    expected = model.generate(ids[which], mask[which], **sampled)
    rows: list[int] = []
    model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    found = model.generate(ids, mask, prompt_of=which, **sampled)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)
    lengths = (found[1] != 0).sum(-1)
    assert lengths.unique().numel() > 3
    if use_cache:
        assert rows[:2] == [3, 7]
        assert 4 * sum(rows[1:]) < 5 * sum(int((lengths > place).sum()) for place in range(1, len(rows)))
    else:
        assert set(rows) == {7}


@pytest.mark.parametrize("wrong", [[], [0, 3], [-1], [[0]]])
def test_an_answer_needs_a_prompt(wrong: list[Any]) -> None:
    """Its row, by number."""
    with pytest.raises(InvalidInput, match="of 3 prompts"):
        tiny("qwen3").generate(tokens(3, 4), max_new_tokens=1, prompt_of=torch.tensor(wrong, dtype=torch.int64))


def test_log_probs_are_those_of_the_forward_pass() -> None:
    """log softmax(logits / temperature) of each chosen token before any filter, 0 behind the end of a row."""
    model = tiny("qwen3_moe", torch.float32)
    ids, mask = left_padded()
    free = model.generate(ids, mask, max_new_tokens=9)[:, ids.shape[1] :]
    out, log_probs = model.generate(
        ids,
        mask,
        max_new_tokens=9,
        do_sample=True,
        temperature=1.4,
        top_k=3,
        stop_token_ids=free[0, :3].tolist(),
        generator=torch.Generator().manual_seed(3),
        return_log_probs=True,
    )
    new = out.shape[1] - ids.shape[1]
    assert log_probs.shape == (3, new)
    targets = torch.full_like(out, -100)
    targets[:, ids.shape[1] - 1 : -1] = out[:, ids.shape[1] :]
    whole = torch.cat((mask, torch.ones(3, new, dtype=mask.dtype)), dim=1)
    with torch.no_grad():
        scored = model(out, attention_mask=whole, shift_labels=targets, temperature=1.4).log_probs
    scored = scored[:, ids.shape[1] - 1 : -1]
    ended = (
        torch.isin(out[:, ids.shape[1] :], free[0, :3]).cumsum(-1)
        - torch.isin(out[:, ids.shape[1] :], free[0, :3]).long()
    )
    torch.testing.assert_close(log_probs, scored.masked_fill(ended > 0, 0.0), rtol=1e-4, atol=1e-5)
    assert (log_probs < 0).any()


def test_greedy_knows_no_temperature() -> None:
    """Not even one of zero, which many use to say greedy."""
    model, ids = untied("qwen3"), tokens(1, 5)
    plain, warm = (model.generate(ids, max_new_tokens=3, temperature=t, return_log_probs=True) for t in (None, 0.0))
    assert torch.equal(plain[0], warm[0])
    assert torch.equal(plain[1], warm[1])
    assert (plain[1] < 0).all()


def test_the_context_is_a_limit_unless_allowed() -> None:
    """Counted in tokens, not in padding."""
    model = tiny("qwen3", max_position_embeddings=16)
    ids, mask = left_padded((5, 11, 3))
    assert model.generate(ids, mask, max_new_tokens=5).shape[1] == 16
    with pytest.raises(InvalidInput, match=r"11 prompt tokens \+ max_new_tokens = 6 exceed .* = 16") as caught:
        model.generate(ids, mask, max_new_tokens=6)
    assert "allow_long" in str(caught.value.remedy)
    assert model.generate(ids, mask, max_new_tokens=6, allow_long=True).shape[1] == 17
    assert model.generate(ids[:1], mask[:1], max_new_tokens=11).shape[1] == 22


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0]])),
        (torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 1]])),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]])),
        (torch.ones(1, 0, dtype=torch.long), None),
        (torch.ones(4, dtype=torch.long), None),
    ],
    ids=["right padding", "a hole", "an empty row", "no token", "one dimension"],
)
def test_prompts_that_cannot_be_continued_are_refused(ids: Tensor, mask: Tensor | None) -> None:
    """Right padding would put new tokens behind a gap."""
    with pytest.raises(InvalidInput):
        tiny("qwen3").generate(ids, mask, max_new_tokens=2)


class Settings:
    """What `generate` reads of a transformers GenerationConfig."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_arguments_win_over_the_config_and_that_over_the_checkpoint() -> None:
    """Stop ids come from the checkpoint by themselves; sampling never does."""
    model, ids = untied("qwen3"), tokens(1, 5)
    free = model.generate(ids, max_new_tokens=20)[0, 5:].tolist()
    assert len(free) == 20
    first, later = free[2], next(token for token in free[3:] if token not in free[:3])
    model.hf_config_json = {"eos_token_id": later}
    assert model.generate(ids)[0, -1] == later
    model.hf_generation_config_json = {"eos_token_id": [first, later], "do_sample": True, "temperature": 5.0}
    assert model.generate(ids)[0, 5:].tolist() == free[:3]
    config = Settings(eos_token_id=later, max_new_tokens=20, do_sample=True, top_k=1, pad_token_id=None)
    assert model.generate(ids, generation_config=config)[0, 5:].tolist() == free[: free.index(later) + 1]
    assert model.generate(ids, generation_config=config, max_new_tokens=2).shape[1] == 7
    assert model.generate(ids, generation_config=config, stop_token_ids=[])[0, 5:].tolist() == free


def test_reading_the_generation_config_changes_no_answer() -> None:
    """Stop ids that config.json alone has hold before and after the transformers object is made."""
    model, ids = untied("qwen3"), tokens(1, 5)
    free = model.generate(ids, max_new_tokens=20)[0, 5:].tolist()
    model.hf_config_json, model.hf_generation_config_json = {"eos_token_id": free[2]}, {"temperature": 0.6}
    stopped = model.generate(ids)
    assert stopped[0, 5:].tolist() == free[: free.index(free[2]) + 1]
    assert model.generation_config.temperature == 0.6
    assert torch.equal(model.generate(ids), stopped)


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicScaling(factor=4.0, original_max_position_embeddings=9),
        LongRopeScaling(
            short_factor=(1.0,) * 12,
            long_factor=tuple(2.0 + i for i in range(12)),
            original_max_position_embeddings=9,
            attention_factor=1.1,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_change_with_the_length_turn_the_cache_off(scaling: Any) -> None:
    """Keys turned by the short frequencies would be wrong beyond the first context."""
    model = untied("qwen3", rope=replace(tiny_config("qwen3").rope, scaling=scaling))
    ids = tokens(1, 6)
    expected, _ = by_full_forward(model, ids[0], 8)
    assert torch.equal(model.generate(ids, max_new_tokens=8)[0, 6:], expected)


def test_router_logits_asked_for_by_the_config_do_not_disturb_generation() -> None:
    """The padding mask grows with the sequence, the router sees the new tokens alone."""
    model = tiny("qwen3_moe", torch.float32, output_router_logits=True)
    ids, mask = left_padded()
    expected = tiny("qwen3_moe", torch.float32).generate(ids, mask, max_new_tokens=4)
    assert torch.equal(model.generate(ids, mask, max_new_tokens=4), expected)


def test_prepare_inputs_passes_only_what_the_cache_has_not_seen() -> None:
    """For trainers that drive the loop themselves."""
    model, ids = tiny("qwen3"), tokens(1, 6)
    assert model.can_generate()
    cache = model(ids[:, :4], use_cache=True).past_key_values
    prepared = model.prepare_inputs_for_generation(ids, past_key_values=cache, attention_mask=torch.ones(1, 6))
    assert torch.equal(prepared["input_ids"], ids[:, 4:])
    torch.testing.assert_close(model(**prepared).logits, model(ids).logits[:, 4:])


QWEN3 = untied("qwen3")


def configured(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 5.0},
        {"num_beams": 3},
        {"min_p": 0.1},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 4},
        {"bad_words_ids": [[3]]},
        {"suppress_tokens": [3]},
        {"stop_strings": ["x"]},
        {"typical_p": 0.5},
    ],
)
def test_what_a_generation_config_asks_and_nobody_implements_is_refused_by_name(fields: dict[str, Any]) -> None:
    model, prompt = QWEN3, tokens(1, 5)
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        model.generate(prompt, generation_config=configured(**fields))


def test_neutral_fields_of_a_generation_config_are_accepted() -> None:
    model, prompt = QWEN3, tokens(1, 5)
    neutral = configured(num_beams=1, repetition_penalty=1.0, min_p=0.0, max_new_tokens=3, bos_token_id=1)
    assert torch.equal(model.generate(prompt, generation_config=neutral), model.generate(prompt, max_new_tokens=3))


def test_max_length_counts_the_prompt() -> None:
    model, prompt = QWEN3, tokens(1, 5)
    assert model.generate(prompt, generation_config=configured(max_length=9)).shape == (1, 9)
    with pytest.raises(InvalidInput, match="new tokens"):
        model.generate(prompt, generation_config=configured(max_length=5))


def test_ended_rows_are_filled_with_the_configured_pad_token() -> None:
    """Of the model's own generation config too; a stop id only where no pad token is known."""
    model, prompt = untied("qwen3"), tokens(2, 5)
    first = model.generate(prompt, max_new_tokens=1)[:, -1]
    if first[0] == first[1]:
        prompt[1] = (prompt[1] + 1) % VOCAB
        first = model.generate(prompt, max_new_tokens=1)[:, -1]
    assert first[0] != first[1], "both rows would end at once"
    model.generation_config = configured(pad_token_id=2, eos_token_id=int(first[0]))
    assert (model.generate(prompt, max_new_tokens=4)[0, 6:] == 2).all()


def test_fields_in_a_dict_are_no_generation_config() -> None:
    model, prompt = QWEN3, tokens(1, 5)
    with pytest.raises(InvalidInput, match="dict"):
        model.generate(prompt, generation_config={"top_k": 3})
