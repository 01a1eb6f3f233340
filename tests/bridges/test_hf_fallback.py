"""The fallback backend: transformers' own models behind our forward contract, loss, surface and export."""

import json
import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bestiary.bridges.errors import (
    FolderNotEmpty,
    NoDecoderConfig,
    UnsupportedLoad,
)
from bestiary.bridges.hf_fallback_head import HeadMap, find_head
from bestiary.bridges.hf_fallback_model import HFDecoder
from bestiary.bridges.hf_fallback_packing import documents_leak
from bestiary.bridges.storage import SINGLE
from bestiary.kernels.errors import LabelOutOfRange, TokenOutOfRange
from bestiary.models import AutoDecoder, DecoderOutput
from bestiary.models.errors import InvalidConfig, InvalidInput
from bestiary.models.generation import GenerationMixin
from bestiary.models.protocol import TrainerProtocol

from .fallbacks import FAMILIES, VOCAB, checkpoint, expected_log_probs, next_tokens, reference, tokens, wrapped

EXACT = {"rtol": 1e-11, "atol": 1e-12}
PACKED = torch.cat((torch.arange(5), torch.arange(4)))[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny checkpoint of a family, written once."""
    return partial(checkpoint, tmp_path_factory.mktemp("fallback"))


# ------------------------------------------------------------------------------------------------- forward and loss


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_to_the_bit(family: str, folder: Callable[..., Path]) -> None:
    """Whole, and the last few or some of them."""
    model, ids = wrapped(folder(family)), tokens(2, 9)
    theirs = reference(folder(family))(ids).logits
    assert isinstance(model(ids), DecoderOutput)
    assert torch.equal(model(ids).logits, theirs)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, theirs[:, -2:], **EXACT)
    some = model(ids, logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(some, theirs[:, [0, 3]], **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_log_probs_and_gradients_come_through_the_core(family: str, folder: Callable[..., Path]) -> None:
    """No logits are made; the loss is transformers', as are the gradients of every parameter."""
    model, theirs = wrapped(folder(family)), reference(folder(family))
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    assert isinstance(model.head_map, HeadMap)
    ours, expected = model(ids, labels=labels), theirs(ids, labels=labels)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss.float(), expected.loss, rtol=1e-6, atol=0)  # theirs is computed in fp32
    targets = next_tokens(labels)
    log_probs = expected_log_probs(expected.logits, targets)
    torch.testing.assert_close(ours.log_probs, log_probs, **EXACT)
    ours.loss.backward()
    (-log_probs.sum() / (targets != -100).sum()).backward()
    named = dict(model.hf.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_declared_maps_are_found(folder: Callable[..., Path]) -> None:
    """Scale, soft cap, neither."""
    found = {family: find_head(reference(folder(family))) for family in ("cohere", "gemma2", "phi")}
    assert found == {"cohere": HeadMap(multiplier=0.3), "gemma2": HeadMap(softcap=2.0), "phi": HeadMap()}


def test_divisor_temperature_and_shifted_labels(folder: Callable[..., Path]) -> None:
    """`num_items_in_batch` divides, temperature flattens, `shift_labels` are taken as they are and keep a graph."""
    model, ids = wrapped(folder("cohere")), tokens(2, 7)
    logits = model(ids).logits
    targets = tokens(2, 7, seed=1)
    wanted = expected_log_probs(logits, targets, temperature=0.7)
    output = model(ids, shift_labels=targets, num_items_in_batch=torch.tensor(5), temperature=0.7, return_logits=True)
    torch.testing.assert_close(output.log_probs, wanted, **EXACT)
    torch.testing.assert_close(output.loss, -wanted.sum() / 5, **EXACT)
    torch.testing.assert_close(output.logits, logits)
    assert not output.log_probs.requires_grad
    assert model(ids, shift_labels=targets).log_probs.requires_grad
    nothing = model(ids, labels=torch.full_like(ids, -100)).loss
    assert nothing == 0
    assert nothing.requires_grad


def test_left_padding(folder: Callable[..., Path]) -> None:
    """As transformers has it, and the loss counts what is labelled."""
    model, ids = wrapped(folder("gpt_neox")), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    ours = model(ids, attention_mask=mask, labels=labels, return_logits=True)
    theirs = reference(folder("gpt_neox"))(ids, attention_mask=mask, labels=labels)
    assert torch.equal(ours.logits, theirs.logits)
    torch.testing.assert_close(ours.loss.float(), theirs.loss, rtol=1e-6, atol=0)


def test_embeddings_in_and_a_cache(folder: Callable[..., Path]) -> None:
    """Token by token equals the whole, under either name of the cache."""
    model, ids = wrapped(folder("phi")), tokens(2, 6)
    whole = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    first = model(ids[:, :4], use_cache=True)
    second = model(ids[:, 4:5], cache=first.past_key_values)
    third = model(ids[:, 5:], past_key_values=second.past_key_values)
    stepwise = torch.cat((first.logits, second.logits, third.logits), dim=1)
    torch.testing.assert_close(stepwise, whole, **EXACT)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"input_ids": tokens(1, 4) + VOCAB}, TokenOutOfRange, "211 embeddings"),
        ({"input_ids": tokens(1, 4), "labels": tokens(1, 4) + VOCAB}, LabelOutOfRange, "label"),
        ({"input_ids": tokens(1, 4), "pixel_values": 1}, InvalidInput, "'pixel_values'"),
        ({"input_ids": tokens(1, 4), "output_attentions": True}, InvalidInput, "output_attentions"),
        ({"input_ids": tokens(1, 4), "output_router_logits": True}, InvalidInput, "no router loss"),
        ({"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 3)}, InvalidInput, "attention_mask"),
        ({}, InvalidInput, "exactly one"),
    ],
)
def test_wrong_inputs_are_named(
    arguments: dict[str, Any], error: type[Exception], said: str, folder: Callable[..., Path]
) -> None:
    with pytest.raises(error, match=said):
        wrapped(folder("phi"))(**arguments)


