"""What of a conversation is trained: exactly what serving lets the model say, its stop token and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.training.data.chat import Conversation, encode_chat, encode_chats, refuse_useless
from bestiary.training.data.errors import MaskRefused, TemplateRefused
from bestiary.training.data.masks import TrainOn
from bestiary.training.data.messages import Message
from bestiary.training.data.skeleton import Skeletons
from bestiary.training.data.template import ChatTemplate, TemplateArguments
from bestiary.training.data.tokens import IGNORED
from bestiary.training.data.turns import lay_out

FAMILIES = ("qwen3", "qwen3:nothink", "gemma3", "gptoss", "llama3.1", "smollm", "qwen3:qwen2_5", "llama3.1:llama3")
STOP = {
    "qwen3": "<|im_end|>",
    "qwen3:nothink": "<|im_end|>",
    "qwen3:qwen2_5": "<|im_end|>",
    "smollm": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "llama3.1": "<|eot_id|>",
    "llama3.1:llama3": "<|eot_id|>",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
        },
    }
]


def user(text):
    return Message(role="user", content=text)


def assistant(text="", **more):
    return Message(role="assistant", content=text, **more)


TALK = (user("Hi there."), assistant("Hello."), user("One plus one?"), assistant("Two."))
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
TOOL_TALK = (
    user("Weather?"),
    assistant(tool_calls=[CALL]),
    Message(role="tool", content="sunny", name="get_weather"),
    assistant("It is sunny."),
)


def trained(tokenizer, encoded):
    """The trained runs of tokens as text."""
    edges = np.flatnonzero(np.diff(np.r_[0, encoded.loss_mask.astype(int), 0]))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(encoded.input_ids[a:b]) for a, b in pairs]


# What each family's model says in the two turns of TALK.
SAID = {
    "qwen3": ["Hello.<|im_end|>", "<think>\n\n</think>\n\nTwo.<|im_end|>"],
    # <|end|> closes harmony's earlier turns and is never generated there: the model would generate <|return|>.
    "gptoss": ["<|channel|>final<|message|>Hello.", "<|channel|>final<|message|>Two.<|return|>"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_assistant_turn_is_trained_with_its_stop_token(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    said = SAID.get(family, [f"{text}{STOP[family]}" for text in ("Hello.", "Two.")])
    assert trained(tokenizer, encode_chat(tokenizer, TALK)) == said


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_before_the_loss_are_what_serving_sends(tokenizer_of, family):
    """transformers' own rendering of the prompt, and its ids, stand before what is trained of the last turn."""
    tokenizer = tokenizer_of(family)
    encoded = encode_chat(tokenizer, TALK, train_on=TrainOn(turns="last"))
    before = encoded.input_ids[: int(np.argmax(encoded.loss_mask))]
    messages = [tokenizer.chat.as_dict(message) for message in TALK[:-1]]
    arguments = tokenizer.chat.arguments
    clock = {"strftime_now": lambda form: arguments.date.strftime(form), "date_string": "05 Aug 2025"}
    options = arguments.given() | (clock if arguments.date else {})
    sent = tokenizer.hf.apply_chat_template(
        messages, add_generation_prompt=True, chat_template=tokenizer.chat.source, return_dict=False, **options
    )
    assert before.tolist() == sent
    assert tokenizer.prompt_ids(TALK[:-1]).tolist() == sent


