"""The one thing that passes from tokenizing to packing: a document's ids and what of it is trained."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # the label of a token that is read and not trained, as in torch's cross entropy


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document as token ids.

    Attributes:
        input_ids: (n,) int32.
        labels: (n,) int32, the token itself where it is trained, `IGNORED` elsewhere; not shifted.
        value: the number that the sample carries beside its tokens (a score, 1 and 0 for wanted and unwanted, the
            margin of a pair, then on both its documents); None where it carries none.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    value: float | None = None

    def __len__(self) -> int:
        return len(self.input_ids)
