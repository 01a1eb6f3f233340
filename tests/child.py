"""Processes beside the one that tests: their Python finds this folder as `tests`, whatever libraries bring along."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
# By its path alone: another distribution may install a package `tests` (verl does), and with the checkout on the path
# the folder kernels/ would shadow Hugging Face's package of that name.
_OURS = (
    "import sys, types; ours = types.ModuleType('tests'); "
    f"ours.__path__ = [{str(TESTS)!r}]; sys.modules['tests'] = ours; "
)


def python(code: str, *arguments: object) -> list[str]:
    """The command of a process that runs `code`, which finds `arguments` in `sys.argv[1:]`, as text."""
    return [sys.executable, "-c", _OURS + code, *map(str, arguments)]
