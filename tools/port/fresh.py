"""Tiny configs that a port has not seen: the verifier's own, with sizes, eps and frequencies drawn anew."""

from __future__ import annotations

import random
from typing import Any

from bestiary.verify.tiny import FROM_DEFAULTS, Raw, tiny_configs

# No multiple of 64, no square root that bfloat16 holds, nothing that the config sweep varies to.
VOCABULARIES = (199, 203, 207, 213, 217, 221)
WIDTHS = (72, 80, 104)
INNER = (106, 108, 114, 116, 122)


def _turned(parameters: Any, share: float) -> Any:
    """RoPE parameters with every base scaled."""
    if not isinstance(parameters, dict):
        return parameters
    return {
        name: round(value * share, 3) if name == "rope_theta" else _turned(value, share)
        for name, value in parameters.items()
    }


def fresh_configs(reference: str, seed: int) -> dict[str, Raw]:
    """The tiny configs of a reference with new numbers; those that stand for defaults or for squares stay.

    Args:
        reference: "transformers:ClassName".
        seed: of the draw.
    """
    draw = random.Random(seed)
    made = {}
    for name, raw in tiny_configs(reference).items():
        if name in FROM_DEFAULTS:
            made[name] = raw
            continue
        new = dict(raw)
        if "intermediate_size" in raw and 2 * raw["intermediate_size"] != raw["hidden_size"]:
            new |= {"vocab_size": draw.choice(VOCABULARIES), "intermediate_size": draw.choice(INNER)}
            if (pad := raw.get("pad_token_id")) is not None:
                new["pad_token_id"] = min(pad, new["vocab_size"] - 1)
            if "head_dim" in raw:
                new["hidden_size"] = draw.choice(WIDTHS)
        if raw.get("rope_parameters") is not None:
            new["rope_parameters"] = _turned(raw["rope_parameters"], draw.uniform(0.5, 2.0))
        made[name] = new
    return made
