"""The valid items as a trie, for decoding that cannot leave the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.semantic_ids import Codes, SemanticIds

Score = Callable[[NDArray[np.int32]], NDArray[np.floating]]


class Catalogue:
    """Items and their codes; a node of the trie is a beginning of codes that some item has.

    Args:
        ids: where the codes' tokens lie.   codes: (items, levels), distinct rows.

    Raises:
        SampleRefused: equal rows, or codes that are none.
    """

    def __init__(self, ids: SemanticIds, codes: Codes) -> None:
        self.ids = ids
        tokens = self._tokens = ids.ids_of(codes)
        order = np.lexsort(tokens.T[::-1])
        self._sorted = tokens[order]
        self._columns = [np.ascontiguousarray(column) for column in self._sorted.T]
        self._items = order
        if len(tokens) > 1 and (self._sorted[1:] == self._sorted[:-1]).all(1).any():
            raise SampleRefused("two items have the same codes.", remedy="distinct() tells them apart")

    def __len__(self) -> int:
        return len(self._items)

    def _range(self, beginning: Sequence[int] | NDArray[np.int32]) -> tuple[int, int]:
        """The rows of the sorted table that begin so."""
        low, high = 0, len(self._sorted)
        # Of the table's own dtype: another one would have the column copied in every search.
        for column, token in zip(self._columns, np.asarray(beginning, self._sorted.dtype), strict=False):
            found = column[low:high]
            low, high = low + int(found.searchsorted(token, "left")), low + int(found.searchsorted(token, "right"))
        return low, high

    def allowed(self, beginning: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Token ids that may follow a beginning, ascending; none behind a whole item or an impossible beginning."""
        if len(beginning) >= self.ids.levels:
            return np.zeros(0, np.int32)
        low, high = self._range(beginning)
        return np.unique(self._sorted[low:high, len(beginning)])

    def count(self, beginning: Sequence[int] | NDArray[np.int32]) -> int:
        """Items that begin so."""
        low, high = self._range(beginning)
        return high - low

    def tokens(self, item: int | Sequence[int]) -> NDArray[np.int32]:
        """(levels,), those of an item; of several (items, levels)."""
        return self._tokens[item]

    def item(self, tokens: Sequence[int] | NDArray[np.int32]) -> int | None:
        """The item that the tokens of all levels name, or None."""
        low, high = self._range(tokens)
        return int(self._items[low]) if len(tokens) == self.ids.levels and high == low + 1 else None

    def mask(self, beginnings: NDArray[np.int32], vocabulary: int) -> NDArray[np.bool_]:
        """(n, depth) beginnings → (n, vocabulary), True where a token may follow."""
        made = np.zeros((len(beginnings), vocabulary), np.bool_)
        for row, beginning in enumerate(beginnings):
            made[row, self.allowed(beginning)] = True
        return made

    def beam_search(self, score: Score, beams: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The likeliest items under a model, among the valid ones only.

        Args:
            score: beginnings (n, depth) int32 → log-probabilities (n, vocabulary) of the next token.
            beams: kept at every level.

        Returns:
            items (at most `beams`,) best first, and their log-probabilities.
        """
        beginnings, totals = np.zeros((1, 0), np.int32), np.zeros(1)
        for _ in range(self.ids.levels):
            log_probs = np.asarray(score(beginnings), np.float64)
            rows, tokens = np.nonzero(self.mask(beginnings, log_probs.shape[1]))
            values = totals[rows] + log_probs[rows, tokens]
            best = np.argsort(-values, kind="stable")[:beams]
            beginnings = np.concatenate([beginnings[rows[best]], tokens[best, None].astype(np.int32)], axis=1)
            totals = values[best]
        items = np.array([self.item(tokens) for tokens in beginnings], np.int64)
        return items, totals
