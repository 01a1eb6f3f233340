"""Reward models between the Hub and bestiary: one rule for every family, from transformers' own naming.

`architectures` of a config.json decides: `…ForSequenceClassification` is the family's decoder under a score head. The
backbone lies under the names it has in the causal checkpoint, the head as `score.weight` (num_labels, H), and
`num_labels` is the length of `id2label`, 2 where a file states neither, as transformers has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from bestiary.bridges.errors import NoScoreClass, UnsupportedLoad
from bestiary.bridges.fields import HFFields
from bestiary.models.config import DecoderConfig, HeadKind

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge

SCORE_WEIGHT = "score.weight"
_CLASS = "ForSequenceClassification"
_DEFAULT_LABELS = 2  # of transformers' PreTrainedConfig
_LABELS = ("num_labels", "id2label", "label2id")


class FreshHeadWarning(UserWarning):
    """A score head that no checkpoint holds was drawn at random: its scores mean nothing before training."""


def score_class(bridge: Bridge) -> str:
    """Name of the class in transformers that is the family under a score head, from the table of its auto classes.

    Raises:
        NoScoreClass: the installed transformers has none (Granite, OLMoE, Cohere 2, …).
        ImportError: transformers' modelling files are out of reach.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as known

    found: str | None = known.get(bridge.model_type)
    if found is None:
        raise NoScoreClass(
            f"{bridge.model_type} with a score head: transformers {version('transformers')} has no {_CLASS} of this "
            "family, so nothing could be verified and no checkpoint be read by others.",
            remedy="take a family that has one, e.g. qwen3, llama, gemma3_text; "
            "or train bestiary's model from its DecoderConfig with head=HeadKind.SCORE and keep model.state_dict()",
        )
    return found


def check_score_class(bridge: Bridge) -> None:
    """Refuse a family without a class for scores, where the table can be read at all.

    Raises:
        NoScoreClass: see `score_class`.
    """
    try:
        score_class(bridge)
    except ImportError:  # a process that runs our models alone: whoever wrote the checkpoint asked the table
        return


def is_score_architecture(json: Mapping[str, Any]) -> bool:
    """Whether the `architectures` of a config.json name a classifier of sequences."""
    names = json.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_CLASS) for name in names)


def read_head(bridge: Bridge, decoder: DecoderConfig, hf: HFFields) -> DecoderConfig:
    """`decoder` with the head that the file names.

    Raises:
        UnsupportedConfig: labels that contradict each other, or none.
        NoScoreClass: a family without a class for scores.
    """
    if not is_score_architecture(hf.json):
        return decoder
    check_score_class(bridge)
    names, stated = hf.json.get("id2label"), hf.json.get("num_labels")
    if names is not None and not isinstance(names, dict):
        raise hf.unsupported("id2label", "is no object.", remedy='{"0": "LABEL_0"} for one label')
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int)):
        raise hf.unsupported("num_labels", "is no integer.", remedy="the number of rows of score.weight")
    if names is not None and stated is not None and len(names) != stated:
        raise hf.unsupported("num_labels", f"contradicts id2label, which has {len(names)}.", remedy="keep id2label")
    count = len(names) if names is not None else _DEFAULT_LABELS if stated is None else stated
    if count < 1:
        name = "num_labels" if names is None else "id2label"
        raise hf.unsupported(name, "leaves a score head without a label.", remedy="at least one label")
    return decoder.with_(head=HeadKind.SCORE, num_labels=count)


def head_to_hf(bridge: Bridge, config: DecoderConfig, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that state the head; `kept` are those that the checkpoint had."""
    if config.head is HeadKind.LM:
        return {"architectures": [bridge.architecture]}
    try:
        architecture = score_class(bridge)
    except ImportError as error:
        raise UnsupportedLoad(
            f"a score head is saved under the name of transformers' class, which cannot be looked up ({error}).",
            remedy="install transformers",
        ) from error
    names = kept.get("id2label")
    if not isinstance(names, dict) or len(names) != config.num_labels:
        names = {str(index): f"LABEL_{index}" for index in range(config.num_labels)}
    return {
        "architectures": [architecture],
        "id2label": names,
        "label2id": {name: int(index) for index, name in names.items()},
    }


def without_labels(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint said besides its labels."""
    return {name: value for name, value in kept.items() if name not in _LABELS}


def with_head(bridge: Bridge, config: DecoderConfig, asked: str | None, *, src: str) -> tuple[DecoderConfig, bool]:
    """The config of the model that was asked for, and whether its head is fresh.

    Args:
        config: of the checkpoint.   asked: "lm", "score", or None for the checkpoint's own.
    Raises:
        UnsupportedLoad: no such head, a language-model head of a reward model, or a family without a class for scores.
    """
    if asked is None or asked == config.head:
        return config, False
    if asked not in list(HeadKind):
        raise UnsupportedLoad(f"head = {asked!r}.", remedy=f"one of {', '.join(HeadKind)}, or None for the file's own")
    if asked == HeadKind.LM:
        raise UnsupportedLoad(
            f'head = "lm", and {src} is a reward model, which holds no language-model head.',
            remedy="load the causal checkpoint it was trained from",
        )
    check_score_class(bridge)
    return config.with_(head=HeadKind.SCORE), True


def warn_fresh(src: str) -> None:
    """Say that the scores of the model that is returned mean nothing yet."""
    warnings.warn(
        f"{src} holds no score head: {SCORE_WEIGHT} was drawn at random (by torch's seed). Train it before use.",
        FreshHeadWarning,
        stacklevel=6,
    )
