"""Errors of the bridges: what in a checkpoint or config cannot travel, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bestiary.kernels.errors import BestiaryError

_SHOWN = 8


class UnsupportedModelType(BestiaryError):
    """A `model_type` that no registered bridge serves.

    Remedy: write a bridge (`bestiary port new MODEL_TYPE`), or load with `backend="hf"`.
    """

    exit_code = 4


class RemoteCodeRefused(BestiaryError):
    """A checkpoint whose model exists only as code that comes with it, which nobody said to run.

    Remedy: read the code, then pass `trust_remote_code=True` and a `revision`; or use a newer transformers.
    """

    exit_code = 4


class NoDecoderConfig(BestiaryError, AttributeError):
    """`decoder_config` of a model that is not ours; an AttributeError, so that `hasattr` says False.

    Remedy: read `model.config`, or write a bridge for the family.
    """

    exit_code = 4

    def __init__(self, architecture: str) -> None:
        super().__init__(
            f"decoder_config: {architecture} runs on the fallback backend and is not described by a DecoderConfig.",
            remedy="read model.config (transformers'), or write a bridge for this family",
        )


class UnsupportedConfig(BestiaryError):
    """A field of an HF config whose value would change the computation and is not implemented.

    Remedy: add the field to the bridge, or load with `backend="hf"`.

    Attributes:
        field: its name in the config, dotted when nested.
        value: what it was set to.
    """

    exit_code = 4

    def __init__(self, field: str, value: Any, why: str, *, read_from: str, remedy: str) -> None:
        self.field, self.value = field, value
        super().__init__(f"{field} = {value!r} {why}", read_from=read_from, remedy=remedy)


class ConfigChanged(BestiaryError):
    """`model.config` no longer describes the model that is about to be saved.

    Remedy: set the field back, or build the model anew from a changed `DecoderConfig`.

    Attributes:
        fields: dotted names of the `DecoderConfig` fields that differ, or the HF name of a switch or type.
    """

    def __init__(self, fields: Iterable[str], *, what: str) -> None:
        self.fields = tuple(fields)
        super().__init__(
            what,
            read_from="model.config",
            remedy="set the field back, or build the model anew from a changed DecoderConfig",
        )


class KeyMismatch(BestiaryError):
    """The tensors of a checkpoint and the parameters of a model do not correspond one to one.

    Remedy: use the config.json that belongs to the weights, or extend the rules of the bridge.

    Attributes:
        missing: names the model needs and the checkpoint lacks.
        extra: names the checkpoint holds and no rule consumes.
        ambiguous: names that arrive twice, or in two layouts at once.
        mismatched: names whose shape or dtype is not the expected one, with both.
    """

    exit_code = 2

    def __init__(
        self,
        *,
        missing: Iterable[str] = (),
        extra: Iterable[str] = (),
        ambiguous: Iterable[str] = (),
        mismatched: Iterable[str] = (),
        read_from: str | None = None,
        remedy: str = "use the config.json that belongs to these weights, or extend the rules of the bridge",
    ) -> None:
        self.missing, self.extra = tuple(missing), tuple(extra)
        self.ambiguous, self.mismatched = tuple(ambiguous), tuple(mismatched)
        lines = ["the checkpoint's tensors do not match the model's parameters."]
        for kind in ("missing", "extra", "ambiguous", "mismatched"):
            names: tuple[str, ...] = vars(self)[kind]
            if names:
                shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
                lines.append(f"  {kind:<11} {len(names)}: {shown}")
        super().__init__("\n".join(lines), read_from=read_from, remedy=remedy)


class InvalidRules(BestiaryError):
    """Rules of a bridge that are not injective, or a pattern that cannot be inverted.

    Remedy: make each rule reach every hub tensor and every parameter exactly once.
    """

    exit_code = 2


class CorruptCheckpoint(BestiaryError):
    """A checkpoint file that is truncated, damaged or contradicts its index.

    Remedy: fetch the file again; compare its size and hash with the hub's.
    """

    exit_code = 2


class MissingShard(CorruptCheckpoint):
    """A shard named by the index that is not there.

    Remedy: fetch the shards that the index names.
    """


class TiedHeadMismatch(BestiaryError):
    """A config that ties the head to the embedding beside a stored head that differs from it.

    Remedy: set `tie_word_embeddings` to false, or leave the stored head out.
    """

    exit_code = 2


class CheckpointNotFound(BestiaryError):
    """A path or hub id that leads to no checkpoint.

    Remedy: give a folder with config.json and safetensors, or a hub id; log in for gated models.
    """


class OfflineError(BestiaryError):
    """A hub id that is not in the local cache while the hub cannot be reached.

    Remedy: go online once, `hf download` it where there is a network, or give a local folder.
    """


class FolderNotEmpty(BestiaryError):
    """An export onto a folder that already holds something.

    Remedy: give another folder, or `overwrite=True` (`--overwrite`).
    """


class UnsupportedLoad(BestiaryError):
    """An argument of a load or save that this version does not implement.

    Remedy: leave out the argument that the message names, or use the one that it offers.
    """


class NoScoreClass(UnsupportedLoad):
    """A family of which transformers has no `…ForSequenceClassification`.

    Remedy: train a reward model of another family.
    """

    exit_code = 4


class UnsupportedAdapter(BestiaryError):
    """An adapter that PEFT can hold and our layers cannot, or the other way round.

    Remedy: train other targets, or export with `merge=True`.
    """

    exit_code = 4
