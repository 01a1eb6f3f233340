"""Verdicts made by hand, for tests of their invariants and their text."""

from typing import Any

from bestiary.verify.self_test import FamilyResult, Kill, Pass, SelfTest, judge
from bestiary.verify.verdict import (
    WORDS,
    Activity,
    Divergence,
    Exit,
    FieldFinding,
    Finding,
    Hypothesis,
    KernelPath,
    Keys,
    LayerError,
    Level,
    Profile,
    Verdict,
    Worst,
)


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


def full(name: str = "qwen3") -> Verdict:
    """A failing verdict with something in every section of a page; `name` stands wherever a text is free."""
    layers = [LayerError(module="model.embed_tokens", figure=0.0)]
    layers += [
        LayerError(module=f"model.layers.{i}", layer=i, layer_type=name, figure=10.0 ** (i - 15)) for i in range(13)
    ]
    layers += [LayerError(module="model.norm", figure=None)]
    profiles = [
        Profile(level="V2", case=f"{name} {i}", gate=1e-10, layers=layers, positions=[0.0, 3e-15, 2e-3, None])
        for i in range(8)
    ]
    profiles.append(Profile(level="V6", case="base", gate=2e-5, stride=3, positions=[1e-6] * 40))
    field = FieldFinding(
        field=f"rope.{name}",
        value={"type": name},
        before=None,
        kind="live",
        ours="ignored",
        note=name,
        read_as=[f"rope.theta: {name} → 2"],
        read_in="bridges/qwen3.py:7",
    )
    refused = FieldFinding(field="attention_dropout", value=0.25, before=0.0, kind="train", ours="refused", note=name)
    return failing(3).model_copy(
        update={
            "family": name,
            "error": name,
            "profiles": profiles,
            "config": [refused, field],
            "keys": Keys(missing=[name], ignored_with_reason={name: name}),
            "activity": {"base": Activity(clipped={name: 0.3}, min_router_margin=1e-3)},
            "kernels": [
                KernelPath(operation="log_prob", implementation=name, status="ran", calls=3, note=name),
                KernelPath(operation="norm", implementation="triton", status="another device", calls=0),
            ],
            "cases": {"base": {"hidden_size": 80, "name": name}},
            "hashes": {"verifier": "0123456789abcdef" * 4},
        }
    )


def self_test(name: str = "C01_gate_up_swapped") -> SelfTest:
    """A self-test of two families: a bug killed, one that survives in one of them, a rewrite with a false alarm."""

    def kill(bug: str, level: str, killed: bool) -> Kill:
        verdict, check = ("numeric", "base/logits") if killed else ("pass", "")
        return Kill(
            bug=bug, level=level, cause=name, killed=killed, named=killed, verdict=verdict, check=check, seconds=1.0
        )

    families = [
        FamilyResult(
            family=family,
            clean="pass",
            unkept=[],
            kills=[kill(name, "V2", True), kill("G22_window", "V5", not survives)],
            passes=[Pass(rewrite="fused", levels="V2", passed=not survives, verdict="pass", detail=name, seconds=1.0)],
            seconds=4.0,
        )
        for family, survives in (("qwen3", False), ("gemma3_text", True))
    ]
    return judge(families, seed=0, seconds=8.0)
