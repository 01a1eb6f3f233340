"""LoRA built into the model: where it goes, what it computes, what trains, how it merges, what is refused.

What an adapter should compute is derived here from the weights alone, never through the code under test.
"""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bestiary.kernels.dispatch import force
from bestiary.models import Decoder, LoRAConfig
from bestiary.models.config import Router, RouterKind, SharedExpert
from bestiary.models.errors import InvalidConfig
from bestiary.models.layers.linear import Linear
from bestiary.models.lora import sites
from bestiary.verify.measure import bit_equal, max_over_std
from bestiary.verify.weights import perturb

from .tiny import FAMILIES, tiny, tiny_config, tokens

EXACT = 1e-12
ROUTED = ("qwen3_moe", "gpt_oss")
EVERYTHING = {family: ("*_proj", "mlp.gate") if family in ROUTED else ("*_proj",) for family in FAMILIES}
CHOICES = ("q_proj", "o_proj", "mlp.gate_proj", "experts.gate_up_proj", "experts.*", "mlp.gate")
IDS = tokens(2, 17)


def lora(*targets: str, r: int = 3, alpha: float = 7.0, **changes: Any) -> LoRAConfig:
    return LoRAConfig(r=r, alpha=alpha, targets=targets, **changes)


def adapted(model: Decoder) -> dict[str, LoRAConfig]:
    return {site.name: site.adapter.config for site in sites(model) if site.adapter is not None}


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        found = model(IDS).logits
    assert found is not None
    return found


def merged_by_hand(model: Decoder) -> Decoder:
    """The same model without LoRA, its weights W + scaling · B A written out from the state dict."""
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith("lora_A")]:
        low, high = state.pop(name), state.pop(name[:-1] + "B")
        site = name.removesuffix("lora_A").rstrip("._")
        config = adapted(model)[site]
        factor = config.alpha / (config.r**0.5 if config.rslora else config.r)
        weight = site if site in state else f"{site}.weight"
        spelled = "eor,eri->eoi" if low.dim() == 3 else "or,ri->oi"
        state[weight] = state[weight] + factor * torch.einsum(spelled, high, low)
    plain = type(model)(model.decoder_config.with_(lora=None), dtype=model.dtype).eval()
    plain.load_state_dict(state)
    return plain


# ---------------------------------------------------------------------------------------------------- where it goes


@pytest.mark.parametrize(
    ("family", "targets", "expected"),
    [
        ("qwen3", ("q_proj",), r"model\.layers\.\d\.self_attn\.q_proj"),
        ("qwen3", ("*_proj",), r"model\.layers\.\d\.(self_attn|mlp)\.\w+_proj"),
        ("qwen3", ("layers.1.mlp.*", "model.layers.0.self_attn.o_proj"), r"model\.layers\.(1\.mlp\..*|0\..*o_proj)"),
        ("qwen3_moe", ("mlp.experts.gate_up_proj",), r"model\.layers\.[02]\.mlp\.experts\.gate_up_proj"),
        ("qwen3_moe", ("down_proj",), r"model\.layers\.(1\.mlp|[02]\.mlp\.experts)\.down_proj"),
        ("gpt_oss", ("mlp.gate",), r"model\.layers\.\d\.mlp\.gate"),
        ("gpt_oss", ("*",), r"model\.layers\.\d\.(self_attn\.\w_proj|mlp\.(gate|experts\.\w+_proj))"),
    ],
)
def test_a_pattern_means_whole_names_and_ends_of_names(family: str, targets: tuple[str, ...], expected: str) -> None:
    model = Decoder(tiny_config(family, lora=lora(*targets)), device="meta")
    names = [site.name for site in sites(model)]
    assert list(adapted(model)) == [name for name in names if re.fullmatch(expected, name)]
    stored = {re.sub(r"[._]lora_[AB]$", "", name) for name in model.state_dict() if "lora" in name}
    assert stored == set(adapted(model))


def test_ranks_and_alphas_follow_the_first_pattern_that_matches() -> None:
    config = lora(
        "*_proj",
        rank_pattern=(("0.self_attn.q_proj", 5), ("q_proj", 2)),
        alpha_pattern={"experts.*": 1.5},  # type: ignore[arg-type]  # a mapping is taken too
    )
    found = adapted(Decoder(tiny_config("qwen3_moe", lora=config), device="meta"))
    assert {(name.rsplit(".", 1)[1], c.r) for name, c in found.items() if ".0.self_attn.q" in name} == {("q_proj", 5)}
    assert {c.r for name, c in found.items() if name.endswith(("1.self_attn.q_proj", "2.self_attn.q_proj"))} == {2}
    assert {c.r for name, c in found.items() if not name.endswith("q_proj")} == {3}
    assert {c.scaling for name, c in found.items() if ".experts." in name} == {0.5}
    assert {c.scaling for name, c in found.items() if name.endswith("o_proj")} == {7 / 3}


def test_a_gated_shared_expert_takes_adapters() -> None:
    config = tiny_config("qwen3_moe", lora=lora("shared_expert*"))
    assert config.moe is not None
    moe = replace(config.moe, shared=SharedExpert(intermediate_size=20, gated=True))
    model = Decoder(config.with_(moe=moe), dtype=torch.float64).eval()
    perturb(model, seed=0)
    inside = {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"}
    assert {name.split(".mlp.")[1] for name in adapted(model)} == inside
    assert max_over_std(logits(model), logits(merged_by_hand(model))) < EXACT


# ---------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_product_is_added_to_the_weight(family: str) -> None:
    model = tiny(family, lora=lora(*EVERYTHING[family]))
    by_hand = merged_by_hand(model)
    assert max_over_std(logits(model), logits(by_hand)) < EXACT
    base = dict(model.state_dict())
    by_hand.load_state_dict({name: tensor for name, tensor in base.items() if "lora" not in name})
    assert max_over_std(logits(model), logits(by_hand)) > 0.1


@pytest.mark.slow
@settings(max_examples=25)
@given(
    r=st.integers(1, 7),
    alpha=st.floats(0.25, 8.0),
    rslora=st.booleans(),
    targets=st.sets(st.sampled_from(CHOICES), min_size=1),
    special=st.integers(1, 4),
)
def test_any_rank_scaling_and_choice_of_targets_is_exact(
    r: int, alpha: float, rslora: bool, targets: set[str], special: int
) -> None:
    first = min(targets)
    config = lora(*sorted(targets), r=r, alpha=alpha, rslora=rslora, rank_pattern=((first, special),))
    model = tiny("qwen3_moe", lora=config)
    assert max_over_std(logits(model), logits(merged_by_hand(model))) < EXACT
    expected = 0
    for site in sites(model):
        if any(fnmatchcase(site.name, f"*.{target}") for target in targets):
            experts = site.weight.shape[0] if site.weight.dim() == 3 else 1
            rank = special if fnmatchcase(site.name, f"*.{first}") else r
            expected += experts * rank * sum(site.weight.shape[-2:])
    assert model.num_parameters(only_trainable=True) == expected


def test_the_sigmoid_router_takes_an_adapter_in_its_own_precision() -> None:
    config = tiny_config("qwen3_moe", lora=lora("mlp.gate"))
    assert config.moe is not None
    router = Router(kind=RouterKind.SIGMOID, top_k=3, normalize=True, num_groups=4, topk_groups=2)
    model = Decoder(config.with_(moe=replace(config.moe, router=router)), dtype=torch.float64).eval()
    perturb(model, seed=0)
    assert max_over_std(logits(model), logits(merged_by_hand(model))) < EXACT


def test_grouped_experts_compute_what_the_loop_computes() -> None:
    config = tiny_config("qwen3_moe", lora=lora("experts.*", r=8))
    model = Decoder(config, dtype=torch.float32).eval()
    perturb(model, seed=0)
    with force(experts="loop"):
        expected = logits(model)
    with force(experts="grouped"):
        assert max_over_std(logits(model), expected) < 1e-5


# ---------------------------------------------------------------------------------------------------- what trains


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing_and_learns(family: str) -> None:
    torch.manual_seed(3)
    config = tiny_config(family, lora=lora(*EVERYTHING[family]))
    model = FAMILIES[family](config, dtype=torch.float64)
    plain = FAMILIES[family](config.with_(lora=None), dtype=torch.float64)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora" not in name})
    assert torch.equal(logits(model), logits(plain))
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name) == parameter.requires_grad
        if parameter.grad is not None:  # with B = 0 the first step moves B alone
            assert bool(parameter.grad.any()) == name.endswith("lora_B")


