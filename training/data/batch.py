"""From a pack to the arguments of a decoder's forward."""

import numpy as np
import torch
from torch import Tensor

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import IGNORED

Batch = dict[str, Tensor | int]


def batch(pack: Pack, *, shifted: bool = False) -> Batch:
    """One packed row as `forward` takes it, ours and transformers' alike.

    Args:
        shifted: give `shift_labels`, the target at each position, in place of `labels`. With those alone gradients flow
            through `log_probs` too, which preference losses need.

    Returns:
        input_ids, position_ids, labels (1, T) int64, with positions that start again at every document and at the
        padding; cu_seq_lens_q and cu_seq_lens_k (documents + 1,) int32, max_length_q and max_length_k, all of them with
        the padding as one document. No attention_mask: one would switch transformers' packed attention off.
    """
    lengths = np.diff(pack.borders)
    positions = np.arange(len(pack.input_ids)) - np.repeat(pack.borders[:-1], lengths)
    borders, longest = torch.from_numpy(pack.borders), int(lengths.max())
    found: Batch = {
        "input_ids": torch.from_numpy(pack.input_ids).long()[None],
        "position_ids": torch.from_numpy(positions).long()[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    labels = torch.from_numpy(pack.labels).long()[None]
    if shifted:
        # The first label of every document is ignored, so the shift carries no target over a border.
        found["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    else:
        found["labels"] = labels
    return found


def document_values(pack: Pack) -> Tensor:
    """The number that each document of a pack carries: a score, 1 or 0, a margin.

    Returns:
        (documents,) float32; for preference pairs `.view(-1, 2)` holds each margin twice.

    Raises:
        SampleRefused: a document carries none.
    """
    values = np.full(pack.documents, np.nan, np.float32) if pack.values is None else pack.values
    if np.isnan(values).any():
        raise SampleRefused(
            f"document {int(np.isnan(values).argmax())} of {pack.documents} in a pack carries no number.",
            remedy="sources of kind unpaired or reward alone, or pairs that all have a margin",
        )
    return torch.from_numpy(values)
