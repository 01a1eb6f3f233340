"""Reinforcement learning sees the ids that were sampled, and behind them what serving would have appended."""

import pytest

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.messages import Message
from bestiary.training.data.rollout import Rollout

ASK = Message(role="user", content="Weather?")
CALL = Message(role="assistant", tool_calls=({"name": "weather", "arguments": {"city": "Paris"}},))
RESULT = Message(role="tool", content="sunny <|im_end|>", name="weather")
ANSWER = Message(role="assistant", content="Sunny.")
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}},
]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
    "gptoss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    "llama3.1": '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>',
}


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_loop_shows_the_policy_what_serving_shows(tokenizer_of, family):
    """All of it is the prompt that the template renders, with control tokens in results as text."""
    tokenizer = tokenizer_of(family)
    rollout = Rollout(tokenizer, [ASK], TOOLS)
    rollout.say(tokenizer.encode_text(CALLS[family], bos=False, neutralise=False), CALL)
    rollout.hear([RESULT])
    assert rollout.ids.tolist() == tokenizer.prompt_ids([ASK, CALL, RESULT], TOOLS).tolist()
    assert tokenizer.decode(rollout.ids[rollout.loss_mask]) == CALLS[family]


def test_sampled_ids_are_never_encoded_again(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    sampled = [*tokenizer.encode_text("he"), *tokenizer.encode_text("llo"), tokenizer.id_of("<|im_end|>")]
    whole = [*tokenizer.encode_text("hello"), tokenizer.id_of("<|im_end|>")]
    assert sampled != whole
    rollout = Rollout(tokenizer, [ASK])
    rollout.say(sampled, Message(role="assistant", content="hello"))
    rollout.hear([Message(role="user", content="Again.")])
    assert rollout.ids[rollout.loss_mask].tolist() == sampled
    assert (rollout.tokens().labels != -100).sum() == len(sampled)


def test_an_answer_that_was_cut_off_is_closed_without_training_the_stop(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    rollout = Rollout(tokenizer, [ASK])
    rollout.say(tokenizer.encode_text("Sun"), Message(role="assistant", content="Sun"))
    added = rollout.hear([ASK])
    assert tokenizer.decode(added) == "<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rollout.ids[rollout.loss_mask]) == "Sun"


def test_nothing_can_be_answered_before_something_is_said(tokenizer_of):
    with pytest.raises(TemplateRefused, match="nothing was said yet"):
        Rollout(tokenizer_of("smollm"), [ASK]).hear([ASK])
