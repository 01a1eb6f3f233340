"""What a run exports says what was trained: the template that was rendered, the tokens that end an answer."""

import json
from dataclasses import replace

import torch

from bestiary.models import AutoDecoder, Qwen3
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.export import write_result

from ..models.tiny import tiny_config
from .data.test_spaces import TEMPLATE, made

TURNS = TEMPLATE.replace("eos_token if", "'<|end|>' if")


def base(**stops):
    """A base model: what ends its generation is the end of a text."""
    config = tiny_config("qwen3", vocab_size=400)
    config = config.with_(attention=replace(config.attention, scale=config.attention.head_dim**-0.5))
    model = Qwen3(config, dtype=torch.float32)
    model.hf_generation_config_json = {"do_sample": True, **stops}
    return model


def test_an_exported_model_stops_where_it_learnt_to(tmp_path):
    """The template's end of turn joins the end of text; nothing else of the generation config moves."""
    tokenizer = made("first", "<|end|>", chat_template=TURNS)
    end, text = tokenizer.id_of("<|end|>"), tokenizer.eos_id
    for name, known in (("one", text), ("several", [text]), ("whole", [end, text]), ("none", None)):
        model = base(**({} if known is None else {"eos_token_id": known}))
        write_result(model, tokenizer, tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert written["eos_token_id"] == ([end, text] if name == "whole" else sorted({text, end})), name
        assert written["do_sample"] is True
        again = AutoDecoder.from_pretrained(tmp_path / name)
        assert set(again.generation_config.eos_token_id) == tokenizer.stop_ids


def test_an_exported_tokenizer_renders_what_was_trained(tmp_path):
    """A template that replaced the checkpoint's own, or stood where there was none; a resume of the export agrees."""
    tokenizer = made("first", "<|end|>", chat_template=TURNS)
    write_result(base(), tokenizer, tmp_path / "export")
    again = BaseHFModelTokenizer.from_pretrained(tmp_path / "export")
    assert again.fingerprint.template == tokenizer.fingerprint.template
    assert again.fingerprint.chat == tokenizer.fingerprint.chat
    assert again.stop_ids == tokenizer.stop_ids
