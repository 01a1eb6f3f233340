"""What one rank of `test_recipes_ranks` does: a step of each recipe, family and mesh, by the real loop."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bestiary.bridges.registry import registered_bridges
from bestiary.models import Decoder, LoRAConfig
from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.models.sharding import whole
from bestiary.training.config import LoopSection, OptimSection
from bestiary.training.control import Control
from bestiary.training.data.loader import Slots, Waits
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import TeacherWords
from bestiary.training.loop import Trainer
from bestiary.training.parallel import DataParallel, build_mesh, clip_grad_norm, data_parallel, parallelize
from bestiary.training.parallel_context import Context
from bestiary.training.recipes.base import Batch, Recipe, Sliceable
from bestiary.training.recipes.context import InContext
from bestiary.training.recipes.distill import Distill
from bestiary.training.recipes.dpo import DPO
from bestiary.training.recipes.kto import KTO
from bestiary.training.recipes.reference import AdaptersOff, Live, Stored
from bestiary.training.recipes.reward import Reward
from bestiary.training.recipes.sft import SFT
from bestiary.verify import tiny
from bestiary.verify.weights import perturb

from .recipes_case import Group, masked, pack, pairs, singles

WORLD, LAYERS, VOCAB, WINDOW = 2, 2, 206, 5  # a window narrower than the shortest document
ANCHORS = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
EVERY = bool(os.environ.get("BESTIARY_EVERY_FAMILY"))
FAMILIES = tuple(registered_bridges()) if EVERY else ANCHORS
MESHES: dict[str, dict[str, int]] = {
    "sharded": {"shard": 2},
    "tensor": {"tensor": 2},
    "expert": {"expert": 2},
    "context": {"context": 2},
}
ADAPTERS = LoRAConfig(r=2, alpha=4.0, targets=("*_proj*",))
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"lora": ADAPTERS},
    "scores": {"head": HeadKind.SCORE, "tie_word_embeddings": False},
    "scores, adapters": {"head": HeadKind.SCORE, "tie_word_embeddings": False, "lora": ADAPTERS},
}
BETA = 0.02  # weights whose words are not decided, so that no sigmoid is flat
SINGLES, PAIRS = singles(), pairs()


def taught(group: Group, seed: int) -> Group:
    """Its documents with four words of a teacher beside each token."""
    random, size = np.random.default_rng(seed), len(group[0])
    words = np.stack([random.permutation(VOCAB)[:4] for _ in range(size)]).astype(np.int32)
    said = TeacherWords(words, np.log(random.dirichlet(np.ones(5), size)[:, :4]))
    return tuple(dataclasses.replace(one, teacher=said) for one in group)


@dataclass(frozen=True)
class Trial:
    """A recipe, the policy that it trains and the documents that it trains on."""

    policy: str
    groups: list[Group]
    make: Callable[[Decoder, Stored], Recipe]


TRIALS: dict[str, Trial] = {
    "sft": Trial("plain", SINGLES, lambda other, stored: SFT()),
    "sft, adapters": Trial("adapters", SINGLES, lambda other, stored: SFT()),
    "sft dft": Trial("plain", SINGLES, lambda other, stored: SFT("dft")),
    "dpo, live": Trial("plain", PAIRS, lambda other, stored: DPO(Live(other), beta=BETA)),
    "dpo, adapters off": Trial("adapters", PAIRS, lambda other, stored: DPO(AdaptersOff(), beta=BETA)),
    "dpo, stored": Trial("plain", PAIRS, lambda other, stored: DPO(stored, "sigmoid_norm", beta=BETA)),
    "kto, live": Trial("plain", SINGLES, lambda other, stored: KTO(Live(other), beta=BETA, undesirable_weight=0.5)),
    "kto, adapters off": Trial("adapters", SINGLES, lambda other, stored: KTO(AdaptersOff(), beta=BETA)),
    "reward": Trial("scores", PAIRS, lambda other, stored: Reward(margin=0.3, centring=0.01)),
    "reward, adapters": Trial("scores, adapters", PAIRS, lambda other, stored: Reward(margin=0.3, centring=0.01)),
    "reward squared": Trial("scores", SINGLES, lambda other, stored: Reward("squared")),
    "distill": Trial("plain", SINGLES, lambda other, stored: Distill(other, "jsd", beta=0.3, temperature=2.0)),
    "distill, words of the data": Trial(
        "plain",
        [taught(group, seed) for seed, group in enumerate(SINGLES)],
        lambda other, stored: Distill(None, "forward_kl"),
    ),
    "distill, top 5": Trial("adapters", SINGLES, lambda other, stored: Distill(other, "reverse_kl", top_k=5)),
}


def config(family: str) -> DecoderConfig:
    """A family at toy size: two layers with every kind of attention, a vocabulary that two ranks can share.

    Without dropout, and without the router's loss: that is a mean over the tokens of one forward pass, everywhere.
    """
    bridge = registered_bridges()[family]
    raw = tiny.tiny_config(bridge.reference, "base") | {"vocab_size": VOCAB}
    found = bridge.parse(raw, source=family).decoder
    types = found.layer_types[:LAYERS]
    absent = set(found.layer_types) - set(types)
    return found.with_(
        num_hidden_layers=LAYERS,
        layer_types=(*types[:-1], absent.pop()) if absent else types,
        sliding_window=found.sliding_window and WINDOW,
        nope_layers=tuple(index for index in found.nope_layers if index < LAYERS),
        dense_layers=tuple(index for index in found.dense_layers if index < LAYERS),
        output_router_logits=False,
        attention=dataclasses.replace(found.attention, dropout=0.0),
        residual_dropout=0.0,
    )


def taken(*places: int) -> bool:
    """Of all combinations, given by places, every other one, so that each pair of values meets; or all of them."""
    return EVERY or sum(places) % 2 == 0


def packs(groups: Sequence[Group], count: int) -> list[Pack]:
    """In `count` packs of unequal lengths."""
    size = len(groups) // count
    return [pack(groups[place : place + size]) for place in range(0, len(groups), size)]


class Models:
    """Those of a family, whole or spread; each is made when it is asked for, and the same on every rank."""

    def __init__(self, family: str, spread: Callable[[Decoder], Decoder] = lambda model: model) -> None:
        self._class, self._config, self._spread = registered_bridges()[family].decoder, config(family), spread
        self._made: dict[str, Decoder] = {}
        other = self._built({}, seed=1)
        with torch.no_grad():
            other.model.norm.weight.mul_(1.5)  # sure of itself and wrong: the estimate of KTO is above 0
        self.stored = Stored.of(other, [pack([*PAIRS, masked(PAIRS[0])])])
        self.other = spread(other)

    def policy(self, name: str) -> Decoder:
        """One of `POLICIES`."""
        if name not in self._made:
            self._made[name] = self._spread(self._built(POLICIES[name], seed=0))
        return self._made[name]

    def _built(self, changes: Mapping[str, Any], seed: int) -> Decoder:
        model = self._class(self._config.with_(**changes), dtype=torch.float64)
        perturb(model, seed=seed)
        if model.decoder_config.ties_head:  # or words are decided, and gradients of them nothing but rounding
            model.model.embed_tokens.weight.data.mul_(0.1)
        return model


@dataclass
class Step:
    """What a step tells and the gradients that it would be made with."""

    values: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As a run's log."""
        self.values = {name: value for name, value in values.items() if name not in ("time", "lr", "skipped")}


class Taken:
    """An optimiser that takes the gradients and moves nothing."""

    def __init__(self, model: Decoder, step: Step) -> None:
        self._model, self._step = model, step

    def set_lr(self, lr: float) -> None:
        """Nothing."""

    def step(self) -> None:
        """Whole gradients by name."""
        named = self._model.named_parameters()
        self._step.gradients = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}

    def zero_grad(self) -> None:
        """As ever."""
        self._model.zero_grad()


class Given:
    """A loader of what it is given."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.waits, self.given = Waits(), Slots()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def step(models: Models, trial: Trial, count: int, control: Control, data: DataParallel, **more: Any) -> Step:
    """One step of a trial over `count` packs, of which this process takes its share; `more` as for `step_over`."""
    return step_over(models, trial, packs(trial.groups, count)[data.rank :: data.size], control, data, **more)


def step_over(
    models: Models,
    trial: Trial,
    own: Sequence[Pack],
    control: Control,
    data: DataParallel,
    context: Context | None = None,
    **more: Any,
) -> Step:
    """One step over these packs of this process, or over slices of their rows."""
    found, model, recipe = Step(), models.policy(trial.policy), trial.make(models.other, models.stored)
    recipe = recipe if context is None else InContext(recipe, context)
    trainer = Trainer(
        model=model,
        recipe=recipe,
        loader=cast(Any, Given([recipe.batch(one) for one in own])),
        optimiser=cast(Any, Taken(model, found)),
        steps=1,
        per_step=len(own),
        loop=LoopSection(steps=1),
        optim=OptimSection(max_grad_norm=None),
        lr=1.0,
        control=control,
        data_rank=data.rank,
        data_parallel=data.size,
        log=found,
        **more,
    )
    trainer.fit()
    return found


def on_mesh(
    family: str, mesh_name: str, mesh: DeviceMesh, control: Control, data: DataParallel
) -> Iterator[tuple[str, Step]]:
    """The trials of a family on a mesh, with two micro-batches for each rank."""
    at = list(MESHES).index(mesh_name) + FAMILIES.index(family)
    models, context = Models(family, partial(parallelize, mesh=mesh)), Context.of(mesh)
    for place, (name, trial) in enumerate(TRIALS.items()):
        if not taken(place, at):
            continue
        if context is None or isinstance(trial.make(models.other, models.stored), Sliceable):
            yield name, step(models, trial, 2 * data.size, control, data, context=context, clip=clip_grad_norm)


def run(rank: int, store: Path, seen: Callable[[str, str, str, Step], None]) -> None:
    """Every family, mesh and trial; each step is shown by those three names."""
    shared, patience = dist.FileStore(str(store), WORLD), timedelta(seconds=120)  # the other one may die
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=WORLD, timeout=patience)
    try:
        group = dist.new_group(backend="gloo")
        for mesh_name, sizes in MESHES.items():
            mesh = build_mesh(**sizes)
            data = data_parallel(mesh)
            control = Control(group, copies=WORLD // data.size)
            for family in FAMILIES:
                if mesh_name == "expert" and config(family).moe is None:
                    continue
                for name, found in on_mesh(family, mesh_name, mesh, control, data):
                    seen(family, mesh_name, name, found)
    finally:
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()


def main(store: str) -> None:
    """A rank that is not the first."""
    torch.set_num_threads(1)
    run(1, Path(store), lambda *found: None)
