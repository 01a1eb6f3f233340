"""`verify-bridge FAMILY --head score` passes, says what it verified, and refuses what it has no answer for."""

import json
from pathlib import Path

import pytest

from bestiary.bridges import get_bridge
from bestiary.bridges.errors import NoScoreClass
from bestiary.models.config import HeadKind
from bestiary.verify.api import verify
from bestiary.verify.cli import main
from bestiary.verify.planted import PlantedBug
from bestiary.verify.planted.score import BUGS
from bestiary.verify.reference import ReferencePool
from bestiary.verify.report import family_lines
from bestiary.verify.run import BadUsage, parse_levels
from bestiary.verify.scoring import score_configs
from bestiary.verify.self_test import plant
from bestiary.verify.verdict import Exit


@pytest.fixture(scope="module")
def pool() -> ReferencePool:
    return ReferencePool()


@pytest.mark.slow
def test_a_reward_model_passes_and_the_verdict_names_its_head() -> None:
    verdict = verify("qwen3", head="score")
    assert (verdict.exit_code, verdict.scope, verdict.head) == (Exit.PASS, "full", "score")
    assert verdict.reference_class == "Qwen3ForSequenceClassification"
    assert [level.id for level in verdict.levels] == ["V0", "V1", "V2", "V4", "V5"]
    assert family_lines(verdict)[0].startswith("qwen3 --head score  transformers")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_soft_caps_experts_and_windows_of_the_backbone_pass_too(family: str) -> None:
    assert verify(family, head="score", level="V2,V5", only=["base"]).exit_code == Exit.PASS


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_every_planted_bug_of_the_head_is_killed_and_named(bug: PlantedBug, pool: ReferencePool) -> None:
    kill = plant("qwen3", bug, pool=pool)
    assert (kill.killed, kill.named) == (True, True)


def test_labels_differ_between_the_tiny_configs() -> None:
    bridge = get_bridge("qwen3")
    read = {name: bridge.parse(raw).decoder for name, raw in score_configs(bridge).items()}
    assert {name: config.num_labels for name, config in read.items()} == {"base": 1, "mha": 3, "mqa": 2, "square": 1}
    assert {config.head for config in read.values()} == {HeadKind.SCORE}


def test_a_family_without_a_class_is_refused_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["granite", "--head", "score"]) == NoScoreClass.exit_code == Exit.REFUSED
    assert "has no ForSequenceClassification" in capsys.readouterr().err


def test_a_checkpoint_of_a_reward_model_names_the_command_for_its_family(tmp_path: Path) -> None:
    config = score_configs(get_bridge("qwen3"))["square"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadUsage, match="verify-bridge qwen3 --head score"):
        verify(tmp_path)


def test_levels_of_another_head_and_other_usage_are_refused() -> None:
    with pytest.raises(BadUsage, match="V7"):
        parse_levels("V7", HeadKind.SCORE)
    with pytest.raises(BadUsage, match="--head score"):
        verify("./somewhere", head="score")
    with pytest.raises(BadUsage, match="lm, score"):
        verify("qwen3", head="value")
