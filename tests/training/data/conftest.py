"""Real tokenizers, loaded once; those without a template of their own take the published one that trl ships."""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from bestiary.tools import assets, npm_assets
from bestiary.training.data.template import TemplateArguments
from bestiary.training.data.tokenizer import BaseHFModelTokenizer

DAY = "2025-08-05"


def published_template(name):
    """The text of a chat template in the trl wheel."""
    return (Path(find_spec("trl").origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def folder(name):
    """The folder of a tokenizer; where it was not fetched the test is skipped, and fails under CI=true."""
    try:
        return assets.checkpoint("smollm2-135m") if name == "smollm" else npm_assets.tokenizer_folder(name)
    except assets.AssetMissing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true and {missing}")
        pytest.skip(f"{missing.what} ({missing.remedy})")


@cache
def load(name):
    """A tokenizer by family; Qwen3 also without thinking, with a foreign template too."""
    base, _, variant = name.partition(":")
    options = {
        "gptoss": {"chat_template": "gptoss", "arguments": {"date": DAY}},
        "llama3.1": {"chat_template": "llama3_1", "arguments": {"date": DAY}},
        "qwen3:nothink": {"arguments": {"enable_thinking": False}},
    }.get(name, {"chat_template": variant} if variant else {})
    template = options.get("chat_template")
    return BaseHFModelTokenizer.from_pretrained(
        folder(base),
        chat_template=published_template(template) if template else None,
        arguments=TemplateArguments(**options.get("arguments", {})),
    )


@pytest.fixture(scope="session")
def tokenizer_of():
    return load


@pytest.fixture(scope="session")
def tokenizer_folder():
    return folder
