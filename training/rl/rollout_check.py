"""Whether a rollout engine says what the policy says of the same answers, and if not, why not.

Training takes the log-probabilities of an engine for those of the policy's weights. `check_rollouts` compares them for
the answers of a step, and names what is wrong by elimination.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder
from bestiary.models.sharding import gathered
from bestiary.training.recipes.documents import frozen_pass
from bestiary.training.rl.mismatch import Parity, parity
from bestiary.training.rl.rollout import Remembered, Rollout, Sampling, remembered

FULL, HALF = 1e-4, 5e-2  # mean |difference| of log-probabilities: both sides in float32 or more, or one in less
BLAMED, BLAMED_TOKENS = 4, 64  # answers, and tokens of each, whose logits are computed to say what is wrong


class StaleWeights(BestiaryError):
    """An engine whose weights are not those of the policy, by its version or by what it says.

    Remedy: sync before sampling, or allow the lag in the run's file.
    """


class WrongTemperature(BestiaryError):
    """Answers sampled at another temperature than the one that is trained at.

    Remedy: sample and train at one temperature.
    """


class Retokenised(BestiaryError):
    """Answers whose ids are not those that were sampled.

    Remedy: hand the sampled ids on as they are; never decode and encode in between.
    """


class WrongConstraint(BestiaryError):
    """Answers sampled among other tokens than those that the run allows.

    Remedy: give rollouts and policy the same tokens to choose from.
    """


def check_rollouts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    *,
    version: int | None = None,
    tolerance: float | None = None,
    engine_dtype: torch.dtype | None = None,
) -> Parity:
    """Whether answers have the log-probabilities that `decoder` gives them, which is what training takes for granted.

    What is wrong is told by elimination: the version; a temperature at which everything agrees; answers that agree up
    to a token and not from there on, or some that agree whole beside others, which weights cannot explain; and else the
    weights.

    Args:
        prompts: of the call; `Rollout.prompt` is a place in it.
        sampling: of the call; log-probabilities are compared at its temperature.
        version: that the answers must have; None: whichever.
        tolerance: of the mean |difference|; default 1e-4, or 5e-2 where a side computes in half.
        engine_dtype: that the engine computes in; None: as the decoder.
    Raises:
        StaleWeights: another version, or log-probabilities of other weights; names the worst token.
        WrongTemperature: names both.
        Retokenised: names the answer and its first token that was not sampled.
        WrongConstraint: names the answer and its first token that was sampled among others than `sampling` allows.
    """
    return compared(decoder, prompts, rollouts, sampling, version, tolerance, engine_dtype)[0]


def compared(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    version: int | None,
    tolerance: float | None,
    engine_dtype: torch.dtype | None,
) -> tuple[Parity, list[Tensor]]:
    """See `check_rollouts`; also the policy's log-probabilities, (tokens,) float64 of each answer."""
    constraint = remembered(sampling.constraint)
    for place, one in enumerate(rollouts):
        if version is not None and one.version != version:
            raise StaleWeights(
                f"answer {place} is of version {one.version}; the policy is at {version}.",
                remedy="sync the engine after the step, before it generates",
            )
        if len(one.ids) != len(one.log_probs):
            raise Retokenised(
                f"answer {place} has {len(one.ids)} tokens and {len(one.log_probs)} log-probabilities.", remedy=_RETOKEN
            )
        check_allowed(place, one, constraint)
    policy, computed = _log_probs(decoder, prompts, rollouts, sampling.temperature)
    half = any(torch.finfo(dtype).bits < 32 for dtype in (computed, engine_dtype) if dtype is not None)
    bound = (HALF if half else FULL) if tolerance is None else tolerance
    there = [told(one) for one in rollouts]
    given = torch.cat(there) if there else torch.zeros(0, dtype=torch.float64)
    found = parity(torch.cat(policy) if policy else given, given, torch.ones(len(given), dtype=torch.bool))
    mean = found.absolute / max(1, found.tokens)
    if mean <= bound:
        return found, policy
    apart = [(mine - theirs).abs() for mine, theirs in zip(policy, there, strict=True)]
    worst = sorted(range(len(apart)), key=lambda place: -float(apart[place].mean()))[:BLAMED]
    few = [rollouts[place] for place in worst]
    said = torch.cat([there[place][:BLAMED_TOKENS] for place in worst])
    _blame_temperature(_logits(decoder, prompts, few), few, said, sampling.temperature, bound)
    _blame_tokens(apart, bound)
    answer = max(range(len(apart)), key=lambda place: float(apart[place].max()))
    token = int(apart[answer].argmax())
    engine, ours = float(there[answer][token]), float(policy[answer][token])
    raise StaleWeights(
        f"log-probabilities of the engine and the policy differ by {mean:.2g} in the mean (at most {bound:g}); worst "
        f"is token {token} of answer {answer}, id {int(rollouts[answer].ids[token])}: {engine:.5f} from the engine, "
        f"{ours:.5f} from the policy.",
        remedy="the engine has other weights than the policy: sync it; float32 on both sides compares best",
    )


