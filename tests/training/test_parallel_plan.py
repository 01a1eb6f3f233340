"""Every module of every family has a style, decided from names."""

import pytest

from bestiary.bridges.registry import registered_bridges
from bestiary.models import Decoder, LoRAConfig
from bestiary.models.config import HeadKind
from bestiary.training.errors import ParallelRefused
from bestiary.training.parallel import Style, plan_of
from tests.models.tiny import tiny_config

LORA = LoRAConfig(r=2, alpha=4, targets=("*_proj*",))


@pytest.mark.parametrize("model_type", sorted(registered_bridges()))
def test_every_family_has_a_plan(model_type: str) -> None:
    """Of each published size: whatever holds parameters has a style, and products are split."""
    for config in registered_bridges()[model_type].decoder.sizes.values():
        model = Decoder(config.with_(lora=LORA), device="meta")
        plan = plan_of(model)
        holding = [
            name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
        ]
        assert [name for name in holding if plan.style(name) is None] == []
        split = {plan.style(name) for name in holding}
        assert {Style.COLUMN, Style.ROW, Style.VOCABULARY, Style.WHOLE} <= split


def test_what_a_family_declares_comes_first() -> None:
    """Its patterns are read before the default ones; a style that there is none of is refused by name."""

    class Own(Decoder):
        parallel_styles = (("lm_head", "whole"),)

    class Wrong(Decoder):
        parallel_styles = (("lm_head", "diagonal"),)

    config = tiny_config("qwen3")
    assert plan_of(Own(config, device="meta")).style("lm_head") is Style.WHOLE
    assert plan_of(Decoder(config, device="meta")).style("lm_head") is Style.VOCABULARY
    with pytest.raises(ParallelRefused, match="diagonal"):
        plan_of(Wrong(config, device="meta"))


def test_a_score_head_is_whole() -> None:
    """It has a row for each label, not for each token."""
    model = Decoder(tiny_config("qwen3", head=HeadKind.SCORE, tie_word_embeddings=False), device="meta")
    assert plan_of(model).style("score") is Style.WHOLE