def test_gradients_are_those_of_the_product() -> None:
    """d loss / dA = s Bᵀ dW and d loss / dB = s dW Aᵀ, with dW from the merged model."""
    model = tiny("gpt_oss", lora=lora(*EVERYTHING["gpt_oss"]))
    by_hand = merged_by_hand(model)
    model(IDS, labels=IDS).loss.backward()
    by_hand(IDS, labels=IDS).loss.backward()
    for site in sites(model):
        assert site.adapter is not None
        grad, factor = by_hand.get_parameter(site.weight_name).grad, site.adapter.config.scaling
        assert grad is not None
        low, high = site.adapter.lora_A, site.adapter.lora_B
        assert low.grad is not None
        assert high.grad is not None
        assert max_over_std(low.grad, factor * high.detach().mT @ grad) < 1e-10
        assert max_over_std(high.grad, factor * grad @ low.detach().mT) < 1e-10


def test_checkpointed_blocks_give_adapters_the_same_gradients() -> None:
    """The embedding is frozen, so nothing that enters a block asks for a gradient."""
    kept, recomputed = (tiny("qwen3_moe", lora=lora("*_proj"), activation_checkpointing=on) for on in (False, True))
    for model in (kept, recomputed):
        model.train()(IDS, labels=IDS).loss.backward()
    for (name, one), (_, two) in zip(kept.named_parameters(), recomputed.named_parameters(), strict=True):
        if one.requires_grad:
            assert one.grad is not None
            assert two.grad is not None
            assert max_over_std(two.grad, one.grad) < EXACT, name


def test_a_starts_uniform_in_one_over_the_root_of_its_width_and_b_at_zero() -> None:
    model = FAMILIES["qwen3_moe"](tiny_config("qwen3_moe", lora=lora("*_proj", "mlp.gate", r=16)))
    for site in sites(model):
        assert site.adapter is not None
        low, bound = site.adapter.lora_A.detach(), site.weight.shape[-1] ** -0.5
        assert not site.adapter.lora_B.any()
        assert 0.9 * bound < low.abs().max() <= bound
        assert abs(float(low.mean())) < 0.1 * bound
        assert float(low.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_dropout_acts_on_the_adapter_alone_and_only_in_training() -> None:
    model = tiny("qwen3", lora=lora("*_proj", dropout=0.5))
    kept = logits(model)
    torch.manual_seed(0)
    assert max_over_std(logits(model.train()), kept) > 1e-3
    assert torch.equal(logits(model.eval()), kept)
    for site in sites(model):
        assert site.adapter is not None
        torch.nn.init.zeros_(site.adapter.lora_B)
    base = logits(model)
    assert torch.equal(logits(model.train()), base)


def test_dropout_keeps_the_mean() -> None:
    layer = Linear(40, 8, lora=lora("x", r=4, alpha=4.0, dropout=0.25)).double()
    torch.nn.init.normal_(layer.lora_B)
    torch.nn.init.zeros_(layer.weight)
    x = torch.randn(1, 40, dtype=torch.float64)
    torch.manual_seed(0)
    drawn = layer(x.expand(20_000, -1))
    error = drawn.std(0) / 20_000**0.5
    assert bool(((drawn.mean(0) - layer.eval()(x)[0]).abs() < 5 * error).all())


def test_without_lora_a_layer_runs_one_operation_and_holds_one_weight() -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x = Linear(6, 4), torch.randn(3, 6)
    with Count() as ours:
        layer(x)
    with Count() as plain:
        F.linear(x, layer.weight)
    assert ours.calls == plain.calls
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


# ---------------------------------------------------------------------------------------------------- dtypes


def test_fp32_adapters_on_a_bf16_base_are_added_before_the_one_rounding() -> None:
    torch.manual_seed(0)
    layer = Linear(24, 10, lora=lora("x", dtype=torch.float32)).bfloat16()
    layer.lora_A.data, layer.lora_B.data = torch.randn(3, 24), torch.randn(10, 3)
    x = torch.randn(5, 24).bfloat16()
    wide = x.float() @ layer.lora_A.T @ layer.lora_B.T * (7 / 3)
    assert torch.equal(layer(x), (F.linear(x, layer.weight).float() + wide).bfloat16())


def test_the_dtype_of_adapters_is_chosen_in_the_config() -> None:
    model = tiny("gpt_oss", torch.bfloat16, lora=lora(*EVERYTHING["gpt_oss"], dtype=torch.float32))
    dtypes = {("lora" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert logits(model).dtype is torch.bfloat16
    model(IDS, labels=IDS).loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_merging_into_bf16_rounds_once() -> None:
    model = tiny("qwen3_moe", torch.bfloat16, lora=lora("*_proj", dtype=torch.float32))
    for site in sites(model):
        if site.adapter is not None:
            weight, high, low = (t.detach().double() for t in (site.weight, site.adapter.lora_B, site.adapter.lora_A))
            delta = site.adapter.config.scaling * high @ low
            merged = site.merged()
            assert merged.dtype is torch.bfloat16
            one_rounding = (weight + delta).abs() * 2**-8 + (weight.abs() + delta.abs()) * 2**-20
            assert bool(((merged.double() - weight - delta).abs() <= one_rounding).all())


# ---------------------------------------------------------------------------------------------------- merging


def test_merged_tensors_leave_the_base_bit_identical_however_often() -> None:
    model = tiny("gpt_oss", torch.bfloat16, lora=lora(*EVERYTHING["gpt_oss"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rounds = [{site.name: site.merged() for site in sites(model)} for _ in range(3)]
    assert all(bit_equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(bit_equal(first, later[name]) for later in rounds[1:] for name, first in rounds[0].items())
    weights = {site.name: site.weight for site in sites(model)}
    assert not any(torch.equal(merged, weights[name]) for name, merged in rounds[0].items())
    assert not any(merged.requires_grad for merged in rounds[0].values())


@pytest.mark.parametrize("family", FAMILIES)
def test_merge_lora_leaves_a_plain_model_that_computes_the_same(family: str) -> None:
    model = tiny(family, lora=lora(*EVERYTHING[family]))
    expected = logits(model)
    model.merge_lora()
    assert max_over_std(logits(model), expected) < EXACT
    plain = FAMILIES[family](model.decoder_config, device="meta")
    assert model.decoder_config.lora is None
    assert model.model.decoder_config is model.decoder_config
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert adapted(model) == {}
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    with pytest.raises(InvalidConfig, match="without LoRA"):
        model.merge_lora()


def test_what_was_never_trainable_stays_so_after_a_merge() -> None:
    config = tiny_config("qwen3_moe", lora=lora("q_proj"))
    assert config.moe is not None
    router = Router(kind=RouterKind.SIGMOID, top_k=3)
    model = Decoder(config.with_(moe=replace(config.moe, router=router)))
    model.merge_lora()
    frozen = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"e_score_correction_bias"}


def test_a_state_dict_carries_adapters() -> None:
    model = tiny("qwen3_moe", lora=lora("*_proj"))
    again = FAMILIES["qwen3_moe"](model.decoder_config, dtype=torch.float64).eval()
    assert max_over_std(logits(again), logits(model)) > 0.1
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj", "query"), r"lora\.targets = 'query' matches no linear layer"),
        (("layers.9.self_attn.q_proj",), "matches no linear layer and no expert projection"),
        (("self_attn",), "matches no linear layer"),
        (("lm_head",), "means lm_head, which takes no adapter: .* tied"),
        (("q_proj", "*head"), "means lm_head"),
        (("embed_tokens",), "means embed_tokens, which takes no adapter"),
        (("model.embed_tokens",), "means embed_tokens"),
    ],
)
def test_a_target_without_a_place_is_refused(family: str, targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said) as caught:
        Decoder(tiny_config(family, lora=lora(*targets)), device="meta")
    assert caught.value.remedy
    assert "q_proj" in caught.value.remedy


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_for_nothing_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"lora\.{field} = 'x_proj' matches no linear layer"):
        Decoder(tiny_config("qwen3", lora=lora("q_proj", **{field: (("x_proj", 2),)})), device="meta")


@pytest.mark.parametrize("target", ["experts.down_proj", "experts.gate_up_proj", "mlp.gate"])
def test_dropout_on_experts_and_routers_is_refused(target: str) -> None:
    with pytest.raises(InvalidConfig, match=r"lora\.dropout = 0\.1 with a target on model\.layers\.0\.mlp\..*"):
        Decoder(tiny_config("qwen3_moe", lora=lora("q_proj", target, dropout=0.1)), device="meta")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": "q_proj"}, "'q_proj' is one string"),
        ({"targets": ()}, "targets is empty"),
        ({"r": 0}, "r = 0"),
        ({"rank_pattern": (("q_proj", 0),)}, "r = 0"),
        ({"dropout": 1.0}, r"dropout = 1\.0"),
        ({"dtype": torch.int8}, r"dtype = torch\.int8"),
    ],
)
def test_a_config_that_means_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        LoRAConfig(**{"r": 2, "alpha": 2.0, "targets": ("q_proj",), **changes})
