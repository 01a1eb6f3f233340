"""What a forward pass answers to labels: loss, log-probabilities, router loss; and to nothing: logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from bestiary.kernels.errors import LabelOutOfRange, TokenOutOfRange
from bestiary.models import Decoder
from bestiary.models.errors import InvalidInput
from bestiary.verify.reference import promoted

from .tiny import FAMILIES, VOCAB, tiny, tokens

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def labelled() -> tuple[Tensor, Tensor]:
    """Two rows of tokens, and labels of which some are ignored."""
    ids = tokens(2, 13)
    return ids, ids.masked_fill(torch.tensor([[0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]).bool(), -100)


def cross_entropy(logits: Tensor, targets: Tensor, temperature: float = 1.0, reduction: str = "mean") -> Tensor:
    return F.cross_entropy((logits / temperature).flatten(0, 1), targets.flatten(), reduction=reduction)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_shifted_here_and_shift_labels_are_not(family: str) -> None:
    """Both give the cross entropy of the next token over the valid targets, and its gradients."""
    model, (ids, labels) = tiny(family), labelled()
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    logits = model(ids).logits
    expected = cross_entropy(logits, targets)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for arguments in ({"labels": labels}, {"shift_labels": targets}, {"labels": ids, "shift_labels": targets}):
        model.zero_grad()
        loss = model(ids, **arguments).loss
        torch.testing.assert_close(loss, expected, **EXACT)
        loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("items", [7, torch.tensor(7), torch.tensor(7.0)])
def test_num_items_divides_the_sum(items: Any) -> None:
    """As trainers with gradient accumulation pass it."""
    model, (ids, labels) = tiny("qwen3"), labelled()
    out = model(ids, labels=labels, num_items_in_batch=items)
    total = cross_entropy(model(ids).logits[:, :-1], labels[:, 1:], reduction="sum")
    torch.testing.assert_close(out.loss, total / 7, **EXACT)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_stand_at_the_position_that_predicts(temperature: float) -> None:
    """log_probs[b, t] = log p(labels[b, t + 1]) under softmax(logits / temperature), 0 where ignored and at the end."""
    model, (ids, labels) = tiny("gemma3"), labelled()
    out = model(ids, labels=labels, temperature=temperature)
    log_p = (model(ids).logits / temperature).log_softmax(-1)
    for row in range(2):
        for at in range(13):
            target = int(labels[row, at + 1]) if at < 12 else -100
            expected = log_p[row, at, target] if target != -100 else torch.zeros((), dtype=log_p.dtype)
            torch.testing.assert_close(out.log_probs[row, at], expected, **EXACT)
    torch.testing.assert_close(out.loss, -out.log_probs.sum() / (out.log_probs != 0).sum(), **EXACT)


def test_log_probs_have_a_graph_where_shift_labels_come_alone() -> None:
    """Losses of one's own (RL, DPO) differentiate them; where the model makes the loss, gradients flow through it."""
    model, (ids, labels) = tiny("qwen3"), labelled()
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    for arguments in ({"labels": labels}, {"shift_labels": targets, "num_items_in_batch": 7}):
        out = model(ids, **arguments)
        assert out.loss.requires_grad
        assert not out.log_probs.requires_grad
    out = model(ids, shift_labels=targets)
    weights = torch.arange(26.0, dtype=torch.float64).view(2, 13)
    (weights * out.log_probs).sum().backward()
    gradient = model.model.norm.weight.grad.clone()
    model.zero_grad()
    log_p = model(ids).logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    (weights * log_p * (targets != -100)).sum().backward()
    torch.testing.assert_close(gradient, model.model.norm.weight.grad, rtol=1e-9, atol=1e-12)


def test_the_entropy_comes_where_it_is_asked_for() -> None:
    """Of softmax(logits / temperature), 0 where ignored; gradients flow through it with `shift_labels` alone."""
    model, (ids, labels) = tiny("gemma3"), labelled()  # it caps its logits
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    assert model(ids, shift_labels=targets).entropy is None
    logits = model(ids).logits / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy() * (targets != -100)
    wanted = torch.autograd.grad(expected.sum(), list(model.parameters()))
    found = model(ids, shift_labels=targets, temperature=0.7, return_entropy=True).entropy
    torch.testing.assert_close(found, expected, **EXACT)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    out = model(ids, labels=labels, temperature=0.7, return_entropy=True)
    torch.testing.assert_close(out.entropy, expected, **EXACT)
    assert not out.entropy.requires_grad


def test_with_labels_logits_come_only_when_asked_for() -> None:
    """The log-prob core never builds them."""
    model, (ids, labels) = tiny("qwen3"), labelled()
    assert "logits" not in model(ids, labels=labels)
    both = model(ids, labels=labels, return_logits=True)
    assert torch.equal(both.logits, model(ids).logits)
    assert "logits" not in model(ids, return_logits=False)


