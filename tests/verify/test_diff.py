"""Progress between two verdicts: what passes now, what fails now, and no comparison of what cannot be compared."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestiary.verify.cli import main
from bestiary.verify.diff import Diff, OtherGateVersion, diff
from bestiary.verify.reading import CorruptVerdict, read_report, read_self_test
from bestiary.verify.verdict import Exit, Finding, Level, Report, Verdict, Worst, report
from tests.verify.verdicts import full, level, self_test, verdict


def failing_level(*checks: str, planned: int = 10, id: str = "V2", figure: float = 0.5) -> Level:
    """A level whose `checks` fail."""
    findings = [Finding(check=one, status="failed", exit_code=Exit.NUMERIC, detail="off") for one in checks]
    return level(
        id=id,
        status="fail" if checks else "ok",
        planned=planned,
        passed=planned - len(checks),
        failed=len(checks),
        findings=findings,
        worst=Worst(check="base/logits", figure=figure, gate=1e-10),
    )


def of(*levels: Level, **changes: object) -> Report:
    """A report of one family with these levels."""
    code = Exit.PASS if all(one.status == "ok" for one in levels) else Exit.NUMERIC
    return report([verdict(code, levels=list(levels), **changes)])


def not_run(id: str = "V3", planned: int = 5) -> Level:
    return level(id=id, status="not run", planned=planned, passed=0, skipped=planned, worst=None)


def test_checks_are_sorted_into_fixed_broken_and_still_open():
    found = diff(of(failing_level("a", "b")), of(failing_level("b", "c")))
    (one,) = found.families[0].levels
    assert (one.fixed, one.broken, one.still) == (["a"], ["c"], ["b"])
    assert found.exit_code == Exit.NUMERIC


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_the_exit_code_says_whether_anything_got_worse(before, after):
    found = diff(of(failing_level(*sorted(before))), of(failing_level(*sorted(after))))
    assert (found.exit_code == Exit.PASS) == (after <= before)
    (one,) = found.families[0].levels
    assert set(one.fixed) == before - after
    assert set(one.broken) == after - before


def test_the_text_names_the_checks_and_the_figures():
    text = diff(of(failing_level("base/layer0", figure=0.031)), of(failing_level(figure=4e-15))).text()
    assert "qwen3   numeric → pass" in text
    assert "V2 semantics      fail 9/10 → ok 10/10   worst 3.1e-02 → 4.0e-15" in text
    assert "newly passing      base/layer0" in text
    assert text.splitlines()[-2:] == ["levels ok 0 → 1, checks newly passing 1, newly failing 0", "exit 0"]


def test_many_checks_are_cut_in_the_text_and_whole_in_json():
    names = [f"check {number}" for number in range(50)]
    found = diff(of(failing_level(*names, planned=60)), of(failing_level(planned=60)))
    assert len(found.text().splitlines()) < 15
    assert "… and 44 more" in found.text()
    assert Diff.model_validate_json(found.to_json()).families[0].levels[0].fixed == names


def test_a_level_that_runs_for_the_first_time_makes_nothing_worse():
    """V2 passes now, so V3 runs and shows what nobody had seen: progress."""
    before = of(failing_level("a"), not_run())
    after = of(failing_level(), failing_level("x", "y", id="V3", planned=5))
    found = diff(before, after)
    assert found.exit_code == Exit.PASS
    assert found.families[0].levels[1].first_seen == ["x", "y"]
    assert found.families[0].levels[1].broken == []


def test_what_is_not_verified_any_more_is_no_progress():
    both = of(failing_level(), failing_level(id="V3"))
    assert diff(both, of(failing_level())).exit_code == Exit.INCONCLUSIVE
    assert diff(of(failing_level(planned=10)), of(failing_level(planned=4))).exit_code == Exit.INCONCLUSIVE
    assert diff(both, report([verdict(family="other")])).exit_code == Exit.INCONCLUSIVE


def test_a_check_that_was_not_asked_is_not_called_fixed():
    found = diff(of(failing_level("a", planned=10)), of(failing_level(planned=3)))
    assert found.families[0].levels[0].fixed == []
    assert found.families[0].levels[0].lost


def test_a_verdict_that_falls_without_a_failing_level_is_worse():
    fallen = report([verdict(Exit.TAMPERING, error="a file differs")])
    assert diff(report([verdict()]), fallen).exit_code == Exit.NUMERIC


def test_equal_verdicts_differ_in_nothing():
    found = diff(report([full(), verdict(family="b")]), report([full(), verdict(family="b")]))
    assert found.exit_code == Exit.PASS
    assert not [one for family in found.families for one in family.levels if one.changed]
    assert all(family.notes == [] for family in found.families)


def test_runs_under_other_conditions_say_so():
    notes = (
        diff(of(failing_level(), seed=1), of(failing_level(), seed=2, env={"transformers": "5.24.0"})).families[0].notes
    )
    assert notes == ["seed 1 → 2", "transformers 5.19.0 → 5.24.0"]


def test_verdicts_of_two_gate_versions_are_not_compared():
    with pytest.raises(OtherGateVersion, match="1 and 2") as caught:
        diff(report([verdict()]), report([verdict(gate_version=2)]))
    assert caught.value.exit_code == 7


# ------------------------------------------------------------------ files


def _cut(text: str) -> bytes:
    return text[: len(text) // 2].encode()


def _edited(text: str) -> bytes:
    document = json.loads(text)
    document["verdicts"][0]["levels"][0]["passed"] += 1
    return json.dumps(document).encode()


def _promoted(text: str) -> bytes:
    document = json.loads(text)
    document["exit_code"] = 0
    return json.dumps(document).encode()


CORRUPTIONS = {
    "cut off": _cut,
    "counts edited": _edited,
    "exit code edited": _promoted,
    "another schema": lambda text: text.replace("bestiary.verdict/1", "bestiary.verdict/9").encode(),
    "a list": lambda text: b"[]",
    "not UTF-8": lambda text: b"\xff\xfe" + text.encode(),
    "empty": lambda text: b"",
    "a self-test": lambda text: self_test().to_json().encode(),
}


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_corrupted_verdict_is_refused_by_name(how, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    text = of(failing_level("a")).to_json()
    good.write_text(text)
    bad.write_bytes(CORRUPTIONS[how](text))
    with pytest.raises(CorruptVerdict, match=r"bad\.json"):
        read_report(bad)
    for arguments in ([good, bad], [bad, good]):
        assert main(["diff", *map(str, arguments)]) == 7
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "CorruptVerdict" in shown.err
        assert "Traceback" not in shown.err


def test_a_missing_file_and_a_verdict_in_place_of_a_self_test_are_refused(tmp_path):
    with pytest.raises(CorruptVerdict, match="is no file"):
        read_report(tmp_path / "nothing.json")
    (tmp_path / "verdict.json").write_text(report([verdict()]).to_json())
    with pytest.raises(CorruptVerdict, match=r"bestiary\.self_test/1"):
        read_self_test(tmp_path / "verdict.json")


def test_what_was_written_is_read_back(tmp_path):
    (tmp_path / "a.json").write_text(report([full()]).to_json())
    (tmp_path / "b.json").write_text(self_test().to_json())
    assert read_report(tmp_path / "a.json") == report([full()])
    assert read_self_test(tmp_path / "b.json") == self_test()


def _written(folder, name: str, one: Verdict) -> str:
    (folder / name).write_text(report([one]).to_json())
    return str(folder / name)


def test_the_command_compares_two_files(tmp_path, capsys):
    good, bad = _written(tmp_path, "good.json", verdict()), _written(tmp_path, "bad.json", full())
    assert main(["diff", bad, bad]) == 0
    assert main(["diff", good, good, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == "bestiary.diff/1"
    capsys.readouterr()
    assert main(["diff", good, bad]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "exit 1"


def test_the_command_refuses_another_gate_version(tmp_path, capsys):
    old, new = _written(tmp_path, "a.json", verdict()), _written(tmp_path, "b.json", verdict(gate_version=2))
    assert main(["diff", old, new]) == 7
    assert "OtherGateVersion" in capsys.readouterr().err
