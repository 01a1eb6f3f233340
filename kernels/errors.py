"""The one error shape of the project: what is wrong, where it was read, how to go on."""

from __future__ import annotations

from typing import Any


class BestiaryError(Exception):
    """An error a person can act on.

    Args:
        what: one sentence that names the field or key and its value.
        read_from: where the value came from (a file, an argument); None when it is the call itself.
        remedy: what to do next.

    Attributes:
        exit_code: what a command line returns for it (VERIFY codes: 2 keys, 4 refused, 7 usage or environment).
    """

    exit_code = 7

    def __init__(self, what: str, *, read_from: str | None = None, remedy: str | None = None) -> None:
        self.what, self.read_from, self.remedy = what, read_from, remedy
        lines = [what]
        if read_from:
            lines.append(f"  read from   {read_from}")
        if remedy:
            lines.append(f"  remedy      {remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its content: subclasses are made from other arguments, and errors cross processes."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[BestiaryError], args: tuple[Any, ...], content: dict[str, Any]) -> BestiaryError:
    error = kind.__new__(kind, *args)
    vars(error).update(content)
    return error


class InvalidArgument(BestiaryError):
    """An argument whose shape, dtype or value makes no sense, or two that contradict each other.

    Remedy: correct the argument that the message names; shapes and dtypes stand in the function's docstring.
    """


class LabelOutOfRange(BestiaryError):
    """A target outside [0, vocab_size) that is not `ignore_index`.

    Remedy: mask positions without a target with -100; ids beyond the vocabulary come from another tokenizer.
    """


class TokenOutOfRange(BestiaryError):
    """A token id outside [0, vocab_size).

    Remedy: use the checkpoint's own tokenizer, or `resize_token_embeddings` after adding tokens.
    """


class UnsupportedDispatch(BestiaryError):
    """A forced implementation that cannot run here; the message says why.

    Remedy: leave the implementation to `dispatch`, or give what the message says it needs.
    """
