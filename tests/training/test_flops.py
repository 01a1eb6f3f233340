"""The FLOP report against torch's counter, against parameters of every size, and against a brute-force mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from bestiary.kernels.attention import MaskSpec
from bestiary.kernels.dispatch import force
from bestiary.models import Decoder, DecoderConfig, LoRAConfig
from bestiary.models.config import MLA, Attention, LayerType, Norm, Rope
from bestiary.models.recomputation import Checkpointing, Part
from bestiary.tools.catalogue import families
from bestiary.training.flops import FlopReport, StepFlops, step_flops, visible_pairs

VOCAB, TOKENS, DOCUMENTS = 128, 24, (11, 13)
SIZES = [(cls, name) for cls in families().values() for name in cls.sizes]
FAMILIES = list(families().values())

LATENT = MLA(kv_lora_rank=14, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, norm_eps=1e-6, q_lora_rank=18)
MLA_CONFIG = DecoderConfig(
    model_type="latent",
    vocab_size=VOCAB,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    attention=Attention(
        num_heads=3,
        num_kv_heads=3,
        head_dim=20,
        scale=0.2,
        mla=LATENT,
    ),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=1e4, rotary_dim=8),
)


def small_heads(attention: Attention) -> Attention:
    """Six of them, over two of keys and values or over a latent, which serves each."""
    if attention.mla is None:
        return replace(attention, num_heads=6, num_kv_heads=2, head_dim=16)
    latent = replace(LATENT, q_lora_rank=attention.mla.q_lora_rank and 18)
    return replace(attention, num_heads=6, num_kv_heads=6, head_dim=20, mla=latent)


def small(cls: type[Decoder], **changes: Any) -> DecoderConfig:
    """The first size of a family with few layers and every width different; windows of 7."""
    config = next(iter(cls.sizes.values()))
    layers = 1 + next((i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL), 0)
    layers = max(layers, 2)
    moe = config.moe
    if moe is not None:
        shared = moe.shared and replace(moe.shared, intermediate_size=28)
        router = replace(moe.router, top_k=3, num_groups=1, topk_groups=1)
        moe = replace(moe, num_experts=8, intermediate_size=20, router=router, shared=shared)
    rotary = 8
    return config.with_(
        vocab_size=VOCAB,
        hidden_size=48,
        padding_idx=None,
        intermediate_size=72,
        num_hidden_layers=layers,
        layer_types=config.layer_types[:layers],
        nope_layers=tuple(i for i in config.nope_layers if i < layers),
        dense_layers=tuple(i for i in config.dense_layers if i < 1),
        sliding_window=None if config.sliding_window is None else 7,
        attention=small_heads(config.attention),
        rope=replace(config.rope, rotary_dim=rotary, scaling=None),
        sliding_rope=config.sliding_rope and replace(config.sliding_rope, rotary_dim=rotary, scaling=None),
        moe=moe,
    ).with_(**changes)


@contextmanager
def plain() -> Iterator[None]:
    """Everything as single torch products, and checkpoints that repeat a whole block."""
    plainly = {
        "attention": "eager",
        "experts": "loop",
        "linear": "torch",
        "gated_linear": "reference",
        "lora_linear": "reference",
    }
    with force(**plainly), set_checkpoint_early_stop(False):
        yield


def counted(model: Decoder, lengths: tuple[int, ...]) -> dict[str, int]:
    """FLOPs of a forward and backward pass over logits, by torch: products with weights, and batched ones."""
    ids = torch.randint(VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, *lengths]).cumsum(0)
    counter = FlopCounterMode(display=False)
    with plain(), counter:
        logits = model(ids, cu_seq_lens_q=borders).logits
        if logits.requires_grad:
            logits.square().mean().backward()
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    batched = found.pop("aten.bmm", 0)
    return {"weights": sum(found.values()), "attention": batched}


def expected(
    report: FlopReport, flops: StepFlops, lengths: tuple[int, ...], *, hardware: bool = False
) -> dict[str, int]:
    """The same from a report; eager attention computes every pair, so pairs are scaled up to the square."""
    sums = {"weights": 0, "attention": 0}
    for row, product in zip(report.rows, flops.products, strict=True):
        value = row.model + (row.recompute if hardware else 0)
        if product.unit == "pair":
            seen = sum(visible_pairs(n, product.window) for n in lengths)
            assert value % seen == 0
            sums["attention"] += value // seen * sum(lengths) ** 2
        else:
            sums["weights"] += value
    return sums


def check(model: Decoder, *, hardware: bool = False) -> None:
    flops = StepFlops.of(model)
    report = flops.report(DOCUMENTS, TOKENS)
    assert counted(model, DOCUMENTS) == expected(report, flops, DOCUMENTS, hardware=hardware)
    totals = flops.totals(DOCUMENTS, TOKENS)
    assert (totals.model, totals.hardware) == (report.model, report.hardware)


@pytest.mark.parametrize("cls", FAMILIES, ids=lambda cls: cls.__name__)
def test_every_family_trained_in_full_costs_what_torch_counts(cls: type[Decoder]) -> None:
    check(cls(small(cls), dtype=torch.float64))


@pytest.mark.parametrize("cls", FAMILIES, ids=lambda cls: cls.__name__)
def test_every_family_under_adapters_costs_what_torch_counts(cls: type[Decoder]) -> None:
    """The base has no dW, and the first layer no dX, except what flows through an adapter's own two products."""
    lora = LoRAConfig(r=4, alpha=8.0, targets=("*_proj",), rank_pattern=(("o_proj", 2),))
    check(cls(small(cls, lora=lora), dtype=torch.float64))


