"""The rules of the house that a linter does not know, read from the source."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("models", "kernels", "bridges", "verify", "training", "tools")
MAX_LINES = 500
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def _sources(*portions: str) -> list[Path]:
    return sorted(path for portion in portions for path in (ROOT / portion).rglob("*.py"))


def _places(rule: Callable[[ast.AST], Iterator[int]], *portions: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in _sources(*portions)
        for line in rule(ast.parse(path.read_text(encoding="utf-8")))
    ]


def _names_float32(node: ast.AST) -> bool:
    return ast.unparse(node) in {"torch.float32", "torch.float"}


def fp32_islands(tree: ast.AST) -> Iterator[int]:
    """Lines that force fp32 where float64 must stay float64 (`torch.promote_types` is the way)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr == "float" and not node.args and not node.keywords:
            yield node.lineno
        elif is_method and node.func.attr == "to" and any(map(_names_float32, node.args)):
            yield node.lineno
        elif any(keyword.arg == "dtype" and _names_float32(keyword.value) for keyword in node.keywords):
            yield node.lineno


def config_defaults(tree: ast.AST) -> Iterator[int]:
    """Lines with getattr(config, name, default): a silent default hides a field that the model ignores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3:
            if "config" in ast.unparse(node.args[0]).lower():
                yield node.lineno


def transformers_imports(tree: ast.AST) -> Iterator[int]:
    """Lines that import transformers, at any depth of the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == "transformers" for name in names):
            yield node.lineno


@pytest.mark.parametrize(
    ("rule", "broken", "fine"),
    [
        (fp32_islands, "y = x.float()", "y = x.to(torch.promote_types(x.dtype, torch.float32))"),
        (fp32_islands, "y = x.to(torch.float32)", "y = float(x)"),
        (fp32_islands, "y = torch.zeros(3, dtype=torch.float)", "y = torch.zeros(3, dtype=x.dtype)"),
        (config_defaults, "a = getattr(self.config, 'eps', 1e-6)", "a = getattr(module, 'bias', None)"),
        (transformers_imports, "def f():\n    from transformers.models import qwen3", "import torch"),
    ],
)
def test_rule_sees_a_break_and_nothing_else(rule: Callable[[ast.AST], Iterator[int]], broken: str, fine: str) -> None:
    """A rule that cannot go red guards nothing."""
    assert list(rule(ast.parse(broken)))
    assert not list(rule(ast.parse(fine)))


def test_no_fp32_island_in_models_and_kernels() -> None:
    """One fp32 island costs 8e-7 against a gate of 1e-10."""
    assert _places(fp32_islands, "models", "kernels") == []


@pytest.mark.slow
def test_no_config_field_is_read_with_a_default() -> None:
    """Every field is read by name."""
    assert _places(config_defaults, *PORTIONS) == []


def test_models_and_kernels_do_not_import_transformers() -> None:
    """The definitions stand on torch alone."""
    assert _places(transformers_imports, "models", "kernels") == []


def test_files_are_short_and_say_what_they_hold() -> None:
    """At most 500 lines, no room called utils, nothing named like a standard module, no conftest at the root."""
    long = [path for path in _sources(*PORTIONS) if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
    unclear = [path for path in _sources(*PORTIONS) if path.stem in VAGUE or path.stem in sys.stdlib_module_names]
    assert [str(path.relative_to(ROOT)) for path in long + unclear] == []
    assert not (ROOT / "conftest.py").exists()


WITHOUT_TRANSFORMERS = """
import sys
from dataclasses import replace

sys.modules["transformers"] = None  # any import of it now raises ImportError

import torch
from bestiary.models import Gemma3, GptOss, Qwen3, Qwen3MoE

for cls in (Qwen3, Gemma3, Qwen3MoE, GptOss):
    config = next(iter(cls.sizes.values()))
    moe = config.moe and replace(config.moe, num_experts=12, intermediate_size=24)
    small = config.with_(
        vocab_size=101, hidden_size=40, intermediate_size=56, num_hidden_layers=2,
        layer_types=config.layer_types[:2], moe=moe, dense_layers=(),
    )
    model = cls(small)
    model.init_weights(0)
    out = model(torch.arange(7)[None], labels=torch.arange(7)[None])
    out.loss.backward()
    assert torch.isfinite(out.loss), cls
assert sys.modules["transformers"] is None
"""


@pytest.mark.slow
def test_models_build_and_train_without_transformers() -> None:
    """Every family, forward and backward, in a process where transformers cannot be imported."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_models_does_not_import_transformers() -> None:
    """Start-up of `bestiary.models` is torch's own."""
    code = "import sys, bestiary.models; sys.exit('transformers' in sys.modules)"
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr or "bestiary.models imported transformers"
