"""Tiny models with adapters, on our side and on PEFT's, in true float64."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from bestiary.bridges import get_bridge
from bestiary.models import AutoDecoder, Decoder, LoRAConfig
from bestiary.models.lora import sites
from bestiary.verify.reference import build, promoted
from bestiary.verify.weights import perturb

from .checkpoints import FAMILIES, tiny_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATTERNS_OF_PARAMETERS = "The following .*_pattern keys did not match any targeted module"  # PEFT looks at modules only
ROUTED = ("gpt_oss", "qwen3_moe")
EVERYTHING = {family: ("*_proj", "mlp.gate") if family in ROUTED else ("*_proj",) for family in FAMILIES}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.randint(0, 1003, (2, 17), generator=torch.Generator().manual_seed(0))


def reference(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """A fresh transformers model, the same one at every call (PEFT changes it in place)."""
    model = build(get_bridge(family).reference, tiny_config(family).to_dict(), dtype)
    perturb(model, seed=0)
    return model


def saved(folder: Path, family: str) -> Path:
    """The reference as a checkpoint inside `folder`, written once."""
    if not (folder / family).exists():
        reference(family).save_pretrained(folder / family)
    return folder / family


def lora(*targets: str, r: int = 3, alpha: float = 7.0, **changes: Any) -> LoRAConfig:
    """A config in few words."""
    return LoRAConfig(r=r, alpha=alpha, targets=targets, **changes)


def ours(folder: Path, adapter: LoRAConfig | Path | str | None, seed: int = 1) -> Decoder:
    """Our model; fresh adapters get values that do something."""
    model = AutoDecoder.from_pretrained(folder, lora=adapter)
    if isinstance(adapter, LoRAConfig):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for site in sites(model):
                if site.adapter is not None:
                    site.adapter.lora_B.normal_(0.0, 0.3, generator=generator)
    return model


def logits(model: Any) -> Tensor:
    """Of the same tokens at every call."""
    with promoted(), torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def with_peft(base: Any, adapter: Path) -> Any:
    """transformers' model, given or of a family, with an adapter folder on it; PEFT must find every key it wants."""
    with promoted(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message=PATTERNS_OF_PARAMETERS)
        return PeftModel.from_pretrained(reference(base) if isinstance(base, str) else base, adapter).eval()


def peft_made(family: str, folder: Path, **options: Any) -> Any:
    """An adapter that PEFT makes, its values random, saved to `folder`; the model it acts in."""
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **options})
    with promoted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=PATTERNS_OF_PARAMETERS)
        model = get_peft_model(reference(family), config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model
