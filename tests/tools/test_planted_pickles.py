"""Nothing that comes from outside is unpickled, and no code that comes with a file is run.

A pickle that makes a folder lies in every place that the package reads from elsewhere; after each attempt the folder
must not be there. Where nothing else can be read, the attempt ends in an error of the package.
"""

import hashlib
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bestiary.bridges.gguf import gguf_to_hf_folder
from bestiary.kernels.errors import BestiaryError
from bestiary.models import AutoDecoder, Qwen3
from bestiary.training.checkpoint import read_tensors
from bestiary.training.checkpoint_reader import METADATA, ResumePointReader
from bestiary.training.data.encoded import encoded
from bestiary.training.data.hub import HubRows
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import CheckpointRefused
from bestiary.training.recipes.reference import Stored
from bestiary.training.rl.records import load_experiences, load_trajectories
from bestiary.verify.reading import read_report


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.mark,)


def bomb(mark: Path) -> bytes:
    return pickle.dumps(Bomb(mark))


def torch_file(mark: Path) -> bytes:
    """As `torch.save` writes it, weights beside the bomb."""
    held = io.BytesIO()
    torch.save({"model.norm.weight": torch.ones(3), "bomb": Bomb(mark)}, held)
    return held.getvalue()


def checkpoint(folder: Path) -> Path:
    """A small one of ours."""
    config = Qwen3.sizes["0.6b"].with_(
        vocab_size=101, hidden_size=40, intermediate_size=56, num_hidden_layers=2, layer_types=()
    )
    model = Qwen3(config)
    model.init_weights(0)
    model.save_pretrained(folder)
    return folder


def only_pickles(folder: Path, mark: Path, **options: object) -> None:
    """The weights are there as a pickle alone."""
    checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_file(mark))
    AutoDecoder.from_pretrained(folder, **options)  # type: ignore[call-overload]


def index_of_pickles(folder: Path, mark: Path) -> None:
    checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / "weights.bin").write_bytes(torch_file(mark))
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "weights.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    AutoDecoder.from_pretrained(folder)


def under_the_other_name(folder: Path, mark: Path) -> None:
    checkpoint(folder)
    (folder / "model.safetensors").write_bytes(torch_file(mark))
    AutoDecoder.from_pretrained(folder)


def adapter(folder: Path, mark: Path, **options: object) -> None:
    base = checkpoint(folder / "base")
    tuned = folder / "adapter"
    tuned.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tuned / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    (tuned / "adapter_model.bin").write_bytes(torch_file(mark))
    AutoDecoder.from_pretrained(base, lora=tuned, **options)  # type: ignore[call-overload]


def gguf(folder: Path, mark: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF" + bomb(mark))
    gguf_to_hf_folder(folder / "model.gguf", folder / "out")


def rows_of(files: str | HubRows) -> None:
    """As a run reads them."""
    source = Source(name="outside", files=files, encode=encoded, on_corrupt="raise")
    next(iter(PackLoader(Plan(sources=(source,), pack_length=8, pad_id=0, tokenizer=""), workers=0)))


def named_data(suffix: str) -> Callable[[Path, Path], None]:
    def attempt(folder: Path, mark: Path) -> None:
        file = folder / f"rows{suffix}"
        file.write_bytes(bomb(mark))
        rows_of(str(file))

    return attempt


def member_of_a_tar(folder: Path, mark: Path) -> None:
    """Suffixes that WebDataset's own reader unpickles."""
    with tarfile.open(folder / "shard.tar", "w") as shard:
        for name in ("0.pyd", "0.pickle", "0.pkl", "0.pth", "0.pt", "0.npy"):
            content = bomb(mark)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    rows_of(str(folder / "shard.tar"))


def hub_data(folder: Path, mark: Path) -> None:
    """The format of `datasets` that is made of pickles."""
    (folder / "rows.pkl").write_bytes(bomb(mark))
    rows_of(HubRows("pandas", arguments={"data_files": str(folder / "rows.pkl")}))


def sums_of_a_reference(folder: Path, mark: Path) -> None:
    with zipfile.ZipFile(folder / "sums.npz", "w") as archive:
        for name in ("digests", "sums"):
            column = io.BytesIO()
            np.save(column, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
            archive.writestr(f"{name}.npy", column.getvalue())
    Stored.load(folder / "sums.npz")


def trajectories(folder: Path, mark: Path) -> None:
    (folder / "told.safetensors").write_bytes(bomb(mark))
    load_trajectories(folder / "told.safetensors")


def experiences(folder: Path, mark: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "told.safetensors", {"format": bomb(mark).hex()})
    load_experiences(folder / "told.safetensors")


def verdict(folder: Path, mark: Path) -> None:
    (folder / "verdict.json").write_bytes(bomb(mark))
    read_report(folder / "verdict.json")


def resume_point(folder: Path, mark: Path) -> None:
    """The manifest agrees: whoever forges one file forges both."""
    (folder / METADATA).write_bytes(bomb(mark))
    digest = hashlib.sha256(bomb(mark)).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"files": {METADATA: {"sha256": digest}}}))
    read_tensors(folder, Qwen3(Qwen3.sizes["0.6b"], device="meta"), None)


def bytes_in_a_resume_point(folder: Path, mark: Path) -> None:
    """torch would unpickle what its metadata calls bytes."""
    held = Metadata({"model.model.norm.weight": BytesStorageMetadata()}, storage_data={})
    (folder / METADATA).write_bytes(pickle.dumps(held))
    (folder / "__0_0.distcp").write_bytes(torch_file(mark))
    ResumePointReader(folder).read_metadata()