# ------------------------------------------------------------------------------------------------- heads that differ


def test_a_head_that_is_not_linear_gets_transformers_own_logits(folder: Callable[..., Path]) -> None:
    """Slower, said in the report, and the same loss."""
    theirs = reference(folder("phi"))
    theirs.set_output_embeddings(nn.Sequential(theirs.lm_head, nn.Tanh()))
    model = HFDecoder(theirs, head=find_head(theirs))
    ids, targets = tokens(2, 6), tokens(2, 6, seed=1)
    logits = theirs(ids).logits
    output = model(ids, shift_labels=targets)
    assert "Sequential, not a plain linear layer" in model.fallback_report()
    assert torch.equal(model(ids).logits, logits)
    torch.testing.assert_close(output.log_probs, expected_log_probs(logits, targets), **EXACT)
    torch.testing.assert_close(output.loss, -output.log_probs.mean(), **EXACT)
    assert output.log_probs.requires_grad
    assert not model(ids, labels=ids).log_probs.requires_grad


def test_logits_that_no_config_field_explains_are_noticed(folder: Callable[..., Path]) -> None:
    """One in a thousand is enough, and so is a head that sees something else than the backbone's output."""
    theirs = reference(folder("phi"))

    def rescale(module: nn.Module, arguments: Any, output: Any) -> None:
        output.logits = output.logits * 1.001

    hook = theirs.register_forward_hook(rescale)
    assert "another function" in str(find_head(theirs))
    hook.remove()
    hook = theirs.lm_head.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.001,))
    assert "another function" in str(find_head(theirs)) or "input" in str(find_head(theirs))
    hook.remove()
    assert find_head(theirs) == HeadMap()


