"""Tools in a loop: what is sampled stays as it was, what the tools say is appended, and what they do wrong is told."""

import sys

import numpy as np
import pytest

from bestiary.training.data.messages import Message, ToolCall
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.conversations import ToolEnvironments, asked
from bestiary.training.rl.environments import Said
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Rollout, Sampling
from bestiary.training.rl.tools import Tools

from ..data.conftest import load

TOOLS = '''
import os, time
from typing import Literal

def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Not shown.
    """
    return a + b

def sleep(seconds: float, how: Literal["well", "badly"] = "well", words: list[str] | None = None):
    time.sleep(seconds)

def leave():
    os._exit(7)

def remember(word):
    """Keeps a word."""
    globals().setdefault("words", []).append(word)
    return words

def add_again(**numbers):
    pass
'''
ASK = Message(role="user", content="What is 2 + 3?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tools")
    (made / "tool_functions.py").write_text(TOOLS)
    sys.path.append(str(made))
    yield made
    sys.path.remove(str(made))


@pytest.fixture(scope="module")
def tools(folder):
    made = Tools([f"tool_functions:{name}" for name in ("add", "sleep", "leave")], timeout_s=1.5, processes=1)
    yield made
    made.close()


class Reciting:
    """An engine that says what it is given for each turn."""

    version = 0

    def __init__(self, tokenizer, *turns, cut=False):
        self.tokenizer, self.turns, self.cut = tokenizer, turns, cut

    def generate(self, prompts, sampling, *, keys=None):
        stop = self.tokenizer.id_of("<|im_end|>")
        found = []
        for place, (_, _, _, turn) in enumerate(keys):
            ids = [int(one) for one in self.tokenizer.encode_text(self.turns[turn], bos=False, neutralise=False)]
            ids = np.array(ids if self.cut else [*ids, stop], np.int32)
            finish = "length" if self.cut else "stop"
            found.append(Rollout(place, ids, np.full(len(ids), -1.0, np.float32), finish, 0))
        return found

    def close(self):
        pass


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def played(tools, *turns, calls=64, cut=False):
    tokenizer = load("qwen3")
    episodes = Episodes(
        Reciting(tokenizer, *turns, cut=cut), context=4096, environment=ToolEnvironments(tokenizer, tools, calls=calls)
    )
    row = {"prompt": [ASK.model_dump(include={"role", "content"})], "answer": "5"}
    try:
        episodes.put([Prompt(prompt_id="p", ids=(1,), row=row)], Sampling(max_tokens=64, stop_ids=(0,)))
        ((one,),) = episodes.take(1)
    finally:
        episodes.close()
    return tokenizer, one


def test_a_tool_is_called_and_its_result_is_what_serving_shows(tools):
    tokenizer, one = played(tools, call("add", '{"a": 2, "b": 3}'), "5")
    assert "failed" not in one.extra
    calls = Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 2, "b": 3}),))
    result = Message(role="tool", content="5", name="add")
    before = tokenizer.prompt_ids([ASK, calls, result], tools.described).tolist()
    assert one.ids[: len(before)].tolist() == before
    assert tokenizer.decode(one.ids[len(before) :]) == "5<|im_end|>"
    assert tokenizer.decode(one.ids[one.sampled]) == call("add", '{"a": 2, "b": 3}') + "<|im_end|>5<|im_end|>"
    assert [one.extra[name] for name in ("turns", "tool_calls", "tool_errors", "broken_calls")] == [2, 1, 0, 0]
    assert one.finish == "stop"


