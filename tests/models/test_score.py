"""The score head: which token it reads, that gradients flow, and what a model with it refuses."""

import pytest
import torch
from torch import Tensor

from bestiary.models import Decoder, LoRAConfig, resize_token_embeddings
from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.models.errors import InvalidConfig, InvalidInput
from bestiary.models.inputs import Inputs, read_inputs

from .tiny import VOCAB, tiny, tokens

LENGTHS = (9, 4, 12, 1)
LABELS = 3


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny("gemma3", head=HeadKind.SCORE, num_labels=LABELS, tie_word_embeddings=True, final_logit_softcap=2.0)


@pytest.fixture(scope="module")
def documents() -> list[Tensor]:
    return [tokens(1, length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: Decoder, documents: list[Tensor]) -> Tensor:
    return torch.cat([model(document).scores for document in documents])


def padded(documents: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    width = max(LENGTHS)
    ids, mask = tokens(len(documents), width, seed=99), torch.zeros(len(documents), width, dtype=torch.int64)
    for row, document in enumerate(documents):
        count = document.shape[1]
        place = slice(0, count) if side == "right" else slice(width - count, width)
        ids[row, place], mask[row, place] = document[0], 1
    return ids, mask


def test_scores_are_the_head_on_the_hidden_state_of_the_last_token(model: Decoder, documents: list[Tensor]) -> None:
    seen: list[Tensor] = []
    handle = model.model.register_forward_hook(lambda module, arguments, output: seen.append(output[0]))
    output = model(documents[0])
    handle.remove()
    assert torch.equal(output.scores, seen[0][:, -1] @ model.score.weight.T)
    assert output["logits"] is output["scores"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_any_content_changes_no_score(
    model: Decoder, documents: list[Tensor], alone: Tensor, side: str
) -> None:
    ids, mask = padded(documents, side)
    assert (model(ids, attention_mask=mask).scores - alone).abs().max() < 1e-12


def test_a_hole_in_the_mask_is_not_the_end(model: Decoder) -> None:
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 3:5], mask[1, -2:] = 0, 0
    hidden = model.model(_inputs(ids, mask))[0]
    assert torch.equal(model(ids, attention_mask=mask).scores, hidden[[0, 1], [7, 5]] @ model.score.weight.T)


def _inputs(ids: Tensor, mask: Tensor) -> Inputs:
    return read_inputs(ids, None, mask, None, None, None)


@pytest.mark.parametrize("by", ["borders", "positions"])
def test_packed_documents_score_as_alone(model: Decoder, documents: list[Tensor], alone: Tensor, by: str) -> None:
    row = torch.cat(documents, dim=1)
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given = {"cu_seq_lens_q": borders} if by == "borders" else {"position_ids": positions}
    assert (model(row, **given).scores - alone).abs().max() < 1e-12


def test_packed_rows_give_their_documents_in_the_order_of_the_tokens(
    model: Decoder, documents: list[Tensor], alone: Tensor
) -> None:
    turned = torch.cat([torch.cat(documents, dim=1), torch.cat(documents[::-1], dim=1)])
    positions = torch.stack([torch.cat([torch.arange(n) for n in order]) for order in (LENGTHS, LENGTHS[::-1])])
    found = model(turned, position_ids=positions).scores
    assert (found - torch.cat([alone, alone.flip(0)])).abs().max() < 1e-12


def test_gradients_of_packed_documents_are_the_sum_of_single_ones(model: Decoder, documents: list[Tensor]) -> None:
    def gradients(*calls: dict[str, Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        for call in calls:
            model(**call).scores.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = gradients({"input_ids": torch.cat(documents, dim=1), "position_ids": positions})
    single = gradients(*({"input_ids": document} for document in documents))
    assert packed.keys() == single.keys() == dict(model.named_parameters()).keys()
    assert max((packed[n] - single[n]).norm() / single[n].norm() for n in packed) < 1e-12


def test_scores_of_a_bfloat16_model_are_float32() -> None:
    model = tiny("qwen3", torch.bfloat16, head=HeadKind.SCORE)
    assert model(tokens(2, 5)).scores.dtype is torch.float32
    assert model.score.weight.dtype is torch.bfloat16


def test_the_fresh_head_depends_on_the_seed_alone() -> None:
    models = [tiny("qwen3", head=HeadKind.SCORE) for _ in range(2)]
    models[0].init_weights(3)
    models[1].init_weights(3, only={"score.weight"})
    assert torch.equal(*(one.score.weight for one in models))
    models[1].init_weights(4, only={"score.weight"})
    assert not torch.equal(*(one.score.weight for one in models))


def test_a_routed_model_gives_its_balancing_loss_beside_the_scores() -> None:
    output = tiny("qwen3_moe", head=HeadKind.SCORE)(tokens(2, 6), output_router_logits=True)
    assert output.scores.shape == (2, 1)
    assert output.aux_loss.requires_grad


def test_lora_trains_the_adapters_and_the_score_head() -> None:
    lora = LoRAConfig(r=2, alpha=4, targets=("q_proj",))
    model = tiny("qwen3", head=HeadKind.SCORE, lora=lora)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained - {"score.weight"}} == {"lora_A", "lora_B"}
    assert "score.weight" in trained
    model.merge_lora()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_vocabulary_grows_without_a_language_model_head(model: Decoder) -> None:
    grown = tiny("qwen3", head=HeadKind.SCORE)
    before = grown(tokens(2, 5)).scores
    resize_token_embeddings(grown, VOCAB + 9)
    assert torch.equal(grown(tokens(2, 5)).scores, before)
    assert grown.get_output_embeddings() is None


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda model: model(tokens(1, 4), labels=tokens(1, 4)), "labels"),
        (lambda model: model(tokens(1, 4), logits_to_keep=1), "logits_to_keep"),
        (lambda model: model.generate(tokens(1, 4)), "generate"),
        (
            lambda model: model(tokens(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])),
            "attention_mask",
        ),
        (lambda model: model(tokens(1, 4), cu_seq_lens_q=torch.tensor([0, 2, 2, 4])), "cu_seq_lens_q"),
    ],
)
def test_what_has_no_score_is_refused(model: Decoder, call: object, names: str) -> None:
    with pytest.raises(InvalidInput, match=names):
        call(model)  # type: ignore[operator]


def test_labels_belong_to_a_score_head() -> None:
    with pytest.raises(InvalidConfig, match="num_labels"):
        tiny("qwen3", num_labels=2)
    with pytest.raises(InvalidConfig, match="num_labels"):
        tiny("qwen3", head=HeadKind.SCORE, num_labels=0)


def test_the_language_model_is_as_before() -> None:
    config: DecoderConfig = tiny("qwen3").decoder_config
    assert (config.head, config.num_labels) == (HeadKind.LM, 1)
    assert "score" not in dict(tiny("qwen3").named_modules())
