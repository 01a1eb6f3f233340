"""Records of acceptance: each family has one that speaks of it as it is, and the README shows what they say."""

from pathlib import Path

import pytest

from bestiary.bridges import get_bridge, registered_bridges
from bestiary.tools import families
from bestiary.tools.bench import published
from bestiary.tools.bench.published import NotPublishable
from bestiary.tools.catalogue import VERDICTS
from bestiary.tools.families import NotAccepted, accept, records, stale, with_table
from bestiary.verify.hashes import digest
from bestiary.verify.self_test import FamilyResult, Kill
from bestiary.verify.verdict import Exit, report
from tests.verify.verdicts import verdict

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _kills(**changes: object) -> FamilyResult:
    bug = Kill(bug="Q1_x", level="V2", cause="x", killed=True, named=True, verdict="numeric", seconds=1.0)
    values = {"family": "qwen3", "clean": "pass", "unkept": [], "kills": [bug], "passes": [], "seconds": 1.0}
    return FamilyResult.model_validate({**values, **changes})


def _survivor() -> Kill:
    return Kill(bug="Q2_y", level="V2", cause="y", killed=False, named=False, verdict="pass", seconds=1.0)


def test_every_family_has_a_record_of_its_present_files() -> None:
    assert set(records(ROOT)) == set(registered_bridges())
    assert stale(ROOT) == {}


def test_the_readme_shows_the_records() -> None:
    assert with_table(README, records(ROOT)) == README, "make readme"


def test_what_an_installed_package_knows_is_in_the_records() -> None:
    known = records(ROOT)
    assert VERDICTS.read_text(encoding="utf-8") == families.summary(known), "make readme"
    assert all(record.verdict.made for record in known.values())


def test_a_readme_without_its_marks_is_an_error() -> None:
    with pytest.raises(NotAccepted, match="no <!-- families"):
        with_table("# bestiary\n", {})


def test_an_acceptance_is_read_back_current_and_goes_stale_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accept(tmp_path, report([verdict()]), [_kills()], seed=0) == ["qwen3"]
    record, bridge = records(tmp_path)["qwen3"], get_bridge("qwen3")
    assert record.why_stale(bridge) is None
    assert (tmp_path / "ports/qwen3/CARD.md").read_text(encoding="utf-8").startswith("# qwen3: pass")
    assert "gpt_oss" in stale(tmp_path)
    edited = tmp_path / "qwen3.py"
    edited.write_text("another bridge", encoding="utf-8")
    monkeypatch.setattr(families, "sources", lambda bridge: [edited])
    assert record.why_stale(bridge) == "its bridge or model file changed"


@pytest.mark.parametrize(
    ("found", "kills", "why"),
    [
        (verdict(Exit.NUMERIC), _kills(), "the verdict is numeric"),
        (verdict(scope="partial"), _kills(), "partial"),
        (verdict(official=False), _kills(), "the verdict is pass"),
        (verdict(gate_version=0), _kills(), "gates of version 0"),
        (verdict(), _kills(clean="numeric"), "the self-test did not pass"),
        (verdict(), _kills(kills=[_survivor()]), "the self-test did not pass"),
    ],
)
def test_what_is_no_pass_is_not_accepted_and_leaves_nothing(
    found: object, kills: FamilyResult, why: str, tmp_path: Path
) -> None:
    with pytest.raises(NotAccepted, match=why):
        accept(tmp_path, report([found]), [kills], seed=0)  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_a_family_without_a_self_test_is_not_accepted(tmp_path: Path) -> None:
    with pytest.raises(NotAccepted, match="qwen3 has no self-test"):
        accept(tmp_path, report([verdict()]), [], seed=0)


def test_a_family_is_its_bridge_and_its_model_file() -> None:
    own = families.sources(get_bridge("gemma3_text"))
    assert [path.relative_to(ROOT).as_posix() for path in own] == ["bridges/gemma3.py", "models/gemma3.py"]
    assert len(digest(own)) == 64


def test_the_readme_shows_the_committed_benchmarks() -> None:
    assert published.with_table(README, published.read(ROOT)) == README, "make readme"


def test_a_run_without_a_figure_that_is_shown_is_not_published() -> None:
    first = published.wanted()[0]
    goal = {"name": first.name, "figure": 2.0, "low": 1.9, "high": 2.1}
    partial = {"benches": {first.bench: {"versions": {}, "cases": [{"goals": [goal]}]}}}
    with pytest.raises(NotPublishable, match=r"step has no figure for 'full T=1024: memory"):
        published.choose(partial, "2026-11-30")
