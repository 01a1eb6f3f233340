"""Whether another checkpoint at the same path is seen, from a small part of its bytes."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from bestiary.bridges import contents as told
from bestiary.bridges.contents import contents
from bestiary.bridges.errors import CheckpointNotFound, MissingShard
from bestiary.models import LoRAConfig, Qwen3

from ..models.tiny import tiny_config

WEIGHTS = "model.safetensors"


def config():
    tiny = tiny_config("qwen3")
    return tiny.with_(attention=replace(tiny.attention, scale=tiny.attention.head_dim**-0.5))


@pytest.fixture
def saved(tmp_path):
    """Writes a model, the same whenever it is asked for the same."""

    def write(name, *, change=None, **options):
        torch.manual_seed(0)
        model = Qwen3(config(), dtype=torch.float32)
        if change is not None:
            with torch.no_grad():
                change(model)
        model.save_pretrained(tmp_path / name, overwrite=True, **options)
        return tmp_path / name

    return write


def test_the_same_model_elsewhere_has_the_same_contents(saved):
    assert contents(saved("one")) == contents(saved("another"))
    assert set(contents(saved("one"))) == {"config.json", WEIGHTS}


def test_every_tensor_of_a_large_file_is_looked_at(saved, monkeypatch):
    monkeypatch.setattr(told, "WHOLE", 0)
    before = contents(saved("model"))
    for name, parameter in Qwen3(config(), device="meta").named_parameters():
        middle = tuple(size // 2 for size in parameter.shape)

        def change(model, name=name, middle=middle):
            model.get_parameter(name)[middle] += 1

        assert contents(saved("model", change=change))[WEIGHTS] != before[WEIGHTS], name
    assert contents(saved("model")) == before


def test_a_large_tensor_is_looked_at_in_many_places_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(told, "WHOLE", 0)
    monkeypatch.setattr(told, "STRIDE", 2**16)
    file, size = tmp_path / "sums.npz", 2**20
    file.write_bytes(bytes(size))
    before, read, pread = contents(file), [], told.os.pread

    def counted(descriptor, count, place):
        read.append((place, count))
        return pread(descriptor, count, place)

    monkeypatch.setattr(told.os, "pread", counted)
    contents(file)
    assert sum(count for _, count in read) < size // 8
    assert max(b - a for (a, _), (b, _) in pairwise(read)) <= 2**16
    places = [place for place, _ in read]
    for start in (places[0], places[len(places) // 2], size - 1):
        changed = bytearray(size)
        changed[start] = 1
        file.write_bytes(changed)
        assert contents(file) != before
    file.write_bytes(bytes(size + 1))
    assert contents(file) != before


def test_stored_sums_are_told_by_the_checksums_at_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(told, "WHOLE", 0)
    values = np.zeros(2**20)
    np.savez(tmp_path / "sums.npz", sums=values)
    before = contents(tmp_path / "sums.npz")
    values[12345] = 1e-9  # between windows
    np.savez(tmp_path / "sums.npz", sums=values)
    assert contents(tmp_path / "sums.npz") != before


def test_shards_and_their_index_are_files_of_the_model_and_nothing_else_is(saved):
    folder = saved("sharded", max_shard_size=20_000)
    (folder / "README.md").write_text("not of the model")
    (folder / "optimizer.safetensors").write_text("neither")
    found = contents(folder)
    shards = sorted(set(json.loads((folder / f"{WEIGHTS}.index.json").read_text())["weight_map"].values()))
    assert len(shards) > 1
    assert set(found) == {"config.json", f"{WEIGHTS}.index.json", *shards}
    assert found["config.json"].startswith(f"{(folder / 'config.json').stat().st_size} bytes, sha256 ")
    (folder / shards[0]).unlink()
    with pytest.raises(MissingShard):
        contents(folder)
    with pytest.raises(CheckpointNotFound):
        contents(folder / "nowhere")


def test_an_adapter_is_told_with_its_base(saved, tmp_path):
    base, adapter = saved("base"), tmp_path / "adapter"
    model = Qwen3.from_pretrained(base, lora=LoRAConfig(r=2, alpha=4, targets=("*_proj",)))
    model.save_pretrained(adapter)
    before = contents(adapter)
    files = {"adapter_config.json", "adapter_model.safetensors", "base/config.json", f"base/{WEIGHTS}"}
    assert set(before) == files
    saved("base", change=lambda model: model.model.norm.weight.add_(1))
    after = contents(adapter)
    assert {name for name in files if after[name] != before[name]} == {f"base/{WEIGHTS}"}


def test_a_commit_says_all_of_what_lies_in_the_cache_of_the_hub(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, place = "c" * 40, tmp_path / "hub" / "models--somebody--model"
    (place / "snapshots").mkdir(parents=True)
    saved("model").rename(place / "snapshots" / commit)
    (place / "snapshots" / commit / WEIGHTS).unlink()  # which another process may have to fetch
    assert contents("somebody/model", commit) == {"commit": commit}
