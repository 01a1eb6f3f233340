"""What trainers and torch ask of a model: parameters, ties, state, memory switches, initial weights."""

import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bestiary.models import Decoder, Qwen3
from bestiary.models.config import (
    Attention,
    DecoderConfig,
    LayerType,
    MoE,
    QKNorm,
    QKNormSpan,
    Router,
    RouterKind,
)
from bestiary.models.errors import InvalidConfig
from bestiary.models.layers.norm import RMSNorm

from ..machine import NEEDS_COMPILER
from .tiny import FAMILIES, VOCAB, tiny, tiny_config, tokens


def is_tied(model: Decoder) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


# ---------------------------------------------------------------------- parameters and state


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_its_parameters(family: str) -> None:
    """No buffers, and the state dict holds each parameter once under its own name."""
    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    assert list(model.buffers()) == []
    assert sorted(model.state_dict()) == sorted(names)
    assert len(set(names)) == len(names)
    assert ("lm_head.weight" in names) is not model.decoder_config.tie_word_embeddings


@pytest.mark.parametrize(("size", "count"), [("0.6b", 596_049_920), ("8b", 8_190_735_360), ("32b", 32_762_123_264)])
def test_num_parameters_is_the_official_count(size: str, count: int) -> None:
    """A tied head counts once, padding of the vocabulary never; built on meta."""
    with torch.device("meta"):
        model = Qwen3(Qwen3.sizes[size])
    assert model.num_parameters() == count
    embedding = model.decoder_config.vocab_size * model.decoder_config.hidden_size
    assert model.num_parameters(exclude_embeddings=True) == count - embedding
    model.model.requires_grad_(False)
    trainable = 0 if model.decoder_config.tie_word_embeddings else embedding
    assert model.num_parameters(only_trainable=True) == trainable


def moved(model: Decoder) -> Decoder:
    return model.to(torch.bfloat16)


def through_meta(model: Decoder) -> Decoder:
    return model.to("meta").to_empty(device="cpu")


def assigned(model: Decoder) -> Decoder:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def pickled(model: Decoder) -> Decoder:
    again: Decoder = pickle.loads(pickle.dumps(model))
    return again


@pytest.mark.parametrize("journey", [moved, through_meta, assigned, deepcopy, pickled])
@pytest.mark.parametrize("tied", [True, False])
def test_ties_hold_through_every_journey(journey: Any, tied: bool) -> None:
    """One Parameter before, one Parameter after; two stay two."""
    model = journey(tiny("qwen3", tie_word_embeddings=tied))
    assert is_tied(model) is tied
    assert ("lm_head.weight" in model.state_dict()) is not tied
    assert model.num_parameters() == sum(tensor.numel() for tensor in model.state_dict().values())


def test_a_copy_of_the_model_is_independent() -> None:
    """Training the copy leaves the original, and both of its uses of the embedding move together."""
    model = tiny("qwen3")
    copied, before = deepcopy(model), model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        copied.model.embed_tokens.weight.add_(1.0)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert torch.equal(copied.lm_head.weight, before + 1.0)


def test_a_copy_of_a_tied_head_alone_stands_for_itself() -> None:
    """PEFT's modules_to_save copies the head and trains the copy: its weight must then be saved."""
    head = deepcopy(tiny("qwen3").lm_head)
    assert list(head.state_dict()) == ["weight"]
    assert [name for name, _ in head.named_parameters()] == ["weight"]


def test_state_dicts_load_with_and_without_the_tied_head() -> None:
    """Strictly; what is missing or extra beyond that is still an error."""
    source, target = tiny("qwen3"), Decoder(tiny_config("qwen3"), dtype=torch.float64)
    state = dict(source.state_dict())
    for given in (state, {**state, "lm_head.weight": state["model.embed_tokens.weight"]}):
        target.init_weights(seed=5)
        target.load_state_dict(given)
        assert torch.equal(target(tokens(1, 5)).logits, source(tokens(1, 5)).logits)
    untied = Decoder(tiny_config("qwen3", tie_word_embeddings=False), dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*lm_head.weight"):
        untied.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*lm_head.bias"):
        target.load_state_dict({**state, "lm_head.bias": torch.zeros(VOCAB)})
    with pytest.raises(RuntimeError, match=r"differs from model\.embed_tokens\.weight"):
        target.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})


def test_the_gradient_of_a_tied_matrix_is_the_sum_of_both_uses() -> None:
    """Embedding rows and head rows."""
    tied, apart = tiny("qwen3"), tiny("qwen3", tie_word_embeddings=False)
    apart.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    ids = tokens(2, 9)
    for model in (tied, apart):
        model(ids, labels=ids).loss.backward()
    both = apart.model.embed_tokens.weight.grad + apart.lm_head.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, both, rtol=1e-10, atol=1e-13)


def test_a_tied_head_is_hidden_only_from_walks_over_modules() -> None:
    """Whoever freezes or counts the head itself finds its weight."""
    head = tiny("qwen3").lm_head
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    assert list(head.named_parameters(recurse=False)) == []
    assert [name for name, _ in head.named_parameters(recurse=False, remove_duplicate=False)] == ["weight"]
    head.requires_grad_(False)
    assert not head.weight.requires_grad


