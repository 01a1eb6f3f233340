"""`AutoDecoder`: the family class that a checkpoint's config names."""

from pathlib import Path
from typing import Any, Literal, overload

import torch

from bestiary.models.config import LoRAConfig
from bestiary.models.decoder import Decoder
from bestiary.models.protocol import bridge_of


class AutoDecoder:
    """Not a model: `from_pretrained` returns an instance of the registered family class."""

    @overload
    @staticmethod
    def from_pretrained(
        src: str | Path,
        *,
        dtype: torch.dtype | str | None = ...,
        device: torch.device | str = ...,
        lora: LoRAConfig | str | Path | None = ...,
        mesh: Any = ...,
        backend: Literal["native"] = ...,
        revision: str | None = ...,
        trust_remote_code: bool = ...,
        head: Literal["lm", "score"] | None = ...,
    ) -> Decoder:
        """A registered family."""

    @overload
    @staticmethod
    def from_pretrained(
        src: str | Path,
        *,
        dtype: torch.dtype | str | None = ...,
        device: torch.device | str = ...,
        lora: LoRAConfig | str | Path | None = ...,
        mesh: Any = ...,
        backend: str,
        revision: str | None = ...,
        trust_remote_code: bool = ...,
        head: Literal["lm", "score"] | None = ...,
    ) -> Any:
        """A wrapped transformers model, which has the surface of a Decoder and is none."""

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
        trust_remote_code: bool = False,
        head: Literal["lm", "score"] | None = None,
    ) -> Any:
        """The model of a checkpoint folder or hub id; arguments and errors as `Decoder.from_pretrained`.

        Args:
            backend: "native": a verified family, refused by name where there is none. "hf": transformers' own model of
                any architecture behind the same surface (`bestiary.bridges.hf_fallback_model.HFDecoder`): forward
                contract, log-prob loss, LoRA by PEFT, export; unverified, and a warning says what is off.
            trust_remote_code: with "hf", run modelling code that comes with the checkpoint.
        """
        more: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
        return bridge_of("auto").load(
            src,
            dtype=dtype,
            device=device,
            lora=lora,
            mesh=mesh,
            backend=backend,
            revision=revision,
            cls=None,
            head=head,
            **more,
        )
