"""Packed equals unpacked, in every family: the loss, the sums over documents, and every gradient."""

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from bestiary.kernels.dispatch import force
from bestiary.models import Decoder
from bestiary.training.data.batch import batch
from bestiary.training.data.packing import Candidate, Pack, assemble
from bestiary.training.data.source import Cursor
from bestiary.training.data.tokens import IGNORED, Tokens
from bestiary.training.recipes.documents import document_batch, document_sums
from tests.models.tiny import FAMILIES, VOCAB, tiny

LENGTHS, PACK = (9, 3, 1, 14, 2, 11), 47  # longer and shorter than the window, one of a token, and padding


def documents(seed: int = 0) -> list[Tokens]:
    """With prompts that are not trained, one document trained from its first token on, and one not at all."""
    generator = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(LENGTHS):
        ids = generator.integers(0, VOCAB, length).astype(np.int32)
        labels = ids.copy()
        labels[: (4, 0, 0, 6, 2, 1)[index]] = IGNORED
        made.append(Tokens(ids, labels))
    return made


def packed(made: list[Tokens]) -> Pack:
    return assemble([Candidate(i, "a", i, Cursor(), 0, (one,)) for i, one in enumerate(made)], PACK, pad_id=5)


def weights(count: int) -> Tensor:
    """A different one for every document, so that a token booked to its neighbour shows."""
    return torch.arange(1, count + 1, dtype=torch.float64)


def gradients(model: Decoder, objective: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(model: Decoder, made: list[Tokens]) -> Tensor:
    """Sums of log-probabilities (documents,), each document in a call of its own, by the head's reference."""
    sums = []
    with force(log_prob="reference"):
        for one in made:
            ids, labels = (torch.from_numpy(x).long()[None] for x in (one.input_ids, one.labels))
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            sums.append(model(ids, shift_labels=targets).log_probs.sum())
    return torch.stack(sums)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family: str) -> None:
    """float64, within 1e-10: mean nll by labels and by shift_labels, and weighted sums over documents."""
    model, made = tiny(family), documents()
    pack = packed(made)
    expected = apart(model, made)
    items = pack.loss_tokens
    assert items == 5 + 2 + 0 + 8 + 0 + 10
    of_loss = gradients(model, -apart(model, made).sum() / items)
    for shifted in (False, True):
        output = model(**batch(pack, shifted=shifted))
        assert abs(output.loss.item() + expected.sum().item() / items) <= 1e-10
        assert_close(gradients(model, output.loss), of_loss)
    sums = document_sums(model(**batch(pack, shifted=True)).log_probs, document_batch(pack))
    assert (sums - expected).abs().max() <= 1e-10
    assert_close(gradients(model, sums @ weights(len(made))), gradients(model, apart(model, made) @ weights(len(made))))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_does_not_move_another(family: str) -> None:
    """Its tokens change, the sums of the others stay; and the padding is as if it were not there."""
    model, made = tiny(family), documents()
    changed = list(made)
    changed[3] = documents(seed=1)[3]
    with torch.no_grad():
        before, after = (
            document_sums(model(**batch(packed(x), shifted=True)).log_probs, document_batch(packed(x)))
            for x in (made, changed)
        )
    moved = (before - after).abs()
    assert moved[3] > 1e-3
    assert moved[[0, 1, 2, 4, 5]].max() <= 1e-12


def test_a_batch_is_one_row_with_positions_that_restart() -> None:
    found = batch(packed(documents()))
    rest = PACK - sum(LENGTHS)
    assert found["position_ids"].tolist() == [[p for length in (*LENGTHS, rest) for p in range(length)]]
    assert found["cu_seq_lens_q"].tolist() == [0, 9, 12, 13, 27, 29, 40, 47]
    assert found["max_length_q"] == 14
    assert {x.shape for x in (found["input_ids"], found["labels"])} == {(1, PACK)}
    assert "attention_mask" not in found


def test_transformers_reads_the_same_batch() -> None:
    """Its packed attention goes by positions: our batch gives its model the documents apart, too."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    made = documents()
    with torch.no_grad():
        found = batch(packed(made))
        # Without a cache: with one, transformers takes restarting positions for one document.
        together = model(found["input_ids"], position_ids=found["position_ids"], use_cache=False).logits
        alone = torch.cat([model(torch.from_numpy(one.input_ids).long()[None]).logits for one in made], dim=1)
    assert (together[:, : sum(LENGTHS)] - alone).abs().max() <= 1e-10
