"""What `bestiary.tools.bench.gpu` runs on the device, one function a section; each returns rows of a table.

A row: section, case, arm, then `ms` and `extra_mb` (peak above the inputs, without the gradients any implementation has
to hold) where it was timed, `error` where it was checked against float64 or another arm, `cannot` with the reason where
an arm cannot run here, `floor_ms` where the limit is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.attention import MaskSpec, attention
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import force
from bestiary.kernels.errors import BestiaryError
from bestiary.kernels.experts import ExpertLinear, experts_mlp
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.system import cxx
from bestiary.models import Decoder, Qwen3
from bestiary.models.decoder import seed_of
from bestiary.tools.bench import process
from bestiary.tools.bench.attention import document_lengths
from bestiary.tools.bench.gpu_blocks import BLOCKS, block_error

Row = dict[str, Any]
DENSE_BF16 = 989e12  # FLOP/s of an H100 or H200, dense
TRL_CHUNK = 32768


@dataclass(frozen=True)
class Place:
    """Where and how large: the device, the dtype of its work, tiny shapes or real ones."""

    device: str
    dtype: torch.dtype
    dry: bool

    @classmethod
    def here(cls, dry: bool) -> Place:
        """The GPU in bf16; dry: the CPU in fp32, tiny."""
        return cls("cpu", torch.float32, True) if dry else cls("cuda", torch.bfloat16, False)

    def draw(self, *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, a leaf that wants a gradient."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return x.normal_(0.0, scale, generator=generator).requires_grad_()

    def measure(self, work: Callable[[], Any], *, held: int = 0, reps: int = 5) -> Row:
        """Milliseconds (median of `reps`, two warm-ups) and peak MB above the level before, less `held` bytes."""
        for _ in range(1 if self.dry else 2):
            work()
        if self.dry:
            process.settle()
            level = process.resident()
            process.reset_peak()
            taken = [_seconds(work) * 1e3 for _ in range(2)]
            extra = process.peak() - level
        else:
            torch.cuda.synchronize()
            level = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            taken = [self._milliseconds(work) for _ in range(reps)]
            extra = torch.cuda.max_memory_allocated() - level
        return {"ms": median(taken), "low_ms": min(taken), "extra_mb": max(extra - held, 0) / 1e6}

    def _milliseconds(self, work: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _try(row: Row, body: Callable[[], Row]) -> Row:
    """The row with what `body` adds, or with the reason why that arm cannot run."""
    try:
        return row | body()
    except (BestiaryError, torch.cuda.OutOfMemoryError) as error:
        return row | {"cannot": f"{type(error).__name__}: {str(error)[:200]}"}


def _relative(is_: Tensor, wanted: Tensor) -> float:
    return float((is_.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def _backward(work: Callable[[], Tensor], leaves: Sequence[Tensor], direction: Tensor | None = None) -> list[Tensor]:
    out = work()
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


# ------------------------------------------------------------------ sections


def peak(place: Place) -> list[Row]:
    """The rate of a square product and of a copy: what floors are measured against."""
    size = 256 if place.dry else 8192
    a, b = (place.draw(size, size, seed=seed).detach() for seed in (0, 1))
    row: Row = {"section": "peak", "case": f"{size}³ product in {place.dtype}", "arm": "torch"} | place.measure(
        lambda: a @ b
    )
    row["tflops"] = 2 * size**3 / row["ms"] / 1e9
    source = torch.empty((1 << 20) if place.dry else (1 << 30), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copy: Row = {"section": "peak", "case": f"copy of {len(source) >> 20} MiB", "arm": "torch"}
    copy |= place.measure(lambda: target.copy_(source))
    copy["tb_per_s"] = 2 * len(source) / copy["ms"] / 1e9
    return [row, copy]


def check(place: Place) -> list[Row]:
    """Ours against float64 on this device: the core, attention and blocks, in the work's dtype and in fp32."""
    rows = []
    for dtype in dict.fromkeys((torch.float32, place.dtype)):
        for arm in ("triton", "chunked", "reference"):
            row = {"section": "check", "case": f"log-prob core, {dtype}", "arm": arm}
            rows.append(_try(row, partial(_core_error, place, dtype, arm)))
        for arm in ("flex", "sdpa"):
            row = {"section": "check", "case": f"attention, {dtype}", "arm": arm}
            rows.append(_try(row, partial(_attention_error, place, dtype, arm)))
        for case in BLOCKS:
            for arm in ("triton", "torch"):
                row = {"section": "check", "case": f"{case}, {dtype}", "arm": arm}
                rows.append(_try(row, partial(block_error, place, dtype, case, arm)))
    return rows