_RETOKEN = "train on the ids that the engine gave: no decoding and encoding between"


def _blame_temperature(
    logits: Sequence[Tensor], rollouts: Sequence[Rollout], given: Tensor, temperature: float, bound: float
) -> None:
    """Raises WrongTemperature where another temperature explains the log-probabilities: all but a quarter at least.

    Some temperature brings other weights a little nearer too.
    """

    def distance(other: float) -> float:
        return float((torch.cat(_at(logits, rollouts, other)) - given).abs().mean())

    # A grid, then ever finer ones about its best: the distance is steep about the right one, and flat far away.
    centre, width = 1.0, 8.0
    for _ in range(8):
        tried = [centre * width ** (step / 8) for step in range(-8, 9)]
        centre, width = min(tried, key=distance), width ** (1 / 4)
    if abs(centre / temperature - 1.0) > 1e-3 and distance(centre) <= min(bound, distance(temperature) / 4):
        raise WrongTemperature(
            f"answers were sampled at temperature {centre:.3g} and are trained at {temperature:g}.",
            remedy="one temperature on both sides: Sampling.temperature",
        )


def _blame_tokens(apart: Sequence[Tensor], bound: float) -> None:
    """Raises Retokenised where every answer agrees whole or breaks off sharply, as other weights would not make it."""
    sharp, broken, agreeing = min(100 * bound, 1.0), [], 0
    for place, found in enumerate(apart):
        beyond = (found > bound).nonzero()
        first = int(beyond[0]) if len(beyond) else len(found)
        agreeing += first
        if len(beyond):
            broken.append((place, first))
    if broken and 2 * agreeing >= len(apart) and all(float(apart[place][first]) > sharp for place, first in broken):
        place, first = broken[0]
        raise Retokenised(
            f"answer {place} agrees with what was sampled up to token {first}, not from there: its ids were changed.",
            remedy=_RETOKEN,
        )


def check_allowed(place: int, one: Rollout, constraint: Remembered | None) -> None:
    """Refuse an answer that was sampled among other ids than a constraint allows.

    Args:
        place: of the answer, for the error.   constraint: of training; None: there is none.
    Raises:
        WrongConstraint, Retokenised: see `check_rollouts`.
    """
    if one.allowed is None or constraint is None:
        if one.allowed is not None or constraint is not None:
            engine, run = ("freely", "under a constraint") if one.allowed is None else ("under one", "without one")
            raise WrongConstraint(
                f"answer {place} was sampled {engine} and is trained {run}.",
                remedy="the same Sampling.constraint on both sides, and an engine that heeds it",
            )
        return
    wanted = constraint.along(one.ids)
    if np.array_equal(one.allowed, wanted) and (wanted == one.ids[:, None]).any(1).all():
        return
    for token, (word, there, here) in enumerate(zip(one.ids.tolist(), one.allowed, wanted, strict=True)):
        if word not in there:
            raise Retokenised(f"token {token} of answer {place}, id {word}, was not allowed there.", remedy=_RETOKEN)
        if not np.array_equal(there[there >= 0], here[here >= 0]):
            raise WrongConstraint(
                f"token {token} of answer {place} was sampled among {int((there >= 0).sum())} ids, the constraint "
                f"allows {int((here >= 0).sum())} there, and they are not the same.",
                remedy="one catalogue on both sides",
            )


