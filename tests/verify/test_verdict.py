"""A verdict cannot contradict itself, and its JSON is what the committed schema says."""

import itertools
import json

import pytest
from pydantic import ValidationError

from bestiary.verify.verdict import PRECEDENCE, SCHEMA_FILE, WORDS, Exit, Report, first_present, report, schema_text
from tests.verify.verdicts import level, verdict


def test_counts_must_add_up_to_what_was_planned():
    with pytest.raises(ValidationError, match="is not planned 3"):
        level(passed=2)


@pytest.mark.parametrize(
    "changes",
    [{"passed": 2, "skipped": 1}, {"passed": 2, "failed": 1}, {"planned": 0, "passed": 0}],
    ids=["skip", "failure", "nothing planned"],
)
def test_a_level_is_not_ok_with(changes):
    with pytest.raises(ValidationError, match="cannot be ok"):
        level(**changes)


@pytest.mark.parametrize("status", ["fail", "refused", "inconclusive", "not run"])
def test_a_verdict_cannot_pass_over_a_level_that_is_not_ok(status):
    counts = {"passed": 2, "skipped": 1} if status != "refused" else {"passed": 2, "refused": 1}
    with pytest.raises(ValidationError, match="each of them is ok"):
        verdict(levels=[level(), level(status=status, **counts)])


def test_a_verdict_cannot_pass_without_levels():
    with pytest.raises(ValidationError, match="each of them is ok"):
        verdict(levels=[])


@pytest.mark.parametrize("changes", [{"error": "tampering"}, {"weak": ["a parameter moves no logit"]}])
def test_a_verdict_cannot_pass_with(changes):
    with pytest.raises(ValidationError, match="cannot pass"):
        verdict(**changes)


def test_word_and_code_of_a_verdict_agree():
    with pytest.raises(ValidationError, match="contradict"):
        verdict(verdict="numeric")


def test_of_several_codes_the_first_of_7_6_2_3_1_5_4_0_counts():
    order = [7, 6, 2, 3, 1, 5, 4, 0]
    assert [int(code) for code in PRECEDENCE] == order
    for first, second in itertools.combinations(order, 2):
        assert first_present([second, first, second]) == first


def test_nothing_verified_is_no_pass():
    assert first_present([]) == Exit.USAGE


def test_every_code_has_a_word():
    assert set(WORDS) == set(Exit) == set(PRECEDENCE)


def test_the_exit_code_of_a_report_follows_from_its_verdicts():
    failing = verdict(Exit.KEYS, levels=[level(status="fail", passed=2, failed=1)])
    assert report([verdict(), failing]).exit_code == Exit.KEYS
    with pytest.raises(ValidationError, match="does not follow"):
        Report(exit_code=Exit.PASS, verdicts=[failing])


def test_json_names_the_schema_and_survives_a_round_trip():
    text = report([verdict()]).to_json()
    assert json.loads(text)["schema"] == "bestiary.verdict/1"
    assert Report.model_validate_json(text) == report([verdict()])


def test_levels_in_json_have_the_counts_that_readers_rely_on():
    (only,) = json.loads(report([verdict()]).to_json())["verdicts"][0]["levels"]
    expected = {"id", "status", "planned", "passed", "failed", "skipped", "refused", "seconds", "worst"}
    assert expected <= set(only)
    assert set(only["worst"]) == {"check", "figure", "gate"}


def test_unknown_fields_and_infinite_figures_are_no_verdict():
    document = json.loads(report([verdict()]).to_json())
    document["verdicts"][0]["remark"] = "fine"
    with pytest.raises(ValidationError):
        Report.model_validate(document)
    with pytest.raises(ValidationError):
        level(worst={"check": "x", "figure": float("inf"), "gate": 1e-10})


def test_the_committed_schema_is_the_one_of_the_code():
    assert SCHEMA_FILE.read_text() == schema_text(), "run bestiary.verify.verdict.write_schema()"
