"""Verdicts made by hand, for tests of their invariants and their text."""

from typing import Any

from bestiary.verify.verdict import WORDS, Divergence, Exit, Finding, Hypothesis, Level, Verdict, Worst


def level(**changes: Any) -> Level:
    """An ok level of three checks."""
    values: dict[str, Any] = {
        "id": "V2",
        "title": "semantics",
        "status": "ok",
        "planned": 3,
        "passed": 3,
        "failed": 0,
        "skipped": 0,
        "refused": 0,
        "seconds": 1.0,
        "worst": Worst(check="base/logits", figure=1e-15, gate=1e-10),
    }
    return Level(**{**values, **changes})


def verdict(code: Exit = Exit.PASS, **changes: Any) -> Verdict:
    """A passing verdict of one level."""
    values: dict[str, Any] = {
        "family": "qwen3",
        "model_type": "qwen3",
        "reference_class": "Qwen3ForCausalLM",
        "verdict": WORDS[code],
        "exit_code": code,
        "scope": "full",
        "gate_version": 1,
        "official": True,
        "env": {"transformers": "5.19.0"},
        "hashes": {},
        "seed": 7,
        "seconds": 3.0,
        "levels": [level()],
    }
    return Verdict(**{**values, **changes})


def failing(findings: int) -> Verdict:
    """A verdict with `findings` failed checks in each of seven levels, a divergence and three causes."""
    failed = [
        Finding(
            check=f"base/layer{i}/{'x' * 80}",
            status="failed",
            exit_code=Exit.NUMERIC,
            detail="RuntimeError: " + "why " * 60,
            figure=1.0,
            gate=1e-10,
        )
        for i in range(findings)
    ]
    levels = [
        level(id=f"V{i}", status="fail", planned=findings + 1, passed=1, failed=findings, findings=failed)
        for i in range(7)
    ]
    divergence = Divergence(
        module="model.layers.0.self_attn",
        hf_module="model.layers.0.self_attn",
        tensor="input of o_proj",
        layer=0,
        layer_type="sliding_attention",
        position=16,
        inputs_equal=True,
        pattern=["only_positions>=16", "only_layer_type:sliding_attention"],
        case="base",
    )
    causes = [Hypothesis(mutation_id=f"c{i}", reproduces_to=2e-16, hint="window counts W+1 tokens") for i in range(3)]
    return verdict(
        Exit.NUMERIC,
        levels=levels,
        first_divergence=divergence,
        hypotheses=causes,
        weak=[f"parameter {i} moves no logit" for i in range(30)],
        repro="verify-bridge qwen3 --level V2 --only layer0 --seed 7",
    )
