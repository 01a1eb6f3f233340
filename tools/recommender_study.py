"""One seed of the recommender example: users apart, semantic ids, a warm start by SFT, then GRPO against users."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from bestiary.models import Decoder, Qwen3
from bestiary.tools.movielens import Interactions
from bestiary.training.beams import likeliest_items
from bestiary.training.config import Count, LoopSection, OptimSection, Positive
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.encoded import encoded
from bestiary.training.data.loader import Batches, PackLoader
from bestiary.training.data.plan import Plan
from bestiary.training.data.ranking import leave_one_out, ndcg_at, ndcg_of_lists, ranks_in_lists
from bestiary.training.data.semantic_ids import SemanticIds, distinct, residual_codes
from bestiary.training.data.source import Source
from bestiary.training.data.together import item_vectors
from bestiary.training.data.tokens import IGNORED
from bestiary.training.loop import Log, Trainer
from bestiary.training.optim import Optimisers
from bestiary.training.recipes.base import Recipe
from bestiary.training.recipes.sft import SFT
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.controller import Controller
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.policy import Account, LocalPolicy, Room
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.prompts import Prompts
from bestiary.training.rl.recommending import Lists, Recommending, SharedCodes
from bestiary.training.rl.rewards import Rewards
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rounds import Roles, Rounds
from bestiary.training.sections import Section

K = 10
LEARNT = 1
"""Levels of codes that come of vectors; one more tells items with the same codes apart."""

Share = Annotated[float, Field(gt=0, lt=1)]


class RecommenderConfig(Section):
    """The example in numbers.

    Attributes:
        films: those that most people rated; histories go without the others.
        held_out: share of the users, whom no training sees.
        before: items of a moment that the policy sees.   ahead: items behind it that are right.
        codes: of a learnt level.   same: items with the same learnt codes, at most.
        hidden, layers: of a Qwen3.
        stretch: items of a piece of history that is imitated.   epochs, sft_lr: of the warm start.
        shown: films of a sampled list.   near: what one is worth whose first code alone is right (`SharedCodes`).
        rounds, moments, answers, rl_lr: of GRPO; users' moments of a round, lists sampled at each of them.
        temperature: of sampling.
        cuts: moments of a held-out user that are judged, `ahead` apart.   beams: of the search for an item.
    """

    films: Count = 256
    held_out: Share = 0.25
    before: Count = 8
    ahead: Count = 10
    codes: Count = 16
    same: Count = 64
    hidden: Count = 32
    layers: Count = 2
    stretch: Count = 24
    epochs: Count = 1
    sft_lr: Positive = 5e-3
    shown: Count = 1
    near: Annotated[float, Field(ge=0, le=1)] = 0.0
    rounds: Count = 60
    moments: Count = 64
    answers: Count = 16
    rl_lr: Positive = 1e-3
    temperature: Positive = 1.0
    cuts: Count = 2
    beams: Count = 60


@dataclass(frozen=True)
class Judged:
    """What lists of items are worth to held-out users.

    Attributes:
        ndcg: NDCG@10 of what they took to in the next `ahead` events, mean over `values`, one a moment.
        next_item: NDCG@10 of the last event alone behind all others (`leave_one_out`).
    """

    ndcg: float
    next_item: float
    values: tuple[float, ...]


class Study:
    """Users, items and a model of one seed.

    Args:
        out: a folder for what is trained on, made here.
        seed: of who is held out, of weights, orders and answers.
        log: of figures of both trainings, with a name in front.
    """

    def __init__(self, config: RecommenderConfig, found: Interactions, out: Path, *, seed: int, log: Log | None = None):
        self.config, self.seed, self._out, self._log = config, seed, out, log
        self._random = np.random.default_rng(seed)
        histories = _most_rated(found, config.films)
        users = self._random.permutation(sorted(histories)).tolist()
        held = int(len(users) * config.held_out)
        self.held_out = {user: histories[user] for user in users[:held]}
        self.training = {user: histories[user] for user in users[held:]}
        vectors = item_vectors(self.training.values(), config.films)
        learnt, _ = residual_codes(vectors, levels=LEARNT, codebook_size=config.codes, rounds=8, seed=seed)
        ids = SemanticIds(levels=LEARNT + 1, codebook_size=max(config.codes, config.same))
        self.catalogue = Catalogue(ids, distinct(learnt, config.same))
        self.items = config.films
        self.model = _qwen3(config, ids.count, seed)
        out.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ training

    def warm_start(self) -> None:
        """SFT: the next item of every event of the users in training."""
        config = self.config
        stretches = [
            history[max(0, end - config.stretch) : end]
            for history in self.training.values()
            for end in range(len(history), 1, -config.stretch // 2)
        ]
        rows = [self._row(items, trained_from=1) for items in stretches]
        length, streams = 16 * config.stretch * (LEARNT + 1), 4
        plan = self._plan("stretches", rows, length, streams)
        steps = max(1, config.epochs * sum(len(row["input_ids"]) for row in rows) // (length * streams))
        recipe = SFT()
        loader = PackLoader(plan, workers=0, make=recipe.batch)
        self._trainer(recipe, loader, steps, config.sft_lr, streams).fit()
        loader.close()

    def reinforce(self) -> None:
        """GRPO: a list at a moment of a user in training, whose reward is its NDCG of what the user did next."""
        config, levels = self.config, LEARNT + 1
        rows = [self._moment(user, place) for user, place in self._moments()]
        algorithm = named("grpo", drop_equal_groups=True)
        lists = Lists(self.catalogue, config.shown)
        trainer = self._trainer(PolicyGradient(algorithm), Account(), config.rounds, config.rl_lr, 0)
        room = Room(256 * (config.before + config.shown) * levels, 0)
        policy = LocalPolicy(trainer, room, constraint=lists)
        gain = SharedCodes(self.catalogue, (0.0, config.near))
        sampler = Episodes(
            EmbeddedEngine(self.model, rows=512),
            context=self.model.decoder_config.max_position_embeddings,
            environment=partial(Recommending, self.catalogue, shown=config.shown, gain=gain),
            threads=1,  # it waits for nothing: more of them would only wait for one another
        )
        plan = self._plan("moments", rows, room.pack_length, 1)
        sampling = Sampling(
            max_tokens=config.shown * levels,
            temperature=config.temperature,
            n=config.answers,
            constraint=lists,
            seed=self.seed,
        )
        rounds = Rounds(rounds=config.rounds, prompts=config.moments, sampling=sampling, algorithm=algorithm)
        with closing(sampler):
            roles = Roles(policy, sampler, Rewards({}))
            Controller(roles, Prompts(plan, config.before * levels), rounds, log=self._log).fit()

    def _moments(self) -> list[tuple[str, int]]:
        """Users and places, without repetition, as many as GRPO takes."""
        config = self.config
        every = [
            (user, place)
            for user, history in self.training.items()
            for place in range(config.before, len(history) - config.ahead + 1)
        ]
        chosen = self._random.permutation(len(every))[: config.rounds * config.moments]
        return [every[place] for place in chosen.tolist()]

    def _moment(self, user: str, place: int) -> dict[str, Any]:
        """A prompt as a row: the next item stands for the answer, which nobody reads."""
        config, history = self.config, self.training[user]
        row = self._row(history[place - config.before : place + 1], trained_from=config.before)
        return row | {"later": history[place : place + config.ahead], "seen": history[:place]}

    def _row(self, items: Sequence[int], *, trained_from: int) -> dict[str, Any]:
        ids = np.concatenate([self.catalogue.tokens(item) for item in items])
        labels = np.where(np.arange(len(ids)) < trained_from * (LEARNT + 1), IGNORED, ids)
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}

    def _plan(self, name: str, rows: Iterable[Mapping[str, Any]], length: int, streams: int) -> Plan:
        file = self._out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = Source(name=name, files=str(file), encode=encoded)
        return Plan(sources=(source,), pack_length=length, pad_id=0, seed=self.seed, streams=streams)

    def _trainer(self, recipe: Recipe, loader: Batches, steps: int, lr: float, per_step: int) -> Trainer:
        optim = OptimSection(lr=lr, weight_decay=0.1)
        return Trainer(
            model=self.model,
            recipe=recipe,
            loader=loader,
            optimiser=Optimisers(self.model, optim, lr),
            steps=steps,
            per_step=per_step,
            loop=LoopSection(steps=steps),
            optim=optim,
            lr=lr,
            log=self._log,
        )

    # ------------------------------------------------------------------ judging

    def judge(self) -> Judged:
        """Items of the whole catalogue, ranked by the model for held-out users, without those that they have seen."""
        before = [history for history, _ in self._later()]
        after = [history for history, _ in leave_one_out(self.held_out).test.values()]
        return self._judged(self._likeliest(before), self._likeliest(after))

    def judge_popularity(self) -> Judged:
        """The same of the items that most users in training took to."""
        watched = np.bincount(np.concatenate([np.array(one) for one in self.training.values()]), minlength=self.items)
        order = np.argsort(-watched, kind="stable").tolist()
        lists = [_without(order, history) for history, _ in self._later()]
        after = [_without(order, history) for history, _ in leave_one_out(self.held_out).test.values()]
        return self._judged(lists, after)

    def _likeliest(self, histories: Sequence[Sequence[int]]) -> list[list[int]]:
        """Items behind each history, the likeliest first, none that is in it."""
        shown = [history[-self.config.before :] for history in histories]
        prompts = [self._row(items, trained_from=0)["input_ids"] for items in shown]
        found = likeliest_items(self.model, self.catalogue, prompts, self.config.beams, rows=256)
        return [_without(items, history) for items, history in zip(found, histories, strict=True)]

    def _judged(self, lists: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Judged:
        values = ndcg_of_lists(lists, [set(later) for _, later in self._later()], K)
        targets = [item for _, item in leave_one_out(self.held_out).test.values()]
        return Judged(float(values.mean()), ndcg_at(ranks_in_lists(after, targets), K), tuple(values.tolist()))

    def _later(self) -> list[tuple[list[int], list[int]]]:
        """Moments of held-out users: all before, and what came next."""
        config = self.config
        places = [
            (history, len(history) - (cut + 1) * config.ahead)
            for history in self.held_out.values()
            for cut in range(config.cuts)
        ]
        return [
            (history[:place], history[place : place + config.ahead])
            for history, place in places
            if place >= config.before
        ]


def _most_rated(found: Interactions, count: int) -> dict[str, list[int]]:
    """Histories of these items alone, numbered anew; of users with three events or more."""
    rated = np.bincount(np.concatenate([np.array(one) for one in found.histories.values()]), minlength=found.items)
    number = {item: place for place, item in enumerate(sorted(np.argsort(-rated, kind="stable")[:count].tolist()))}
    kept = {user: [number[item] for item in history if item in number] for user, history in found.histories.items()}
    return {user: history for user, history in kept.items() if len(history) >= 3}


def _without(items: Sequence[int], seen: Collection[int]) -> list[int]:
    known = set(seen)
    return [item for item in items if item not in known]


def _qwen3(config: RecommenderConfig, vocabulary: int, seed: int) -> Decoder:
    """A small one, in float32."""
    full = next(iter(Qwen3.sizes.values()))
    small = full.with_(
        vocab_size=vocabulary,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers,
        layer_types=full.layer_types[: config.layers],
        attention=replace(full.attention, num_heads=2, num_kv_heads=2, head_dim=config.hidden // 2),
        rope=replace(full.rope, rotary_dim=config.hidden // 2),
    )
    model = Qwen3(small, dtype=torch.float32)
    model.init_weights(seed)
    return model
