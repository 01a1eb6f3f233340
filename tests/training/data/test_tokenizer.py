"""The tokenizer layer: the ids of AutoTokenizer, one BOS, a pad token that stops nothing, a fingerprint that tells."""

import json
import shutil

import numpy as np
import pytest
import quicktok
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bestiary.bridges.errors import OfflineError
from bestiary.training.data.errors import FingerprintChanged, TokenizerRefused
from bestiary.training.data.fingerprint import PROBES, Fingerprint
from bestiary.training.data.messages import Message
from bestiary.training.data.template import TemplateArguments
from bestiary.training.data.tokenizer import BaseHFModelTokenizer

FAMILIES = ("qwen3", "gemma3", "gptoss", "llama3.1", "smollm")
TALK = (Message(role="user", content="Hi."), Message(role="assistant", content="Yes?"))
# Texts that tokenizers have disagreed on: accents that compose, jamo, joined emoji, line ends, spaces, controls.
TEXTS = st.text(
    st.sampled_from("ab Z09.,'\n\r\t\u0301\u1112\u1161\u200d\N{MAN}\N{THUMBS UP SIGN}\u00a0\u2581中<|>\0"), max_size=40
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(text=TEXTS)
def test_auto_tokenizer_equals_the_raw_file(tokenizer_of, tokenizer_folder, family, text):
    """transformers rebuilds some tokenizers by their class; the ids must be those of tokenizer.json itself."""
    raw = RAW.setdefault(family, None) or Tokenizer.from_file(str(tokenizer_folder(family) / "tokenizer.json"))
    RAW[family] = raw
    tokenizer = tokenizer_of(family)
    for one in (text, *PROBES):
        assert tokenizer.hf(one, add_special_tokens=False).input_ids == raw.encode(one, add_special_tokens=False).ids


RAW: dict[str, Tokenizer] = {}


@pytest.mark.parametrize(
    ("family", "engine"), [("qwen3", "qwen3"), ("gptoss", "o200k_harmony"), ("llama3.1", "llama3")]
)
@settings(max_examples=100)
@given(text=TEXTS)
def test_an_independent_engine_gives_the_same_ids(tokenizer_of, family, engine, text):
    other = quicktok.get_encoding(engine)
    for one in (text, *PROBES):
        if "<" not in one:  # it knows fewer added tokens
            assert tokenizer_of(family).encode_text(one, bos=False).tolist() == list(other.encode(one))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pad_token_is_no_stop_token_and_not_the_beginning(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    assert tokenizer.pad_id not in tokenizer.stop_ids | {tokenizer.bos_id}


def test_a_pad_token_that_stops_is_refused(tokenizer_of):
    with pytest.raises(TokenizerRefused, match=r"pad_token = '<\|im_end\|>' is a stop token"):
        BaseHFModelTokenizer(tokenizer_of("smollm").hf, pad_token="<|im_end|>")


def test_stop_tokens_are_what_ends_an_answer_and_a_call(tokenizer_of):
    tokenizer = tokenizer_of("gptoss")
    assert tokenizer.stop_ids == {tokenizer.id_of("<|return|>"), tokenizer.id_of("<|call|>")}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_one_bos_on_every_way_in(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    wanted = 1 if family in {"gemma3", "llama3.1"} else 0
    rendered = tokenizer.chat.render(TALK)
    ways = {
        "text": tokenizer.encode_text("Hi."),
        "prompt": tokenizer.prompt_ids(TALK[:1]),
        "rendered": tokenizer.encode_rendered(rendered),
        "rendered and encoded as text": tokenizer.encode_text(rendered, neutralise=False),
        "without its BOS": tokenizer.encode_rendered(rendered.removeprefix(tokenizer.hf.bos_token or "\0")),
    }
    bos = tokenizer.bos_id if tokenizer.adds_bos else -1
    assert {way: int((ids == bos).sum()) for way, ids in ways.items()} == dict.fromkeys(ways, wanted)


def test_a_second_bos_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("gemma3")
    with pytest.raises(TokenizerRefused, match=r"second beginning-of-sequence token \(id 2\) at position 1"):
        tokenizer.encode_rendered("<bos>" + tokenizer.chat.render(TALK))


def test_bos_in_plain_text_stays_text(tokenizer_of):
    tokenizer = tokenizer_of("gemma3")
    ids = tokenizer.encode_text("<bos>a<eos>")
    assert (ids == tokenizer.bos_id).sum() == 1
    assert tokenizer.decode(ids) == "<bos><bos>a<eos>"


def test_an_id_without_a_row_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("gemma3")
    with_rows = BaseHFModelTokenizer(tokenizer.hf, vocab_rows=262144)
    with pytest.raises(TokenizerRefused, match="token id 262144"):
        with_rows.encode_text("<image_soft_token>", neutralise=False)


def test_decoding_changes_no_space(tokenizer_of):
    for family in FAMILIES:
        text = "it 's , said n't . fine ?  two"
        assert tokenizer_of(family).decode(tokenizer_of(family).encode_text(text, bos=False)) == text


def test_state_that_others_left_in_the_engine_does_not_leak(tokenizer_of):
    tokenizer = tokenizer_of("smollm")
    before = tokenizer.encode_text("one two three four five six")
    tokenizer.hf(["a b c", "a"], padding=True, truncation=True, max_length=2, split_special_tokens=True)
    assert np.array_equal(tokenizer.encode_text("one two three four five six"), before)


def test_a_fingerprint_survives_json_and_accepts_itself(tokenizer_of, tmp_path):
    mark = tokenizer_of("smollm").fingerprint
    mark.save(tmp_path / "f.json")
    mark.require(Fingerprint.load(tmp_path / "f.json"), "f.json")
    other = mark.model_copy(update={"versions": {**mark.versions, "tokenizers": "0.1"}})
    mark.require(other, "another version that does the same")


def test_a_file_that_is_no_fingerprint_is_refused(tmp_path):
    (tmp_path / "f.json").write_text("{}")
    with pytest.raises(FingerprintChanged, match="not a tokenizer fingerprint"):
        Fingerprint.load(tmp_path / "f.json")


def test_a_fingerprint_says_what_changed(tokenizer_of, tokenizer_folder, tmp_path):
    """The same vocabulary under another normaliser: other ids for accents, the rest as before."""
    stored = tokenizer_of("smollm").fingerprint
    made = tmp_path / "other"
    shutil.copytree(tokenizer_folder("smollm"), made, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((made / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFC"}
    (made / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    template = (made / "chat_template.jinja").read_text(encoding="utf-8").replace("named SmolLM", "named Small")
    (made / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(FingerprintChanged) as caught:
        BaseHFModelTokenizer.from_pretrained(made, fingerprint=stored)
    told = str(caught.value)
    assert "tokenizer file" in told
    assert "chat template" in told
    assert f"token ids of {PROBES[2]!r}" in told
    assert f"token ids of {PROBES[0]!r}" not in told


def test_a_config_beside_the_files_changes_no_id(tokenizer_of, tokenizer_folder, tmp_path):
    """transformers picks the tokenizer's class by config.json where there is one."""
    alone = tmp_path / "alone"
    shutil.copytree(tokenizer_folder("smollm"), alone, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    assert (tokenizer_folder("smollm") / "config.json").is_file()
    BaseHFModelTokenizer.from_pretrained(alone, fingerprint=tokenizer_of("smollm").fingerprint)


def test_template_arguments_are_part_of_the_fingerprint(tokenizer_of):
    tokenizer = tokenizer_of("gptoss")
    later = BaseHFModelTokenizer(
        tokenizer.hf,
        chat_template=tokenizer.chat.source,
        arguments=TemplateArguments(date="2025-08-06"),
        source=tokenizer.source,
    )
    changed = later.fingerprint.differences(tokenizer.fingerprint)
    assert len(changed) == 2
    assert '"date":"2025-08-05"' in changed[0]
    assert changed[1] == "token ids of a small conversation"


def test_a_tokenizer_of_the_hub_is_the_one_of_its_files_and_known_by_its_name(
    tokenizer_of, tokenizer_folder, tmp_path, monkeypatch
):
    place = tmp_path / "models--word"
    shutil.copytree(tokenizer_folder("smollm"), place / "snapshots" / ("e" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("e" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    made, local = BaseHFModelTokenizer.from_pretrained("word"), tokenizer_of("smollm")
    assert (made.source, made.hf.name_or_path) == ("word", "word")
    assert made.fingerprint.probes == local.fingerprint.probes
    assert made.fingerprint.chat == local.fingerprint.chat
    with pytest.raises(OfflineError):
        BaseHFModelTokenizer.from_pretrained("another")
