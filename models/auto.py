"""`AutoDecoder`: the family class that a checkpoint's config names."""

from pathlib import Path
from typing import Any

import torch

from bestiary.models.config import LoRAConfig
from bestiary.models.decoder import Decoder
from bestiary.models.protocol import bridge_of


class AutoDecoder:
    """Not a model: `from_pretrained` returns an instance of the registered family class."""

    @staticmethod
    def from_pretrained(
        src: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        lora: LoRAConfig | str | Path | None = None,
        mesh: Any = None,
        backend: str = "native",
        revision: str | None = None,
    ) -> Decoder:
        """The model of a checkpoint folder or hub id; arguments and errors as `Decoder.from_pretrained`."""
        model: Decoder = bridge_of("auto").load(
            src, dtype=dtype, device=device, lora=lora, mesh=mesh, backend=backend, revision=revision, cls=None
        )
        return model
