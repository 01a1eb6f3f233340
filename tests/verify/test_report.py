"""The text of a verdict fits an agent's window and says what happened, where and how to see it again."""

from bestiary.verify.report import MAX_LINES, family_lines, text
from bestiary.verify.verdict import Exit, FieldFinding, report
from tests.verify.verdicts import failing, verdict


def test_a_verdict_takes_at_most_40_lines_however_much_failed():
    for findings in (1, 5, 190):
        lines = family_lines(failing(findings))
        assert len(lines) <= MAX_LINES == 40
        assert all("\n" not in line and len(line) <= 220 for line in lines)


def test_a_failure_names_place_cause_and_command():
    shown = "\n".join(family_lines(failing(190)))
    assert "first divergence  model.layers.0.self_attn input of o_proj" in shown
    assert "only_positions>=16" in shown
    assert "likely cause      window counts W+1 tokens (reproduces our output to 2e-16)" in shown
    assert "verify-bridge qwen3 --level V2 --only layer0 --seed 7" in shown
    assert shown.splitlines()[-1].startswith("exit 1  numeric")


def test_a_pass_is_short_and_shows_the_worst_figure_beside_its_gate():
    lines = family_lines(verdict())
    assert len(lines) == 3
    assert "3/3" in lines[1]
    assert "worst 1.0e-15 at base/logits (gate 1e-10)" in lines[1]
    assert lines[-1].startswith("exit 0  pass")


def test_refused_fields_are_listed():
    finding = FieldFinding(field="attention_dropout", value=0.25, kind="train", ours="refused")
    assert any("refused by name   attention_dropout" in line for line in family_lines(verdict(config=[finding])))


def test_several_families_are_one_line_each_and_only_failing_ones_in_full():
    shown = text(report([verdict(), failing(2)])).splitlines()
    assert shown[0].startswith("qwen3          pass")
    assert shown[1].startswith("qwen3          numeric")
    assert sum(line.startswith("  V2 semantics") for line in shown) == 1
    assert shown[-1] == f"exit {int(Exit.NUMERIC)}"
