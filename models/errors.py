"""Errors of the canonical models."""

from bestiary.kernels.errors import BestiaryError


class InvalidConfig(BestiaryError):
    """Fields of a `DecoderConfig` that contradict each other.

    Remedy: change one of the fields that the message names; `Family.sizes` holds configs that work.
    """


class InvalidInput(BestiaryError):
    """Arguments of a forward or generate call that contradict each other or leave the model's range.

    Remedy: correct the argument that the message names; padding, packing and cache do not all go together.
    """


class NoSuchModule(BestiaryError):
    """A module name or pattern that matches nothing.

    Remedy: print the names: `bestiary models show NAME`, or `model.named_modules()`.
    """


class MissingBridge(BestiaryError):
    """No bridge is registered for a model type; without one a model cannot meet a Hugging Face checkpoint.

    Remedy: install the package that has the bridge, or write one: `bestiary port new MODEL_TYPE`.
    """

    exit_code = 4
