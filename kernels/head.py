"""Logits of a linear head whose vocabulary is computed in multiples of 64 and never shows it."""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64


def head_logits(hidden: Tensor, weight: Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> Tensor:
    """softcap(hidden Wᵀ / divisor) over the real vocabulary.

    The last V mod 64 rows of the weight go through one zero-padded tile of 64 rows, so that every GEMM is aligned; the
    padded columns are cut before anything sees them, and their gradient never exists.

    Args:
        hidden: (..., H).   weight: (V, H).
        divisor: Granite's `logits_scaling`.   softcap: cap · tanh(z / cap), in the logits' dtype (Gemma).
    Returns:
        (..., V), contiguous, in the dtype of the product.
    """
    ragged = weight.shape[0] % TILE
    if ragged == 0:
        logits = F.linear(hidden, weight)
    else:
        whole = weight.shape[0] - ragged
        tile = F.linear(hidden, F.pad(weight[whole:], (0, 0, 0, TILE - ragged)))[..., :ragged]
        logits = torch.cat((F.linear(hidden, weight[:whole]), tile), dim=-1)
    if divisor != 1.0:
        logits = logits / divisor
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits
