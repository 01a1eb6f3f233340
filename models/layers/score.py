"""The score head of a reward model: one row of scores a document, read off its last token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.kernels.precision import at_least_fp32
from bestiary.models.config import DecoderConfig
from bestiary.models.errors import InvalidInput
from bestiary.models.inputs import Inputs, may_look


class ScoreHead(nn.Module):
    """weight (num_labels, H), no bias: `score` of transformers' `…ForSequenceClassification`.

    Soft caps and divisors of logits are the language-model head's; neither side applies them to scores.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = config.hidden_size, config.num_labels
        self.weight = nn.Parameter(torch.empty(config.num_labels, config.hidden_size))

    def forward(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Scores (documents, num_labels) of hidden (B, T, H) at the tokens `last` (documents,), counted through rows.

        In fp32 at least: margins between scores are small against the steps of bfloat16.
        """
        wide = at_least_fp32(hidden.dtype)
        return F.linear(hidden.flatten(0, 1)[last].to(wide), self.weight.to(wide))

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def last_tokens(inputs: Inputs, rows: int, borders: Tensor | None) -> Tensor:
    """Where each document of a batch ends: (documents,) int64, tokens counted through the rows.

    By borders where there are, else by the mask, one document a row, else where positions restart; never by a token
    id. transformers looks for the rightmost token that is not `pad_token_id` and at no mask: there a document that ends
    with the pad token (often the end-of-text token itself) is read one token early, padding filled with another id is
    read as text, packed documents are one, and without a pad id only one row at a time is taken.

    Args:
        borders: `cu_seq_lens_q` (documents + 1,), or None.
    Raises:
        InvalidInput: a document without a token (looked for on the CPU alone: elsewhere that would stop the device).
    """
    device = inputs.position_ids.device
    if borders is not None:
        _check(borders[1:] > borders[:-1], "cu_seq_lens_q", borders)
        return borders[1:].to(device, torch.int64) - 1
    places = torch.arange(rows * inputs.length, device=device).view(rows, inputs.length)
    if inputs.key_valid is not None:
        valid = inputs.key_valid[:, -inputs.length :]
        _check(valid.any(-1), "attention_mask", valid.sum(-1))
        return torch.where(valid, places, places[:, :1]).amax(-1)
    if inputs.documents is not None:
        ends = F.pad(inputs.documents[:, 1:] != inputs.documents[:, :-1], (0, 1), value=True)
        return places[ends]
    return places[:, -1]


def _check(full: Tensor, name: str, shown: Tensor) -> None:
    if may_look(full) and not bool(full.all()):
        raise InvalidInput(
            f"{name} holds a document without tokens ({shown.tolist()[:16]}): it has no last one to score.",
            remedy="drop empty documents and rows",
        )
