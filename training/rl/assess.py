"""From rewards to advantages: the records of a step, with what its algorithm makes of their rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bestiary.training.errors import InvalidRun
from bestiary.training.rl import advantages as of
from bestiary.training.rl.algorithms import Advantage, Algorithm
from bestiary.training.rl.records import Experience, Trajectory, Values


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What becomes of answers that were cut off or nearly so.

    Attributes:
        masked: those cut off are not trained; their rewards still count in their group's mean, as in TRL's
            `mask_truncated_completions`.
        max_tokens, cache, factor: `advantages.overlong_penalty` of the longest answer in a conversation, added to the
            weighted rewards; cache None: none.
    """

    masked: bool = False
    max_tokens: int = 0
    cache: int | None = None
    factor: float = 1.0


class Assessed(NamedTuple):
    """Experiences with advantages, in the order given, and figures of their rewards."""

    experiences: list[Experience]
    figures: dict[str, float]


def assess(
    experiences: Sequence[Experience],
    algorithm: Algorithm,
    *,
    weights: Mapping[str, float] | None = None,
    overlong: Overlong | None = None,
) -> Assessed:
    """Advantages of the answers of a step, all groups whole.

    An answer whose rewards are all None is in no mean and is not trained.

    Figures: reward (mean of the weighted sums), reward_std, reward/NAME, unscored, cut_off (shares of the answers),
    equal_groups (share of the groups that say nothing), answer_tokens (mean), kl_in_reward (mean of an answer's sum).

    Args:
        weights: of the reward functions by name; None: 1 each. A function without a weight is an error.
    Raises:
        InvalidRun: no answers, other reward functions than weights, a reward that is not finite, or a divergence in
            the reward without log-probabilities of the reference.
    """
    if not experiences:
        raise InvalidRun("no answers to assess.", remedy="prompts that are not all refused")
    judged = _judged([one.trajectory for one in experiences], weights, overlong)
    matrix, total, groups, lengths, listed, cut, figures = judged
    penalties = _penalties(experiences, algorithm.advantage.kl_coef)
    if penalties is not None:
        figures["kl_in_reward"] = float(sum(each.sum() for each in penalties)) / len(penalties)
    values = _values(algorithm.advantage, matrix, total, groups, lengths, listed, penalties)
    trained = of.scored(total)
    if overlong is not None and overlong.masked:
        trained &= ~cut
    if algorithm.drop_equal_groups:
        trained &= of.informative(total, groups)
    figures["trained"] = float(trained.double().mean())
    made = [
        replace(one, advantages=_placed(one, found), trained=one.trained and trains)
        for one, found, trains in zip(experiences, values, trained.tolist(), strict=True)
    ]
    return Assessed(made, figures)


def informative_groups(
    trajectories: Sequence[Trajectory],
    *,
    weights: Mapping[str, float] | None = None,
    overlong: Overlong | None = None,
) -> set[str]:
    """Groups whose rewards, as `assess` adds them up, are not all equal: those that `drop_equal_groups` leaves in.

    Raises:
        InvalidRun: see `assess`.
    """
    judged = _judged(trajectories, weights, overlong)
    says = of.informative(judged.total, judged.groups).tolist()
    return {one.group_id for one, some in zip(trajectories, says, strict=True) if some}