def test_latent_attention_costs_what_torch_counts() -> None:
    for lora in (None, LoRAConfig(r=4, alpha=8.0, targets=("kv_b_proj", "q_a_proj"))):
        check(Decoder(MLA_CONFIG.with_(lora=lora), dtype=torch.float64))


def _named(*endings: str) -> Any:
    return lambda name: name.endswith(endings)


@pytest.mark.parametrize(
    "trains",
    [
        _named("model.layers.1.self_attn.v_proj.weight"),
        _named("model.layers.1.self_attn.q_norm.weight"),
        _named("model.layers.0.mlp.gate.weight"),
        _named("model.layers.1.mlp.experts.down_proj"),
        _named("model.layers.1.post_attention_layernorm.weight"),
        _named("model.norm.weight"),
        _named("lm_head.weight"),
        _named("model.embed_tokens.weight"),
        _named("nothing"),
    ],
    ids=["v", "q_norm", "router", "experts", "norm", "final norm", "head", "embedding", "nothing"],
)
def test_gradients_cost_where_they_flow_and_nowhere_else(trains: Any) -> None:
    model = families()["Qwen3MoE"](small(families()["Qwen3MoE"]), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    check(model)


@pytest.mark.parametrize(
    "lora", [None, LoRAConfig(r=4, alpha=8.0, targets=("layers.1.*o_proj",))], ids=["trained", "lora"]
)
@pytest.mark.parametrize(
    "checkpointing",
    [
        Checkpointing(),
        Checkpointing(part=Part.ATTENTION),
        Checkpointing(part=Part.MLP, every=2),
        Checkpointing(first=2),
    ],
    ids=["full", "attention", "every second MLP", "the first two"],
)
def test_checkpointing_costs_hardware_and_not_the_model(lora: LoRAConfig | None, checkpointing: Checkpointing) -> None:
    """Blocks below the first that trains are not computed again: nothing of theirs is asked for."""
    config = small(families()["Gemma3"], lora=lora)
    plain_model, checkpointed = (
        families()["Gemma3"](config.with_(activation_checkpointing=how), dtype=torch.float64)
        for how in (False, checkpointing)
    )
    check(checkpointed, hardware=True)
    same = [StepFlops(model.decoder_config).totals(DOCUMENTS, 5).model for model in (plain_model, checkpointed)]
    assert same[0] == same[1]


def test_selective_checkpointing_repeats_every_product_and_no_pair() -> None:
    config = small(families()["Gemma3"], activation_checkpointing=Checkpointing(part=Part.SELECTIVE))
    rows = step_flops(config, lengths=DOCUMENTS, loss_tokens=5).rows
    assert all(row.recompute == (0 if row.name.endswith(("attention", "lm_head")) else row.forward) for row in rows)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_head_costs_what_its_targets_cost(frozen: bool) -> None:
    """Through the log-prob core, which drops positions without a label before it projects them."""
    config = small(families()["Llama"])
    model = families()["Llama"](config.with_(tie_word_embeddings=False), dtype=torch.float64)
    model.lm_head.weight.requires_grad_(not frozen)
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[0, 3:10] = ids[0, 3:10]
    counter = FlopCounterMode(display=False)
    with plain(), counter:
        model(ids, shift_labels=labels, num_items_in_batch=7).loss.backward()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows = step_flops(model.decoder_config, lengths=(TOKENS,), loss_tokens=7, trainable=names.__contains__).rows
    weights = sum(row.model for row in rows if not row.name.endswith("attention"))
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    found.pop("aten.bmm")
    assert sum(found.values()) == weights


@pytest.mark.parametrize(("cls", "size"), SIZES, ids=[f"{cls.__name__}-{size}" for cls, size in SIZES])
def test_every_size_multiplies_each_token_once_with_each_weight_that_it_meets(cls: type[Decoder], size: str) -> None:
    """2 FLOPs a weight; of experts the share that a token is routed to; names are those of the parameters."""
    config = cls.sizes[size]
    model = cls(config, device="meta", dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    met = {"model.embed_tokens.weight"}
    for product in StepFlops(config, backward=False).products:
        if product.unit == "pair":
            continue
        weight = product.name if ".experts." in product.name else f"{product.name}.weight"
        if product.name == "lm_head" and config.tie_word_embeddings:
            weight = "model.embed_tokens.weight"
        share = 1
        if ".experts." in product.name:
            assert config.moe is not None
            share = config.moe.num_experts // config.moe.router.top_k
        assert product.forward * share == 2 * shapes[weight].numel(), product.name
        met.add(weight)
    assert met == {name for name, shape in shapes.items() if len(shape) > 1 and not name.endswith("bias")}


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
    causal=st.booleans(),
)
def test_visible_pairs_are_those_of_the_mask(lengths: list[int], window: int | None, causal: bool) -> None:
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    mask = MaskSpec(sum(lengths), sum(lengths), window=window, documents=documents, causal=causal)
    seen = int(mask.dense(torch.device("cpu")).sum())
    assert sum(visible_pairs(n, window, causal=causal) for n in lengths) == seen


def test_sliding_layers_pay_for_their_window_alone() -> None:
    config = small(families()["Gemma3"])
    rows = step_flops(config, lengths=(100,), loss_tokens=0).rows
    by_window = {
        config.window(i): next(r for r in rows if r.name == f"model.layers.{i}.self_attn.attention")
        for i in range(config.num_hidden_layers)
    }
    heads = config.attention
    pair = 4 * heads.num_heads * heads.head_dim
    assert by_window[7].forward == pair * (7 * 8 // 2 + 93 * 7)
    assert by_window[None].forward == pair * 5050


def test_a_score_head_and_a_model_that_is_only_asked() -> None:
    config = small(families()["Qwen3"])
    (head,) = (row for row in step_flops(config, lengths=(9, 4), loss_tokens=2, labels=1).rows if row.name == "score")
    assert head.forward == 2 * 2 * config.hidden_size
    report = step_flops(config, lengths=(9, 4), loss_tokens=2, backward=False)
    assert report.model == report.forward > 0