def changed_class(folder: Path, mark: Path) -> None:
    """State that a class is given and not an object, as if torch had been written so: the folder says that it was."""
    named = b"ctorch.distributed.checkpoint.metadata\n%b\n"
    setting = named % b"Metadata" + b"(N}Vsize\n" + named % b"ChunkStorageMetadata" + b"stb."
    (folder / METADATA).write_bytes(setting)
    try:
        ResumePointReader(folder).read_metadata()
    finally:
        if "size" in vars(Metadata):
            del Metadata.size  # type: ignore[attr-defined]
            mark.mkdir()


def attribute_of_a_class(folder: Path, mark: Path) -> None:
    """Python 3.11.2 writes a member of an Enum as an attribute of its class: of one class, and those alone."""
    named = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n%b\nV%b\ntR"
    (folder / METADATA).write_bytes(named % (b"_MEM_FORMAT_ENCODING", b"mro") + b"(tR.")
    with pytest.raises(CheckpointRefused, match="it asks for the attribute mro"):
        ResumePointReader(folder).read_metadata()
    (folder / METADATA).write_bytes(named % (b"Metadata", b"TORCH_CONTIGUOUS_FORMAT") + b".")
    ResumePointReader(folder).read_metadata()


def beside_a_resume_point(folder: Path, mark: Path) -> None:
    """A tensor that lies elsewhere."""
    index, place = MetadataIndex("model.a", [0]), _StorageInfo("../elsewhere.distcp", 0, 8)
    one = TensorStorageMetadata(
        TensorProperties(), torch.Size([1]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]
    )
    (folder / METADATA).write_bytes(pickle.dumps(Metadata({"model.a": one}, storage_data={index: place})))
    ResumePointReader(folder).read_metadata()


def code_of_a_model(folder: Path, mark: Path) -> None:
    checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    AutoDecoder.from_pretrained(folder, backend="hf")


def code_of_a_tokenizer(folder: Path, mark: Path) -> None:
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    settings = {"auto_map": {"AutoTokenizer": ["code.T", "code.T"]}, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    BaseHFModelTokenizer.from_pretrained(folder)


REFUSED: dict[str, Callable[[Path, Path], None]] = {
    "checkpoint": only_pickles,
    "checkpoint, fallback": lambda folder, mark: only_pickles(folder, mark, backend="hf"),
    "checkpoint, index": index_of_pickles,
    "checkpoint, another name": under_the_other_name,
    "adapter": adapter,
    "adapter, fallback": lambda folder, mark: adapter(folder, mark, backend="hf"),
    "gguf": gguf,
    "jsonl": named_data(".jsonl"),
    "jsonl.gz": named_data(".jsonl.gz"),
    "parquet, a teacher's file too": named_data(".parquet"),
    "arrow": named_data(".arrow"),
    "data of an unknown format": named_data(".pkl"),
    "members of a tar": member_of_a_tar,
    "hub data": hub_data,
    "sums of a reference": sums_of_a_reference,
    "trajectories": trajectories,
    "experiences": experiences,
    "verdict": verdict,
    "resume point": resume_point,
    "bytes in a resume point": bytes_in_a_resume_point,
    "a class in a resume point": changed_class,
    "an attribute in a resume point": attribute_of_a_class,
    "a place outside of a resume point": beside_a_resume_point,
    "code of a model": code_of_a_model,
    "code of a tokenizer": code_of_a_tokenizer,
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_pickle_is_refused_and_not_unpickled(place: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "outside", tmp_path / "unpickled"
    folder.mkdir()
    with pytest.raises(BestiaryError) as caught:
        REFUSED[place](folder, mark)
    assert not mark.exists()
    assert caught.value.what


@pytest.mark.filterwarnings("ignore::bestiary.bridges.hf_fallback.FallbackWarning")
def test_a_pickle_that_lies_beside_good_weights_is_left_alone(tmp_path: Path) -> None:
    folder, mark = checkpoint(tmp_path / "outside"), tmp_path / "unpickled"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_bytes(torch_file(mark))
    AutoDecoder.from_pretrained(folder)
    AutoDecoder.from_pretrained(folder, backend="hf")
    assert not mark.exists()


def test_a_description_of_tensors_is_read_whichever_python_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = TensorProperties(torch.bfloat16, memory_format=torch.contiguous_format)
    parts = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))]
    held = Metadata({"model.a": TensorStorageMetadata(properties, torch.Size([1]), parts)}, storage_data={})
    written = []
    for form in (lambda one, _: (type(one), (one.value,)), lambda one, _: (getattr, (type(one), one.name))):
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", form)  # of 3.12, and of 3.11.2
        written.append(pickle.dumps(held))
        (tmp_path / METADATA).write_bytes(written[-1])
        found = ResumePointReader(tmp_path).read_metadata().state_dict_metadata["model.a"]
        assert found.properties == properties
    assert written[0] != written[1]


def test_the_bomb_goes_off_where_it_is_unpickled(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    pickle.loads(bomb(tmp_path / "unpickled"))
    torch.load(io.BytesIO(torch_file(tmp_path / "too")), weights_only=False)
    assert (tmp_path / "unpickled").is_dir()
    assert (tmp_path / "too").is_dir()