@pytest.mark.parametrize(
    ("family", "thought", "called"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\n", call("add", '{"a": 2, "b": 3}') + "<|im_end|>"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
        ),
        ("llama3.1", "", '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>'),
    ],
)
def test_what_follows_a_call_is_the_same_whatever_was_thought_before_it(tools, family, thought, called):
    """Reasoning stays in the ids as it was sampled, though templates leave it out of what they render of the past."""
    tokenizer = load(family)
    calls = Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 2, "b": 3}),))
    result = Message(role="tool", content="5", name="add")
    rendered = tokenizer.decode(tokenizer.prompt_ids([ASK, calls, result], tools.described))
    begun, _, follows = rendered.rpartition(called)
    assert begun
    for before in {"", thought}:
        conversation = ToolEnvironments(tokenizer, tools)()
        conversation.reset(Prompt(prompt_id="p", ids=(1,), row={"prompt": ASK.content}), seed=0)
        ids = tokenizer.encode_text(before + called, bos=False, neutralise=False).tolist()
        heard = conversation.step(Said(ids=tuple(ids), finish="stop", turn=0))
        assert tokenizer.decode(heard.ids) == follows
        assert not heard.done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sleep", '{"seconds": 60}'), "Error: the call took more than 1.5 s."),
        (call("leave", "{}"), "Error: its process died (exit code 7)."),
        (call("add", '{"a": "2", "b": 3}'), "Error: TypeError: can only concatenate str"),
        (call("add", '{"c": 2}'), "Error: TypeError: add() got an unexpected keyword argument 'c'"),
        (call("multiply", "{}"), "Error: there is no tool 'multiply'; there are ['add', 'leave', 'sleep']."),
    ],
)
def test_what_a_call_does_wrong_is_told_to_the_policy_and_counted(tools, said, told):
    """In one turn with a call that works: its result is there too."""
    tokenizer, one = played(tools, said + "\n" + call("add", '{"a": 1}'), "done")
    heard = tokenizer.decode(one.ids[~one.sampled])
    assert f"<tool_response>\n{told}" in heard
    assert "<tool_response>\n2\n</tool_response>" in heard
    assert [one.extra[name] for name in ("turns", "tool_calls", "tool_errors")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("turns", "cut", "expected"),
    [
        (('<tool_call>\n{"name": "add", "argu',), False, (0, 0, 1, "stop")),
        ((call("add", '{"a": 2}'),), True, (0, 0, 0, "length")),
        (("",), False, (0, 0, 0, "stop")),
        ((call("add", '{"a": 2}'), call("add", '{"a": 3}'), "4"), False, (2, 1, 0, "stop")),
    ],
)
def test_a_conversation_ends_with_an_answer_that_calls_nothing_or_is_cut_off(tools, turns, cut, expected):
    """The last of these calls once more than the conversation may."""
    _, one = played(tools, *turns, cut=cut, calls=1)
    assert (*(one.extra[name] for name in ("tool_calls", "tool_errors", "broken_calls")), one.finish) == expected
    assert one.extra["turns"] == len(turns)


def test_tools_describe_themselves_by_annotations_and_docstrings(tools):
    add, sleep, _ = (tool["function"] for tool in tools.described)
    assert add["description"] == "Adds two numbers."
    assert add["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    }
    assert sleep["parameters"]["properties"] == {
        "seconds": {"type": "number"},
        "how": {"enum": ["well", "badly"]},
        "words": {"type": "array", "items": {"type": "string"}},
    }


@pytest.mark.parametrize("fresh", [False, True])
def test_a_fresh_process_remembers_nothing(folder, fresh):
    made = Tools(["tool_functions:remember"], processes=1, fresh=fresh)
    results = [made.call(ToolCall(name="remember", arguments={"word": word})).text for word in "ab"]
    made.close()
    assert results == ['["a"]', '["b"]' if fresh else '["a", "b"]']


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["tool_functions:missing"], "'tool_functions:missing' cannot be loaded"),
        (["tool_functions:add_again"], "has no name to call it by"),
        (["tool_functions:add", "tool_functions:add"], "two tools are named 'add'"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(folder, paths, told):
    with pytest.raises(InvalidRun, match=told):
        Tools(paths, processes=1)


def test_a_row_asks_by_a_text_by_messages_or_by_a_conversation_without_its_answer():
    answered = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
    for row in ({"prompt": "What is 2 + 3?"}, {"prompt": answered[:1]}, {"messages": answered}):
        assert asked(Prompt(prompt_id="p", ids=(1,), row=row)) == (ASK,)
