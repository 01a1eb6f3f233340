"""What a wrapped model does between its backbone and its logits, found out on a few tokens and never assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# How configs spell what happens to the head's product, in this order: · multiplier, / divisor, soft cap.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "final_logit_softcap")
_TOKENS = 5


@dataclass(frozen=True)
class HeadMap:
    """logits = cap(product · multiplier / divisor), product = hidden Wᵀ + b; cap(u) = softcap · tanh(u / softcap)."""

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def logits(self, product: Tensor) -> Tensor:
        """The logits (..., V) of the head's product (..., V), operation by operation as transformers writes them."""
        if self.multiplier != 1.0:
            product = product * self.multiplier
        if self.divisor != 1.0:
            product = product / self.divisor
        return product if self.softcap is None else torch.tanh(product / self.softcap) * self.softcap

    def core_options(self, head: nn.Linear) -> dict[str, Any]:
        """`bias`, `divisor` and `softcap` of the log-prob core, which adds the bias after dividing."""
        scale = self.multiplier / self.divisor
        bias = head.bias if head.bias is None or scale == 1.0 else head.bias * scale
        return {"bias": bias, "divisor": 1.0 / scale, "softcap": self.softcap}


@torch.no_grad()
def find_head(model: Any) -> HeadMap | str:
    """The map from the head's product to the logits of a transformers model, or why there is none.

    The model runs once on a few tokens, and its backbone once more alone: the backbone's output must be the head's
    input bit for bit, and a map that the config declares must give the logits to four units of rounding.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model:
        return "the model does not tell its backbone from its head"
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    ids = torch.arange(_TOKENS, device=head.weight.device)[None] % model.get_input_embeddings().weight.shape[0]
    seen: dict[str, list[Tensor]] = {"hidden": [], "input": [], "product": []}

    def of_backbone(module: nn.Module, arguments: Any, output: Any) -> None:
        seen["hidden"].append(output[0])

    def of_head(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen["input"].extend(arguments[:1])
        seen["product"].append(output)

    handles = [backbone.register_forward_hook(of_backbone), head.register_forward_hook(of_head)]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except (RuntimeError, TypeError, ValueError) as error:
        return f"a forward pass of a few tokens fails ({str(error).splitlines()[0]})"
    finally:
        for handle in handles:
            handle.remove()
    if {len(found) for found in seen.values()} != {1}:
        return "a forward pass does not call backbone and head once each, in this order"
    hidden, given, product = (seen[name][0] for name in ("hidden", "input", "product"))
    if not torch.equal(hidden, given):
        return "the head's input is not the backbone's output"
    if not torch.equal(backbone(input_ids=ids, use_cache=False)[0], hidden):
        return "the backbone alone computes other hidden states than inside the model"
    for candidate in _candidates(model.config.get_text_config().to_dict()):
        if _same(candidate.logits(product), logits):
            return candidate
    return "the logits are another function of the head's output than the config declares"


def _candidates(config: Mapping[str, Any]) -> Iterator[HeadMap]:
    """Everything that is declared first; then parts of it, for a class may not read all that its config has."""
    multiplier, divisor = _declared(config, _MULTIPLIERS), _declared(config, _DIVISORS)
    softcap = _declared(config, _CAPS)
    for cap in dict.fromkeys((softcap, None)):
        for scale in dict.fromkeys(((multiplier or 1.0, divisor or 1.0), (multiplier or 1.0, 1.0), (1.0, 1.0))):
            yield HeadMap(*scale, cap)


def _declared(config: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    values = (config[name] for name in names if name in config)
    return next((float(value) for value in values if isinstance(value, int | float) and value), None)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    wide = torch.promote_types(ours.dtype, theirs.dtype)
    unit = max(torch.finfo(ours.dtype).eps, torch.finfo(theirs.dtype).eps) * theirs.abs().max()
    return bool((ours.to(wide) - theirs.to(wide)).abs().max() <= 4 * unit)
