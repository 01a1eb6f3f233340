"""One seed of the recommender example: users apart, semantic ids, SFT on logged users, GRPO before online ones."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bestiary.models import Decoder, Qwen3
from bestiary.tools.movielens import Interactions
from bestiary.training.beams import likeliest_items
from bestiary.training.config import Count, EvaluationSection, LoopSection, OptimSection, Positive
from bestiary.training.data.catalogue import Catalogue
from bestiary.training.data.encoded import encoded
from bestiary.training.data.loader import Batches, PackLoader
from bestiary.training.data.packing import Pack
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
from bestiary.training.rl.policy import Account, LocalFrozen, LocalPolicy, Room
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.rl.prompts import Prompts
from bestiary.training.rl.recommending import Recommending
from bestiary.training.rl.rewards import Rewards
from bestiary.training.rl.rollout import Sampling
from bestiary.training.rl.rounds import Roles, Rounds
from bestiary.training.sections import Section

K = 10
BEST = 5
"""The highest rating."""
SHORTEST = 3
"""Events of a user without whom nothing can be told."""
LEARNT = 1
"""Levels of codes that come of vectors; one more tells items with the same codes apart."""

Share = Annotated[float, Field(gt=0, lt=1)]


class RecommenderConfig(Section):
    """The example in numbers.

    Attributes:
        films: those that most people rated of whom histories are known; all else is left out.
        held_out: share of the users who are judged, and whom no training sees.
        validation: share who say when imitation is over.
        logged: share of the others whose histories are known beforehand. The rest meets the policy.
        before: films of a moment that the policy sees.   ahead: films behind it that are right.
        codes: of a learnt level.   same: films with the same learnt codes, at most.
        hidden, layers: of a Qwen3.
        stretch: films of a piece of history that is imitated.   epochs, sft_lr: of the imitation.
        rounds, moments, answers, rl_lr: of GRPO; users' moments of a round, films sampled at each of them.
        kl: how dear it is to leave what imitation led to.
        cuts: moments of a user that are judged, `ahead` apart.
    """

    films: Count = 256
    held_out: Share = 0.25
    validation: Share = 0.15
    logged: Share = 0.2
    before: Count = 8
    ahead: Count = 10
    codes: Count = 16
    same: Count = 64
    hidden: Count = 32
    layers: Count = 2
    stretch: Count = 24
    epochs: Count = 30
    sft_lr: Positive = 3e-3
    rounds: Count = 120
    moments: Count = 64
    answers: Count = 32
    rl_lr: Positive = 1e-3
    kl: Positive = 0.1
    cuts: Count = 3


@dataclass(frozen=True)
class Judged:
    """What lists of films are worth to users.

    Attributes:
        ndcg: NDCG@10 of the next `ahead` events, a film worth 2^rating − 1, mean over `values`, one a user:
            the mean of the user's moments, which have much in common.
        next_item: NDCG@10 of the last event alone behind all others (`leave_one_out`).
    """

    ndcg: float
    next_item: float
    values: tuple[float, ...]


class Event(NamedTuple):
    """A film that somebody watched, and the rating, 1 to 5."""

    item: int
    rating: int

    @property
    def worth(self) -> float:
        """The usual gain, in (0, 1]."""
        return float((2**self.rating - 1) / (2**BEST - 1))


History = Sequence[Event]


class Study:
    """Users, films and a model of one seed.

    Args:
        out: a folder for what is trained on, made here.
        seed: of who is who, of weights, orders and answers.
        log: of figures of both trainings, with a name in front.

    Attributes:
        held_out, validation, logged, online: user → history, see `RecommenderConfig`.
    """

    def __init__(self, config: RecommenderConfig, found: Interactions, out: Path, *, seed: int, log: Log | None = None):
        self.config, self.seed, self._out, self._log = config, seed, out, log
        self._random = np.random.default_rng(seed)
        users = self._random.permutation(sorted(found.histories)).tolist()
        held, validation = int(len(users) * config.held_out), int(len(users) * config.validation)
        learnt_from = held + validation
        logged = max(1, int((len(users) - learnt_from) * config.logged))
        parts = np.split(np.array(users), [held, learnt_from, learnt_from + logged])
        films = _most_rated(found, parts[2].tolist(), config.films)
        self.held_out, self.validation, self.logged, self.online = (
            {user: history for user in part.tolist() if len(history := _history(found, user, films)) >= SHORTEST}
            for part in parts
        )
        vectors = item_vectors([_items(history) for history in self.logged.values()], config.films)
        learnt, _ = residual_codes(vectors, levels=LEARNT, codebook_size=config.codes, rounds=8, seed=seed)
        ids = SemanticIds(levels=LEARNT + 1, codebook_size=max(config.codes, config.same))
        self.catalogue = Catalogue(ids, distinct(learnt, config.same))
        self.model = _qwen3(config, ids.count, seed)
        out.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ training

    def imitate(self) -> None:
        """SFT: the next film of every event of logged users, until it is no likelier to the users of the validation."""
        config, length, streams = self.config, 16 * self.config.stretch * (LEARNT + 1), 4
        rows, seen = self._stretches(self.logged), self._stretches(self.validation)
        an_epoch = max(1, sum(len(row["input_ids"]) for row in rows) // (length * streams))
        recipe = SFT()
        loader = PackLoader(self._plan("stretches", rows, length, streams), workers=0, make=recipe.batch)
        once = replace(self._plan("validation", seen, length, 1), epochs=1)
        best = Best()
        steps = config.epochs * an_epoch
        trainer = self._trainer(recipe, loader, steps, OptimSection(lr=config.sft_lr, weight_decay=0.1), streams)
        trainer.loop = LoopSection(steps=steps, evaluation=EvaluationSection(sources=(), every=an_epoch))
        trainer.held_out, trainer.callbacks = list(PackLoader(once, workers=0, make=_itself)), (best,)
        trainer.fit()
        loader.close()
        self.model.load_state_dict(best.weights)

    def reinforce(self) -> None:
        """GRPO: a film at a moment of an online user, whose reward is what the user will have made of it."""
        config, levels = self.config, LEARNT + 1
        algorithm = named("grpo", drop_equal_groups=True, kl_coef=config.kl)
        # As high as long as it learns, then down, so that it ends where it was going and not where it was thrown.
        optim = OptimSection(lr=config.rl_lr, weight_decay=0.1, schedule="wsd", warmup=0.08)
        trainer = self._trainer(PolicyGradient(algorithm), Account(), config.rounds, optim, 0)
        room = Room(256 * (config.before + 1) * levels, 0)
        policy = LocalPolicy(trainer, room, constraint=self.catalogue)
        reference = LocalFrozen(copy.deepcopy(self.model).requires_grad_(False).eval(), room)
        sampler = Episodes(
            EmbeddedEngine(self.model, rows=512),
            context=self.model.decoder_config.max_position_embeddings,
            environment=partial(Recommending, self.catalogue),
            threads=1,  # it waits for nothing: more of them would only wait for one another
        )
        rows = [self._moment(user, place) for user, place in self._moments()]
        plan = self._plan("moments", rows, room.pack_length, 1)
        sampling = Sampling(max_tokens=levels, n=config.answers, constraint=self.catalogue, seed=self.seed)
        rounds = Rounds(rounds=config.rounds, prompts=config.moments, sampling=sampling, algorithm=algorithm)
        with closing(sampler):
            roles = Roles(policy, sampler, Rewards({}), reference)
            Controller(roles, Prompts(plan, config.before * levels), rounds, log=self._log).fit()

    def _stretches(self, users: Mapping[str, History]) -> list[dict[str, Any]]:
        """Histories in pieces that overlap by half, as rows."""
        size = self.config.stretch
        pieces = [
            history[max(0, end - size) : end]
            for history in users.values()
            for end in range(len(history), 1, -size // 2)
        ]
        return [self._row(_items(piece), trained_from=1) for piece in pieces]

    def _moments(self) -> list[tuple[str, int]]:
        """Users and places, without repetition, as many as GRPO takes."""
        config = self.config
        every = [
            (user, place)
            for user, history in self.online.items()
            for place in range(config.before, len(history) - config.ahead + 1)
        ]
        chosen = self._random.permutation(len(every))[: config.rounds * config.moments]
        return [every[place] for place in chosen.tolist()]

    def _moment(self, user: str, place: int) -> dict[str, Any]:
        """A prompt as a row: the next film stands for the answer, which nobody reads."""
        config, history = self.config, self.online[user]
        row = self._row(_items(history[place - config.before : place + 1]), trained_from=config.before)
        later = history[place : place + config.ahead]
        worth = [event.worth for event in later]
        return row | {"later": _items(later), "worth": worth, "seen": _items(history[:place])}

    def _row(self, items: Sequence[int], *, trained_from: int) -> dict[str, Any]:
        ids = self.catalogue.tokens(items).reshape(-1)
        labels = np.where(np.arange(len(ids)) < trained_from * (LEARNT + 1), IGNORED, ids)
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}

    def _plan(self, name: str, rows: Iterable[Mapping[str, Any]], length: int, streams: int) -> Plan:
        file = self._out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = Source(name=name, files=str(file), encode=encoded)
        return Plan(sources=(source,), pack_length=length, pad_id=0, seed=self.seed, streams=streams)

    def _trainer(self, recipe: Recipe, loader: Batches, steps: int, optim: OptimSection, per_step: int) -> Trainer:
        lr = optim.lr
        assert lr is not None
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
        """Films of the whole catalogue, ranked by the model for held-out users, without those that they have seen."""
        return self._judged(self._likeliest)

    def judge_popularity(self) -> Judged:
        """The same of the films that most logged users took to."""
        every = np.concatenate([_items(history) for history in self.logged.values()])
        order = np.argsort(-np.bincount(every, minlength=self.config.films), kind="stable").tolist()
        return self._judged(lambda histories: [_without(order, history) for history in histories])

    def _likeliest(self, histories: Sequence[Sequence[int]]) -> list[list[int]]:
        """Films behind each history, the likeliest first, none that is in it."""
        shown = [history[-self.config.before :] for history in histories]
        prompts = [self._row(items, trained_from=0)["input_ids"] for items in shown]
        found = likeliest_items(self.model, self.catalogue, prompts, len(self.catalogue), rows=256)
        return [_without(items, history) for items, history in zip(found, histories, strict=True)]

    def _judged(self, ranked: Callable[[Sequence[Sequence[int]]], list[list[int]]]) -> Judged:
        moments = self._later()
        gains = [{event.item: event.worth for event in later} for _, _, later in moments]
        worth = ndcg_of_lists(ranked([before for _, before, _ in moments]), gains, K)
        of_user: dict[str, list[float]] = {}
        for (user, _, _), one in zip(moments, worth.tolist(), strict=True):
            of_user.setdefault(user, []).append(one)
        values = tuple(fmean(those) for those in of_user.values())
        last = leave_one_out({user: _items(history) for user, history in self.held_out.items()}).test.values()
        ranks = ranks_in_lists(ranked([before for before, _ in last]), [item for _, item in last])
        return Judged(fmean(values), ndcg_at(ranks, K), values)

    def _later(self) -> list[tuple[str, list[int], History]]:
        """Moments of held-out users: who, all films before, and what came next."""
        config = self.config
        places = [
            (user, len(history) - (cut + 1) * config.ahead)
            for user, history in self.held_out.items()
            for cut in range(config.cuts)
        ]
        return [
            (user, _items(self.held_out[user][:place]), self.held_out[user][place : place + config.ahead])
            for user, place in places
            if place >= config.before
        ]


class Best:
    """A `Callback` that keeps the weights with the lowest loss on held-out data.

    Attributes:
        weights: a copy, by name; empty before the first evaluation.   loss: theirs.
    """

    def __init__(self) -> None:
        self.loss, self.weights = math.inf, dict[str, Tensor]()

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """See `Callback`."""
        if values["eval/loss"] < self.loss:
            self.loss = values["eval/loss"]
            self.weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _itself(pack: Pack) -> Pack:
    return pack


def _items(history: History) -> list[int]:
    return [event.item for event in history]


def _most_rated(found: Interactions, users: Sequence[str], count: int) -> dict[int, int]:
    """Item → number, of the items that most of these users rated."""
    rated = np.bincount(np.concatenate([found.histories[user] for user in users]), minlength=found.items)
    return {item: place for place, item in enumerate(sorted(np.argsort(-rated, kind="stable")[:count].tolist()))}


def _history(found: Interactions, user: str, films: Mapping[int, int]) -> list[Event]:
    """Of these films alone, numbered anew."""
    events = zip(found.histories[user], found.ratings[user], strict=True)
    return [Event(films[item], rating) for item, rating in events if item in films]


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