def test_a_head_put_in_its_place_later_is_used(folder: Callable[..., Path]) -> None:
    model, ids = wrapped(folder("phi")), tokens(1, 5)
    model.hf.set_output_embeddings(nn.Sequential(model.hf.lm_head, nn.Tanh()))
    expected = model.hf(ids).logits
    assert torch.equal(model(ids).logits, expected)
    targets = next_tokens(ids)
    torch.testing.assert_close(model(ids, labels=ids).log_probs, expected_log_probs(expected, targets), **EXACT)


# ------------------------------------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "phi"])
def test_packed_documents_are_kept_apart(family: str, folder: Callable[..., Path]) -> None:
    """By restarting positions or by borders: log-probabilities as if each stood alone, no target across a border."""
    model, ids = wrapped(folder(family)), tokens(1, 9)
    apart = [model(ids[:, part], labels=ids[:, part]).log_probs for part in (slice(5), slice(5, None))]
    for packing in ({"position_ids": PACKED}, {"cu_seq_lens_q": torch.tensor([0, 5, 9])}):
        packed = model(ids, labels=ids, **packing)
        torch.testing.assert_close(packed.log_probs, torch.cat(apart, dim=1), **EXACT)
    assert "kept apart" in model.fallback_report()


def test_documents_that_would_see_each_other_are_refused(folder: Callable[..., Path]) -> None:
    """A model without position_ids, one that does not act on them, and positions that contradict the borders."""
    ids = tokens(1, 9)
    with pytest.raises(InvalidInput, match="takes no position_ids"):
        wrapped(folder("bloom"))(ids, position_ids=PACKED)
    model = wrapped(folder("gpt_neox"))
    with pytest.raises(InvalidInput, match="different documents"):
        model(ids, position_ids=PACKED, cu_seq_lens_q=torch.tensor([0, 4, 9]))

    def blind(module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, {**named, "position_ids": torch.arange(named["input_ids"].shape[1])[None]}

    model.train().hf.base_model.register_forward_pre_hook(blind, with_kwargs=True)
    with pytest.raises(InvalidInput, match=r"see each other .* moves another one's"):
        model(ids, position_ids=PACKED)
    assert model.hf.training
    assert "refused" in model.fallback_report()
    plain = model(ids, position_ids=torch.arange(9)[None]).logits
    assert torch.equal(plain, model(ids).logits)


def test_the_probe_tells_a_leak_from_rounding() -> None:
    """A model that mixes documents, one that does not, one that rounds otherwise, one that reads no tokens."""

    def run(ids: Tensor, positions: Tensor, leak: float = 0.0, noise: float = 0.0, own: float = 1.0) -> Tensor:
        document = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        same = document[:, :, None] == document[:, None, :]
        weights = torch.where(same, own, leak).to(torch.float64) + noise
        return (weights.tril() @ ids[..., None].to(torch.float64)).float()

    device = torch.device("cpu")
    assert documents_leak(run, VOCAB, device) is None
    assert documents_leak(partial(run, noise=3e-7), VOCAB, device) is None
    assert "moves another" in str(documents_leak(partial(run, leak=1e-3), VOCAB, device))
    assert "nothing" in str(documents_leak(partial(run, own=0.0), VOCAB, device))


def test_positions_of_a_model_that_takes_none(folder: Callable[..., Path]) -> None:
    """Counted from 0 they say nothing; others are refused."""
    model, ids = wrapped(folder("bloom")), tokens(1, 6)
    assert torch.equal(model(ids, position_ids=torch.arange(6)[None]).logits, model(ids).logits)
    with pytest.raises(InvalidInput, match="takes none"):
        model(ids, position_ids=torch.arange(3, 9)[None])


# ------------------------------------------------------------------------------------------------- training and travel


@pytest.mark.parametrize("family", ["bloom", "phi"])
def test_it_trains_saves_and_reloads(family: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """One step, then the same logits in transformers and here, from shards too."""
    model, ids = wrapped(folder(family)).train(), tokens(2, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model(ids, labels=ids).loss
    before.backward()
    optimizer.step()
    model.eval()
    after = model(ids, labels=ids).loss
    assert after < before
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for target in (tmp_path / "one", tmp_path / "many"):
        theirs = reference(target)
        named = dict(theirs.named_parameters())
        assert all(torch.equal(parameter, named[name]) for name, parameter in model.hf.named_parameters())
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, **EXACT)
        torch.testing.assert_close(wrapped(target)(ids, labels=ids).loss, after, **EXACT)
    with pytest.raises(FolderNotEmpty):
        model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "one", overwrite=True)


@pytest.mark.parametrize("family", [*FAMILIES, "dots1"])
def test_tensors_have_their_hub_names(family: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """Those of the checkpoint, tied ones once, experts as the hub stores them."""
    source = folder(family, dtype=torch.float32)  # grouped matmul has no float64
    found, stored = dict(wrapped(source).named_hf_tensors()), load_file(source / SINGLE)
    assert sorted(found) == sorted(stored)
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_gradient_checkpointing_changes_no_gradient(folder: Callable[..., Path]) -> None:
    """And the reentrant kind is refused."""
    model, ids = wrapped(folder("gpt_neox")).train(), tokens(2, 7)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    with pytest.raises(InvalidConfig, match="use_reentrant"):
        model.activation_checkpointing_enable({"use_reentrant": True})


def test_what_is_written_on_the_config_is_exported(folder: Callable[..., Path], tmp_path: Path) -> None:
    model = wrapped(folder("phi"))
    model.config.pad_token_id = 7
    model.generation_config.pad_token_id = 7
    model.save_pretrained(tmp_path / "saved")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "saved" / name).read_text())["pad_token_id"] == 7