def test_a_batch_without_targets_has_loss_zero_and_zero_gradients() -> None:
    """Not NaN: on another rank the step goes on."""
    model, ids = tiny("qwen3_moe"), tokens(2, 5)
    out = model(ids, labels=torch.full_like(ids, -100))
    assert out.loss == 0
    out.loss.backward()
    assert model.lm_head.weight.grad.abs().max() == 0


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 50, -3])
def test_labels_and_tokens_outside_the_vocabulary_are_named(bad: int) -> None:
    """Also where the padded vocabulary would have a row for them."""
    model, ids = tiny("qwen3"), tokens(2, 5)
    wrong = ids.clone()
    wrong[1, 2] = bad
    with pytest.raises(LabelOutOfRange, match=f"label {bad} .* outside"):
        model(ids, labels=wrong)
    with pytest.raises(TokenOutOfRange, match=rf"token id {bad}, outside \[0, {VOCAB}\)"):
        model(wrong)


@pytest.mark.parametrize("kept", [0, 1, 4, torch.tensor([2, 7]), torch.arange(13) > 9], ids=str)
def test_logits_to_keep(kept: Any) -> None:
    """The last n positions, chosen ones, or all."""
    model, ids = tiny("gpt_oss"), tokens(2, 13)
    whole = model(ids).logits
    expected = (
        whole if isinstance(kept, int) and kept == 0 else whole[:, -kept:] if isinstance(kept, int) else whole[:, kept]
    )
    torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, expected, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_may_stand_in_for_tokens(family: str) -> None:
    """Taken as they are: Gemma's are already scaled. Features that are no token work the same."""
    model, ids = tiny(family), tokens(2, 13)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    features = torch.randn(1, 9, 80, dtype=torch.float64, requires_grad=True)
    out = model(inputs_embeds=features, shift_labels=tokens(1, 9))
    out.loss.backward()
    assert features.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": tokens(1, 3), "inputs_embeds": torch.zeros(1, 3, 80)}, "exactly one"),
        ({"input_ids": tokens(1, 3)[0]}, r"input_ids has shape \(3,\)"),
        ({"inputs_embeds": torch.zeros(3, 80)}, r"inputs_embeds has shape \(3, 80\)"),
        ({"input_ids": tokens(1, 3), "pixel_values": None}, "no argument 'pixel_values'"),
        ({"input_ids": tokens(1, 3), "lables": tokens(1, 3)}, "no argument 'lables'"),
        ({"input_ids": tokens(1, 3), "output_hidden_states": True}, r"output_hidden_states=True"),
        ({"input_ids": tokens(1, 3), "output_attentions": True}, r"output_attentions=True"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], named: str) -> None:
    """A misspelt column of a data set would otherwise train on nothing."""
    with pytest.raises(InvalidInput, match=named) as caught:
        tiny("qwen3")(**arguments)
    assert caught.value.remedy


def test_arguments_that_trainers_always_pass_are_ignored_by_name() -> None:
    """They ask for nothing that the model would withhold."""
    model, ids = tiny("gemma3"), tokens(1, 5)
    quiet = {"return_dict": True, "output_attentions": False, "output_hidden_states": None, "cache_position": None}
    assert torch.equal(model(ids, token_type_ids=torch.zeros_like(ids), **quiet).logits, model(ids).logits)


# ---------------------------------------------------------------------- router loss


def router_loss(model: Decoder, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    moe = model.decoder_config.moe
    assert moe is not None
    with promoted():
        loss = load_balancing_loss_func(logits, moe.num_experts, moe.router.top_k, mask)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_router_loss_is_transformers_and_joins_the_loss(family: str, padded: bool) -> None:
    """One logit tensor a routed layer (dense layers have none), the coefficient from the config, gradients included."""
    model, (ids, labels) = tiny(family, router_aux_loss_coef=0.3), labelled()
    mask = (torch.arange(13)[None] >= torch.tensor([[0], [5]])).long() if padded else None
    plain = model(ids, attention_mask=mask, labels=labels)
    assert "router_logits" not in plain
    assert "aux_loss" not in plain
    out = model(ids, attention_mask=mask, labels=labels, output_router_logits=True)
    routed = sum(model.decoder_config.is_moe_layer(index) for index in range(3))
    assert [tuple(logits.shape) for logits in out.router_logits] == [(26, 12)] * routed
    expected = router_loss(model, out.router_logits, mask)
    torch.testing.assert_close(out.aux_loss, expected, **EXACT)
    torch.testing.assert_close(out.loss, plain.loss + 0.3 * expected, **EXACT)

    router = model.model.layers[0].mlp.gate.weight
    (ours,) = torch.autograd.grad(out.aux_loss, router, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, router)
    torch.testing.assert_close(ours, theirs, **EXACT)
    assert ours.abs().max() > 0


def test_the_config_may_ask_for_the_router_loss_and_a_call_may_decline() -> None:
    """The argument wins; a dense model has none to give."""
    model, ids = tiny("qwen3_moe", output_router_logits=True), tokens(1, 6)
    assert model(ids).aux_loss is not None
    assert model(ids, output_router_logits=False).aux_loss is None
    assert tiny("qwen3")(ids, output_router_logits=True).aux_loss is None


def test_under_a_cache_the_router_loss_counts_the_new_tokens() -> None:
    """The mask covers the past as well."""
    model, ids = tiny("qwen3_moe", output_router_logits=True), tokens(2, 9)
    mask = (torch.arange(9)[None] >= torch.tensor([[0], [7]])).long()
    cache = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    out = model(ids[:, 6:], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(out.aux_loss, router_loss(model, out.router_logits, mask[:, 6:]), **EXACT)
