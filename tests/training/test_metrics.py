"""Throughput, utilisation and memory of a step."""

import numpy as np
import pytest
import torch

from bestiary.models import DecoderConfig
from bestiary.models.config import Attention, Norm, Rope
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import IGNORED
from bestiary.training.flops import StepFlops
from bestiary.training.memory import PeakMemory
from bestiary.training.metrics import Peak, Throughput, device_peak, measured_peak
from bestiary.training.peaks import published

CONFIG = DecoderConfig(
    model_type="small",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=1e4, rotary_dim=8),
    activation_checkpointing=True,
)
STEP = {"seconds": 0.5, "tokens": 32, "useful_tokens": 24, "loss_tokens": 20, "data_wait_s": 0.1}


def pack() -> Pack:
    """Documents of 10 and 14 tokens, then 8 of padding; 20 labels."""
    labels = np.full(32, IGNORED, np.int32)
    labels[1:10], labels[11:22] = 5, 5
    return Pack(np.zeros(32, np.int32), labels, np.array([0, 10, 24, 32], np.int32), documents=2)


def test_a_step_is_booked_from_its_packs_and_divided_by_what_the_devices_could_do() -> None:
    flops = StepFlops(CONFIG)
    wanted = flops.totals((10, 14), 20)
    meter = Throughput(
        [flops], Peak(1e9, "given"), devices=2, sums=lambda values: {k: 2 * v for k, v in values.items()}
    )
    make = meter.watching(lambda taken: taken.documents)
    assert make(pack()) == 2
    values = meter.read(**STEP)
    assert values["mfu"] == pytest.approx(2 * wanted.model / (1e9 * 2 * 0.5))
    assert values["hfu"] == pytest.approx(2 * wanted.hardware / (1e9 * 2 * 0.5))
    assert values["hfu"] > values["mfu"]
    rates = [values[f"{name}_per_s"] for name in ("tokens", "useful_tokens", "loss_tokens")]
    assert rates == [64, 48, 40]
    assert meter.read(**STEP)["mfu"] == 0.0  # the next step starts from nothing


def test_what_a_recipe_asks_beside_the_model_counts_forward_alone_and_a_score_head_by_documents() -> None:
    trained, asked = StepFlops(CONFIG, labels=1), StepFlops(CONFIG, backward=False)
    meter = Throughput([trained, asked], Peak(1.0, "given"))
    meter.book((10, 14), 20)
    total = trained.totals((10, 14), 2).model + asked.report((10, 14), 20).forward
    assert meter.read(**STEP)["mfu"] == pytest.approx(total / 0.5)


def test_every_key_of_the_contract_is_there() -> None:
    values = Throughput([StepFlops(CONFIG)], Peak(1.0, "given")).read(**STEP)
    assert {"tokens", "useful_tokens", "loss_tokens", "tokens_per_s", "mfu", "data_wait_s", "mem_gib"} <= values.keys()


def test_memory_counts_from_where_it_was_made() -> None:
    memory = PeakMemory(torch.device("cpu"))
    held = torch.ones(24 * 2**20)  # 96 MiB
    del held
    assert 90 * 2**20 < memory.read() < 200 * 2**20


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_devices_are_known_by_the_name_that_torch_gives_them(name: str, tera: float) -> None:
    peak = published(name)
    assert peak is not None
    assert peak.flops == pytest.approx(tera * 1e12)


def test_an_unknown_device_has_no_published_rate() -> None:
    assert published("NVIDIA GeForce GTX 1080") is None


def test_the_peak_of_a_cpu_is_measured_once() -> None:
    device = torch.device("cpu")
    peak = device_peak(device)
    assert peak is measured_peak(device, torch.float32, torch.get_num_threads())
    assert "measured" in peak.source
    assert peak.flops > 1e9
