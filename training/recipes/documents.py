"""What recipes share: batches that know their documents, and sums over those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from bestiary.kernels.dispatch import as_trained
from bestiary.models import Decoder
from bestiary.training.data.batch import batch
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import IGNORED
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import Batch, LossSum

FORWARD = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def document_batch(pack: Pack) -> Batch:
    """What `forward` takes, with `shift_labels`, and what a loss over documents needs.

    Returns:
        Beside the arguments of `bestiary.training.data.batch.batch`: document (T,) int64, the index of each position's,
        padding being one more; targets (documents,) int64, the trained tokens of each; documents, their number.
    """
    found: Batch = dict(batch(pack, shifted=True))
    document = torch.from_numpy(np.repeat(np.arange(len(pack.borders) - 1), np.diff(pack.borders)))
    trained = (found["shift_labels"][0] != IGNORED).long()
    targets = torch.zeros(len(pack.borders) - 1, dtype=torch.int64).index_add_(0, document, trained)
    return found | {"document": document, "targets": targets[: pack.documents], "documents": pack.documents}


def model_inputs(found: Batch, model: nn.Module, *more: str) -> Batch:
    """The arguments of forward in a batch, and those named, on the model's device."""
    device = next(model.parameters()).device
    given = {name: found[name] for name in (*FORWARD, *more)}
    given = {name: on(value, device) if isinstance(value, Tensor) else value for name, value in given.items()}
    if "context" in found:
        given["context_slice"] = found["context"].slice_of(found["input_ids"].shape[1], device)
    return given


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there."""
    return tensor.to(device, non_blocking=True)


def document_sums(values: Tensor, found: Batch) -> Tensor:
    """(1, T) → (documents,), padding left out; over all ranks that share the row, and the same on each."""
    sums = values.new_zeros(int(found["documents"]) + 1)
    sums = sums.index_add(0, on(found["document"], values.device), values[0])[:-1]
    return found["context"].total(sums) if "context" in found else sums


def token_sum(total: Tensor, found: Batch, metrics: Mapping[str, Tensor] | None = None) -> LossSum:
    """A sum over the tokens that were computed here, and figures of the same kind, as the loop takes them."""
    given = metrics or {}
    if "context" not in found:
        return LossSum(total, given)
    shares = found["context"].shares
    return LossSum(shares(total), {name: shares(value) for name, value in given.items()})


@contextmanager
def frozen_pass(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without gradients and without dropout."""
    training = {module for module in model.modules() if module.training}
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def scoring_pass(model: nn.Module) -> Iterator[None]:
    """`frozen_pass` with the bits of a pass that trains: those of a policy whose weights are the same."""
    with frozen_pass(model), as_trained():
        yield


def router_term(model: Decoder, found: Mapping[str, object], units: int) -> Tensor | float:
    """The router's load-balancing loss of a batch where the model's config asks for it, weighed by its units.

    It is a mean over the tokens of one forward pass, as everywhere, so packing does change it.
    """
    aux = found.get("aux_loss")
    if not isinstance(aux, Tensor):
        return 0.0
    return model.decoder_config.router_aux_loss_coef * aux * units


def check_positive(value: float, field: str) -> None:
    """Raises:
    InvalidRun: it is not above 0.
    """
    if not value > 0:
        raise InvalidRun(f"{field} = {value:g}.", remedy="a number above 0")
