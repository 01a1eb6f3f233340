"""Ministral between the Hub and bestiary: Mistral with a layer type for each layer."""

from __future__ import annotations

from typing import Any

from bestiary.bridges import mistral
from bestiary.bridges.bridge import Bridge
from bestiary.bridges.fields import HFFields
from bestiary.bridges.llama import RULES
from bestiary.models import Ministral
from bestiary.models.config import DecoderConfig, LayerType


def config_from_hf(hf: HFFields) -> DecoderConfig:
    """MinistralConfig: MistralConfig with `layer_types`, where nothing stands in for a missing head_dim or window."""
    hf.positive("head_dim")
    window = hf.positive("sliding_window", 4096)
    types = hf.layer_types(hf.positive("num_hidden_layers", 32), lambda _: LayerType.SLIDING)
    return mistral.windowed(hf, "ministral").with_(layer_types=types, sliding_window=window)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of MinistralConfig that describe `config`."""
    return mistral.config_to_hf(config) | {"model_type": "ministral", "layer_types": list(config.layer_types)}


# fmt: off
KILL_LIST = (
    "B0*", "B1*", "B43*", "B44b*", "B44c*", "B44d*", "B44e*", "B44f*", "B44g*", "B45*", "C01*", "C02*", "C03*",
    "C04*", "C05*", "C06*", "C07*", "C08a*", "C08c*", "C10*", "C11b*", "C11c*", "C11d*", "C12*", "C13*", "C14*",
    "C16*", "C17*", "C2*", "C51*", "C52*", "C54*", "C58*", "C59*", "G22*", "G23*", "H*", "K01*", "K04*", "K05*",
    "K06*", "K07*", "N01*", "N02*", "N03*", "O4*", "T46a*", "T46b*", "T46c*", "T47a*", "T47b*", "T47e*", "T47f*",
    "X*",
)
# fmt: on

BRIDGE = Bridge(
    model_type="ministral",
    reference="transformers:MinistralForCausalLM",
    decoder=Ministral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=RULES,
    kill_list=KILL_LIST,
)
