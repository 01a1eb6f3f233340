"""A checkpoint through our loader and our export with a few parameters in memory: the files of `load` and `save`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bestiary.bridges.export import save_from
from bestiary.bridges.hub import CONFIG, resolve
from bestiary.bridges.loading import compare_head, fill_parameters, read_config, remember, stored_dtype
from bestiary.bridges.plan import Plan
from bestiary.bridges.storage import SafetensorsSource, TensorSource

if TYPE_CHECKING:
    from bestiary.bridges.bridge import Bridge
    from bestiary.models.decoder import Decoder

KEPT = 2
"""Parameters kept, the last ones read: a matrix of experts is asked for once for each expert's tensor."""


class StoredParameters(Mapping[str, Tensor]):
    """The parameters of a model, each read from its checkpoint when it is asked for.

    Args:
        model: says names, shapes and dtypes; nothing is written into it.
        plan: from `plan_import` for this model and `source`.
    """

    def __init__(self, model: Decoder, source: TensorSource, plan: Plan) -> None:
        self.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._source, self._plan = source, plan
        self._items = {item.native: item for item in plan.items}
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._kept:
            plan = replace(self._plan, items=(self._items[name],))
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            made = torch.empty(self._shapes[name], dtype=self.dtypes[name])
            fill_parameters({name: made}, self._source, plan)
            self._kept[name] = made
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@contextmanager
def stored_parameters(bridge: Bridge, src: str | Path) -> Iterator[tuple[Decoder, StoredParameters]]:
    """Our model of a checkpoint on meta, and its parameters as `load` would fill them, in the dtype that it would take.

    Raises:
        bestiary.bridges.errors: those of `load`.
    """
    folder = resolve(src)
    json = read_config(folder)
    parsed = bridge.parse(json, source=str(folder / CONFIG))
    with SafetensorsSource(folder) as source:
        plan = bridge.plan_import(parsed.decoder, source.infos, quantization=parsed.quantization, read_from=str(folder))
        dtype = parsed.dtype or stored_dtype(plan, source)
        model = bridge.decoder(parsed.decoder, dtype=dtype, device="meta")
        remember(model, folder, json, str(src))
        parameters = StoredParameters(model, source, plan)
        if plan.duplicate_head is not None:
            compare_head(source, plan)
        yield model.eval(), parameters


def export_checkpoint(bridge: Bridge, src: str | Path, path: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
    """Writes what `load` followed by `save` writes, with at most `KEPT` parameters in memory; returns the folder.

    Raises:
        bestiary.bridges.errors: those of `load` and `save`.
    """
    with stored_parameters(bridge, src) as (model, parameters):
        return save_from(bridge, model, parameters, path, max_shard_size=max_shard_size)
