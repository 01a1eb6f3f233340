"""Command lines of `python -m bestiary.tools.…`: wrong usage exits 7, results go to JSON the same way everywhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

USAGE_ERROR = 7  # exit codes are those of `verify-bridge`


class Parser(argparse.ArgumentParser):
    """argparse that keeps the layout of description and examples, has `--json`, and exits 7 on wrong usage.

    Args:
        module: what follows `python -m`.
        about: the module's docstring.
        examples: printed after the options.
    """

    def __init__(self, module: str, about: str | None, examples: str) -> None:
        super().__init__(
            prog=f"python -m {module}",
            description=about,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, and silences the rest")

    def error(self, message: str) -> NoReturn:
        """Prints the usage and `message`, exits 7."""
        self.print_usage(sys.stderr)
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def at_least(least: int) -> Any:
    """An argparse type: an integer not below `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    return parse


def write_json(target: str | None, payload: Mapping[str, Any]) -> None:
    """Writes `payload` to a file, to stdout for "-", nowhere for None."""
    if target is None:
        return
    text = json.dumps(payload, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
