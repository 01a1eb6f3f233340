"""`make verify-large`: what it writes is a checkpoint that passes, and more memory than allowed is a failure."""

import pytest

from bestiary.bridges import get_bridge
from bestiary.tools import verify_large
from bestiary.verify.checkpoint import run_checkpoint
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Exit


@pytest.mark.parametrize("model", verify_large.MODELS)
def test_a_checkpoint_of_small_shapes_passes_keys_and_v8(model, tmp_path):
    bridge = get_bridge(model)
    raw = tiny_config(bridge.reference, "base")
    packed = model == "gpt_oss"
    if packed:
        raw = {**raw, "hidden_size": 96, "intermediate_size": 64}
    verify_large.write_checkpoint(tmp_path / "checkpoint", bridge, bridge.parse(raw).decoder, packed=packed)
    verdict = run_checkpoint(tmp_path / "checkpoint", levels=("V0", "V8"), work=tmp_path / "work")
    assert verdict.exit_code == Exit.PASS, [item for level in verdict.levels for item in level.findings]
    assert [level.id for level in verdict.levels] == ["V0", "V8"]
    assert verdict.scope == "partial"


@pytest.mark.parametrize(("exit_code", "peak", "expected"), [(0, 17.9, 0), (0, 18.1, 1), (2, 3.0, 2)])
def test_the_exit_code_is_that_of_the_verdict_or_of_the_memory(exit_code, peak, expected, monkeypatch, capsys):
    result = {
        "exit_code": exit_code,
        "verdict": "word",
        "peak_gib": peak,
        "seconds": 1.0,
        "layer_parameters": 10**9,
        "worst": "text/max 1e-05",
    }
    monkeypatch.setattr(verify_large, "measure", lambda *_: dict(result))
    assert verify_large.main(["gpt_oss"]) == expected
    assert f"peak {peak:.1f} GiB of 18" in capsys.readouterr().out