# ---------------------------------------------------------------------- what trainers read


def test_names_that_trainers_look_for() -> None:
    """Values, not mere presence."""
    model = tiny("gemma3", torch.bfloat16)
    assert model.base_model is model.model is getattr(model, model.base_model_prefix)
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert model.main_input_name == "input_ids"
    assert (model.loss_type, model.accepts_loss_kwargs) == ("ForCausalLM", True)
    assert model._tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {type(module).__name__ for module in model.model.layers} == set(model._no_split_modules)
    model.add_model_tags(["sft", "trl"])
    model.add_model_tags("sft")
    assert model.model_tags == ["sft", "trl"]
    assert tiny("gemma3").model_tags is None


# ---------------------------------------------------------------------- memory and speed switches


def gradients(model: Decoder, ids: Tensor, **arguments: Any) -> list[Tensor]:
    """Loss, then every gradient."""
    model.zero_grad()
    loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_memory_and_nothing_else(family: str) -> None:
    """Bit-equal gradients, by the switch and by the config; fewer tensors kept."""
    model, ids = tiny(family), tokens(2, 13)
    kept: list[int] = []

    def measured(model: Decoder) -> list[Tensor]:
        kept.append(0)

        def pack(tensor: Tensor) -> Tensor:
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return gradients(model, ids, output_router_logits=True)

    expected = measured(model)
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing
    configured = tiny(family, activation_checkpointing=True)
    assert configured.is_gradient_checkpointing
    for other in (model, configured):
        for ours, plain in zip(measured(other), expected, strict=True):
            assert torch.equal(ours, plain)
        assert kept[-1] < kept[0] / 2
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    with torch.no_grad():
        assert torch.equal(configured(ids).logits, model(ids).logits)


def test_only_every_nth_block_is_recomputed_where_asked() -> None:
    """As transformers' Trainer asks; the gradients are the same bits."""
    model, ids = tiny("qwen3"), tokens(2, 9)
    expected = gradients(model, ids)
    runs: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, arguments, index=index: runs.append(index))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=None, every_n_layers=2, offload=False)
    for ours, plain in zip(gradients(model, ids), expected, strict=True):
        assert torch.equal(ours, plain)
    assert runs == [0, 1, 2, 2, 0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant = True"),  # loses gradients
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant = True"),
        ({"offload": True}, "offload = True"),
        ({"every_n_layers": 0}, "every_n_layers = 0"),
    ],
)
def test_checkpointing_of_another_kind_is_refused(asked: dict[str, Any], said: str) -> None:
    """By name, whatever transformers calls it."""
    with pytest.raises(InvalidConfig, match=said):
        tiny("qwen3").activation_checkpointing_enable(**asked)


def test_generation_works_on_a_model_that_checkpoints() -> None:
    """Evaluation in the middle of training."""
    model, ids = tiny("qwen3", activation_checkpointing=True).train(), tokens(2, 5)
    assert torch.equal(model.generate(ids, max_new_tokens=4), tiny("qwen3").generate(ids, max_new_tokens=4))


def test_inputs_can_be_made_to_require_gradients() -> None:
    """For adapters behind a frozen embedding; undone by its counterpart; twice is once."""
    model, ids = tiny("qwen3"), tokens(1, 5)
    model.requires_grad_(False)
    assert not model(ids).logits.requires_grad
    model.enable_input_require_grads()
    model.enable_input_require_grads()
    assert model(ids).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(ids).logits.requires_grad


def two_layers(family: str, dtype: torch.dtype, **changes: Any) -> Decoder:
    return tiny(
        family, dtype, num_hidden_layers=2, layer_types=tiny_config(family).layer_types[:2], dense_layers=(), **changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_compute_the_same(family: str) -> None:
    """Traced block by block: loss and gradients, a packed row, and a generation that compiles nothing."""
    torch._dynamo.reset()
    model, plain = (two_layers(family, torch.float64, compile_blocks=compiled) for compiled in (True, False))
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)  # what torch traces, without the time of code generation
    ids = tokens(1, 11)
    for arguments in ({}, {"position_ids": torch.cat((torch.arange(4), torch.arange(7)))[None]}):
        pairs = zip(gradients(model, ids, **arguments), gradients(plain, ids, **arguments), strict=True)
        for ours, expected in pairs:
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    traced = len(graphs)
    assert traced > 0
    assert torch.equal(model.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))
    assert len(graphs) == traced, "generation compiled the blocks again"


