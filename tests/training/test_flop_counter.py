"""torch's FLOP counter over the operators that run by default: what the report says, as products of visible pairs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.dispatch import force, record
from bestiary.kernels.log_prob_ops import per_token, scalar_loss
from bestiary.kernels.log_prob_terms import LogitMap, ScalarLoss, Setting, Wanted
from bestiary.models import LoRAConfig
from bestiary.tools.catalogue import families
from bestiary.training.flops import step_flops

LENGTHS, TARGETS, VOCAB = (11, 13), 7, 128
ALL = LoRAConfig(r=4, alpha=8.0, targets=("*_proj",))


@pytest.mark.parametrize("lora", [None, ALL], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3MoE"])
def test_a_whole_step_counts_what_its_products_cost(name: str, lora: LoRAConfig | None) -> None:
    """Windows and documents, routed experts, positions without a label."""
    cls = families()[name]
    config = next(iter(cls.sizes.values()))
    moe = config.moe and replace(config.moe, num_experts=8, intermediate_size=20)
    if moe is not None:
        moe = replace(moe, router=replace(moe.router, top_k=3))
    config = config.with_(
        vocab_size=VOCAB,
        padding_idx=None,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        layer_types=(config.layer_types[0], config.layer_types[-1]),
        nope_layers=(),
        dense_layers=(),
        sliding_window=7 if config.sliding_window else None,
        attention=replace(config.attention, num_heads=6, num_kv_heads=2, head_dim=16),
        rope=replace(config.rope, rotary_dim=16, scaling=None),
        sliding_rope=config.sliding_rope and replace(config.sliding_rope, rotary_dim=16, scaling=None),
        moe=moe,
        lora=lora,
    )
    model = cls(config, dtype=torch.float32)
    ids = torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[0, 3 : 3 + TARGETS] = ids[0, :TARGETS]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    counter = FlopCounterMode(display=False)
    implementation = {"attention": "documents"} | ({"experts": "sorted"} if moe else {})
    with force(**implementation), record() as log, counter:
        model(ids, shift_labels=labels, cu_seq_lens_q=borders, num_items_in_batch=TARGETS).loss.backward()
    assert set(implementation.items()) <= set(log)
    names = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    report = step_flops(model.decoder_config, lengths=LENGTHS, loss_tokens=TARGETS, trainable=names.__contains__)
    assert counter.get_total_flops() == report.model


@pytest.mark.parametrize("padded", [False, True])
def test_attention_counts_the_pairs_of_a_dense_mask(padded: bool) -> None:
    """Rows of several pieces and of padding; the pair of a query with itself that padding keeps is one of them."""
    names = torch.tensor([[0, 0, 1, 0, 2, 2, 1], [3, 3, 3, 3, 3, 3, 3]])
    spec = MaskSpec(7, 7, window=3, documents=names, key_valid=names != 1 if padded else None)
    visible = spec.dense(torch.device("cpu"))[:, 0] | (torch.eye(7, dtype=torch.bool) & (names == 0).any())
    if padded:
        visible[0] |= torch.eye(7, dtype=torch.bool)
    q, k, v = (torch.randn(2, n, 7, 4, requires_grad=True) for n in (2, 1, 1))
    counter = FlopCounterMode(display=False)
    with force(attention="documents"), counter:
        attention(q, k, v, spec, scale=0.5).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * (4 + 4) * int(visible.sum())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
def test_operators_of_the_head_count_positions_with_a_label(frozen: bool, scalar: bool) -> None:
    """Logits once, of the real vocabulary, and the gradients that are asked for."""
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(70, 8, requires_grad=not frozen)
    target = torch.tensor([3, -100, 0, -100, 69])
    setting = Setting(LogitMap(1.0, None, 1.0), Wanted(), -100, torch.float32, 70, None)
    counter = FlopCounterMode(display=False)
    with counter:
        if scalar:
            each = torch.ones(5)
            loss = ScalarLoss(each, each, 0.0, 0.0, 0.0)
            scalar_loss("chunked", hidden, weight, None, target, loss, setting)[0].backward()
        else:
            per_token("chunked", hidden, weight, None, target, setting).log_prob.sum().backward()
    assert counter.get_total_flops() == (2 if frozen else 3) * (2 * 3 * 8 * 70)