def _core_error(place: Place, dtype: torch.dtype, arm: str) -> Row:
    """The largest relative error of loss, dX and dW."""
    n, h, v = (16, 32, 515) if place.dry else (1024, 512, 32003)
    leaves = place.draw(n, h, seed=0, dtype=dtype), place.draw(v, h, seed=1, scale=h**-0.5, dtype=dtype)
    target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(2)).to(place.device)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact = _backward(lambda: F.cross_entropy(F.linear(*wide), target), wide)
    with force(log_prob=arm):
        found = _backward(lambda: linear_cross_entropy(*leaves, target), leaves)
    return {"error": max(map(_relative, found, exact))}


def _attention_error(place: Place, dtype: torch.dtype, arm: str) -> Row:
    """The largest relative error of output, dQ, dK and dV."""
    q, k, v, mask = _packed(place, 64 if place.dry else 1024, 4, 2, 16 if place.dry else 64, dtype)
    wide_q, wide_k, wide_v = wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    direction = torch.ones_like(q)
    with force(attention="eager"):
        exact = _backward(lambda: attention(wide_q, wide_k, wide_v, mask, scale=0.1), wide, direction.double())
    with force(attention=arm):
        found = _backward(lambda: attention(q, k, v, mask, scale=0.1), (q, k, v), direction)
    return {"error": max(map(_relative, found, exact))}


HEADS = {"2560x151936": (8192, 2560, 151936), "2880x201088": (8192, 2880, 201088)}


def log_prob(place: Place, case: str) -> list[Row]:
    """The core, forward and backward to dX and dW, against every peer that is installed."""
    n, h, v = (32, 64, 1003) if place.dry else HEADS[case]
    x, weight = place.draw(n, h, seed=0), place.draw(v, h, seed=1, scale=h**-0.5)
    target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(2)).to(place.device)
    held = (x.numel() + weight.numel()) * x.element_size()
    floor = 6 * n * h * v / DENSE_BF16 * 1e3
    rows = []
    for arm, loss in _losses().items():
        row = {"section": "log_prob", "case": f"{n}x{h}x{v}", "arm": arm, "floor_ms": floor}
        if loss is None:
            rows.append(row | {"cannot": "not installed, or not in this torch"})
        else:
            call = partial(loss, x, weight, target)
            rows.append(_try(row, partial(place.measure, partial(_backward, call, (x, weight)), held=held)))
    return rows


def _losses() -> dict[str, Callable[..., Tensor] | None]:
    def per_token(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return -linear_log_prob(x, weight, target).log_prob.mean()

    def naive(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).to(torch.float32), target)

    found: dict[str, Callable[..., Tensor] | None] = {"ours": linear_cross_entropy, "ours, per token": per_token}
    return found | {"naive": naive, "torch": _torch_loss(), "liger": _liger_loss(), "trl": _trl_loss()}


def _torch_loss() -> Callable[..., Tensor] | None:
    if "linear_cross_entropy" not in dir(F):
        return None
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return lambda x, weight, target: F.linear_cross_entropy(x, weight, target, options=LinearCrossEntropyOptions())


def _liger_loss() -> Callable[..., Tensor] | None:
    if find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda x, weight, target: liger_fused_linear_cross_entropy(x, weight, target)


def _trl_loss() -> Callable[..., Tensor] | None:
    if find_spec("trl") is None:
        return None
    from trl.kernels import ChunkedLogProbFunction

    extras = (None, 1.0, ("log_probs",))
    return lambda x, weight, target: (
        -ChunkedLogProbFunction.apply(x, weight, None, target, 1.0, TRL_CHUNK, *extras)[0].mean()
    )


def attentions(place: Place) -> list[Row]:
    """Packed documents in a window: FlexAttention against SDPA under a dense mask, at four lengths."""
    rows = []
    for tokens in (64, 128, 192, 256) if place.dry else (2048, 4096, 8192, 16384):
        heads, kv, dim = (4, 2, 16) if place.dry else (32, 8, 128)
        q, k, v, mask = _packed(place, tokens, heads, kv, dim, place.dtype)
        direction = torch.ones_like(q)
        pairs = sum(
            sum(min(index + 1, mask.window or length) for index in range(length)) for length in _lengths(tokens)
        )
        floor = 12 * heads * dim * pairs / DENSE_BF16 * 1e3
        call = partial(attention, q, k, v, mask, scale=dim**-0.5)
        for arm in ("flex", "sdpa"):
            row = {"section": "attention", "case": f"T={tokens}", "arm": arm, "floor_ms": floor}
            rows.append(_try(row, partial(_forced, place, {"attention": arm}, call, (q, k, v), direction)))
    return rows


def _forced(
    place: Place,
    choice: Mapping[str, str],
    call: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    direction: Tensor,
    held: int = 0,
) -> Row:
    with force(**choice):
        return place.measure(partial(_backward, call, leaves, direction), held=held)


def _lengths(tokens: int) -> list[int]:
    return document_lengths(tokens, 4 if tokens < 1024 else 16)


