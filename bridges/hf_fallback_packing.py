"""Whether a wrapped model keeps packed documents apart by their `position_ids`: asked of the model itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Two rows with borders in different places; a third document shows that the second border counts too.
_LENGTHS = ((5, 4, 3), (2, 7, 3))


@torch.no_grad()
def documents_leak(run: Callable[[Tensor, Tensor], Tensor], vocab_size: int, device: torch.device) -> str | None:
    """Why documents that share a row would see each other; None if the model keeps them apart.

    Every token of the first documents is exchanged for another one: their own hidden states must move and no other may.

    Args:
        run: hidden states or logits (B, T, …) of input_ids (B, T) and position_ids (B, T).
    """
    positions = torch.tensor([[p for length in row for p in range(length)] for row in _LENGTHS], device=device)
    lengths = torch.tensor(_LENGTHS, device=device)
    first = torch.arange(positions.shape[1], device=device) < lengths[:, :1]
    ids = torch.arange(positions.numel(), device=device).view_as(positions) % vocab_size
    other = torch.where(first, (ids + vocab_size // 2) % vocab_size, ids)
    before, after = run(ids, positions), run(other, positions)
    moved = (after - before).abs().amax(dim=-1)
    own, foreign = float(moved[first].max()), float(moved[~first].max())
    if not own > 0:
        return "exchanging tokens moves nothing, so that nothing can be told"
    # Where a token's neighbours change the shape of a product (experts), the same numbers may round otherwise.
    if foreign == 0 or (before.dtype in (torch.float32, torch.float64) and foreign <= 64 * _eps(before) * own):
        return None
    return f"exchanging the tokens of one document moves another one's hidden states by {foreign / own:.1e} of its own"


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps
