"""Parts of the README that a command writes: they stand between two marks, each a line of its own."""

from __future__ import annotations

from collections.abc import Iterable

from bestiary.kernels.errors import BestiaryError


def between(readme: str, start: str, end: str, lines: Iterable[str], *, error: type[BestiaryError]) -> str:
    """The README's text with other lines between its two marks.

    Raises:
        error: the marks are gone.
    """
    head, opened, rest = readme.partition(start)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise error(f"README.md has no {start} or no {end}.", remedy="put both lines back")
    return "\n".join([head + start, "", *lines, "", end + tail])
