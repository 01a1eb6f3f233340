"""Tokenizers that put a space in front of every text (Llama 2, Mistral, Phi 3): none in the middle of a document."""

import json
import string

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bestiary.training.data.encode import RowEncoder
from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.messages import Message
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED
from bestiary.training.data.traps import template_warnings

TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}{{ eos_token if one.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HOW = ("prepend", "first", "always")


def made(how, *more, **options):
    """A small SentencePiece: bytes, letters, a few merges, its space in front by a normaliser or a pre-tokenizer.

    more: special tokens.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *string.ascii_letters, *string.digits, *"+=?:.,<>/", "▁4", "▁42", "42", "▁t"]
    merges = [("▁", "4"), ("▁4", "2"), ("4", "2"), ("▁", "t")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    engine = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if how == "prepend":
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence(steps)
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.add_special_tokens([*more])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return BaseHFModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=engine, **special), **options)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("prompt", "completion", "trained"),
    [
        ("20+22=", " 42", ["▁42", "</s>"]),
        ("20+22=", "42", ["42", "</s>"]),
        ("say: ", "to", ["t", "o", "</s>"]),
        ("", "42", ["▁42", "</s>"]),
    ],
)
def test_a_completion_goes_on_where_its_prompt_ends(how, prompt, completion, trained):
    """Nobody writes a space between the two; the prompt alone is what serving sends."""
    tokenizer = made(how)
    tokens = RowEncoder(tokenizer=tokenizer, kind="completion")({"prompt": prompt, "completion": completion})
    assert tokenizer.hf.convert_ids_to_tokens(tokens.labels[tokens.labels != IGNORED].tolist()) == trained
    asked = tokens.input_ids[tokens.labels == IGNORED].tolist()
    assert asked == ([tokenizer.bos_id] if not prompt else tokenizer.hf(prompt).input_ids)
    assert tokenizer.hf.decode(tokens.input_ids[1:-1]) == prompt + completion


@pytest.mark.parametrize("how", HOW)
def test_a_control_token_that_is_cut_apart_gets_no_space(how):
    """In plain text and in a conversation, whose masks still lie on the answer."""
    tokenizer = made(how, chat_template=TEMPLATE)
    said = "a </s> to"
    assert tokenizer.hf.decode(tokenizer.encode_text(said)[1:]) == said
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "42"}]
    tokens = RowEncoder(tokenizer=tokenizer, kind="chat")({"messages": messages})
    assert tokenizer.hf.decode(tokens.input_ids[1:]).startswith(f"user: {said}\nassistant: 42</s>")
    assert tokenizer.decode(tokens.labels[tokens.labels != IGNORED]).strip() == "42</s>"


def test_what_joins_the_line_break_before_it_is_refused():
    tokenizer = made("first")
    engine = json.loads(tokenizer.hf.backend_tokenizer.to_str())
    engine["model"]["vocab"] |= {name: 900 + place for place, name in enumerate(("\n", "\n\n"))}
    engine["model"]["merges"].append(["\n", "\n"])
    joined = BaseHFModelTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(engine)), eos_token="</s>", unk_token="<unk>"
        )
    )
    with pytest.raises(SampleRefused, match="joins to a line break"):
        RowEncoder(tokenizer=joined, kind="completion")({"prompt": "a", "completion": "\n42"})


def test_a_template_without_the_token_in_front_is_a_trap():
    """It is put in front of the ids; transformers' own rendering and servers leave it out."""
    tokenizer = made("first", chat_template=TEMPLATE)
    assert tokenizer.prompt_ids([Message(role="user", content="a")])[0] == tokenizer.bos_id
    assert any("begins without '<s>'" in text for text in template_warnings(tokenizer))
    whole = made("first", chat_template="{{ bos_token }}" + TEMPLATE)
    assert not any("begins without" in text for text in template_warnings(whole))


def test_a_tokenizer_is_written_with_the_template_that_it_renders(tmp_path):
    """Not with its own, of which a run that replaced it knows nothing."""
    tokenizer = made("first", chat_template=TEMPLATE)
    tokenizer.hf.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    assert tokenizer.hf.chat_template == "{{ messages }}"