# ------------------------------------------------------------------------------------------------- generation


def test_generate_is_greedy_though_the_checkpoint_samples(folder: Callable[..., Path], tmp_path: Path) -> None:
    """transformers' greedy tokens, left-padded rows too, and the log-probability of each."""
    theirs = reference(folder("phi"))
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    theirs.generation_config.update(do_sample=True, temperature=3.0, top_k=5, repetition_penalty=2.0)
    theirs.save_pretrained(tmp_path / "sampling")
    model = wrapped(tmp_path / "sampling")
    kept = deepcopy(model.generation_config.to_dict())
    sequence, log_probs = model.generate(ids, mask, max_new_tokens=5, stop_token_ids=[], return_log_probs=True)
    position, expected = ids, ids
    for _ in range(5):
        rows = torch.cat((mask, mask.new_ones(2, position.shape[1] - 6)), dim=1)
        places = (rows.cumsum(-1) - 1).clamp(min=0)
        logits = theirs(position, attention_mask=rows, position_ids=places).logits[:, -1]
        position = torch.cat((position, logits.argmax(-1, keepdim=True)), dim=1)
        expected = position
    assert torch.equal(sequence, expected)
    rows = torch.cat((mask, mask.new_ones(2, 5)), dim=1)
    logits = theirs(sequence, attention_mask=rows, position_ids=(rows.cumsum(-1) - 1).clamp(min=0)).logits[:, 5:-1]
    wanted = expected_log_probs(logits, sequence[:, 6:])
    torch.testing.assert_close(log_probs, wanted.float(), rtol=1e-5, atol=1e-6)  # transformers samples from fp32
    assert model.generation_config.to_dict() == kept


