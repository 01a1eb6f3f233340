"""The estimate of a step: exact where it can be, and near the measured peak where it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bestiary.models import Decoder, DecoderConfig, LoRAConfig
from bestiary.models.config import Attention, MoE, Norm, QKNorm, Rope, Router, RouterKind
from bestiary.models.context import ContextSlice
from bestiary.models.recomputation import Checkpointing, Part
from bestiary.tools.bench.recompute import peak_of_a_step
from bestiary.training.config import OptimSection, RunConfig
from bestiary.training.estimate import Estimate, estimate, estimate_step
from bestiary.training.flops import StepFlops
from bestiary.training.optim import Optimisers

FACTOR = 1.5  # as the module says
TOKENS = 4096
CONFIG = DecoderConfig(
    model_type="small",
    vocab_size=2048,
    hidden_size=160,
    intermediate_size=512,
    num_hidden_layers=2,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, qk_norm=QKNorm()),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=1e4, rotary_dim=32),
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": Checkpointing(part=Part.SELECTIVE)},
        {"activation_checkpointing": Checkpointing(part=Part.ATTENTION, every=2)},
        {"activation_checkpointing": Checkpointing(part=Part.MLP)},
        {"lora": LoRAConfig(r=4, alpha=8.0, targets=("*_proj",))},
        {"moe": MoE(num_experts=8, intermediate_size=64, router=Router(kind=RouterKind.SOFTMAX_TOPK, top_k=3))},
    ],
    ids=["full", "checkpointing", "selective", "every second attention", "mlp", "lora", "experts"],
)
def test_the_estimate_is_near_the_measured_peak(changes: dict[str, Any]) -> None:
    config = CONFIG.with_(**changes)
    measured, wanted = peak_of_a_step(config, 512), estimate_step(config, tokens=512, dtype=torch.float32).total
    assert wanted / FACTOR < measured < wanted * FACTOR


def repeated(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of four slices that are alike."""
    return k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1)


@pytest.mark.slow
def test_the_estimate_of_a_slice_is_near_the_measured_peak() -> None:
    """The second of four slices of a row that is long beside the model."""
    context = ContextSlice(TOKENS, ((512, 1024), (3072, 3584)), repeated)
    measured = peak_of_a_step(CONFIG, TOKENS, context=context)
    wanted = estimate_step(CONFIG, tokens=TOKENS, dtype=torch.float32, context=4)
    assert wanted.total / FACTOR < measured < wanted.total * FACTOR
    whole = estimate_step(CONFIG, tokens=TOKENS, dtype=torch.float32)
    assert wanted.activations < whole.activations / 2
    assert (wanted.parameters, wanted.flops) == (whole.parameters, whole.flops)


def test_parameters_gradients_and_states_are_those_of_the_model() -> None:
    for lora in (None, LoRAConfig(r=4, alpha=8.0, targets=("*_proj",))):
        config = CONFIG.with_(lora=lora)
        model = Decoder(config, dtype=torch.bfloat16)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(trained)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step()
        states = [t for state in optimiser.state.values() for t in state.values() if t.ndim]
        found = estimate_step(config, tokens=64, dtype=torch.bfloat16)
        assert found.parameters == sum(parameter.nbytes for parameter in model.parameters())
        assert found.gradients == sum(parameter.nbytes for parameter in trained)
        assert found.optimiser == sum(state.nbytes for state in states)


def test_states_of_eight_bits_are_counted_as_torchao_makes_them() -> None:
    model = Decoder(CONFIG, dtype=torch.float32)
    optimiser = Optimisers(model, OptimSection(name="adamw8bit"), 1e-3)
    tensors = optimiser.tensors(dict(model.named_parameters()))
    found = estimate_step(CONFIG, tokens=64, dtype=torch.float32, optimiser="adamw8bit").optimiser
    assert found == sum(tensor.nbytes for name, tensor in tensors.items() if "exp_avg" in name)


def test_each_knob_saves_what_it_says() -> None:
    def of(config: DecoderConfig = CONFIG, **options: Any) -> Estimate:
        return estimate_step(config, **{"tokens": TOKENS, "dtype": torch.float32, **options})

    saved = of().savings
    less = {
        "half of data.pack_length": of(tokens=TOKENS // 2),
        "model.checkpointing=full": of(CONFIG.with_(activation_checkpointing=True)),
        "a section lora": of(CONFIG.with_(lora=LoRAConfig(r=1, alpha=1.0, targets=("q_proj",)))),
        "twice the processes (parallel.shard)": of(shards=2),
    }
    assert saved.keys() == less.keys()
    for knob, lower in less.items():
        assert of().total - lower.total == pytest.approx(saved[knob], rel=0.25), knob
    assert list(saved.values()) == sorted(saved.values(), reverse=True)


def test_a_step_costs_its_packs_and_the_models_beside_it() -> None:
    one = estimate_step(CONFIG, tokens=100).flops.model
    assert estimate_step(CONFIG, tokens=100, packs=3).flops.model == 3 * one
    asked = estimate_step(CONFIG, tokens=100, beside=[(CONFIG, torch.bfloat16)])
    assert asked.flops.model - one == StepFlops(CONFIG, backward=False).totals([100], 100).model
    assert asked.beside == asked.parameters


def test_a_run_is_estimated_without_its_weights(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    sizes = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 160}
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **heads, **sizes}
    (checkpoint / "config.json").write_text(json.dumps(fields))
    data = {
        "tokenizer": {"src": str(checkpoint)},
        "sources": [{"name": "talks", "files": "talks.jsonl", "kind": "chat"}],
        "pack_length": 256,
        "streams": 2,
        "epochs": 1,
    }
    run = {"recipe": "sft", "model": {"src": str(checkpoint)}, "data": data, "out": str(tmp_path / "run")}
    full = estimate(RunConfig.model_validate(run))
    adapted = estimate(RunConfig.model_validate(run | {"lora": {"r": 4}}))
    assert full.tokens == 512
    assert full.gradients == full.parameters
    assert 0 < adapted.gradients < full.gradients / 4
    shared = estimate(RunConfig.model_validate(run | {"parallel": {"context": 2}}), processes=2)
    assert shared.parameters == full.parameters // 2
    assert shared.activations < 0.8 * full.activations
    assert f"{full.total / 2**30:.2f} GiB" in full.words()
    assert json.loads(json.dumps(full.as_json()))["bytes"]["total"] == full.total