def _packed(
    place: Place, tokens: int, heads: int, kv: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, MaskSpec]:
    q, k, v = (place.draw(1, n, tokens, dim, seed=seed, dtype=dtype) for seed, n in enumerate((heads, kv, kv)))
    lengths = torch.tensor(_lengths(tokens))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].to(place.device)
    return q, k, v, MaskSpec(q_len=tokens, kv_len=tokens, window=max(tokens // 8, 16), documents=documents)


def experts(place: Place) -> list[Row]:
    """Qwen3-MoE's experts: one grouped product against a loop."""
    tokens, hidden, width, count, top_k = (32, 64, 32, 4, 2) if place.dry else (8192, 2048, 768, 128, 8)
    x = place.draw(tokens, hidden, seed=0)
    gate_up = place.draw(count, 2 * width, hidden, seed=1, scale=0.02)
    down = place.draw(count, hidden, width, seed=2, scale=0.02)
    scores = torch.rand(tokens, count, generator=torch.Generator().manual_seed(3))
    chosen = scores.topk(top_k, dim=-1)
    indices, weights = chosen.indices.to(place.device), chosen.values.softmax(-1).to(place.device, place.dtype)
    leaves = (x, gate_up, down)
    held = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
    floor = 18 * tokens * top_k * hidden * width / DENSE_BF16 * 1e3
    case = f"{tokens} tokens, {count} experts, {top_k} each"
    linears = ExpertLinear(gate_up), ExpertLinear(down)
    call = partial(experts_mlp, x, indices, weights, *linears, activation="silu")
    direction = torch.ones_like(x)
    rows, results = [], []
    for arm in ("grouped", "loop"):
        row = {"section": "experts", "case": case, "arm": arm, "floor_ms": floor}
        rows.append(_try(row, partial(_forced, place, {"experts": arm}, call, leaves, direction, held)))
        if "cannot" not in rows[-1]:
            with force(experts=arm):
                results.append(_backward(call, leaves, direction))
    if len(results) == 2:
        rows[0]["error"] = max(map(_relative, *results))
    return rows


def step(place: Place, arm: str) -> list[Row]:
    """Forward and backward of a Qwen3-4B-shaped model of four layers (dry: two), 8192 tokens in two rows."""
    rows, tokens = (2, 32) if place.dry else (2, 4096)
    model = _qwen3(place, arm)
    config = Qwen3.sizes["0.6b" if place.dry else "4b"]
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(place.device)
    parameters = list(model.parameters())
    losses = []

    def work() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.detach())
        torch.autograd.grad(loss, parameters)

    linear = sum(parameter.numel() for name, parameter in model.named_parameters() if "layers" in name)
    head = vocab * model.get_input_embeddings().weight.shape[1]
    pairs, layers = rows * tokens * (tokens + 1) // 2, model.config.num_hidden_layers
    flops = 6 * rows * tokens * (linear + head) + 12 * layers * config.attention.num_heads * 128 * pairs
    row = {"section": "step", "case": f"Qwen3 4B's shape, {layers} layers, {rows}x{tokens}", "arm": arm}
    row["floor_ms"] = flops / DENSE_BF16 * 1e3
    if arm == "ours, compiled blocks" and place.dry and cxx() is None:
        return [row | {"cannot": "there is no C++ compiler, which torch.compile calls on a CPU"}]
    held = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return [_try(row, lambda: place.measure(work, held=held, reps=5) | {"loss": float(losses[0])})]


def _qwen3(place: Place, arm: str) -> Any:
    """The same weights on both sides: each parameter drawn from its name."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1003} if place.dry else {}
    config, layers = Qwen3.sizes["4b"], 2 if place.dry else 4
    config = config.with_(num_hidden_layers=layers, layer_types=config.layer_types[:layers], **sizes)
    if arm.startswith("ours"):
        model: Any = Decoder(config, dtype=place.dtype, device=place.device)
        if arm == "ours, compiled blocks":
            for layer in model.model.layers:
                layer.compile()
    else:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        theirs = Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=config.attention.num_heads,
            num_key_value_heads=config.attention.num_kv_heads,
            head_dim=config.attention.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        model = Qwen3ForCausalLM(theirs).to(place.device, place.dtype)
    _fill(model.named_parameters(), place)
    return model.train()


def _fill(parameters: Iterable[tuple[str, Tensor]], place: Place) -> None:
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(place.device).manual_seed(seed_of(name, 0))
                parameter.normal_(0.0, 0.02, generator=generator)


SECTIONS: Mapping[str, Callable[[Place], list[Row]]] = {
    "peak": peak,
    "check": check,
    "log_prob 2560x151936": lambda place: log_prob(place, "2560x151936"),
    "log_prob 2880x201088": lambda place: log_prob(place, "2880x201088"),
    "step ours": lambda place: step(place, "ours"),
    "step transformers": lambda place: step(place, "transformers"),
    "attention": attentions,
    "experts": experts,
    "step ours, compiled blocks": lambda place: step(place, "ours, compiled blocks"),
}
