"""A forward that borrows from transformers is caught, in the process and in one of its own."""

import pytest
import torch
from torch import nn

from bestiary.bridges import get_bridge
from bestiary.models import Decoder
from bestiary.verify import delegation
from bestiary.verify.delegation import IsolationFailed, delegates, foreign_code, foreign_modules, isolated_logits
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.isolated import Blocker
from bestiary.verify.measure import max_over_std
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_config
from tests.verify.families import FAMILIES, REFERENCES


def _both(family: str = "qwen3"):
    raw = tiny_config(REFERENCES[family], "square")
    reference = Reference(REFERENCES[family], raw, 0)
    model: Decoder = OurSide(get_bridge(family)).build(raw, reference.state(), torch.float64)
    return reference, model, Inputs(tokens(80, 1, 20, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_our_families_borrow_nothing(family):
    _, model, inputs = _both(family)
    assert delegates(model, inputs) == []


def test_a_borrowed_module_is_named():
    reference, model, _ = _both()
    model.model.layers[1].mlp = reference.model.model.layers[1].mlp
    found = foreign_modules(model)
    assert found[0].startswith("model.layers.1.mlp: transformers.models.qwen3.modeling_qwen3.Qwen3MLP")


def test_a_subclass_of_a_borrowed_module_is_named():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    class Norm(Qwen3RMSNorm):
        """Ours by name only."""

    _, model, _ = _both()
    model.model.norm = Norm(80)
    assert len(foreign_modules(model)) == 1


def test_a_borrowed_function_is_named_where_it_runs():
    from transformers.models.qwen3 import modeling_qwen3

    class Borrower(nn.Module):
        """Calls a function of the reference."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return modeling_qwen3.rotate_half(x)

    borrower = Borrower()
    assert foreign_modules(borrower) == []
    assert foreign_code(lambda: borrower(torch.ones(4))) == ["models/qwen3/modeling_qwen3.py:rotate_half"]


def _checkpoint(tmp_path, family: str = "qwen3"):
    reference, _, inputs = _both(family)
    with quiet():
        reference.model.save_pretrained(tmp_path / "square")
    return reference, {"square": {"input_ids": inputs.input_ids}}


@pytest.mark.slow
def test_our_forward_runs_where_the_modelling_files_cannot_be_imported(tmp_path):
    reference, questions = _checkpoint(tmp_path)
    logits = isolated_logits(tmp_path, questions)["square"]
    assert max_over_std(logits, reference.logits(Inputs(questions["square"]["input_ids"]))) <= 1e-10


@pytest.mark.slow
def test_a_forward_that_fails_there_is_an_error_of_its_own(tmp_path):
    _, questions = _checkpoint(tmp_path)
    (tmp_path / "square" / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(IsolationFailed, match="nothing") as error:
        isolated_logits(tmp_path, questions)
    assert error.value.exit_code == 6


def test_the_block_covers_modelling_files_and_nothing_else():
    blocker = Blocker()
    with pytest.raises(ImportError, match="blocked"):
        blocker.find_spec("transformers.models.qwen3.modeling_qwen3")
    for name in ("transformers.models.qwen3.configuration_qwen3", "transformers", "torch"):
        assert blocker.find_spec(name) is None


def test_a_process_of_its_own_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(delegation, "TIMEOUT", 0.01)
    with pytest.raises(IsolationFailed, match=r"gave no logits in 0\.01 s"):
        isolated_logits(tmp_path, {})
