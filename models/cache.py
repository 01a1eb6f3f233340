"""Keys and values of past tokens; sliding layers forget what no query can see any more."""

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig


class Cache:
    """One buffer a layer, grown by doubling; a sliding layer keeps the last window − 1 tokens.

    A forward pass appends to every layer, then calls `advance`. `length` counts the tokens seen by all layers.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.windows = [config.window(index) for index in range(config.num_hidden_layers)]
        self.length = 0
        self._keys: list[Tensor | None] = [None] * config.num_hidden_layers
        self._values: list[Tensor | None] = [None] * config.num_hidden_layers
        self._kept = [0] * config.num_hidden_layers

    def __len__(self) -> int:
        """Tokens seen."""
        return self.length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, under transformers' name."""
        return self.length

    def kept(self, index: int) -> int:
        """Past tokens that layer `index` still holds."""
        return self._kept[index]

    def append(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, kept + T, head_dim) that the T new tokens of layer `index` may look at."""
        keys = self._extended(self._keys[index], k, self._kept[index])
        values = self._extended(self._values[index], v, self._kept[index])
        total = self._kept[index] + k.shape[2]
        seen_k, seen_v = keys[:, :, :total], values[:, :, :total]
        window = self.windows[index]
        if window is not None and total > window - 1:
            start = total - (window - 1)
            self._keys[index], self._values[index] = seen_k[:, :, start:].clone(), seen_v[:, :, start:].clone()
            self._kept[index] = window - 1
        else:
            self._keys[index], self._values[index], self._kept[index] = keys, values, total
        return seen_k, seen_v

    @staticmethod
    def _extended(buffer: Tensor | None, new: Tensor, kept: int) -> Tensor:
        needed = kept + new.shape[2]
        if buffer is None:
            return new
        if torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad):
            return torch.cat((buffer[:, :, :kept], new), dim=2)  # autograd keeps what it saved
        if buffer.shape[2] < needed or not buffer.is_contiguous():
            grown = new.new_empty((*new.shape[:2], max(needed, 2 * kept), new.shape[3]))
            grown[:, :, :kept] = buffer[:, :, :kept]
            buffer = grown
        buffer[:, :, kept:needed] = new
        return buffer

    def advance(self, tokens: int) -> None:
        """Count `tokens` as seen, once a forward pass."""
        self.length += tokens

    def reorder(self, rows: Tensor) -> None:
        """Keep batch rows `rows` (n,) int64, in that order."""
        self._keys = [None if k is None else k.index_select(0, rows) for k in self._keys]
        self._values = [None if v is None else v.index_select(0, rows) for v in self._values]