@pytest.mark.slow
@NEEDS_COMPILER
def test_compiled_code_computes_the_same() -> None:
    """With torch's own compiler, in fp32: a layer with experts, in their loop, and a dense one."""
    torch._dynamo.reset()
    options = {"num_hidden_layers": 2, "layer_types": tiny_config("qwen3_moe").layer_types[:2], "dense_layers": (1,)}
    model, plain = (tiny("qwen3_moe", torch.float32, compile_blocks=compiled, **options) for compiled in (True, False))
    ids = tokens(2, 9)
    for ours, expected in zip(gradients(model, ids), gradients(plain, ids), strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


# ---------------------------------------------------------------------- initial weights


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_are_a_function_of_seed_and_name(family: str) -> None:
    """The same after meta, in another dtype of default, after other draws; another seed gives others."""
    config = tiny_config(family)
    torch.manual_seed(1)
    first = Decoder(config, dtype=torch.float32)
    first.init_weights(seed=7)
    with torch.device("meta"):
        second = Decoder(config, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in second.parameters())
    second.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.fill_(torch.nan)
    torch.rand(3)
    second.init_weights(seed=7)
    other = Decoder(config, dtype=torch.float32)
    other.init_weights(seed=8)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert name.endswith(("norm.weight", "bias")) or not torch.equal(a, c), name
    torch.manual_seed(1)
    again = Decoder(config, dtype=torch.float32)
    torch.manual_seed(1)
    for a, b in zip(Decoder(config, dtype=torch.float32).parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_follow_the_config(family: str) -> None:
    """Matrices N(0, initializer_range), norms the identity, biases zero."""
    model = Decoder(tiny_config(family, initializer_range=0.5, vocab_size=1003), dtype=torch.float32)
    model.init_weights(seed=0)
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            x = torch.randn(4, module.weight.shape[0])
            expected = x * (x.square().mean(-1, keepdim=True) + module.config.eps).rsqrt()
            torch.testing.assert_close(module(x), expected), name
    for name, parameter in model.named_parameters():
        assert not name.endswith("bias") or parameter.abs().max() == 0
        if parameter.ndim >= 2 and not name.endswith("bias"):
            assert abs(float(parameter.detach().mean())) < 0.1, name
            assert 0.45 < float(parameter.detach().std()) < 0.55, name


def test_building_leaves_the_defaults_of_torch_alone() -> None:
    """Dtype and device, also when construction fails."""
    Decoder(tiny_config("qwen3"), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        Decoder(tiny_config("qwen3", hidden_size=-1), dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(0).device == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_dtype_asked_for(family: str, dtype: torch.dtype) -> None:
    """And the forward pass keeps it."""
    model = tiny(family, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(tokens(1, 5)).logits.dtype == dtype


def test_a_forward_pass_on_meta_gives_shapes() -> None:
    """For planning: no memory, every family."""
    for family in FAMILIES:
        with torch.device("meta"):
            model = Decoder(tiny_config(family), dtype=torch.float32)
            logits = model(torch.zeros(2, 9, dtype=torch.long)).logits if family in {"qwen3", "gemma3"} else None
        assert logits is None or (logits.is_meta and logits.shape == (2, 9, VOCAB))


# ---------------------------------------------------------------------- configs that contradict themselves


BASE = tiny_config("qwen3")
HEADS: Attention = BASE.attention
WRONG: dict[str, Any] = {
    "num_heads = 4 is not a multiple": lambda: BASE.with_(attention=replace(HEADS, num_kv_heads=3)),
    "layer_types has 2 entries": lambda: BASE.with_(layer_types=(LayerType.FULL,) * 2),
    "sliding_window = None": lambda: BASE.with_(layer_types=(LayerType.SLIDING,) * 3),
    "after_rope = True": lambda: BASE.with_(
        attention=replace(HEADS, qk_norm=QKNorm(span=QKNormSpan.FULL, after_rope=True))
    ),
    "num_groups = 2": lambda: Router(kind=RouterKind.SOFTMAX_TOPK, top_k=2, num_groups=2),
    "scale = 2.0": lambda: Router(kind=RouterKind.TOPK_SOFTMAX, top_k=2, scale=2.0),
    "router.bias = True on a sigmoid router": lambda: Router(kind=RouterKind.SIGMOID, top_k=2, bias=True),
}


@pytest.mark.parametrize("named", WRONG)
def test_a_config_that_contradicts_itself_is_refused(named: str) -> None:
    """Before anything is built, with a remedy."""
    with pytest.raises(InvalidConfig, match=named) as caught:
        WRONG[named]()
    assert caught.value.remedy


def test_runtime_switches_do_not_make_another_architecture() -> None:
    """Equal configs, equal hashes: the same weights fit."""
    switched = BASE.with_(activation_checkpointing=True, compile_blocks=True)
    assert switched == BASE
    assert hash(switched) == hash(BASE)
    assert BASE.with_(vocab_size=1) != BASE
    assert DecoderConfig.padded_vocab_size.fget(BASE) == 256
    assert MoE(num_experts=4, intermediate_size=8, router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=2)).clamp is None


def test_a_plain_module_may_hold_a_decoder() -> None:
    """Its state dict and loading nest; the tie is made again."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = Decoder(tiny_config("qwen3"), dtype=torch.float64)
            self.value = nn.Linear(80, 1)

    first, second = Critic(), Critic()
    assert "actor.lm_head.weight" not in first.state_dict()
    second.load_state_dict(first.state_dict(), assign=True)
    assert is_tied(second.actor)
    assert torch.equal(second.actor.lm_head.weight, first.actor.model.embed_tokens.weight)
