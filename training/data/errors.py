"""What can be wrong with data: each error says which file, row or field, and how to go on."""

from bestiary.kernels.errors import BestiaryError


class TokenizerRefused(BestiaryError):
    """A tokenizer that lacks what training needs: a fast backend, a distinct pad token, control tokens, one BOS.

    Remedy: use the tokenizer that came with the checkpoint, or correct its tokenizer_config.json.
    """


class FingerprintChanged(BestiaryError):
    """Another tokenizer, template or template argument than the one that made a checkpoint or a resume state.

    Remedy: go back to the tokenizer and template of the checkpoint, or start a new run.
    """


class TemplateRefused(BestiaryError):
    """A chat template whose turns cannot be found by its behaviour, or that refuses a conversation.

    Remedy: correct the template or its arguments; `bestiary data inspect` shows what it renders.
    """


class MaskRefused(BestiaryError):
    """A loss mask that trains nothing, or everything, or a span that does not exist.

    Remedy: correct `train_on` or the columns; `bestiary data inspect` shows what is trained.
    """


class SampleRefused(BestiaryError):
    """A row that is not the record it should be; names source, row and field.

    Remedy: correct the row, map its `columns`, or let the source skip what is corrupt.
    """


class InvalidPlan(BestiaryError):
    """Settings of a data plan that contradict each other or the data.

    Remedy: correct the setting in the section `data`.
    """


class CorruptRow(BestiaryError):
    """A row that cannot be read or encoded, or more of them than the plan tolerates.

    Remedy: repair the row, or set `on_corrupt: skip` for its source.
    """


class StorageFailed(BestiaryError):
    """A file that could not be listed, opened or read, after every retry.

    Remedy: check address, rights and network; `bestiary[data]` brings fsspec, each protocol a package.
    """


class OverflowRefused(BestiaryError):
    """A document longer than a pack, under the policy that refuses those.

    Remedy: raise `data.pack_length`, or set `data.overflow` to truncate, split or drop.
    """


class StateMismatch(BestiaryError):
    """A state that was taken under another plan, or that does not fit this loader; the message says what differs.

    Remedy: resume with the plan that the state was taken under.
    """


class WorkerFailed(BestiaryError):
    """A producer process that died without an error of its own.

    Remedy: look for the kernel's out-of-memory killer; lower `loop.workers`.
    """