def test_generation_stops_pads_and_is_seeded(folder: Callable[..., Path]) -> None:
    model, ids = wrapped(folder("phi")), tokens(2, 4)
    first = int(model.generate(ids, max_new_tokens=1)[0, -1])
    sequence, log_probs = model.generate(
        ids, max_new_tokens=4, stop_token_ids=first, pad_token_id=0, return_log_probs=True
    )
    assert sequence[0, 4:].tolist() == [first, 0, 0, 0][: sequence.shape[1] - 4]
    assert torch.equal(log_probs[0, 1:], torch.zeros_like(log_probs[0, 1:]))
    draws = [
        model.generate(
            ids, max_new_tokens=8, do_sample=True, top_k=50, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(InvalidInput, match="padding on the right"):
        model.generate(ids, torch.tensor([[1, 1, 1, 0]] * 2))
    with pytest.raises(InvalidInput, match="max_position_embeddings"):
        model.generate(ids, max_new_tokens=10_000)


# ------------------------------------------------------------------------------------------------- what it says


def test_it_has_every_name_of_our_models(folder: Callable[..., Path]) -> None:
    """What trainers ask by name; `decoder_config` alone is absent, with an error that says so."""
    model = wrapped(folder("cohere"))
    surface = {name for kind in (TrainerProtocol, GenerationMixin) for name in vars(kind) if not name.startswith("__")}
    native = {"hf_config_json", "hf_generation_config_json", "from_pretrained", "_bridge", "_config"}
    internal = {"_generation_config"}
    assert {name for name in surface - native - internal if not hasattr(model, name)} == set()
    assert getattr(model, model.base_model_prefix) is model.base_model is model.hf.model
    assert model.get_output_embeddings() is model.hf.lm_head
    assert (model.dtype, model.device) == (torch.float64, torch.device("cpu"))
    assert model._tied_weights_keys == {"hf.lm_head.weight": "hf.model.embed_tokens.weight"}
    assert model.num_parameters() == model.hf.num_parameters()
    embedding = model.get_input_embeddings().weight.numel()
    assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - embedding
    assert {type(layer).__name__ for layer in model.hf.model.layers} <= set(model._no_split_modules)
    assert not hasattr(model, "decoder_config")
    with pytest.raises(NoDecoderConfig, match="CohereForCausalLM runs on the fallback backend"):
        _ = model.decoder_config
    with pytest.raises(UnsupportedLoad, match="tensors by name into transformers' CohereForCausalLM"):
        model.load_hf_tensors(model.named_hf_tensors())
    model.add_model_tags(["sft", "trl"])
    model.add_model_tags("sft")
    assert model.model_tags == ["sft", "trl"]
    model.requires_grad_(False)
    model.enable_input_require_grads()
    assert model(tokens(1, 3)).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(tokens(1, 3)).logits.requires_grad


@pytest.mark.parametrize("journey", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(journey: Callable[[Any], Any], folder: Callable[..., Path]) -> None:
    model, ids = wrapped(folder("cohere")), tokens(1, 5)
    again = journey(model)
    assert torch.equal(again(ids, labels=ids).loss, model(ids, labels=ids).loss)
    assert again.num_parameters() == model.num_parameters()


def test_it_says_what_is_off(folder: Callable[..., Path]) -> None:
    """Once at load, and when asked; a family that has a bridge is told so."""
    with pytest.warns(UserWarning, match=r"verification +off") as said:
        model = AutoDecoder.from_pretrained(folder("phi"), backend="hf")
    assert sum("fallback backend" in str(one.message) for one in said) == 1
    report = model.fallback_report()
    for line in ("verification      off", "kernels           off", "tried at the first packed batch", "log-prob core"):
        assert line in report
    assert "native bridge" not in report
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens(1, 4), labels=tokens(1, 4))
    assert "qwen3 has a native bridge" in wrapped(folder("qwen3")).fallback_report()


def test_flops_are_counted(folder: Callable[..., Path]) -> None:
    """Two a multiply-add of every linear layer and of both products of attention; nothing else of the model changes."""
    model = wrapped(folder("gpt_neox"))
    implementation = model.config._attn_implementation
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 2 * 2 * 2 * (5 * 5 * 48) * 3  # layers · products · 2 · T² · H · B
    assert abs(model.count_flops(3, 5) - (2 * 3 * 5 * linear + attention)) <= 0.01 * attention
    assert model.config._attn_implementation == implementation