@pytest.mark.parametrize("family", ["qwen3:qwen2_5", "smollm"])
def test_a_token_never_reaches_from_the_prompt_into_the_answer(tokenizer_of, family):
    """Encoding the whole text at once would join the header's line end and the answer's; serving cannot."""
    tokenizer = tokenizer_of(family)
    talk = (user("Q"), assistant("\n\nA"))
    joined = tokenizer.encode_rendered(tokenizer.chat.render(talk)).tolist()
    encoded = encode_chat(tokenizer, talk)
    sent = tokenizer.prompt_ids(talk[:1]).tolist()
    assert joined[: len(sent)] != sent
    assert encoded.input_ids[: int(np.argmax(encoded.loss_mask))].tolist() == sent
    assert trained(tokenizer, encoded) == ["\n\nA<|im_end|>"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_is_byte_for_byte_what_the_template_renders(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    encoded = encode_chat(tokenizer, TALK)
    assert tokenizer.decode(encoded.input_ids) == tokenizer.chat.render(TALK)


@pytest.mark.parametrize("family", ["qwen3", "smollm", "gptoss"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_text_is_found_again(tokenizer_of, family, data):
    """Whatever people write, control tokens included, the trained text is what the last turn renders to."""
    tokenizer = tokenizer_of(family)
    words = st.sampled_from(
        ["a", " ", "\n", "\n\n", "<|im_end|>", "<|end|>", "<think>", "Ω", "\N{GRINNING FACE}", "</s>"]
    )
    text = st.lists(words, min_size=1, max_size=6).map("".join)
    question, answer = data.draw(text), data.draw(text.filter(lambda one: "think" not in one))
    talk = [user(question), assistant(answer)]
    prompt = tokenizer.chat.render(talk[:1], prompt=True)
    (said,) = trained(tokenizer, encode_chat(tokenizer, talk))
    assert tokenizer.chat.render(talk).startswith(prompt + said)
    assert said.endswith(STOP[family])


def test_a_tool_call_is_trained_and_its_result_is_not(tokenizer_of):
    calls = {
        "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "llama3.1": '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>',
        "gptoss": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    }
    for family, call in calls.items():
        tokenizer = tokenizer_of(family)
        encoded = encode_chat(tokenizer, TOOL_TALK, TOOLS)
        assert trained(tokenizer, encoded)[0] == call
        assert [turn.role for turn in encoded.turns] == ["user", "assistant", "tool", "assistant"]
        without = trained(tokenizer, encode_chat(tokenizer, TOOL_TALK, TOOLS, train_on=TrainOn(tool_calls=False)))
        assert "Paris" not in "".join(without)


def test_a_template_that_leaves_tools_out_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    with pytest.raises(TemplateRefused, match="row 7: message 1 calls a tool, and the chat template does not show it"):
        encode_chat(tokenizer, TOOL_TALK, where="row 7")
    with pytest.raises(TemplateRefused, match="the tool 'get_weather' is given"):
        encode_chat(tokenizer, TALK, TOOLS)


THOUGHT = (user("One plus one?"), assistant("Two.", reasoning="Count."))


def test_reasoning_is_trained_or_left_out(tokenizer_of):
    for family, thought, answer in (
        ("qwen3", "<think>\nCount.\n</think>\n\n", "Two.<|im_end|>"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>Count.<|end|><|start|>assistant",
            "<|channel|>final<|message|>Two.<|return|>",
        ),
    ):
        tokenizer = tokenizer_of(family)
        assert trained(tokenizer, encode_chat(tokenizer, THOUGHT)) == [thought + answer]
        assert trained(tokenizer, encode_chat(tokenizer, THOUGHT, train_on=TrainOn(reasoning=False))) == [answer]


def test_an_empty_think_block_that_the_prompt_supplies_is_not_trained(tokenizer_of):
    assert trained(tokenizer_of("qwen3:nothink"), encode_chat(tokenizer_of("qwen3:nothink"), TALK)) == [
        "Hello.<|im_end|>",
        "Two.<|im_end|>",
    ]


def test_reasoning_contradicts_a_prompt_that_ends_it(tokenizer_of):
    with pytest.raises(TemplateRefused, match="says there is none"):
        encode_chat(tokenizer_of("qwen3:nothink"), THOUGHT)


def test_reasoning_that_no_template_shows_is_refused(tokenizer_of):
    with pytest.raises(TemplateRefused, match="no place for it"):
        encode_chat(tokenizer_of("smollm"), THOUGHT)


def test_reasoning_of_the_history_is_dropped_as_serving_drops_it(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    encoded = encode_chat(tokenizer, (*THOUGHT, user("Sure?"), assistant("Yes.", reasoning="Again.")))
    assert trained(tokenizer, encoded) == ["Two.<|im_end|>", "<think>\nAgain.\n</think>\n\nYes.<|im_end|>"]


def test_thinking_inside_the_content_is_the_template_s_business(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    encoded = encode_chat(tokenizer, (user("Q"), assistant("<think>\nlong enough\n</think>\n\nA")))
    assert trained(tokenizer, encoded) == ["<think>\nlong enough\n</think>\n\nA<|im_end|>"]


def test_chosen_turns_and_flags(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    for train_on, said in ((TrainOn(turns="last"), ["Two."]), (TrainOn(turns=(0,)), ["Hello."])):
        assert trained(tokenizer, encode_chat(tokenizer, TALK, train_on=train_on)) == [f"{said[0]}<|im_end|>"]
    flagged = [*TALK[:3], TALK[3].model_copy(update={"train": False})]
    assert trained(tokenizer, encode_chat(tokenizer, flagged)) == ["Hello.<|im_end|>"]
    with pytest.raises(MaskRefused, match="row 3: turns = \\[2\\]: the conversation has 2 assistant turns"):
        encode_chat(tokenizer, TALK, train_on=TrainOn(turns=(2,)), where="row 3")


def test_chosen_spans_are_trained_and_the_stop_token_with_the_end(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    text = "  Keep this, not that. "
    first, end = (text.index("Keep"), text.index(",")), (text.index(" that"), len(text))
    talk = (user("Q"), assistant(text, train_spans=(first,)))
    assert trained(tokenizer, encode_chat(tokenizer, talk)) == [" Keep this"]  # one token holds the space
    talk = (user("Q"), assistant(text.strip(), train_spans=((first[0] - 2, first[1] - 2), (end[0] - 2, len(text) - 3))))
    assert trained(tokenizer, encode_chat(tokenizer, talk)) == ["Keep this", " that.<|im_end|>"]


def test_an_empty_answer_trains_its_stop_token_alone(tokenizer_of):
    for family in ("qwen3:qwen2_5", "gemma3", "llama3.1", "smollm"):
        encoded = encode_chat(tokenizer_of(family), (user("Q"), assistant("")))
        assert trained(tokenizer_of(family), encoded) == [STOP[family]]


def test_a_conversation_may_begin_with_the_assistant(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    encoded = encode_chat(tokenizer, (assistant("Welcome."), user("Hi."), assistant("Yes?")))
    assert trained(tokenizer, encoded) == ["Welcome.<|im_end|>", "Yes?<|im_end|>"]


def test_a_mask_that_trains_nothing_names_the_sample(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    rows = [Conversation(TALK, None, "row 0"), Conversation((user("Q"),), None, "row 1")]
    with pytest.raises(MaskRefused, match=r"row 1: none of \d+ tokens is trained"):
        encode_chats(tokenizer, rows)


def test_a_mask_that_trains_everything_is_refused():
    with pytest.raises(MaskRefused, match="all 3 tokens are trained"):
        refuse_useless(np.ones(3, dtype=bool))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gptoss", "llama3.1", "smollm"])
def test_control_tokens_that_people_write_stay_text(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    bad = f"a{STOP[family]}b"
    plain, attacked = (encode_chat(tokenizer, (user(text), assistant("Ok."))) for text in ("ab", bad))
    stop = tokenizer.id_of(STOP[family])
    assert (attacked.input_ids == stop).sum() == (plain.input_ids == stop).sum()
    assert bad in tokenizer.decode(attacked.input_ids)
    assert trained(tokenizer, attacked) == trained(tokenizer, plain)


def test_control_tokens_in_tool_arguments_and_descriptions_stay_text(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    bad = [{"type": "function", "function": {**TOOLS[0]["function"], "description": "<|im_start|>system"}}]
    call = assistant(tool_calls=[{"name": "get_weather", "arguments": {"city": "<|im_end|>"}}])
    talk = (TOOL_TALK[0], call, *TOOL_TALK[2:])
    one, other = encode_chat(tokenizer, TOOL_TALK, TOOLS), encode_chat(tokenizer, talk, bad)
    for token in ("<|im_start|>", "<|im_end|>"):
        index = tokenizer.id_of(token)
        assert (one.input_ids == index).sum() == (other.input_ids == index).sum()
    assert '"city": "<|im_end|>"' in trained(tokenizer, other)[0]


def test_a_text_the_template_looks_into_is_followed(tokenizer_of):
    """Qwen3 takes a user's message in <tool_response> tags for a tool's; a mark in it must not change that."""
    tokenizer = tokenizer_of("qwen3")
    talk = (user("Q"), assistant("A", reasoning="r"), user("<tool_response>x</tool_response>"), assistant("B"))
    assert trained(tokenizer, encode_chat(tokenizer, talk))[0] == "<think>\nr\n</think>\n\nA<|im_end|>"


def test_a_stop_token_that_belongs_to_the_next_message_is_trained(tokenizer_of):
    """GLM's turns end where the next role begins; a model trained without that token never stops."""
    hf = tokenizer_of("smollm").hf
    text = "{% for m in messages %}{{ '<file_sep>' if m.role == 'user' else '<filename>' }}{{ m.content }}{% endfor %}"
    tokenizer = type(tokenizer_of("smollm"))(
        hf, chat_template=text + "{% if add_generation_prompt %}<filename>{% endif %}", pad_token="<gh_stars>"
    )
    encoded = encode_chat(tokenizer, TALK)
    assert trained(tokenizer, encoded) == ["Hello.<file_sep>", "Two.<|im_end|>"]
    assert {tokenizer.id_of("<file_sep>"), tokenizer.eos_id} <= tokenizer.stop_ids


def template(text, arguments=None):
    return ChatTemplate(text, special_tokens={}, control=["<s>", "</s>"], arguments=arguments or TemplateArguments())


CHATML = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"


def test_a_template_without_a_generation_prompt_is_refused():
    with pytest.raises(TemplateRefused, match="generation prompt is not an addition"):
        template(CHATML)


def test_a_template_whose_turns_no_control_token_ends_is_refused():
    with pytest.raises(TemplateRefused, match="no special token of the tokenizer ends"):
        template((CHATML + PROMPT).replace("</s>", "[/s]").replace("<s>", "[s]"))


def test_a_template_that_rewrites_texts_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    text = tokenizer.chat.source.replace("message['content']", "(message['content'] | replace('abab', 'x'))")
    other = type(tokenizer)(tokenizer.hf, chat_template=text)
    with pytest.raises(TemplateRefused, match="renders other text when a text in it gets a mark"):
        encode_chat(other, (user("Q"), assistant("abab")))


def test_an_argument_that_the_template_never_reads_is_refused():
    with pytest.raises(TemplateRefused, match="enable_thinking = True is never read"):
        template(CHATML + PROMPT, TemplateArguments(enable_thinking=True))


def test_a_template_that_prints_the_date_needs_one(tokenizer_of):
    source = tokenizer_of("gptoss").chat.source
    with pytest.raises(TemplateRefused, match="prints today's date"):
        template(source.replace("<|return|>", "</s>"))


def test_labels_are_the_tokens_where_trained(tokenizer_of):
    encoded = encode_chat(tokenizer_of("smollm"), TALK)
    tokens = encoded.tokens()
    assert tokens.labels.dtype == tokens.input_ids.dtype == np.int32
    assert (tokens.labels[encoded.loss_mask] == tokens.input_ids[encoded.loss_mask]).all()
    assert (tokens.labels[~encoded.loss_mask] == IGNORED).all()


def test_turns_lie_side_by_side_and_cover_the_text(tokenizer_of):
    encoded = encode_chat(tokenizer_of("qwen3"), TOOL_TALK, TOOLS)
    edges = [turn.start for turn in encoded.turns] + [encoded.turns[-1].end]
    assert edges[0] == 0
    assert edges[-1] == len(encoded.input_ids)
    assert all(turn.end == after for turn, after in zip(encoded.turns, edges[1:], strict=True))


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "gemma3", "smollm"])
@settings(max_examples=30)
@given(data=st.data())
def test_a_recognised_form_gives_what_marks_give(tokenizer_of, family, data):
    """Layouts are found by marks once and recognised afterwards; both ways say the same of any text."""
    template = tokenizer_of(family).chat
    words = [
        "a",
        " ",
        "\n",
        "<think>",
        "</think>",
        "<tool_response>",
        "assistant",
        template.facts.generation_prompt,
        "Ω",
    ]
    text = st.lists(st.sampled_from(words), max_size=5).map("".join)
    talk = [user(data.draw(text)), assistant(data.draw(text)), user(data.draw(text)), assistant(data.draw(text))]
    template.skeletons = Skeletons()
    by_marks = layout_or_refusal(template, talk)
    template.skeletons = Skeletons()
    lay_out(template, TALK)
    lay_out(template, [*TALK[:3], assistant("")])
    assert layout_or_refusal(template, talk) == by_marks


def test_an_answer_that_spells_the_opening_of_reasoning_has_none(tokenizer_of):
    """It is content, whoever finds the layout."""
    template = tokenizer_of("qwen3").chat
    template.skeletons = Skeletons()
    turns = lay_out(template, [user("a"), assistant("<think>"), user("a"), assistant("")]).turns
    assert turns[1].parts.keys() == {"content", "stop"}
    assert turns[3].parts.keys() == {"reasoning", "stop"}


def layout_or_refusal(template, talk):
    try:
        return lay_out(template, talk)
    except TemplateRefused as error:
        return str(error)


def test_a_known_form_is_recognised(tokenizer_of, monkeypatch):
    template = tokenizer_of("qwen3").chat
    lay_out(template, TALK)
    monkeypatch.setattr("bestiary.training.data.turns._Marks", None)  # whoever asks for marks fails
    layout = lay_out(template, [user(" other\n"), assistant("Fine."), user("!"), assistant("Longer than before.")])
    parts = [layout.text[a:b] for turn in layout.turns for a, b in (turn.parts["content"],)]
    assert parts == ["other", "Fine.", "!", "Longer than before."]
