"""Checks become counts: every outcome is counted once, a refusal or a crash is never a pass."""

import math

import pytest
import torch

from bestiary.bridges.errors import KeyMismatch, UnsupportedConfig
from bestiary.verify.checks import (
    Check,
    Outcome,
    Replay,
    execute,
    exit_codes,
    judged,
    not_run,
    passed,
    run_level,
    selected,
)
from bestiary.verify.gates import Gate
from bestiary.verify.inputs import Inputs
from bestiary.verify.verdict import Exit

GATE = Gate(1e-10)


def _raising(error: Exception) -> Check:
    def run() -> Outcome:
        raise error

    return Check("base/raises", run)


def _level(*checks: Check, answers: bool = False):
    return run_level("V2", "semantics", checks, on_error=Exit.NUMERIC, refusals_are_answers=answers)[0]


REFUSAL = UnsupportedConfig("mlp_bias", True, "is not implemented.", read_from="a test", remedy="drop it")


def test_a_crash_of_ours_is_a_failure_with_the_code_of_its_level():
    outcome = execute(_raising(RuntimeError("shapes\nmore")), Exit.KEYS)
    assert (outcome.status, outcome.exit_code) == ("failed", Exit.KEYS)
    assert outcome.detail == "RuntimeError: shapes"


def test_a_typed_refusal_is_refused_and_another_typed_error_a_failure():
    assert execute(_raising(REFUSAL), Exit.NUMERIC).status == "refused"
    assert execute(_raising(KeyMismatch(missing=["x"])), Exit.NUMERIC).status == "failed"


@pytest.mark.parametrize("error", [MemoryError(), OSError("disk full")])
def test_errors_of_the_environment_are_not_findings(error):
    with pytest.raises(type(error)):
        execute(_raising(error), Exit.NUMERIC)


@pytest.mark.parametrize("figure", [2e-10, math.nan, math.inf])
def test_a_figure_past_its_gate_fails(figure):
    outcome = judged(figure, GATE)
    assert (outcome.status, outcome.exit_code) == ("failed", Exit.NUMERIC)


def test_counts_worst_figure_and_order_of_findings():
    level = _level(
        Check("a", passed),
        Check("b", lambda: judged(5e-11, GATE)),
        Check("c", lambda: judged(1e-3, GATE)),
        _raising(REFUSAL),
        Check("d", lambda: Outcome("inconclusive", Exit.INCONCLUSIVE, "too short")),
    )
    assert (level.planned, level.passed, level.failed, level.refused, level.skipped) == (5, 2, 1, 1, 1)
    assert level.status == "fail"
    assert level.worst is not None
    assert (level.worst.check, level.worst.figure) == ("c", 1e-3)
    assert [finding.status for finding in level.findings] == ["failed", "refused", "inconclusive"]
    assert exit_codes(level) == [Exit.NUMERIC]


def test_a_figure_that_is_not_finite_is_the_worst_and_is_written_as_none():
    level = _level(Check("a", lambda: judged(1e-3, GATE)), Check("b", lambda: judged(math.nan, GATE)))
    assert level.worst is not None
    assert (level.worst.check, level.worst.figure) == ("b", None)


def test_a_share_at_its_best_is_not_the_worst_figure():
    share = Gate(0.999, at_least=True)
    level = _level(Check("a", lambda: judged(1.0, share)), Check("b", lambda: judged(1e-12, GATE)))
    assert level.worst is not None
    assert level.worst.check == "b"
    level = _level(Check("a", lambda: judged(0.9, share)), Check("b", lambda: judged(1e-12, GATE)))
    assert level.worst is not None
    assert level.worst.check == "a"


def test_a_refusal_leaves_only_config_coverage_ok():
    assert _level(Check("a", passed), _raising(REFUSAL)).status == "refused"
    assert _level(Check("a", passed), _raising(REFUSAL), answers=True).status == "ok"
    assert _level(_raising(REFUSAL), answers=True).status == "refused", "a bridge that refuses everything is no pass"


def test_a_level_without_checks_is_inconclusive():
    assert _level().status == "inconclusive"
    assert exit_codes(_level()) == [Exit.INCONCLUSIVE]


def test_a_level_that_did_not_run_skips_all_its_checks():
    level = not_run("V3", "config", [Check("a", passed), Check("b", passed)], "V2 is not ok")
    assert (level.planned, level.skipped, level.status) == (2, 2, "not run")
    assert exit_codes(level) == [Exit.INCONCLUSIVE]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ([], ["base/logits", "base/layer0", "mha/layer1", "base/cached, steps"]),
        (["layer0"], ["base/layer0"]),
        (["base"], ["base/logits", "base/layer0", "base/cached, steps"]),
        (["mha/*"], ["mha/layer1"]),
        (["base/cached, steps"], ["base/cached, steps"]),
        (["layer0", "layer1"], ["base/layer0", "mha/layer1"]),
        (["layer9"], []),
    ],
)
def test_only_selects_by_layer_part_or_glob(only, expected):
    checks = [
        Check("base/logits", passed),
        Check("base/layer0", passed, 0),
        Check("mha/layer1", passed, 1),
        Check("base/cached, steps", passed),
    ]
    assert [check.id for check in selected(checks, only)] == expected


def test_nothing_is_asked_behind_the_first_failure_that_can_be_looked_at_again():
    asked = []

    def check(name: str, outcome: Outcome) -> Check:
        return Check(name, lambda: asked.append(name) or outcome)

    lost = Outcome("failed", Exit.KEYS, "nothing to look at")
    seen = judged(1.0, GATE, replay=Replay("base", Inputs(torch.zeros(1, 1))))
    checks = [check("a", passed()), check("b", lost), check("c", seen), check("d", passed()), check("e", lost)]
    options = {"on_error": Exit.NUMERIC, "refusals_are_answers": False}
    level, outcomes = run_level("V2", "semantics", checks, **options, first_failure=True)
    assert asked == ["a", "b", "c"]
    assert (level.planned, level.passed, level.failed, level.skipped) == (5, 1, 2, 2)
    assert len(outcomes) == 5
    assert exit_codes(level) == [Exit.KEYS, Exit.NUMERIC]
    run_level("V2", "semantics", checks, **options)
    assert len(asked) == 3 + 5
