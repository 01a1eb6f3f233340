"""A checkpoint that is exported with a few parameters in memory is the one that loading and saving write."""

import gc
from pathlib import Path

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.bridges.errors import KeyMismatch, TiedHeadMismatch
from bestiary.bridges.streaming import KEPT, StoredParameters, export_checkpoint, stored_parameters
from bestiary.verify.reference import Reference, quiet
from bestiary.verify.tiny import tiny_config
from tests.verify.families import FAMILIES, REFERENCES


def _saved(tmp_path: Path, family: str, case: str = "base") -> Path:
    model = Reference(REFERENCES[family], tiny_config(REFERENCES[family], case), 0, dtype=torch.float32).model
    with quiet():
        model.to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.parametrize("case", ["base", "mha"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_are_those_of_load_and_save(family: str, case: str, tmp_path: Path) -> None:
    bridge, folder = get_bridge(family), _saved(tmp_path, family, case)
    whole = bridge.save(bridge.load(folder), tmp_path / "whole", max_shard_size=200_000)
    streamed = export_checkpoint(bridge, folder, tmp_path / "streamed", max_shard_size=200_000)
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in streamed.iterdir())
    assert len(names) > 3
    for name in names:
        assert (whole / name).read_bytes() == (streamed / name).read_bytes(), name


def test_only_the_parameters_last_read_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    read = StoredParameters.__getitem__

    def counted(self: StoredParameters, name: str) -> torch.Tensor:
        tensor = read(self, name)
        held.append(len(self._kept))
        return tensor

    monkeypatch.setattr(StoredParameters, "__getitem__", counted)
    export_checkpoint(get_bridge("qwen3_moe"), _saved(tmp_path, "qwen3_moe"), tmp_path / "out")
    gc.collect()
    assert max(held) == KEPT


def test_what_loading_refuses_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    bridge, folder = get_bridge("qwen3"), _saved(tmp_path, "qwen3", "mha")  # tied
    tensors = load_file(folder / "model.safetensors")
    other = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, "lm_head.weight": other}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TiedHeadMismatch):
        export_checkpoint(bridge, folder, tmp_path / "out")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KeyMismatch, match=r"model\.norm\.weight"), stored_parameters(bridge, folder):
        pass
    assert not (tmp_path / "out").exists()
