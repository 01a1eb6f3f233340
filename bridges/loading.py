"""From a checkpoint folder to a model: build on meta, allocate, read each tensor to where it belongs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import entry_points
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bestiary.bridges.errors import (
    CheckpointNotFound,
    KeyMismatch,
    TiedHeadMismatch,
    UnsupportedLoad,
    UnsupportedModelType,
)
from bestiary.bridges.fields import FLOAT_TYPES
from bestiary.bridges.hub import CONFIG, GENERATION, commit_of, resolve
from bestiary.bridges.mxfp4 import dequantize
from bestiary.bridges.peft_import import read_adapter, scored_by
from bestiary.bridges.pieces import HubTensor, Piece
from bestiary.bridges.plan import Plan, Transfer
from bestiary.bridges.score import warn_fresh, with_head
from bestiary.bridges.storage import SafetensorsSource, TensorSource, read_json, read_rows
from bestiary.models.config import HeadKind, LoRAConfig
from bestiary.models.sharding import is_spread, own_box, own_part

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge
    from bestiary.models.decoder import Decoder

_CHUNK = 32 * 2**20  # bytes of a tensor that one task handles; also the scratch of a cast or a dequantisation
_READERS = 2
_FEW = 2**22  # elements that are copied before threads have started


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint folder.

    Raises:
        CheckpointNotFound: there is none.
        CorruptCheckpoint: it is no JSON object.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointNotFound(f"no {CONFIG} in {folder}.", remedy="give a folder written by save_pretrained")
    return read_json(folder / CONFIG)


def load_checkpoint(
    bridge: Bridge,
    src: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    lora: LoRAConfig | str | Path | None = None,
    mesh: Any = None,
    backend: str = "native",
    revision: str | None = None,
    cls: type[Any] | None = None,
    name: str | None = None,
    head: str | None = None,
) -> Decoder:
    """The model of a checkpoint.

    Args:
        src: a folder, or a hub id (`revision`: branch, tag or commit there).
        dtype: of the parameters ("bfloat16" will do); None or "auto": what the config states, else that of the stored
            embedding.
        mesh: processes to spread the model over, all of which call this, or a function that spreads a model on meta;
            each reads only its part, onto the mesh's device. The model is never whole anywhere.
        lora: adapters to build in, the base frozen: fresh ones (B zero), or those of a PEFT folder or hub id.
        cls: the family class that was asked for.
        name: what to remember as `name_or_path`; None: `src`.
        head: "score": a reward model; of a causal checkpoint its backbone under a fresh head of one label, drawn by
            torch's seed, with a warning. "lm": a language model. None: what the checkpoint is.
    Raises:
        bestiary.bridges.errors: see each; nothing is returned half-loaded.
    """
    if backend != "native":
        raise UnsupportedLoad(f"backend = {backend!r} is not implemented.", remedy='leave it out, or backend="hf"')
    spread = None if mesh is None else spreading(mesh)
    asked, device = float_type(dtype), usable_device(device)
    if not (lora is None or isinstance(lora, LoRAConfig | str | Path)):
        raise UnsupportedLoad(
            f"lora = {lora!r} is a {type(lora).__name__}.",
            remedy='LoRAConfig(r=8, alpha=16, targets=("*_proj",)) for fresh adapters, or a PEFT folder or hub id',
        )
    folder = resolve(src, revision=revision)
    json = read_config(folder)
    parsed = bridge.parse(json, source=str(folder / CONFIG))
    remembered = str(src) if name is None else name
    headed, new_head = with_head(bridge, parsed.decoder, head, src=remembered)
    adapter = None if lora is None or isinstance(lora, LoRAConfig) else read_adapter(bridge, headed, lora)
    if adapter is not None and adapter.num_labels is not None:
        headed, new_head = scored_by(adapter, headed, asked=head), parsed.decoder.head is HeadKind.LM
    config = headed.with_(lora=lora if adapter is None else adapter.lora)
    family = _family(bridge, cls)
    with SafetensorsSource(folder) as source:
        plan = bridge.plan_import(
            config, source.infos, quantization=parsed.quantization, read_from=str(folder), new_head=new_head
        )
        chosen = asked or parsed.dtype or stored_dtype(plan, source)
        if adapter is not None:
            config = config.with_(lora=adapter.lora_for(chosen))
        model = family(config, dtype=chosen, device="meta")
        if spread is not None:
            spread(model)
            device = device_of(model)
        model.to_empty(device=device)
        fill(model, source, plan)
    if adapter is not None:
        adapter.fill(model)
    if new_head and (adapter is None or adapter.num_labels is None):
        warn_fresh(remembered)
    remember(model, folder, json, remembered)
    return model.eval()


def remember(model: Decoder, folder: Path, json: Mapping[str, Any], name: str) -> None:
    """What an export of `model` carries on from the checkpoint in `folder` with the config `json`."""
    model.name_or_path = name
    model.revision = None if Path(name).expanduser().is_dir() else commit_of(folder)
    model.hf_config_json = copy.deepcopy(dict(json))
    model.hf_generation_config_json = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else None


def spreading(mesh: Any) -> Callable[[Decoder], object]:
    """What spreads a model over `mesh`: the function itself, or `training.parallel.parallelize` with its defaults.

    It is reached by the entry point `bestiary.parallel`, for nothing down here knows about training.

    Raises:
        UnsupportedLoad: neither a mesh nor a function.
    """
    if callable(mesh):
        return cast(Callable[["Decoder"], object], mesh)
    if not isinstance(mesh, DeviceMesh):
        raise UnsupportedLoad(
            f"mesh = {mesh!r} is a {type(mesh).__name__}.",
            remedy="bestiary.training.parallel.build_mesh() makes one; or pass a function that spreads a model",
        )
    points = {point.name: point for point in entry_points(group="bestiary.parallel")}
    if "parallelize" not in points:
        raise UnsupportedLoad(
            "mesh = … and no entry point bestiary.parallel: parallelize.", remedy="install bestiary again (pip install)"
        )
    return partial(points["parallelize"].load(), mesh=mesh)


def device_of(model: Decoder) -> torch.device:
    """Where the parts of a spread model belong: the device of its mesh, of an accelerator the current one."""
    meshes = (p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor))
    return torch.device(next(meshes, "cpu"))


@torch.no_grad()
def fill(model: Decoder, source: TensorSource, plan: Plan) -> None:
    """Write every parameter of `model` from `source`, each element once; initialise fresh adapters.

    Tensors are read in the order of the file: straight into the parameter's memory where dtype and layout agree, and
    otherwise through a scratch of some 32 MiB per reader. Of a model that is spread over processes each reads the rows
    that hold something of its parts, in a scratch no larger than the largest of them; the model is one already given
    its memory.

    Raises:
        TiedHeadMismatch: a stored head differs from the embedding it is tied to.
        KeyMismatch: an element was written twice or not at all (a bug of a rule, caught here).
    """
    named = dict(model.named_parameters())
    parts, chunk = {name: own_part(parameter) for name, parameter in named.items()}, _CHUNK
    mine = plan
    if is_spread(named.values()):
        mine = plan.within({name: own_box(parameter) for name, parameter in named.items()})
        chunk = min(_CHUNK, max(part.nbytes for part in parts.values()) // (4 * _READERS))
    fill_parameters(parts, source, mine, chunk)
    model.init_weights(torch.initial_seed() % 2**31, only=frozenset(plan.fresh))
    if plan.duplicate_head is not None:
        compare_head(source, plan, chunk)


@torch.no_grad()
def fill_parameters(parameters: Mapping[str, Tensor], source: TensorSource, plan: Plan, chunk: int = _CHUNK) -> None:
    """Write `parameters`, those of a model or of a part of it, by the items of `plan`, which name no others.

    Args:
        chunk: bytes of a hub tensor that a reader holds; a row, if that is more.
    Raises:
        KeyMismatch: an element was written twice or not at all (a bug of a rule, caught here).
    """
    tasks = sorted(_tasks(plan, chunk), key=lambda task: _position(source, task[0].hub, task[1]))
    written: Counter[str] = Counter()
    if sum(p.numel() for p in parameters.values()) <= _FEW:
        for task in tasks:
            written.update(_copy(source, parameters, *task))
    else:
        with ThreadPoolExecutor(_READERS) as pool:
            for counts in pool.map(lambda task: _copy(source, parameters, *task), tasks):
                written.update(counts)
    wrong = [name for name, p in parameters.items() if name not in plan.fresh and written[name] != p.numel()]
    if wrong:
        raise KeyMismatch(mismatched=wrong, read_from=source.name, remedy="correct the rule of these parameters")


@torch.no_grad()
def fill_named(bridge: Bridge, model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Write hub tensors, as `named_hf_tensors` of such a model gives them, into one that lies whole in this process.

    Returns:
        Parameters that were not written wholly; adapters are none of them.
    Raises:
        KeyMismatch: a name or shape that the model does not have; what came before it is written.
    """
    plan = bridge.plan_export(model.decoder_config)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    transfers = {transfer.hub.name: transfer for transfer in plan.transfers}
    written: Counter[str] = Counter()
    for name, tensor in tensors:
        transfer = transfers.get(name)
        if transfer is None:
            raise KeyMismatch(extra=[name], read_from="a stream of tensors")
        if tuple(tensor.shape) != transfer.hub.shape:
            wrong = f"{name} {list(tensor.shape)}, expected {list(transfer.hub.shape)}"
            raise KeyMismatch(mismatched=[wrong], read_from="a stream of tensors")
        for native, piece in transfer.pieces:
            piece.read(tensor, parameters[native])
            written[native] += piece.numel
    return [item.native for item in plan.items if written[item.native] != parameters[item.native].numel()]


