"""Random numbers as a function of what they are for: nothing here has a state that could be lost or copied.

Philox is a counter-based generator, so draw k costs the same whether or not the draws before it were made. Only raw
64-bit words are used: numpy promises those across versions, and nothing about how it turns them into shuffles.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # words computed at once; 4 words a counter


def key_of(*parts: object) -> NDArray[np.uint64]:
    """A Philox key (2,) uint64 that depends on every part and its place."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)


class Draws:
    """Uniform numbers in [0, 1), one per counter: `Draws(seed, "mixture")[k]` is always the same."""

    def __init__(self, *key: object) -> None:
        self._key = key_of(*key)
        self._block = -1
        self._words: NDArray[Any] = np.empty(0)

    def __getitem__(self, draw: int) -> float:
        block, place = divmod(draw, BLOCK)
        if block != self._block:
            generator = np.random.Philox(key=self._key, counter=np.array([block * (BLOCK // 4), 0, 0, 0], np.uint64))
            self._words = (generator.random_raw(BLOCK) >> np.uint64(11)) * 2.0**-53
            self._block = block
        return float(self._words[place])


def permutation(length: int, *key: object) -> list[int]:
    """A permutation of range(length), a function of the key alone."""
    words = np.random.Philox(key=key_of(*key)).random_raw(length)
    return [int(index) for index in np.argsort(words, kind="stable")]
