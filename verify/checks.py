"""A check: one question with one answer. Levels plan them, the runner asks them, the verdict counts them."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from bestiary.bridges.errors import KeyMismatch, TiedHeadMismatch, UnsupportedConfig, UnsupportedModelType
from bestiary.kernels.errors import BestiaryError
from bestiary.verify.gates import Gate
from bestiary.verify.inputs import Inputs
from bestiary.verify.verdict import Exit, Finding, Level, Status, Worst

if TYPE_CHECKING:
    from bestiary.verify.reference import Reference

MAX_FINDINGS = 200


@dataclass(frozen=True)
class Question:
    """What a check asked that one plain forward does not answer: how to put it to a reference, and what ours said."""

    reference: Reference
    ask: Callable[[Reference], Tensor]
    ours: Tensor


@dataclass(frozen=True)
class Replay:
    """Where a failure can be looked at again: a tiny config and inputs of both sides.

    With a `question` it can be asked again, but one forward of each side on `inputs` does not show the failure.
    """

    case: str
    inputs: Inputs
    question: Question | None = None


@dataclass(frozen=True)
class Outcome:
    """The answer to a check; `figure` is judged by `gate` where there is one."""

    status: Literal["passed", "failed", "refused", "inconclusive"]
    exit_code: Exit = Exit.PASS
    detail: str = ""
    figure: float | None = None
    gate: Gate | None = None
    replay: Replay | None = None


@dataclass(frozen=True)
class Check:
    """A planned check.

    Attributes:
        id: unique in its level, parts joined by "/", the tiny config first.
        run: gives the outcome; an exception of ours becomes a failure, a typed refusal a refusal.
        layer: the layer it looks at, for `--only layerN`; None: none in particular.
        always: whether it runs whatever `--only` names, because it says why the others cannot.
        needs: arguments of forward that it uses beside `input_ids` and `labels`, or `foreign.OWN`: an implementation
            of somebody else's without them is not asked.
    """

    id: str
    run: Callable[[], Outcome]
    layer: int | None = None
    always: bool = False
    needs: tuple[str, ...] = ()


def passed(detail: str = "") -> Outcome:
    """A check without a figure that holds."""
    return Outcome("passed", detail=detail)


def failed(code: Exit, detail: str, *, replay: Replay | None = None) -> Outcome:
    """A check without a figure that does not hold."""
    return Outcome("failed", code, detail, replay=replay)


def holds(condition: bool, code: Exit, detail: str) -> Outcome:
    """Passed, or failed with `detail` as the explanation."""
    return passed() if condition else failed(code, detail)


def judged(figure: float, gate: Gate, *, detail: str = "", replay: Replay | None = None) -> Outcome:
    """A figure against its gate; a failure is numeric."""
    if gate.holds(figure):
        return Outcome("passed", figure=figure, gate=gate)
    shown = f"{figure:.1e}" if math.isfinite(figure) else "not finite or of another shape"
    text = f"{shown} (gate {gate.limit:g}){': ' if detail else ''}{detail}"
    return Outcome("failed", Exit.NUMERIC, text, figure, gate, replay)


def execute(check: Check, on_error: Exit) -> Outcome:
    """Runs a check.

    A typed refusal is `refused`; any other exception of the implementation under test is a failure with code
    `on_error`, because it is what the check found. Errors of the environment (memory, disk) are not caught.
    """
    try:
        return check.run()
    except (UnsupportedConfig, UnsupportedModelType) as error:
        return Outcome("refused", Exit.REFUSED, f"{type(error).__name__}: {error.what}")
    except BestiaryError as error:
        return failed(on_error, f"{type(error).__name__}: {error.what}")
    except (MemoryError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - the code under test may raise anything; it becomes the finding
        first = str(error).splitlines()[0] if str(error) else ""
        return failed(on_error, f"{type(error).__name__}: {first}")


def unless_mismatched(id: str, imported: Callable[[], object], plan: Callable[[], list[Check]]) -> list[Check]:
    """The checks of `plan`, or one alone that fails with the whole text of a mismatch that `imported` raises.

    Without an import every check would fail for the same reason, and the names of innocent keys would hide the culprit.
    """
    try:
        imported()
    except (KeyMismatch, TiedHeadMismatch) as error:
        outcome = failed(Exit.KEYS, str(error))
        return [Check(id, lambda: outcome, always=True)]
    except (MemoryError, OSError):
        raise
    except Exception:  # noqa: BLE001 - each of the planned checks meets it again and reports it
        return plan()
    return plan()


def selected(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """The checks that one of the `only` patterns names: `layerN`, a glob over the id, or a part of the id."""
    if not only:
        return list(checks)

    def named(check: Check) -> bool:
        parts = check.id.split("/")
        return check.always or any(
            pattern == f"layer{check.layer}"
            or fnmatch.fnmatchcase(check.id, pattern)
            or fnmatch.fnmatchcase(check.id, pattern + "/*")
            or pattern in parts
            for pattern in only
        )

    return [check for check in checks if named(check)]


def _nearness(outcome: Outcome) -> float:
    """Distance of a figure from its gate as a ratio; above 1 is past it."""
    if outcome.figure is None or outcome.gate is None:
        return -1.0
    if not math.isfinite(outcome.figure):
        return math.inf
    if outcome.gate.at_least:  # shares: how much of the allowed shortfall is used
        return (1 - outcome.figure) / (1 - outcome.gate.limit) if outcome.gate.limit < 1 else math.inf
    return outcome.figure / outcome.gate.limit if outcome.gate.limit else (math.inf if outcome.figure else 0.0)


_NOT_ASKED = Outcome("inconclusive", Exit.INCONCLUSIVE, "not asked: an earlier check failed")


def run_level(
    level: str,
    title: str,
    checks: Sequence[Check],
    *,
    on_error: Exit,
    refusals_are_answers: bool,
    first_failure: bool = False,
) -> tuple[Level, list[Outcome]]:
    """Runs every check of a level and counts.

    Args:
        on_error: exit code of an exception in the code under test.
        refusals_are_answers: whether a refused check leaves the level ok (config coverage), or makes it `refused`.
        first_failure: ask no further once a check has failed that can be looked at again.
    """
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    for check in checks:
        outcomes.append(execute(check, on_error))
        if first_failure and outcomes[-1].status == "failed" and outcomes[-1].replay is not None:
            outcomes += [_NOT_ASKED] * (len(checks) - len(outcomes))
            break
    counts = {word: sum(o.status == word for o in outcomes) for word in ("passed", "failed", "refused", "inconclusive")}
    worst: Worst | None = None
    findings = []
    nearest = -1.0
    for check, outcome in zip(checks, outcomes, strict=True):
        near = _nearness(outcome)
        if outcome.gate is not None and near > nearest:
            nearest = near
            figure = outcome.figure if outcome.figure is not None and math.isfinite(outcome.figure) else None
            worst = Worst(check=check.id, figure=figure, gate=outcome.gate.limit)
        if outcome.status != "passed":
            findings.append(
                Finding(
                    check=check.id,
                    status=outcome.status,
                    exit_code=outcome.exit_code,
                    detail=outcome.detail,
                    figure=outcome.figure if outcome.figure is not None and math.isfinite(outcome.figure) else None,
                    gate=outcome.gate.limit if outcome.gate else None,
                )
            )
    findings.sort(key=lambda finding: finding.status != "failed")
    status: Status = "ok"
    if counts["failed"]:
        status = "fail"
    elif counts["inconclusive"] or not checks:
        status = "inconclusive"
    elif counts["refused"] and not (refusals_are_answers and counts["passed"]):
        status = "refused"
    result = Level(
        id=level,
        title=title,
        status=status,
        planned=len(checks),
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["inconclusive"],
        refused=counts["refused"],
        seconds=time.perf_counter() - start,
        worst=worst,
        findings=findings[:MAX_FINDINGS],
    )
    return result, outcomes


def not_run(level: str, title: str, checks: Sequence[Check], why: str) -> Level:
    """A level that an earlier failure kept from running: all its checks are skipped."""
    findings = [Finding(check="*", status="skipped", exit_code=Exit.INCONCLUSIVE, detail=why)]
    return Level(
        id=level,
        title=title,
        status="not run",
        planned=len(checks),
        passed=0,
        failed=0,
        skipped=len(checks),
        refused=0,
        seconds=0.0,
        findings=findings,
    )


def exit_codes(level: Level) -> list[Exit]:
    """The codes a level contributes to its verdict."""
    if level.status == "ok":
        return [Exit.PASS]
    if level.status == "fail":
        return [finding.exit_code for finding in level.findings if finding.status == "failed"]
    if level.status == "refused":
        return [Exit.REFUSED]
    return [Exit.INCONCLUSIVE]
