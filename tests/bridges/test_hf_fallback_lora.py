"""LoRA on the fallback backend: our LoRAConfig, PEFT's layers, folders that PEFT reads and writes."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from bestiary.bridges.errors import KeyMismatch, UnsupportedAdapter, UnsupportedConfig, UnsupportedLoad
from bestiary.models import AutoDecoder, LoRAConfig
from bestiary.models.errors import InvalidConfig

from .fallbacks import checkpoint, reference, tokens, wrapped

EXACT = {"rtol": 1e-10, "atol": 1e-11}
TARGETS = {"phi": ("*_proj", "0.mlp.fc1"), "gpt2": ("c_attn", "1.mlp.c_proj")}
IDS = tokens(2, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny checkpoint of a family, written once."""
    return partial(checkpoint, tmp_path_factory.mktemp("fallback"))


def lora(family: str = "phi", **changes: object) -> LoRAConfig:
    given = {"r": 3, "alpha": 7, "targets": TARGETS[family], "rank_pattern": {"1.*": 2}, "alpha_pattern": {"0.*": 5}}
    return LoRAConfig(**{**given, **changes})  # type: ignore[arg-type]


def factors(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def trained(source: Path, family: str = "phi") -> torch.nn.Module:
    """Adapters after a step and a kick, so that no factor is zero."""
    model = wrapped(source, lora=lora(family))
    with torch.no_grad():
        for parameter in factors(model).values():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


@pytest.mark.parametrize("family", TARGETS)
def test_a_fresh_adapter_changes_nothing_and_alone_trains(family: str, folder: Callable[..., Path]) -> None:
    """Ranks and scalings by pattern, the base frozen and bit-identical after a step."""
    model, plain = wrapped(folder(family), lora=lora(family)), reference(folder(family))
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(factors(model))
    ranks = {name: p.shape[0] for name, p in factors(model).items() if "lora_A" in name}
    assert {rank for name, rank in ranks.items() if ".0." in name} == {3}
    assert {rank for name, rank in ranks.items() if ".1." in name} == {2}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    before = model(IDS, labels=IDS).loss
    before.backward()
    optimizer.step()
    assert model(IDS, labels=IDS).loss < before
    base = dict(plain.named_parameters())
    for name, tensor in model.named_hf_tensors(merge_lora=False):
        assert torch.equal(tensor, base[name]), name


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_folder_goes_round(family: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT computes our logits from it; here it loads beside its base, by its own name, and into built adapters."""
    model = trained(folder(family), family)
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = PeftModel.from_pretrained(reference(folder(family)), tmp_path / "adapter")
    torch.testing.assert_close(theirs(IDS).logits, logits, **EXACT)
    for again in (wrapped(folder(family), lora=tmp_path / "adapter"), wrapped(tmp_path / "adapter")):
        assert torch.equal(again(IDS).logits, logits)
        assert {n for n, p in again.named_parameters() if p.requires_grad} == set(factors(model))
    fresh = wrapped(folder(family), lora=lora(family))
    fresh.load_adapter(tmp_path / "adapter")
    assert torch.equal(fresh(IDS).logits, logits)


def test_an_adapter_that_peft_made_is_read(folder: Callable[..., Path], tmp_path: Path) -> None:
    """And written back as it was."""
    config = LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False)
    theirs = get_peft_model(reference(folder("phi")), config)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    model = wrapped(folder("phi"), lora=tmp_path / "theirs")
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, **EXACT)
    model.save_pretrained(tmp_path / "ours")
    again = PeftModel.from_pretrained(reference(folder("phi")), tmp_path / "ours")
    torch.testing.assert_close(again(IDS).logits, theirs(IDS).logits, **EXACT)


@pytest.mark.parametrize("family", TARGETS)
def test_merging(family: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """A full checkpoint out of place, then in place: the same logits, and adapters gone."""
    model = trained(folder(family), family)
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "merged", merge=True)
    assert torch.equal(model(IDS).logits, logits)
    plain = reference(tmp_path / "merged")
    torch.testing.assert_close(plain(IDS).logits, logits, **EXACT)
    stored = dict(plain.named_parameters())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.named_hf_tensors())
    model.merge_lora()
    assert factors(model) == {}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    with pytest.raises(InvalidConfig, match="without LoRA"):
        model.merge_lora()


def test_adapters_may_have_a_wider_dtype(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Kept through a folder."""
    model = wrapped(folder("phi"), dtype="bfloat16", lora=lora(dtype=torch.float32))
    assert {p.dtype for p in factors(model).values()} == {torch.float32}
    model.save_pretrained(tmp_path / "adapter")
    for again in (model, wrapped(folder("phi"), dtype="bfloat16", lora=tmp_path / "adapter")):
        assert {p.dtype for p in factors(again).values()} == {torch.float32}
        assert again.dtype == torch.bfloat16
        assert torch.isfinite(again(IDS, labels=IDS).loss)
    same = wrapped(folder("phi"), dtype="bfloat16", lora=lora())
    assert {p.dtype for p in factors(same).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": ("w_pack",)}, "'w_pack' matches no linear layer"),
        ({"targets": ("lm_head",)}, "lm_head, which is the embedding or the head"),
        ({"targets": ("q_proj",), "rank_pattern": {"9.*": 2}}, "'9.*' matches no linear layer"),
    ],
)
def test_patterns_that_cannot_be_meant(changes: dict[str, object], said: str, folder: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        AutoDecoder.from_pretrained(folder("phi"), backend="hf", lora=lora(**changes))
    assert said in str(caught.value)
    assert "q_proj" in str(caught.value.remedy)


def test_experts_are_refused_by_name(folder: Callable[..., Path]) -> None:
    """Not left out in silence."""
    with pytest.raises(InvalidConfig, match=r"experts\.\w+, which is a parameter of experts"):
        AutoDecoder.from_pretrained(folder("dots1"), backend="hf", lora=LoRAConfig(r=2, alpha=2, targets=("*_proj",)))


def test_a_folder_that_does_not_fit_changes_nothing(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Another rank, missing tensors, other methods, a base that trained too, a model without adapters."""
    model = trained(folder("phi"))
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    before = {name: tensor.clone() for name, tensor in factors(model).items()}
    for change, error in (
        ({"lora_alpha": 9}, UnsupportedAdapter),
        ({"peft_type": "IA3"}, UnsupportedConfig),
        ({"use_dora": True}, UnsupportedConfig),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, UnsupportedAdapter),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(error, match=next(iter(change))):
            model.load_adapter(tmp_path / "adapter")
    path.write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(KeyMismatch, match="extra"):
        AutoDecoder.from_pretrained(folder("phi"), backend="hf", lora=tmp_path / "adapter")
    assert all(torch.equal(tensor, before[name]) for name, tensor in factors(model).items())
    model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(UnsupportedAdapter, match="trains beside the adapters"):
        model.save_pretrained(tmp_path / "more")
    with pytest.raises(UnsupportedAdapter, match="without adapters"):
        wrapped(folder("phi")).load_adapter(tmp_path / "adapter")


def test_an_adapter_without_a_base_or_with_another_beside_it(folder: Callable[..., Path], tmp_path: Path) -> None:
    trained(folder("phi")).save_pretrained(tmp_path / "adapter")
    load = partial(AutoDecoder.from_pretrained, tmp_path / "adapter", backend="hf")
    with pytest.raises(UnsupportedLoad, match="an adapter itself"):
        load(lora=lora())
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(UnsupportedLoad, match="names no base"):
        load()


def test_without_peft_one_error_names_the_extra(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedLoad, match="`peft` is not installed") as caught:
        AutoDecoder.from_pretrained(folder("phi"), backend="hf", lora=lora())
    assert "bestiary[peft]" in str(caught.value.remedy)
    assert torch.isfinite(wrapped(folder("phi"))(IDS).logits).all()
