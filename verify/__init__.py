"""How we know: the verifier of bridges and models, its levels, and the verdict it gives.

    from bestiary.verify import verify

    verdict = verify("qwen3", level="V0..V2")
    assert verdict.exit_code == 0

The names below are imported at first use: torch and transformers are loaded when something is verified.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bestiary.verify.api import verify
    from bestiary.verify.verdict import Exit, Report, Verdict

__all__ = ["Exit", "Report", "Verdict", "verify"]

_HOMES = {"verify": "api", "Exit": "verdict", "Report": "verdict", "Verdict": "verdict"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bestiary.verify.{_HOMES[name]}"), name)
