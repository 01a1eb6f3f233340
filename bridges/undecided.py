"""`undecided`: what stands in a port's skeleton where a person or an agent must decide; a run stops there by name."""

from __future__ import annotations

from typing import Any

from bestiary.bridges.errors import UnsupportedConfig


class OpenDecision(UnsupportedConfig):
    """A decision that a port has not taken yet; `decision` is its name.

    Remedy: decide it after transformers' modelling file; PORT.md lists all that are open.
    """

    def __init__(self, decision: str, question: str) -> None:
        self.decision = decision
        remedy = f"replace undecided({decision!r}, …) in the bridge by what transformers' modelling file does"
        why = f"is an open decision of this port: {question}."
        super().__init__(decision, "undecided", why, read_from="the bridge's skeleton", remedy=remedy)


def undecided(decision: str, question: str) -> Any:
    """Stands in the place of a value: raises `OpenDecision`.

    Args:
        decision: name, e.g. "norm.cast".
        question: what is to be found out.
    """
    raise OpenDecision(decision, question)
