"""The result of a run in Hugging Face's layout: from the model at its end, or from any of its resume points."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from bestiary.bridges import FreshHeadWarning
from bestiary.models import AutoDecoder, Decoder
from bestiary.models.config import HeadKind
from bestiary.training.checkpoint import STATE, check_frozen, read_tensors, verify
from bestiary.training.config import CommonConfig, read_config
from bestiary.training.data.fingerprint import Fingerprint
from bestiary.training.data.tokenizer import BaseHFModelTokenizer

CONFIG = "config.yaml"
FINGERPRINT = "bestiary_tokenizer.json"


def load_tokenizer(config: CommonConfig, model: Decoder) -> BaseHFModelTokenizer:
    """The run's tokenizer, whose ids all have a row in the model's embedding.

    Raises:
        TokenizerRefused.
    """
    rows = config.data.tokenizer.vocab_rows or model.decoder_config.vocab_size
    return config.data.tokenizer.model_copy(update={"vocab_rows": rows}).load()


def write_result(
    model: Decoder, tokenizer: BaseHFModelTokenizer, folder: Path, *, first: bool = True, **options: Any
) -> Path:
    """Write model and tokenizer; all processes of a spread model call it, the `first` one writes the tokenizer.

    Whoever loads them renders the template that was trained on, and stops where the model learnt to: a base model's
    generation config knows the end of a text and not that of a turn.

    Args:
        options: of `save_pretrained`.
    """
    if model.decoder_config.head is HeadKind.LM:
        generation = model.generation_config
        known = [] if generation.eos_token_id is None else generation.eos_token_id
        known = [known] if isinstance(known, int) else list(known)
        if unknown := sorted(tokenizer.stop_ids.difference(known)):
            generation.eos_token_id = [*known, *unknown]
    written = model.save_pretrained(folder, **options)
    if first:
        tokenizer.save_pretrained(folder)
        tokenizer.fingerprint.save(folder / FINGERPRINT)
    return written


class _Read(CommonConfig):
    """A run's file whatever the run trains by: what is its alone is not looked at."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def load_resume_point(place: Path) -> tuple[Decoder, BaseHFModelTokenizer]:
    """The model of a resume point, whole in this process whatever wrote it, and the run's tokenizer.

    Args:
        place: `OUT/checkpoints/step-…`; the run's `config.yaml` says base, adapters and dtype.
    Raises:
        CheckpointRefused: damaged, or its base is no longer the same.   InvalidRun: the run's file.
        FingerprintChanged: the tokenizer is no longer the same.
    """
    config = read_config(_Read, place.absolute().parents[1] / CONFIG)
    verify(place, remedy="another resume point of the run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FreshHeadWarning)  # the head of the run is read into it below
        model = AutoDecoder.from_pretrained(
            config.model.src,
            revision=config.model.revision,
            dtype=config.precision.parameters,
            lora=config.adapters,
            head="score" if config.recipe == "reward" else None,
        )
    read_tensors(place, model, None)
    state = json.loads((place / STATE).read_text(encoding="utf-8"))
    check_frozen(state, model, place)
    tokenizer = load_tokenizer(config, model)
    now = tokenizer.fingerprint
    now.require(Fingerprint(**state["bound"]["tokenizer"], versions=now.versions), str(place / STATE))
    return model, tokenizer
