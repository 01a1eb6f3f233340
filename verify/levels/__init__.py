"""The levels of the verifier, one file each; `REGISTRY` lists them in the order they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from bestiary.models.config import HeadKind
from bestiary.verify.verdict import Exit

if TYPE_CHECKING:
    from bestiary.verify.checks import Check
    from bestiary.verify.lab import Lab


@dataclass(frozen=True)
class LevelSpec:
    """One level.

    Attributes:
        id, title: as in VERIFY.
        module: its file under `levels/`, with a function `plan(lab) -> list[Check]`.
        on_error: exit code of an exception in the code under test.
        refusals_are_answers: whether a typed refusal of a check leaves the level ok.
        own: what it judges, where that is no implementation of somebody else's; "" for a level that judges any.
    """

    id: str
    title: str
    module: str
    on_error: Exit = Exit.NUMERIC
    refusals_are_answers: bool = False
    own: str = ""

    def plan(self, lab: Lab) -> list[Check]:
        """The checks of this level, planned without running our side."""
        plan: Callable[[Lab], list[Check]] = self.load().plan
        return plan(lab)

    def load(self) -> ModuleType:
        """Its file, imported."""
        return import_module(f"bestiary.verify.levels.{self.module}")


REGISTRY: tuple[LevelSpec, ...] = (
    LevelSpec("V0", "keys", "v0_keys", on_error=Exit.KEYS),
    LevelSpec("V1", "round trip", "v1_round_trip", on_error=Exit.KEYS, own="bestiary's loader and export"),
    LevelSpec("V2", "semantics", "v2_semantics"),
    LevelSpec("V3", "config", "v3_config", on_error=Exit.CONFIG, refusals_are_answers=True),
    LevelSpec("V4", "gradients", "v4_gradients"),
    LevelSpec("V5", "inputs", "v5_inputs"),
    LevelSpec("V6", "fp32", "v6_fp32"),
    LevelSpec("V7", "bf16", "v7_bf16"),
    LevelSpec("K", "kernels", "k_kernels", own="bestiary's kernels"),
)

SCORE_REGISTRY: tuple[LevelSpec, ...] = (
    LevelSpec("V0", "keys", "v0_keys", on_error=Exit.KEYS),
    LevelSpec("V1", "round trip", "v1_round_trip", on_error=Exit.KEYS),
    LevelSpec("V2", "semantics", "score_semantics"),
    LevelSpec("V4", "gradients", "score_gradients"),
    LevelSpec("V5", "inputs", "score_inputs"),
)
"""The levels of a reward model. What config fields, fp32 and bfloat16 do to its backbone, a run without it asks."""


def registry(head: HeadKind) -> tuple[LevelSpec, ...]:
    """The levels of a model under a head."""
    return REGISTRY if head is HeadKind.LM else SCORE_REGISTRY
