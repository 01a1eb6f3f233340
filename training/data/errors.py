"""What can be wrong with data: each error says which file, row or field, and how to go on."""

from bestiary.kernels.errors import BestiaryError


class TokenizerRefused(BestiaryError):
    """A tokenizer that lacks what training needs: a fast backend, a distinct pad token, control tokens, one BOS."""


class FingerprintChanged(BestiaryError):
    """Another tokenizer, template or template argument than the one that made a checkpoint or a resume state."""


class TemplateRefused(BestiaryError):
    """A chat template whose turns cannot be found by its behaviour, or that refuses a conversation."""


class MaskRefused(BestiaryError):
    """A loss mask that trains nothing, or everything, or a span that does not exist."""


class SampleRefused(BestiaryError):
    """A row that is not the record it should be; names source, row and field."""


class InvalidPlan(BestiaryError):
    """Settings of a data plan that contradict each other or the data."""


class CorruptRow(BestiaryError):
    """A row that cannot be read or encoded, or more of them than the plan tolerates."""


class StorageFailed(BestiaryError):
    """A file that could not be listed, opened or read, after every retry."""


class OverflowRefused(BestiaryError):
    """A document longer than a pack, under the policy that refuses those."""


class StateMismatch(BestiaryError):
    """A state that was taken under another plan, or that does not fit this loader; the message says what differs."""


class WorkerFailed(BestiaryError):
    """A producer process that died without an error of its own."""
