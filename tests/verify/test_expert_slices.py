"""Experts that stay in bfloat16 and run in slices give what the whole module gives in float32."""

import copy
from pathlib import Path

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.verify import expert_slices
from bestiary.verify.checkpoint import run_checkpoint
from bestiary.verify.expert_slices import are_experts, sliced
from bestiary.verify.measure import relative_rms
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.side import OurSide
from bestiary.verify.streamed_models import StreamedDecoder, StreamedModel
from bestiary.verify.tiny import tiny_config
from bestiary.verify.verdict import Exit
from tests.verify.families import REFERENCES

FAMILIES = ("qwen3_moe", "gpt_oss")
SIDES = ("ours", "theirs")
SMALL = 2**17


def _checkpoint(tmp_path: Path, family: str) -> Path:
    model = Reference(REFERENCES[family], tiny_config(REFERENCES[family], "base"), 0, dtype=torch.float32).model
    with quiet():
        model.to(torch.bfloat16).save_pretrained(tmp_path / family)
    return tmp_path / family


def _experts(family: str, side: str):
    raw = tiny_config(REFERENCES[family], "base")
    reference = Reference(REFERENCES[family], raw, 0, dtype=torch.float32)
    model = reference.model
    if side == "ours":
        model = OurSide(get_bridge(family)).build(raw, reference.state(), torch.float32)
    return next(module for module in model.modules() if are_experts(module))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_any_size_add_up_to_the_module(family, side, monkeypatch):
    experts = _experts(family, side)
    narrow = copy.deepcopy(experts).to(torch.bfloat16)
    wide = copy.deepcopy(narrow).float()
    x = torch.randn(19, 80)
    indices = torch.stack([torch.randperm(11)[:3] for _ in range(19)])  # the twelfth expert gets nothing
    weights = torch.rand(19, 3)
    one = 4 * sum(p[0].numel() for p in experts.parameters())
    with torch.no_grad():
        expected = wide(x, indices, weights)
        for size in (one, 5 * one, 100 * one):
            monkeypatch.setattr(expert_slices, "SLICE_BYTES", size)
            with sliced(narrow):
                assert relative_rms(narrow(x, indices, weights), expected) < 1e-6
    assert "forward" not in vars(narrow)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_only_stacks_over_experts_are_taken_for_experts():
    assert not are_experts(torch.nn.Linear(3, 3))
    assert not are_experts(torch.nn.MultiheadAttention(4, 2))
    assert are_experts(_experts("gpt_oss", "ours"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_verified_with_its_experts_in_bfloat16_and_all_else_in_float32(family, tmp_path, monkeypatch):
    folder = _checkpoint(tmp_path, family)
    monkeypatch.setattr(expert_slices, "SLICE_BYTES", SMALL)
    seen: dict[tuple[str, bool], set[torch.dtype]] = {}
    step = StreamedModel.step

    def looked_at(self, name, index, x):
        side = "ours" if isinstance(self, StreamedDecoder) else "theirs"
        for module in self.layers[index].modules():
            for parameter in module.parameters(recurse=False):
                seen.setdefault((side, are_experts(module)), set()).add(parameter.dtype)
        return step(self, name, index, x)

    monkeypatch.setattr(StreamedModel, "step", looked_at)
    verdict = run_checkpoint(folder, levels=("V8",), work=tmp_path / "work")
    assert verdict.exit_code == Exit.PASS, [f.detail for level in verdict.levels for f in level.findings]
    for side in SIDES:
        assert seen[side, True] == {torch.bfloat16}
        assert seen[side, False] == {torch.float32}


def test_a_slice_that_is_lost_on_our_side_fails(tmp_path, monkeypatch):
    folder = _checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.setattr(expert_slices, "SLICE_BYTES", SMALL)
    part = expert_slices._Sliced._part

    def without_the_first(self, start, stop, dtype):
        made = part(self, start, stop, dtype)
        if start == 0 and type(made).__module__.startswith("bestiary."):
            made.down_proj.data.zero_()
        return made

    monkeypatch.setattr(expert_slices._Sliced, "_part", without_the_first)
    verdict = run_checkpoint(folder, levels=("V8",), work=tmp_path / "work")
    assert verdict.exit_code == Exit.NUMERIC
