"""Keys and values of past tokens; sliding layers forget what no query can see any more."""

from typing import Protocol

import torch
from torch import Tensor

from bestiary.models.config import DecoderConfig


class KeyValues(Protocol):
    """Where keys and values come from that a forward pass does not compute itself: earlier tokens, or other slices."""

    def append(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """With those (B, heads, T, head_dim) that layer `index` has just computed, all that its queries look at."""
        ...


class Cache:
    """One buffer a layer, grown by doubling; a sliding layer keeps the last window − 1 tokens.

    A sliding layer's buffer has room for a quarter of a window more, so that tokens move once in so many steps and not
    in each. A forward pass appends to every layer, then calls `advance`. `length` counts the tokens seen by all layers.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.windows = [config.window(index) for index in range(config.num_hidden_layers)]
        self.length = 0
        self._keys: list[Tensor | None] = [None] * config.num_hidden_layers
        self._values: list[Tensor | None] = [None] * config.num_hidden_layers
        self._first = [0] * config.num_hidden_layers  # where in its buffer a layer's oldest token is
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
        keys, values = self._extended(index, k, v)
        first, kept = self._first[index], self._kept[index]
        end = first + kept + k.shape[2]
        seen_k, seen_v = keys[:, :, first:end], values[:, :, first:end]
        window = self.windows[index]
        if window is not None:
            first = max(first, end - (window - 1))
            if keys.shape[2] > _most(window):  # a long prompt, of which the window alone stays
                keys, values, first, end = keys[:, :, first:].clone(), values[:, :, first:].clone(), 0, end - first
        self._keys[index], self._values[index] = keys, values
        self._first[index], self._kept[index] = first, end - first
        return seen_k, seen_v

    def _extended(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers that hold the kept tokens and then the new ones: the old ones, or others that start with them."""
        keys, values = self._keys[index], self._values[index]
        if keys is None or values is None:
            return k, v
        kept, new = self._kept[index], k.shape[2]
        past = slice(self._first[index], self._first[index] + kept)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (keys, values, k, v)):
            self._first[index] = 0
            return torch.cat((keys[:, :, past], k), 2), torch.cat((values[:, :, past], v), 2)  # autograd keeps its own
        if keys.shape[2] < past.stop + new or not (keys.is_contiguous() and values.is_contiguous()):
            window = self.windows[index]
            size = max(kept + new, 2 * kept if window is None else min(2 * kept, _most(window)))
            keys, values = _moved(keys[:, :, past], size), _moved(values[:, :, past], size)
            self._first[index], past = 0, slice(0, kept)
        keys[:, :, past.stop : past.stop + new], values[:, :, past.stop : past.stop + new] = k, v
        return keys, values

    def advance(self, tokens: int) -> None:
        """Count `tokens` as seen, once a forward pass."""
        self.length += tokens

    def reorder(self, rows: Tensor) -> None:
        """Keep batch rows `rows` (n,) int64, in that order."""
        self._keys = [None if k is None else k.index_select(0, rows) for k in self._keys]
        self._values = [None if v is None else v.index_select(0, rows) for v in self._values]


def _most(window: int) -> int:
    """Tokens in the buffer of a sliding layer."""
    return window - 1 + max(window // 4, 1)


def _moved(past: Tensor, size: int) -> Tensor:
    """`past` (B, heads, kept, head_dim) at the start of a buffer of `size` tokens."""
    buffer = past.new_empty((*past.shape[:2], size, past.shape[3]))
    buffer[:, :, : past.shape[2]] = past
    return buffer
