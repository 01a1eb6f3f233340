"""An answer is read back as the message that the chat template would have written it from."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.training.data.errors import TemplateRefused
from bestiary.training.data.messages import Message, ToolCall
from bestiary.training.data.template import ChatTemplate, TemplateArguments
from bestiary.training.data.tool_calls import CallForm, _said

from .conftest import DAY, published_template

KINDS = {
    "qwen3": "object",
    "llama3_1": "object",
    "gptoss": "header",
    "glm4moe": "pairs",
    "qwen3_5_think": "pairs",
}
CONTROL = re.compile(r"<\|[^|<>]+\|>")


def template_of(name):
    text = published_template(name)
    return ChatTemplate(
        text,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        control=["</s>", *sorted(set(CONTROL.findall(text)))],
        arguments=TemplateArguments(date=DAY),
    )


TEMPLATES = {name: template_of(name) for name in KINDS}
words = st.text("abc XYZ\"{}\\é漢,:'", max_size=12).map(str.strip)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
values = st.one_of(words, st.integers(-99, 99), st.booleans(), st.lists(st.integers(0, 9), max_size=3))
TYPES = {str: "string", int: "integer", bool: "boolean", list: "array"}


def described(call):
    types = {name: {"type": TYPES[type(value)]} for name, value in call.arguments.items()}
    return {"type": "function", "function": {"name": call.name, "parameters": {"properties": types}}}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(
    calls=st.lists(st.builds(ToolCall, name=names, arguments=st.dictionaries(names, values, max_size=3)), max_size=3),
    content=words,
)
def test_reading_is_the_inverse_of_writing(name, calls, content):
    if name in ("llama3_1", "gptoss"):  # one call, in place of content
        calls, content = calls[:1], "" if calls else content
    if name == "llama3_1" and content.startswith("{"):
        content = "x" + content
    calls = list({call.name: call for call in calls}.values())
    template = TEMPLATES[name]
    form = CallForm.of(template)
    assert form.kind == KINDS[name]
    message = Message(role="assistant", content=content, tool_calls=tuple(calls))
    read = form.read(_said(template, message), [described(call) for call in calls])
    assert read.message == message
    assert not read.broken


@pytest.mark.parametrize(
    ("name", "text", "calls", "content", "reasoning"),
    [
        (
            "qwen3",
            '<think>\nhm\n</think>\nA.<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
            1,
            "A.",
            "hm",
        ),
        ("qwen3", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}', 1, "", None),
        (
            "gptoss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}',
            1,
            "<|channel|>commentary",
            "hm",
        ),
        ("gptoss", "<|channel|>final<|message|>So.", 0, "So.", None),
        ("glm4moe", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", 1, "", None),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", 1, "", None),
        ("llama3_1", 'See {"name": "f", "parameters": {}}', 0, 'See {"name": "f", "parameters": {}}', None),
        ("qwen3", "", 0, "", None),
    ],
)
def test_what_models_write_is_read_laxly(name, text, calls, content, reasoning):
    read = CallForm.of(TEMPLATES[name]).read(text)
    assert [(one.name, one.arguments) for one in read.message.tool_calls] == [("f", {"a": 1})] * calls
    assert (read.message.content, read.message.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", 'Well. <tool_call>\n{"name": "f", "arguments": {"a"'),
        ("qwen3", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("qwen3", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("gptoss", " to=functions.f<|message|>nothing"),
        ("glm4moe", "<tool_call>f\n<arg_key>a</arg_key>"),
        ("qwen3_5_think", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ],
)
def test_an_opening_without_a_call_is_told_and_calls_nothing(name, text):
    read = CallForm.of(TEMPLATES[name]).read(text)
    assert read.broken
    assert read.message.tool_calls == ()
    assert read.message.content == text.strip()


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text() | st.text('<tool_call>{}"name:arguments/fto=functions. \n|', max_size=60))
def test_whatever_a_model_writes_is_read(name, text):
    CallForm.of(TEMPLATES[name]).read(text)


def test_a_template_whose_calls_have_another_form_is_refused():
    with pytest.raises(TemplateRefused, match="no form that can be read back"):
        CallForm.of(template_of("gemma4"))
