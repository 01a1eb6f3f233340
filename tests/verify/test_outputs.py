"""What a run writes beside its text: JUnit XML, a Markdown card, a page; each fails where the verdict fails."""

import json
from xml.etree import ElementTree as xml

import pytest

from bestiary.verify.cli import main
from bestiary.verify.junit import junit_report, junit_self_test
from bestiary.verify.model_card import card
from bestiary.verify.self_test import judge
from bestiary.verify.verdict import Exit, report
from tests.verify.verdicts import full, level, self_test, verdict


def problems(text: str) -> list[tuple[str, str]]:
    """Kind and case of everything in a JUnit document that is not passed; skipped ones apart."""
    root = xml.fromstring(text)
    return [(child.tag, case.get("name", "")) for case in root.iter("testcase") for child in case]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (verdict(), []),
        (
            verdict(
                Exit.NUMERIC,
                levels=[
                    level(status="fail", passed=2, failed=1),
                    level(id="V3", title="config", status="not run", passed=0, skipped=3),
                ],
            ),
            [("failure", "V2 semantics"), ("skipped", "V3 config")],
        ),
        (verdict(Exit.REFUSED, levels=[level(status="refused", passed=2, refused=1)]), [("error", "V2 semantics")]),
        (
            verdict(Exit.INCONCLUSIVE, levels=[level(status="inconclusive", passed=2, skipped=1)]),
            [("error", "V2 semantics")],
        ),
        (verdict(Exit.TAMPERING, error="a file differs"), [("error", "verdict")]),
        (verdict(Exit.INCONCLUSIVE, weak=["a parameter moves nothing"]), [("error", "verdict")]),
    ],
    ids=["pass", "fail", "refused", "inconclusive", "tampering", "weak"],
)
def test_a_level_is_a_case_and_only_a_pass_has_no_problem(one, expected):
    assert problems(junit_report(report([one]))) == expected


def test_counts_of_a_suite_are_those_of_its_cases():
    (suite,) = xml.fromstring(junit_report(report([full()])))
    assert suite.get("name") == "qwen3"
    assert (suite.get("tests"), suite.get("failures")) == ("7", "7")
    assert (suite.get("errors"), suite.get("skipped")) == ("0", "0")


def test_any_text_makes_well_formed_xml():
    evil = "]]> & < \x00 \x1b[0m \ud800 \uffff \U0001f40d"
    one = full().model_copy(update={"family": evil, "error": evil})
    assert xml.fromstring(junit_report(report([one]))).find("testsuite") is not None


def test_survivors_and_false_alarms_of_a_self_test_are_failures():
    names = [name for kind, name in problems(junit_self_test(self_test())) if kind == "failure"]
    assert names == ["V5 G22_window", "benign fused"]


def test_a_self_test_that_proves_nothing_has_an_error():
    assert ("error", "result") in problems(junit_self_test(judge([], seed=0, seconds=0.0)))


# ------------------------------------------------------------------ card


def test_the_card_says_what_was_compared_and_with_what_result():
    text = card(report([full()]), self_test())
    assert text.startswith("# qwen3: numeric\n")
    assert "`Qwen3ForCausalLM` of transformers 5.19.0" in text
    assert "7 of 28 checks passed" in text
    assert "| V2 semantics | fail | 1/4 |" in text
    assert "* ignored: `rope.qwen3`" in text
    assert "* refused: `attention_dropout`" in text
    assert "| qwen3 | 2/2 | 2/2 | 0/1 |" in text
    assert "| sha256 of verifier | `0123456789abcdef" in text


def test_every_row_of_a_table_has_its_columns_whatever_the_text_holds():
    lines = card(report([full("a|b\n| c `d` <script>")]), self_test("x|y")).splitlines()
    width = 0
    for line in lines:
        count = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert width == 0 or count in (0, width), line
        width = count
    assert not [line for line in lines if line.startswith("| c")]


def test_a_partial_run_and_tightened_gates_are_said():
    text = card(report([verdict(scope="partial", official=False)]))
    assert "partial run" in text
    assert "tightened" in text


# ------------------------------------------------------------------ the command


def test_one_run_writes_all_forms(tmp_path, capsys):
    kills = tmp_path / "kills.json"
    kills.write_text(self_test().to_json())
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "report", "card", "junit")}
    options = [text for kind, path in out.items() for text in (f"--{kind}", str(path))]
    assert main(["qwen3", "--level", "V0", "--quiet", "--kill-matrix", str(kills), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("exit 0")
    assert json.loads(out["json"].read_text())["exit_code"] == 0
    assert "Kill matrix" in out["report"].read_text()
    assert "## Planted bugs" in out["card"].read_text()
    assert problems(out["junit"].read_text()) == []
    assert len(list(tmp_path.iterdir())) == 5


def test_stdout_holds_one_document_and_nothing_else(capsys):
    assert main(["qwen3", "--level", "V0", "--quiet", "--report", "-"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("<!DOCTYPE html>")
    assert shown.rstrip().endswith("</html>")
    assert main(["qwen3", "--level", "V0", "--quiet", "--report", "-", "--card", "-"]) == 7


def test_a_bad_kill_matrix_is_refused_before_the_run(tmp_path, capsys):
    assert main(["qwen3", "--quiet", "--kill-matrix", str(tmp_path / "nothing.json")]) == 7
    assert "CorruptVerdict" in capsys.readouterr().err
