"""Safetensors files: ours read by the library and the library's by us, and every way a file can be damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bestiary.bridges.errors import CheckpointNotFound, CorruptCheckpoint, FolderNotEmpty, MissingShard, UnsupportedLoad
from bestiary.bridges.storage import INDEX, SINGLE, MemorySource, SafetensorsSource, read_rows
from bestiary.bridges.writing import Entry, parse_size, staged, write_checkpoint

TENSORS = {
    "a": torch.arange(12, dtype=torch.bfloat16).view(4, 3),
    "b.weight": torch.arange(5, dtype=torch.float64),
    "c": torch.arange(8, dtype=torch.uint8).view(2, 2, 2),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
}


def write(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    entries = [Entry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    write_checkpoint(folder, entries, tensors.__getitem__, **options)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    with SafetensorsSource(folder) as source:
        return {name: read_rows(source, name, 0, info.num_rows).view(info.shape) for name, info in source.infos.items()}


@pytest.mark.parametrize("limit", ["5GB", 30, "1KB"])
def test_what_we_write_the_library_reads(tmp_path: Path, limit: int | str) -> None:
    write(tmp_path, TENSORS, max_shard_size=limit)
    found = {name: t for path in tmp_path.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert (tmp_path / INDEX).exists() == (limit == 30)


def test_what_the_library_writes_we_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    found = read(tmp_path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]), st.integers(0, 9)), max_size=6),
    st.integers(1, 64),
)
def test_any_dtypes_in_any_shards_come_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, int]], limit: int
) -> None:
    tensors = {f"t.{i}": torch.arange(rows * 2).to(dtype).view(rows, 2) for i, (dtype, rows) in enumerate(kinds)}
    found = read(write(tmp_path_factory.mktemp("shards"), tensors, max_shard_size=limit))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_rows_are_read_by_position(tmp_path: Path, kind: str) -> None:
    source = MemorySource(TENSORS) if kind == "memory" else SafetensorsSource(write(tmp_path, TENSORS))
    assert torch.equal(read_rows(source, "a", 1, 3), TENSORS["a"][1:3])
    assert torch.equal(read_rows(source, "c", 1, 2), TENSORS["c"][1:2])


def test_shards_stay_under_the_limit_and_the_index_sums_up(tmp_path: Path) -> None:
    tensors = {f"t.{i}": torch.zeros(10, dtype=torch.float32) for i in range(7)}
    write(tmp_path, tensors, max_shard_size=80)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 7 * 40
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2 MiB", 2**21), (7, 7), ("10KB", 10_000)])
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "5 bananas", "-1GB", "0GB", 0, -5, 1.5, True])
def test_no_sizes(text: Any) -> None:
    with pytest.raises(UnsupportedLoad, match="max_shard_size"):
        parse_size(text)


def test_a_target_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UnsupportedLoad, match="cannot be written"), staged(tmp_path / "file" / "out", overwrite=False):
        pytest.fail("the body must not run")
    assert (tmp_path / "file").read_text() == "mine"


def header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a file, its data unchanged."""
    data = (folder / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + length])
    change(content)
    text = json.dumps(content).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def truncate(folder: Path, size: int) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda d: truncate(d, 0), "truncated"),
    "cut in the header": (lambda d: truncate(d, 40), "truncated"),
    "cut in the data": (lambda d: truncate(d, -1), "truncated"),
    "bytes at the end": (lambda d: (d / SINGLE).write_bytes((d / SINGLE).read_bytes() + b"x"), "no tensor owns"),
    "no safetensors": (lambda d: (d / SINGLE).write_bytes(b"\x80\x02pickle" * 20), "truncated or no safetensors"),
    "no JSON": (lambda d: (d / SINGLE).write_bytes((4).to_bytes(8, "little") + b"{{{{"), "damaged header"),
    "no UTF-8": (lambda d: (d / SINGLE).write_bytes((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe"), "damaged header"),
    "deep nesting": (
        lambda d: (d / SINGLE).write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5),
        "damaged header",
    ),
    "no object": (lambda d: (d / SINGLE).write_bytes((2).to_bytes(8, "little") + b"[]"), "damaged header"),
    "a name twice": (
        lambda d: (d / SINGLE).write_bytes((14).to_bytes(8, "little") + b'{"a":1,"a":2} '),
        "damaged header",
    ),
    "an entry without dtype": (lambda d: header(d, lambda h: h["a"].pop("dtype")), "describes tensor a wrongly"),
    "an unknown dtype": (lambda d: header(d, lambda h: h["a"].update(dtype="F4")), "dtype F4"),
    "a shape of another size": (lambda d: header(d, lambda h: h["a"].update(shape=[4, 4])), "24 bytes"),
    "a tensor forgotten": (lambda d: header(d, lambda h: h.pop("a")), "gap or an overlap"),
    "a tensor over another": (lambda d: header(d, lambda h: h.update(z=h["a"])), "gap or an overlap"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(write(tmp_path, TENSORS) and tmp_path)
    with pytest.raises(CorruptCheckpoint, match=message) as caught:
        SafetensorsSource(tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.read_from == str(tmp_path / SINGLE)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    with SafetensorsSource(write(tmp_path, TENSORS)) as source:
        with (tmp_path / SINGLE).open("r+b") as file:
            file.truncate(source.infos["a"].offset + 2)
        with pytest.raises(CorruptCheckpoint, match="ends inside tensor a"):
            read_rows(source, "a", 0, 4)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write(tmp_path, {f"t.{i}": torch.full((2,), float(i)) for i in range(3)}, max_shard_size=1)


def reindex(folder: Path, **weight_map: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {name.replace("_", "."): shard for name, shard in weight_map.items()}
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MissingShard, match="1 of 3 shards are missing: model-00002-of-00003"):
        SafetensorsSource(sharded)


def test_a_tensor_that_only_the_index_knows(sharded: Path) -> None:
    reindex(sharded, t_9="model-00001-of-00003.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"lacks t\.9"):
        SafetensorsSource(sharded)


def test_a_tensor_that_the_index_places_elsewhere(sharded: Path) -> None:
    reindex(sharded, t_0="model-00003-of-00003.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"lacks t\.0"):
        SafetensorsSource(sharded)


def test_a_tensor_that_the_index_does_not_know(sharded: Path) -> None:
    save_file({"t.0": torch.zeros(2), "stray": torch.zeros(2)}, sharded / "model-00001-of-00003.safetensors")
    with pytest.raises(CorruptCheckpoint, match="holds stray"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_that_points_outside_the_folder(sharded: Path, shard: str) -> None:
    reindex(sharded, t_0=shard)
    with pytest.raises(CorruptCheckpoint, match="outside the folder"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CorruptCheckpoint):
        SafetensorsSource(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFound, match=r"pytorch_model\.bin: pickles are never read"):
        SafetensorsSource(tmp_path)


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("new")


def write_half(path: Path, *, overwrite: bool) -> None:
    with staged(path, overwrite=overwrite) as folder:
        fill(folder, "config.json", SINGLE)
        raise KeyError


def test_a_staged_folder_appears_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "deep" / "out", overwrite=False) as folder:
        fill(folder, "x")
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "x").read_text() == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_left_after_an_error(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "config.json").write_text("old")
    with pytest.raises(KeyError):
        write_half(out, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])
    assert not overwrite or [path.read_text() for path in out.iterdir()] == ["old"]


def test_overwriting_replaces_the_weights_and_leaves_the_rest(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", INDEX, "model-00001-of-00001.safetensors"):
        (tmp_path / name).write_text("old")
    with staged(tmp_path, overwrite=True) as folder:
        fill(folder, "config.json", SINGLE)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"tokenizer.json": "old", "config.json": "new", SINGLE: "new"}


@pytest.mark.parametrize("kind", ["folder with content", "file"])
def test_a_folder_with_content_is_not_written(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    with pytest.raises(FolderNotEmpty) as caught, staged(out, overwrite=False):
        pytest.fail("the body must not run")
    assert caught.value.exit_code == 7
    assert "overwrite" in str(caught.value.remedy)
