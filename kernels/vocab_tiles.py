"""The vocabulary in tiles, and how large chunks of tokens and tiles of the vocabulary are.

Sizes are a pure function of shape and dtype, never of free memory: a sum runs in the same order on every machine.
Figures on two cores (AVX2, MKL): contiguous (R, 2048) tiles reach the rate of a large square GEMM from R = 256 on, in
all three products; a (R, V) buffer whose tiles are column slices loses a fifth of it in the forward product.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.head import TILE
from bestiary.kernels.log_prob_terms import LogitMap
from bestiary.kernels.products import in_onednn, mm, put_product

COLUMNS = 2048  # of a vocabulary tile: (512, 2048) fp32 logits are 4 MiB and stay in the last cache
ROWS = 512  # tokens of a chunk when only one tile of logits lives at a time
HELD_BYTES = 2**28  # logits of a chunk when all of its tiles live until its gradients are done
HELD_ROWS = (256, 512, 2048)  # of such a chunk: the least, the least for wide heads, the most


def row_chunks(tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, *, held: int = 0) -> list[slice]:
    """Chunks of tokens, as equal as they come.

    Args:
        held: how many (R, V) buffers of logits live through a chunk. 0: R = 512. Otherwise as many rows as fit
            256 MiB together, or, where the vocabulary is too large for that, two fifths of the hidden size (the
            buffers then stay below 0.4 of the head's own gradient) between 256 and 512; never more than 2048.
        dtype: of the logits.
    Returns:
        Slices of range(tokens).
    """
    limit = ROWS
    if held:
        fitting = HELD_BYTES // (held * max(vocab_size, 1) * dtype.itemsize)
        least = min(max(2 * hidden_size // 5, HELD_ROWS[0]), HELD_ROWS[1]) * 4 // (held * dtype.itemsize)
        limit = min(max(fitting, least, 1), HELD_ROWS[2])
        limit -= limit % TILE if limit > TILE else 0
    count = -(-tokens // limit)
    size = -(-tokens // count) if count else 0
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size or 1)]


@dataclass(frozen=True)
class Tile:
    """Columns [start, start + real) of the vocabulary, computed in `width` columns, a multiple of 64."""

    index: int
    start: int
    real: int

    @property
    def width(self) -> int:
        """`real` rounded up to a multiple of 64."""
        return -(-self.real // TILE) * TILE

    @property
    def columns(self) -> slice:
        """Where the tile lies in the vocabulary."""
        return slice(self.start, self.start + self.real)


def tiles_of(vocab_size: int) -> list[Tile]:
    """Tiles of `COLUMNS` columns over the whole multiples of 64, then one of 64 for the rest, as in `head.py`."""
    whole = vocab_size - vocab_size % TILE
    tiles = [Tile(i, start, min(COLUMNS, whole - start)) for i, start in enumerate(range(0, whole, COLUMNS))]
    if whole < vocab_size:
        tiles.append(Tile(len(tiles), whole, vocab_size - whole))
    return tiles


class Vocabulary:
    """A head's weight tile by tile in at least fp32, and the logits it gives.

    Args:
        weight: (V, H), any strides.   bias: (V,) or None.
        dtype: that products are computed and accumulated in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, logit_map: LogitMap, dtype: torch.dtype) -> None:
        self.size, self.hidden_size = weight.shape
        self.map, self.dtype, self.device, self.tiles = logit_map, dtype, weight.device, tiles_of(self.size)
        self._weight, self._bias = weight, bias
        self._copy: Tensor | None = None

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.tiles)

    def weight(self, tile: Tile) -> Tensor:
        """(tile.width, H), rows beyond the real ones zero; valid until the next call."""
        rows = self._weight[tile.columns]
        if tile.real == tile.width and rows.dtype == self.dtype:
            return rows
        if self._copy is None:
            self._copy = rows.new_empty(max(t.width for t in self.tiles), self.hidden_size, dtype=self.dtype)
        padded = self._copy[: tile.width]
        padded[: tile.real].copy_(rows)
        padded[tile.real :].zero_()
        return padded

    def logits(self, x: Tensor, weight: Tensor, tile: Tile, out: Tensor, *, stay: bool = True) -> Tensor:
        """Logits (R, tile.width), 0 in the padded columns.

        Args:
            x: (R, H), hidden states times `map.inner`.   weight: `self.weight(tile)`.
            out: memory for them.   stay: they must lie there; otherwise they may lie where the product puts them.
        """
        if self._bias is None and not stay and in_onednn(len(x), x, weight):
            out = mm(x, weight.T)
        elif self._bias is None:
            put_product(out, x, weight.T)
        else:
            bias = self._bias[tile.columns].to(self.dtype) * self.map.bias_factor
            torch.addmm(F.pad(bias, (0, tile.width - tile.real)), x, weight.T, out=out)
        if self.map.outer is not None:
            out.tanh_().mul_(self.map.outer)
        return out


class Blocks:
    """Memory for one tile of logits, or for all of them (`held`): contiguous (rows, width) views of one allocation."""

    def __init__(self, vocabulary: Vocabulary, rows: int, *, held: bool = False) -> None:
        widths = [tile.width for tile in vocabulary]
        columns = sum(widths) if held else max(widths, default=0)
        self._held = held
        self._memory = torch.empty(rows * columns, dtype=vocabulary.dtype, device=vocabulary.device)

    def block(self, tile: Tile, rows: int) -> Tensor:
        """(rows, tile.width), whatever was there before."""
        start = rows * tile.start if self._held else 0
        return self._memory[start : start + rows * tile.width].view(rows, tile.width)
