"""Edited reference files and functions replaced in memory are seen; the hashes cover what a verdict rests on."""

import sys

import transformers
from transformers.models.qwen3 import modeling_qwen3

from bestiary.verify import hashes
from bestiary.verify.hashes import altered_files, digest, loaded_files, own_hashes, patched_functions, reference_modules


def test_installed_files_are_those_of_the_wheel():
    assert altered_files() == []
    assert len(loaded_files()) > 50


def test_a_file_that_differs_from_the_record_is_named():
    target = next(path for path in loaded_files() if path.name == "modeling_qwen3.py")
    recorded = hashes._recorded()
    assert target in recorded
    assert altered_files({**recorded, target: "0" * 43}) == [str(target)]


def test_a_file_that_the_record_does_not_know_is_named():
    target = next(path for path in loaded_files() if path.name == "modeling_qwen3.py")
    without = {path: value for path, value in hashes._recorded().items() if path != target}
    assert altered_files(without) == [str(target)]


def test_a_method_replaced_in_memory_is_named(monkeypatch):
    modules = reference_modules(transformers.Qwen3ForCausalLM)
    assert patched_functions(modules) == []
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: x)
    assert patched_functions(modules) == ["transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward"]


def test_a_function_replaced_in_memory_is_named(monkeypatch):
    monkeypatch.setattr(modeling_qwen3, "rotate_half", lambda x: x)
    modules = reference_modules(transformers.Qwen3ForCausalLM)
    assert patched_functions(modules) == ["transformers.models.qwen3.modeling_qwen3.rotate_half"]


def test_the_modules_of_a_reference_include_the_shared_ones():
    names = reference_modules(transformers.Qwen3ForCausalLM)
    assert "transformers.models.qwen3.modeling_qwen3" in names
    assert "transformers.masking_utils" in names
    assert all(name in sys.modules for name in names)


def test_hashes_change_with_what_they_cover(tmp_path):
    own = own_hashes("bestiary.bridges.qwen3", "{}")
    assert own.keys() == {"verifier", "gates", "bridges", "bridge", "models", "kernels", "config"}
    assert own["config"] != own_hashes("bestiary.bridges.qwen3", "{ }")["config"]
    assert own["bridge"] != own_hashes("bestiary.bridges.gemma3", "{}")["bridge"]
    (tmp_path / "a.py").write_text("x = 1")
    before = digest([tmp_path / "a.py"])
    (tmp_path / "a.py").write_text("x = 2")
    assert digest([tmp_path / "a.py"]) != before
