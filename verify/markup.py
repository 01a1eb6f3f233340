"""HTML and SVG as expressions: `tag("td", text, class_="ok")`. What is not markup already is escaped, always."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Union

Child = Union["Html", str, int, float, None, Iterable["Child"]]
Attribute = str | int | float | bool | None

VOID = frozenset({"meta", "link", "br", "hr"})
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if chr(code) not in "\t\n"}


class Html(str):
    """Text that is markup. Only this module makes it."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup that shows it, inside an element or a quoted attribute."""
    return Html(html.escape(text.translate(_CONTROL), quote=True))


def join(*children: Child) -> Html:
    """Children side by side: markup as it is, text and numbers escaped, None nothing, iterables item by item."""
    return Html("".join(_render(child) for child in children))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return escape(str(child))
    return "".join(_render(item) for item in child)


def tag(element: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element. `class_` gives `class`, `data_label` gives `data-label`; None and False leave an attribute out."""
    shown = []
    for key, value in attributes.items():
        label = key.rstrip("_").replace("_", "-")
        if value is True:
            shown.append(f" {label}")
        elif value is not None and value is not False:
            shown.append(f' {label}="{escape(str(value))}"')
    opened = f"<{element}{''.join(shown)}>"
    return Html(opened) if element in VOID else Html(f"{opened}{join(*children)}</{element}>")


def document(title: str, *, style: str, body: Child) -> str:
    """A whole page without a script and without anything from elsewhere, which its policy also forbids.

    Args:
        style: trusted CSS.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"
