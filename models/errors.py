"""Errors of the canonical models."""

from bestiary.kernels.errors import BestiaryError


class InvalidConfig(BestiaryError):
    """Fields of a `DecoderConfig` that contradict each other."""


class InvalidInput(BestiaryError):
    """Arguments of a forward or generate call that contradict each other or leave the model's range."""


class NoSuchModule(BestiaryError):
    """A module name or pattern that matches nothing."""


class MissingBridge(BestiaryError):
    """No bridge is registered for a model type; without one a model cannot meet a Hugging Face checkpoint."""

    exit_code = 4