def float_type(dtype: Any) -> torch.dtype | None:
    """A float type from itself or its name; None for "auto".

    Raises:
        UnsupportedLoad: no float type.
    """
    if dtype is None or dtype == "auto":
        return None
    found = FLOAT_TYPES.get(str(dtype).removeprefix("torch."))
    if found is None or not isinstance(dtype, torch.dtype | str):
        raise UnsupportedLoad(
            f"dtype = {dtype!r} is no type for parameters.",
            remedy=f"one of {', '.join(f'torch.{name}' for name in FLOAT_TYPES)}, or None for the checkpoint's own",
        )
    return found


def usable_device(device: Any) -> torch.device:
    """A device that exists here.

    Raises:
        UnsupportedLoad: it does not.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        raise UnsupportedLoad(
            f"device = {device!r} cannot be used here ({str(error).splitlines()[0]}).",
            remedy='"cpu", or "cuda" on a machine with a GPU and a torch built for it',
        ) from error
    return found


def _family(bridge: Bridge, cls: type[Any] | None) -> type[Decoder]:
    if cls is None or issubclass(bridge.decoder, cls):
        return bridge.decoder
    if issubclass(cls, bridge.decoder):
        return cls
    raise UnsupportedModelType(
        f"the checkpoint's model_type is served by {bridge.decoder.__name__}, not by {cls.__name__}.",
        remedy=f"use {bridge.decoder.__name__}.from_pretrained or AutoDecoder.from_pretrained",
    )


def stored_dtype(plan: Plan, source: TensorSource) -> torch.dtype:
    """That of the first tensor a plan reads that is not packed."""
    return next(source.infos[t.hub.name].dtype for t in plan.transfers if not t.hub.packed)


def _tasks(plan: Plan, chunk: int) -> Iterator[tuple[Transfer, int, int]]:
    """The rows of each hub tensor that somebody wants, in ranges of at most a chunk."""
    for transfer in plan.transfers:
        wanted = [piece.source[0] for _, piece in transfer.pieces]
        first, rows = min(rows.start for rows in wanted), max(rows.stop for rows in wanted)
        row_bytes = max(1, prod(transfer.hub.shape[1:]) * 2)
        step = max(1, chunk // row_bytes)
        for start in range(first, rows, step):
            yield transfer, start, min(rows, start + step)


def _position(source: TensorSource, hub: HubTensor, row: int) -> tuple[int, int]:
    info = source.infos[next(iter(hub.stored))]
    return info.file, info.offset + row * info.row_bytes


def _copy(
    source: TensorSource, parameters: Mapping[str, Tensor], transfer: Transfer, start: int, stop: int
) -> Counter[str]:
    """Rows [start, stop) of one hub tensor to where they belong; the number of elements written per parameter."""
    parts = [(native, part) for native, piece in transfer.pieces if (part := piece.rows(start, stop)) is not None]
    if not parts:  # between rows that others own
        return Counter()
    native, part = parts[0]
    target = parameters[native][part.dest]
    if len(parts) == 1 and _direct(source, part, target):
        source.read_into(transfer.hub.name, start, target)
    else:
        hub = _rows(source, transfer.hub, start, stop)
        for native, part in parts:
            part.read(hub, parameters[native])
    counts: Counter[str] = Counter()
    for native, part in parts:
        counts[native] += part.numel
    return counts


def _direct(source: TensorSource, part: Piece, target: Tensor) -> bool:
    """Whether the bytes of the file are the bytes of the parameter's region."""
    return (
        not part.hub.packed
        and not part.transposed
        and target.is_contiguous()
        and target.device.type == "cpu"
        and target.dtype is source.infos[part.hub.name].dtype
        and part.numel == target.numel() == prod((part.source[0].stop, *part.hub.shape[1:]))
    )


def _rows(source: TensorSource, hub: HubTensor, start: int, stop: int) -> Tensor:
    stored = [read_rows(source, name, start, stop) for name in hub.stored]
    if not hub.packed:
        return stored[0]
    return dequantize(*stored, name=hub.name, read_from=source.place(f"{hub.name}_scales"), first=start)


def compare_head(source: TensorSource, plan: Plan, chunk: int = _CHUNK) -> None:
    """Refuse a stored head that is not, bit for bit, the stored embedding; `chunk` bytes of each at a time."""
    assert plan.duplicate_head is not None
    head, native = plan.duplicate_head
    embedding = next(t.hub.name for t in plan.transfers if t.pieces[0][0] == native)
    info = source.infos[head]
    step = max(1, chunk // info.row_bytes)
    for start in range(0, info.num_rows, step):
        stop = min(info.num_rows, start + step)
        ours = read_rows(source, embedding, start, stop)
        theirs = read_rows(source, head, start, stop)
        if ours.dtype is not theirs.dtype or not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise TiedHeadMismatch(
                f"{head} differs from {embedding}, and the config says tie_word_embeddings = True.",
                read_from=source.name,
                remedy="set tie_word_embeddings to false in config.json if the head was trained apart, or remove it",
            )
