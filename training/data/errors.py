"""What can be wrong with data: each error says which sample, which field, and how to go on."""

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
