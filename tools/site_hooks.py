"""Hooks of mkdocs: where the API reference is read from, and the table of every message on the page for trouble.

The folders of this repository are packages below `bestiary` only once they are installed. The reference is read from
source, so a copy below out/site-source stands in for that.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bestiary.tools.error_messages import messages, table
from bestiary.tools.error_page import PORTIONS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "out" / "site-source" / "bestiary"
MARK = "<!-- every message: written when the site is built -->"


def on_startup(**_: Any) -> None:
    """Lays the folders out as the packages that they are, before anybody looks whether they are there."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for portion in PORTIONS:
        shutil.copytree(ROOT / portion, SOURCE / portion, ignore=shutil.ignore_patterns("__pycache__"))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Puts the messages of all errors in the place of the mark."""
    return markdown.replace(MARK, table(messages(ROOT))) if page.file.src_uri == "troubleshooting.md" else markdown