def reward_figures(
    trajectories: Sequence[Trajectory], *, weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Those of `assess` that are of rewards and lengths alone.

    Raises:
        InvalidRun: see `assess`.
    """
    return _judged(trajectories, weights, None).figures


class _Judged(NamedTuple):
    """Rewards of the answers of a step, with what they are weighed by."""

    matrix: Tensor
    total: Tensor
    groups: Tensor
    lengths: list[int]
    weights: list[float] | None
    cut: Tensor
    figures: dict[str, float]


def _judged(
    trajectories: Sequence[Trajectory], weights: Mapping[str, float] | None, overlong: Overlong | None
) -> _Judged:
    # Episodes that errors of their environments ended, or that were cut off, may lack rewards, even by name.
    ended = any(one.finish == "stop" and "failed" not in one.extra for one in trajectories)
    given = {name for one in trajectories for name in one.rewards}
    names = sorted(given if given and ended else given | set(weights or ()))
    if weights is not None and set(weights) != set(names):
        raise InvalidRun(
            f"weights of {sorted(weights)} for rewards of {names}.", remedy="a weight for each reward function"
        )
    matrix = of.reward_matrix([[one.rewards.get(name) for name in names] for one in trajectories])
    groups = of.group_index([one.group_id for one in trajectories])
    lengths = [one.tokens for one in trajectories]
    listed = None if weights is None else [weights[name] for name in names]
    total = of.weighted_sum(matrix, listed)
    cut = torch.tensor([one.finish == "length" for one in trajectories])
    figures = _figures(matrix, names, total, groups, cut, lengths)
    if overlong is not None and overlong.cache is not None:
        longest = torch.tensor([_longest(one) for one in trajectories])
        penalty = of.overlong_penalty(longest, overlong.max_tokens, overlong.cache, overlong.factor)
        figures["overlong_penalty"] = float(penalty.mean())
        # A further function: without a judgement of the answer it judges nothing either.
        matrix = torch.cat([matrix, torch.where(of.scored(total), penalty, math.nan)[:, None]], 1)
        listed = [*([1.0] * len(names) if listed is None else listed), 1.0]
        total = of.weighted_sum(matrix, listed)
    return _Judged(matrix, total, groups, lengths, listed, cut, figures)


def _longest(trajectory: Trajectory) -> int:
    """Tokens of the longest answer in a conversation, which is what `max_tokens` bounds."""
    edges = np.flatnonzero(np.diff(trajectory.sampled.astype(np.int8), prepend=0, append=0))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _values(
    advantage: Advantage,
    matrix: Tensor,
    total: Tensor,
    groups: Tensor,
    lengths: Sequence[int],
    weights: Sequence[float] | None,
    penalties: Sequence[Tensor] | None,
) -> Sequence[Tensor]:
    """Advantages of each answer: () or (its tokens,)."""
    if advantage.kind == "reinforce_plus_plus":
        return of.reinforce_plus_plus(total, lengths, penalties=penalties, gamma=advantage.gamma)
    if penalties is not None:
        # Of the whole answer: one more reward function, which is not normalised apart from the others.
        sums = torch.stack([each.sum() for each in penalties])
        total = total - sums
        if advantage.aggregate == "normalize_then_sum":
            raise InvalidRun(
                f"advantage.kl_coef = {advantage.kl_coef:g} with aggregate = normalize_then_sum.",
                remedy="kl_coef of the loss",
            )
    if advantage.kind == "reinforce_plus_plus_baseline":
        return of.reinforce_plus_plus_baseline(total, groups, lengths)
    if advantage.kind == "leave_one_out":
        return of.leave_one_out(total, groups).unbind()
    if advantage.aggregate == "normalize_then_sum":
        found = of.combined(
            matrix, groups, weights=weights, aggregate=advantage.aggregate, scale=advantage.scale, eps=advantage.eps
        )
        return found.unbind()
    return of.group_normalised(total, groups, scale=advantage.scale, eps=advantage.eps).unbind()


def _penalties(experiences: Sequence[Experience], kl_coef: float) -> list[Tensor] | None:
    """kl_coef · (log π − log π_ref) at the sampled tokens of each answer, π being the policy that sampled.

    0 of those that arrive untrained and without a reference: `with_log_probs` gives them none.
    """
    if not kl_coef:
        return None
    found = []
    for one in experiences:
        if one.reference_log_probs is None and one.trains:
            raise InvalidRun(
                f"{one.trajectory.name}: advantage.kl_coef = {kl_coef:g} and it has no reference_log_probs.",
                remedy="reward_kl_coef = 0, or packing.with_log_probs(reference, …, 'reference_log_probs')",
            )
        policy = one.trajectory.rollout_log_probs if one.old_log_probs is None else one.old_log_probs
        reference = policy if one.reference_log_probs is None else one.reference_log_probs
        difference = (policy.astype(np.float64) - reference)[one.trajectory.sampled]
        found.append(kl_coef * torch.from_numpy(difference))
    return found


def _placed(experience: Experience, found: Tensor) -> Values:
    values = np.zeros(len(experience.trajectory))
    values[experience.trajectory.sampled] = found.numpy()
    return values


def _figures(
    matrix: Tensor, names: Sequence[str], total: Tensor, groups: Tensor, cut: Tensor, lengths: Sequence[int]
) -> dict[str, float]:
    known = total[of.scored(total)]
    figures = {
        "reward": float(known.mean()) if len(known) else 0.0,
        "reward_std": float(known.std()) if len(known) > 1 else 0.0,
        "unscored": 1.0 - len(known) / len(total),
        "cut_off": float(cut.double().mean()),
        "equal_groups": 1.0 - len(groups[of.informative(total, groups)].unique()) / len(groups.unique()),
        "answer_tokens": sum(lengths) / len(lengths),
    }
    for name, column in zip(names, matrix.unbind(1), strict=True):
        given = column[~column.isnan()]
        if len(given):
            figures[f"reward/{name}"] = float(given.mean())
    return figures
