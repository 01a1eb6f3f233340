"""What a step needs before anything is loaded: memory by what it is for, and FLOPs.

    parameters, gradients, optimiser     exact, from the modules themselves on the meta device
    activations     what blocks save for the backward pass: of each token residual and normed states, queries, keys,
                    values, the output of attention, gate and up of the MLP or of the chosen experts; of what activation
                    checkpointing repeats the states between, and once the most that is repeated together
    working         gradients of one block's activations, or the head's chunk of logits and its gradients in fp32

Where processes share each row, activations are those of a slice, beside the keys and values of the whole row, which
each of them gathers. One document fills a pack and every position has a label. The most that torch allocates lies
within a factor of 1.5 of the sum (small models on a CPU: 0.75 to 1.4); a process holds more, for its allocator and its
libraries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bestiary.bridges import get_bridge, read_config
from bestiary.bridges.hub import CONFIG, resolve, split_revision
from bestiary.bridges.peft_import import base_of, is_adapter
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.vocab_tiles import row_chunks
from bestiary.models import Decoder, DecoderConfig
from bestiary.models.config import NormPlacement
from bestiary.models.lora import adapter
from bestiary.models.recomputation import Part
from bestiary.training.config import CommonConfig
from bestiary.training.flops import CONVENTION, StepFlops, Totals, Trainable, trained_by_default
from bestiary.training.memory import GIB

_STATES = {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1)}  # a parameter: of matrices of the blocks, of all else


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, and FLOPs of a step on all of them.

    Attributes:
        parameters, gradients, optimiser, activations, working: see the module.
        beside: of frozen models that the recipe asks.
        tokens: of a step, on all devices.   flops: of it.
        savings: what to change → bytes that it saves, the most first.
    """

    parameters: int
    gradients: int
    optimiser: int
    activations: int
    working: int
    beside: int
    tokens: int
    flops: Totals
    savings: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, int]:
        names = ("parameters", "gradients", "optimiser", "activations", "working", "beside")
        return {name: getattr(self, name) for name in names}

    def words(self) -> str:
        """One line: the sum, its parts, and what saves most."""
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self._parts().items() if size)
        knobs = "; ".join(f"{knob} saves {_gib(size)}" for knob, size in self.savings.items())
        return f"{_gib(self.total)} GiB a device ({parts}); {knobs}"

    def lines(self) -> list[str]:
        """For a terminal."""
        shown = [f"{name:<12} {_gib(size):>8} GiB" for name, size in self._parts().items() if size]
        flops = (
            f"{self.flops.model / 1e12:.4g} TFLOP, with recomputation {self.flops.hardware / 1e12:.4g} ({CONVENTION})"
        )
        return [
            "memory of a device, about",
            *(f"  {line}" for line in (*shown, f"{'sum':<12} {_gib(self.total):>8} GiB")),
            *(f"  {knob} saves {_gib(size)} GiB" for knob, size in self.savings.items()),
            f"a step: {self.tokens:,} tokens, {flops}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Bytes and FLOPs as plain JSON values."""
        return {
            "bytes": {**self._parts(), "total": self.total},
            "savings": dict(self.savings),
            "tokens": self.tokens,
            "flops": {"model": self.flops.model, "hardware": self.flops.hardware, "convention": CONVENTION},
        }


def estimate(config: CommonConfig, *, processes: int | None = None) -> Estimate:
    """The estimate of a run's file, from the checkpoint's config alone.

    Args:
        processes: of the run; None: as the environment says (WORLD_SIZE), or one.
    Raises:
        CheckpointNotFound, OfflineError, UnsupportedModelType, UnsupportedConfig: of a checkpoint that is named.
    """
    decoder, stored = _read(config.model.src, config.model.revision)
    decoder = decoder.with_(lora=config.adapters, activation_checkpointing=config.model.recomputes or False)
    dtype = stored if config.precision.parameters is None else getattr(torch, config.precision.parameters)
    compute = dtype if config.precision.compute is None else getattr(torch, config.precision.compute)
    world = processes or int(os.environ.get("WORLD_SIZE", "1"))
    parallel = config.parallel
    shards = max(world // (parallel.replicate * parallel.tensor), 1)
    if parallel.shard > 0:
        shards = parallel.shard * parallel.context * parallel.expert
    asked = [_read(*split_revision(src)) for src in config.beside]
    return estimate_step(
        decoder,
        tokens=config.data.pack_length,
        packs=config.data.streams,
        dtype=dtype,
        compute=compute,
        optimiser=config.optim.name,
        shards=shards * parallel.tensor,
        context=parallel.context,
        labels=1 if config.recipe == "reward" else None,
        beside=asked,
    )


def estimate_step(
    config: DecoderConfig,
    *,
    tokens: int,
    packs: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype | None = None,
    optimiser: str = "adamw",
    trainable: Trainable | None = None,
    shards: int = 1,
    context: int = 1,
    labels: int | None = None,
    beside: list[tuple[DecoderConfig, torch.dtype]] | None = None,
) -> Estimate:
    """The estimate of one step.

    Args:
        config: of the model, LoRA included.
        tokens: of a micro-batch.   packs: micro-batches of a step, on all devices.
        dtype: of parameters, gradients and optimiser states.   compute: of activations; None: `dtype`.
        optimiser: adamw, adamw8bit, muon or sgd.
        trainable, labels: as for `StepFlops`.
        shards: devices that share parameters, gradients and optimiser states.   context: that share each row.
        beside: config and dtype of frozen models that are asked at every step.
    """
    if trainable is None:
        trainable = trained_by_default(config)
    compute = dtype if compute is None else compute
    sizes = _sizes(config, labels)
    trained = {name: shape for name, shape in sizes.items() if trainable(name)}
    parameters = sum(shape.numel() for shape in sizes.values()) * dtype.itemsize
    gradients = sum(shape.numel() for shape in trained.values()) * dtype.itemsize
    states = sum(_states(name, shape, optimiser, dtype) for name, shape in trained.items())
    blocks, own = range(config.num_hidden_layers), -(-tokens // context)
    kept, again = zip(*(_kept(config, index, _part(config, index), tokens, own) for index in blocks), strict=True)
    light, once = zip(*(_kept(config, index, Part.FULL, tokens, own) for index in blocks), strict=True)
    activations = (sum(kept) + max(again)) * compute.itemsize
    least = (sum(light) + max(once)) * compute.itemsize
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    working = _working(config, tokens, own, compute, head=labels is None, head_trains=trainable(head))
    flops = [StepFlops(config, trainable=trainable, labels=labels)]
    flops += [StepFlops(other, backward=False) for other, _ in beside or []]
    one = [each.totals([tokens], 1 if each.scores_documents else tokens) for each in flops]
    savings = {"half of data.pack_length": (activations + working) // 2}
    if activations > least:
        savings["model.checkpointing=full"] = activations - least
    if config.lora is None:
        savings["a section lora"] = (gradients + states) // shards
    savings["twice the processes (parallel.shard)"] = (parameters + gradients + states) // (2 * shards)
    return Estimate(
        parameters=parameters // shards,
        gradients=gradients // shards,
        optimiser=states // shards,
        activations=activations,
        working=working,
        beside=sum(
            sum(shape.numel() for shape in _sizes(other, None).values()) * kind.itemsize for other, kind in beside or []
        ),
        tokens=tokens * packs,
        flops=Totals(packs * sum(each.model for each in one), packs * sum(each.hardware for each in one)),
        savings=dict(sorted(savings.items(), key=lambda knob: -knob[1])),
    )


def _part(config: DecoderConfig, index: int) -> Part | None:
    return None if config.checkpointing is None else config.checkpointing.of(index)


def _kept(config: DecoderConfig, index: int, part: Part | None, tokens: int, own: int) -> tuple[int, int]:
    """Elements that block `index` keeps for the backward pass, and those that it computes again at once.

    Args:
        tokens: of a row.   own: of them on this device, which gathers the keys and values of the others.
    """
    heads, hidden = config.attention, own * config.hidden_size
    attention, mlp = (own * size for size in _saved(config, index))
    attention += (tokens - own) * _keys_and_values(config)
    found: dict[Part | None, tuple[int, int]] = {
        None: (attention + mlp, 0),
        Part.FULL: (hidden, attention + mlp),
        Part.SELECTIVE: (2 * hidden + own * heads.num_heads * heads.v_head_dim, max(attention, mlp)),
        Part.ATTENTION: (hidden + mlp, attention),
        Part.MLP: (attention + hidden, mlp),
    }
    return found[part]


def _keys_and_values(config: DecoderConfig) -> int:
    """Elements of a token's keys and values in one block, as attention reads them."""
    heads = config.attention
    return heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)


def _saved(config: DecoderConfig, index: int) -> tuple[int, int]:
    """Elements that the halves of block `index` save for the backward pass, a token."""
    heads, hidden = config.attention, config.hidden_size
    states = {NormPlacement.PARALLEL: (2, 1), NormPlacement.SANDWICH: (3, 3)}.get(config.norm.placement, (2, 2))
    again = 1 if heads.qk_norm is not None else 0  # before and after the norm
    q, k = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    v = heads.num_kv_heads * heads.v_head_dim
    attention = states[0] * hidden + (1 + again) * (q + k) + v + heads.num_heads * heads.v_head_dim
    if heads.mla is not None:
        attention += 2 * (heads.mla.kv_lora_rank + (heads.mla.q_lora_rank or 0))
    return attention, states[1] * hidden + _inner(config, index, saved=True)


def _inner(config: DecoderConfig, index: int, *, saved: bool) -> int:
    """Elements between the two halves of the MLP of block `index`: as saved, or with gradients beside them."""
    bare = adapter(config, f"model.layers.{index}.mlp.down_proj") is None  # then their product is computed again
    columns = (2 if bare else 3) if saved else 4
    moe = config.moe
    if moe is None or not config.is_moe_layer(index):
        return columns * config.intermediate_size
    inner = moe.router.top_k * moe.intermediate_size * (2 if saved else 4)
    inner += 0 if saved else 3 * moe.router.top_k * config.hidden_size  # sorted by expert: rows, results, gradients
    shared = 0 if moe.shared is None else columns * moe.shared.intermediate_size
    return inner + shared + 3 * moe.num_experts


def _working(
    config: DecoderConfig, tokens: int, own: int, compute: torch.dtype, *, head: bool, head_trains: bool
) -> int:
    """Bytes that live for a moment: a block's gradients, or the head's logits and gradients."""
    widest = max(_inner(config, index, saved=False) for index in range(config.num_hidden_layers))
    block = own * (widest + 3 * config.hidden_size) * compute.itemsize
    wide = at_least_fp32(compute)
    if own < tokens:  # gradients of all keys and values: of a piece, of all pieces, as they are sent
        block = max(block, 3 * tokens * _keys_and_values(config) * wide.itemsize)
    if not head:
        return block
    chunks = row_chunks(own, config.hidden_size, config.vocab_size, wide, held=1)
    elements = (chunks[0].stop if chunks else 0) * config.padded_vocab_size + own * config.hidden_size
    elements += config.vocab_size * config.hidden_size * head_trains
    return max(block, elements * wide.itemsize)


def _states(name: str, shape: torch.Size, optimiser: str, dtype: torch.dtype) -> int:
    """Bytes that an optimiser keeps for a parameter, the counter of its steps left out."""
    if optimiser == "adamw8bit":
        size = shape.numel()
        coded = size >= 4096 and size % 256 == 0  # a byte, and fp32 scales of 256 of them
        return 2 * (size + size // 64 if coded else size * dtype.itemsize)
    matrix, rest = _STATES[optimiser]
    return shape.numel() * (matrix if ".layers." in name and len(shape) == 2 else rest) * dtype.itemsize


def _sizes(config: DecoderConfig, labels: int | None) -> dict[str, torch.Size]:
    """Shapes of all parameters; with `labels` a score head stands in the place of the language model's."""
    model = Decoder(config, device="meta")
    found = {name: parameter.shape for name, parameter in model.named_parameters()}
    if labels is not None:
        found.pop("lm_head.weight", None)
        found["score.weight"] = torch.Size((labels, config.hidden_size))
    return found


def _read(src: str, revision: str | None) -> tuple[DecoderConfig, torch.dtype]:
    """What a checkpoint's config states; bfloat16 where it states no dtype."""
    folder = resolve(src, revision=revision, weights=False)
    if is_adapter(folder):
        return _read(*base_of(folder, None))
    json = read_config(folder)
    place = str(folder / CONFIG)
    parsed = get_bridge(str(json.get("model_type")), read_from=place).parse(json, source=place)
    return parsed.decoder, parsed.dtype or torch.bfloat16


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