def _log_probs(
    decoder: Decoder, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], temperature: float
) -> tuple[list[Tensor], torch.dtype]:
    """Of each answer, (tokens,) float64, and the dtype that they were computed in."""
    found: list[Tensor] = []
    with frozen_pass(decoder), gathered(decoder):
        for one in rollouts:
            ids = _ids(decoder, prompts, one)
            targets = ids.roll(-1, 1)
            targets[:, -1] = targets[:, : -len(one) - 1] = -100
            more = {} if one.allowed is None else {"allowed": _among(one, ids)}
            values = decoder(ids, shift_labels=targets, temperature=temperature, **more).log_probs
            found.append(values[0, -len(one) - 1 : -1].double().cpu())
    return found, computed_in(decoder)


def computed_in(decoder: Decoder) -> torch.dtype:
    """The dtype of its forward pass: what FSDP2 casts parameters to, and else theirs."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            cast = module._get_fsdp_state()._mp_policy.param_dtype
            if cast is not None:
                return cast
    return next(decoder.parameters()).dtype


def _ids(decoder: Decoder, prompts: Sequence[Sequence[int]], one: Rollout) -> Tensor:
    """(1, T): a prompt and its answer."""
    words = [*map(int, prompts[one.prompt]), *one.ids.tolist()]
    return torch.tensor([words], device=next(decoder.parameters()).device)


def _among(one: Rollout, ids: Tensor) -> Tensor:
    """(1, T, k): what each next token of a prompt and its answer was sampled among."""
    assert one.allowed is not None
    made = torch.full((1, ids.shape[1], one.allowed.shape[1]), -1, device=ids.device)
    made[0, -len(one) - 1 : -1] = torch.from_numpy(one.allowed).to(made)
    return made


def _logits(decoder: Decoder, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Of the first tokens of each answer, (at most `BLAMED_TOKENS`, vocabulary) float64, -inf for what is barred."""
    found: list[Tensor] = []
    with frozen_pass(decoder), gathered(decoder):
        for one in rollouts:
            first, ids = len(prompts[one.prompt]), _ids(decoder, prompts, one)
            read = ids[:, : first + BLAMED_TOKENS]
            kept = decoder(read, logits_to_keep=read.shape[1] - first + 1).logits[0]
            said = kept[: min(len(one), BLAMED_TOKENS)].double().cpu()
            if one.allowed is not None:
                # One column more, for the places that hold no id.
                words = torch.from_numpy(one.allowed[: len(said)]).long()
                open_ = torch.zeros(len(said), said.shape[1] + 1, dtype=torch.bool)
                open_.scatter_(1, words.where(words >= 0, said.shape[1]), True)
                said = said.masked_fill(~open_[:, :-1], -torch.inf)
            found.append(said)
    return found


def _at(logits: Sequence[Tensor], rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
    """Log-probabilities of the tokens that there are logits of, (tokens,) float64 of each answer."""
    return [
        (of / temperature)
        .log_softmax(-1)
        .gather(-1, torch.from_numpy(one.ids[: len(of)].astype(np.int64))[:, None])[:, 0]
        for of, one in zip(logits, rollouts, strict=True)
    ]


def told(one: Rollout) -> Tensor:
    """The engine's log-probabilities, float64."""
    return torch.from_numpy(np.array(one.log_probs)).double()  # of one from another process, a copy: it is read-only
