"""The one thing that passes from tokenizing to packing: a document's ids and what of it is trained."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # the label of a token that is read and not trained, as in torch's cross entropy
NO_WORD = -1


@dataclass(frozen=True, slots=True)
class TeacherWords:
    """What a teacher said in the place of each token: its likeliest words, for which no teacher is asked again.

    Attributes:
        words: (n, k) int32, for each token the ids that the teacher found likeliest in its place, `NO_WORD` where it
            named fewer, or was not asked. Not shifted: row i belongs to token i, as labels do.
        log_probs: (n, k) float32, or float64 where that says more; −inf where there is no word.
    """

    words: NDArray[np.int32]
    log_probs: NDArray[np.floating[Any]]

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def none(cls, tokens: int, width: int, dtype: Any = np.float32) -> "TeacherWords":
        """No words for any of `tokens`."""
        return cls(np.full((tokens, width), NO_WORD, np.int32), np.full((tokens, width), -np.inf, dtype))

    def part(self, start: int, end: int) -> "TeacherWords":
        """Those of some tokens in a row."""
        return TeacherWords(self.words[start:end], self.log_probs[start:end])


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document as token ids.

    Attributes:
        input_ids: (n,) int32.
        labels: (n,) int32, the token itself where it is trained, `IGNORED` elsewhere; not shifted.
        value: the number that the sample carries beside its tokens (a score, 1 and 0 for wanted and unwanted, the
            margin of a pair, then on both its documents); None where it carries none.
        teacher: a teacher's words for the trained tokens; None where they are not wanted.
        least: places that it needs in a pack though it is shorter: an answer to its prompt is to be sampled.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    value: float | None = None
    teacher: TeacherWords | None = None
    least: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def places(self) -> int:
        """What it takes of a pack."""
        return max(len(self.input_ids), self.least)

    @property
    def prompt(self) -> int:
        """How many tokens stand before its last answer, the last trained tokens in a row; all where none is trained."""
        return prompt_length(self.labels)


def prompt_length(labels: NDArray[np.int32]) -> int:
    """How many tokens stand before the last trained ones in a row, at least one; all where none is trained."""
    trained = labels != IGNORED
    if not trained.any():
        return len(labels)
    end = len(labels) - int(trained[::-1].argmax())
    before = np.flatnonzero(~trained[:end])
    return int(before[-1]) + 1 if len(before) else 1


def digest_of(input_ids: NDArray[np.int32], labels: NDArray[np.int32]) -> str:
    """A name for a document, from its tokens and what of them is trained: 24 hexadecimal digits."""
    return hashlib.blake2b(input_ids.tobytes() + labels.tobytes(), digest_size=12).hexdigest()
