"""What is written from something else and committed: the README's tables, `verdicts.json`, the page of errors.

`make readme` runs it; a test holds each against what it is made from.
"""

from __future__ import annotations

import sys

from bestiary.tools.bench import published
from bestiary.tools.catalogue import VERDICTS
from bestiary.tools.error_page import PAGE, error_classes, page
from bestiary.tools.families import records, summary, with_table
from bestiary.tools.port.state import checkout


def main() -> int:
    """Writes all of them into the checkout; returns 0."""
    root = checkout()
    known = records(root)
    readme = root / "README.md"
    text = with_table(readme.read_text(encoding="utf-8"), known)
    readme.write_text(published.with_table(text, published.read(root)), encoding="utf-8")
    VERDICTS.write_text(summary(known), encoding="utf-8")
    (root / PAGE).write_text(page(error_classes(root)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
