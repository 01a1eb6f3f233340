"""Advantages: how much better an answer was than others, from rewards in groups of answers to one prompt.

Everything here is a vector over the answers of one optimiser step, or of one batch of rollouts, in float64. A reward
that a function did not give (`None`) is NaN inside: such an answer counts in no mean and in no deviation, its advantage
is 0, and it must not be trained on (`scored` says which have one). Deviations have Bessel's correction, as in every
implementation that was read. Where implementations differ the docstrings say how.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from bestiary.training.errors import InvalidRun

Scale = Literal["group", "batch", "none"]
Aggregate = Literal["sum_then_normalize", "normalize_then_sum"]

# ------------------------------------------------------------------ rewards


def reward_matrix(rewards: Sequence[Sequence[float | None]]) -> Tensor:
    """What reward functions gave, a row an answer, a column a function; NaN where one gave nothing.

    Returns:
        (answers, functions) float64.
    Raises:
        InvalidRun: rows of different lengths, or a number that is not finite: a function that failed must say None.
    """
    columns = {len(row) for row in rewards}
    if len(columns) > 1:
        raise InvalidRun(f"rewards of {sorted(columns)} functions.", remedy="each function gives a number or None")
    for answer, row in enumerate(rewards):
        for function, value in enumerate(row):
            if value is not None and not math.isfinite(value):
                raise InvalidRun(
                    f"reward {function} of answer {answer} is {value}.",
                    remedy="a finite number, or None where the function cannot judge",
                )
    rows = [[math.nan if value is None else float(value) for value in row] for row in rewards]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), max(columns, default=0))


def group_index(names: Sequence[Hashable]) -> Tensor:
    """A number for each group, by first appearance.

    Returns:
        (answers,) int64.
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)


def scored(rewards: Tensor) -> Tensor:
    """Which answers have a reward: (answers,) or (answers, functions) → (answers,) bool; one function suffices."""
    return ~rewards.isnan() if rewards.dim() == 1 else (~rewards.isnan()).any(1)


def weighted_sum(rewards: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Σ w · reward over the functions that gave one; NaN where none did. As TRL.

    Args:
        rewards: (answers, functions).   weights: of the functions; None: 1 each.
    Returns:
        (answers,).
    """
    columns = rewards * _weights(weights, rewards)
    return torch.where(scored(rewards), columns.nansum(1), math.nan)


def overlong_penalty(lengths: Tensor, max_tokens: int, cache: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft punishment of long answers (arXiv:2503.14476, equation 13), to be added to the reward.

    0 up to max_tokens − cache, then falling in a line to −factor at max_tokens and −factor beyond. verl's reward
    manager (`overlong_buffer`) is the same up to max_tokens, and goes on falling beyond, where no answer can be.

    Args:
        lengths: (answers,) sampled tokens.   cache: tokens before the limit in which the punishment grows.
    Returns:
        (answers,) float64, not positive.
    Raises:
        InvalidRun: cache is outside (0, max_tokens].
    """
    if not 0 < cache <= max_tokens:
        raise InvalidRun(f"overlong.cache = {cache} of {max_tokens} tokens.", remedy="at least 1, at most max_tokens")
    beyond = lengths.double() - (max_tokens - cache)
    return -factor * (beyond / cache).clamp(0.0, 1.0)


# ------------------------------------------------------------------ advantages of answers


def group_normalised(rewards: Tensor, groups: Tensor, *, scale: Scale = "group", eps: float = 1e-6) -> Tensor:
    """(R − mean of the group) / (deviation + eps): GRPO (arXiv:2402.03300); `scale="none"`: Dr.GRPO (2503.20783).

    * eps: 1e-6 in verl and SkyRL, 1e-4 in TRL.
    * A group with one scored answer gives 0, as in TRL; verl and SkyRL take mean 0 and deviation 1 there, which makes
      the advantage the bare reward: with a reward of 1 for "wrong" and 2 for "right", both would be reinforced.
    * A group whose rewards are equal gives exactly 0, not the rounding of the mean divided by eps.
    * `scale="batch"`: the deviation of all rewards of the batch (TRL's `scale_rewards`, arXiv:2508.08221).

    Args:
        rewards: (answers,), NaN where there is none.   groups: (answers,), as `group_index` gives.
    Returns:
        (answers,) float64.
    """
    values = rewards.double()
    centred, spread = _centred(values, groups)
    if scale == "group":
        centred = centred / (spread + eps)
    elif scale == "batch":
        known = values[scored(values)]
        centred = centred / ((known.std() if len(known) > 1 else 0.0) + eps)
    return centred


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """R − mean of the others in the group: RLOO (arXiv:2402.14740).

    A group with one scored answer gives 0, as in TRL; verl leaves the bare reward.

    Returns:
        (answers,) float64.
    """
    centred, _ = _centred(rewards.double(), groups)
    counts = _sums(scored(rewards).double(), groups)
    return centred * counts / (counts - 1).clamp(min=1.0)


def combined(
    rewards: Tensor,
    groups: Tensor,
    *,
    weights: Sequence[float] | None = None,
    aggregate: Aggregate = "sum_then_normalize",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """`group_normalised` of several reward functions.

    `sum_then_normalize`: of the weighted sum. `normalize_then_sum` (GDPO, arXiv:2601.05242): each function is
    normalised in its groups first, so that none drowns the others; the weighted sum of those is normalised over the
    batch, its answers counting alike as in TRL (verl's `gdpo` whitens over tokens, so that long answers count more),
    and `scale` does not apply.

    Args:
        rewards: (answers, functions), NaN where a function gave nothing.
    Returns:
        (answers,) float64.
    """
    if aggregate == "sum_then_normalize":
        return group_normalised(weighted_sum(rewards, weights), groups, scale=scale, eps=eps)
    columns = [group_normalised(column, groups, eps=eps) for column in rewards.double().unbind(1)]
    total = weighted_sum(torch.where(rewards.isnan(), math.nan, torch.stack(columns, 1)), weights)
    known = total[scored(total)]
    if _equal(known):
        return torch.zeros_like(total)
    return torch.where(scored(total), (total - known.mean()) / (known.std() + eps), 0.0)


# ------------------------------------------------------------------ advantages of tokens


def whitened(returns: Sequence[Tensor], trained: Sequence[bool], *, eps: float = 1e-8) -> list[Tensor]:
    """Per-token returns of a batch with mean 0 and deviation 1 over its trained tokens.

    Every token counts alike, so a long answer counts more. Equal returns give 0.

    Args:
        returns: (tokens of the answer,) each, float64.   trained: whether an answer counts; others give zeros.
        eps: beside the variance, in the root, as verl's `masked_whiten`.
    """
    counted = [values for values, counts in zip(returns, trained, strict=True) if counts and len(values)]
    every = torch.cat(counted) if counted else torch.zeros(0, dtype=torch.float64)
    if len(every) < 2 or _equal(every):
        return [torch.zeros_like(values) for values in returns]
    mean, scale = every.mean(), (every.var() + eps).rsqrt()
    return [
        (values - mean) * scale if counts else torch.zeros_like(values)
        for values, counts in zip(returns, trained, strict=True)
    ]


def returns_to_go(reward: float, tokens: int, penalties: Tensor | None = None, gamma: float = 1.0) -> Tensor:
    """Σ_{s ≥ t} γ^{s−t} r_s of an answer whose reward comes at its last token, a penalty at every one.

    Args:
        penalties: (tokens,), subtracted: β times an estimate of the divergence from the reference.
    Returns:
        (tokens,) float64.
    """
    rewards = torch.zeros(tokens, dtype=torch.float64)
    if penalties is not None:
        rewards -= penalties.double()
    if tokens:
        rewards[-1] += reward
    if gamma == 1.0:
        return rewards.flip(0).cumsum(0).flip(0)
    found, running = torch.zeros_like(rewards), 0.0
    for place in range(tokens - 1, -1, -1):
        running = float(rewards[place]) + gamma * running
        found[place] = running
    return found


def reinforce_plus_plus(
    rewards: Tensor,
    lengths: Sequence[int],
    *,
    penalties: Sequence[Tensor] | None = None,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> list[Tensor]:
    """Whitened returns-to-go without groups: REINFORCE++ (arXiv:2501.03262), as verl.

    Args:
        rewards: (answers,), NaN where there is none.   lengths: trained tokens of each.
        penalties: of each answer, as `returns_to_go` takes them: the divergence from the reference is part of the
            reward here.
    Returns:
        (tokens,) float64 for each answer.
    """
    known = scored(rewards).tolist()
    each: Sequence[Tensor | None] = penalties if penalties is not None else [None] * len(lengths)
    returns = [
        returns_to_go(float(reward) if counts else 0.0, tokens, penalty, gamma)
        for reward, counts, tokens, penalty in zip(rewards, known, lengths, each, strict=True)
    ]
    return whitened(returns, known, eps=eps)


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, lengths: Sequence[int], *, eps: float = 1e-8
) -> list[Tensor]:
    """R − mean of the group, whitened over the batch's tokens: REINFORCE++-baseline (arXiv:2501.03262), as verl.

    A group with one scored answer is centred to 0 first; verl leaves the bare reward there.

    Returns:
        (tokens,) float64 for each answer.
    """
    centred, _ = _centred(rewards.double(), groups)
    returns = [
        torch.full((tokens,), float(value), dtype=torch.float64) for value, tokens in zip(centred, lengths, strict=True)
    ]
    return whitened(returns, scored(rewards).tolist(), eps=eps)


# ------------------------------------------------------------------ groups


def informative(rewards: Tensor, groups: Tensor) -> Tensor:
    """Which answers are in a group that says something: two scored answers with different rewards.

    DAPO leaves the others out and samples new ones (`dynamic sampling`). Without a term for the reference or the
    entropy they add nothing to a gradient; what changes is what the sum is divided by.

    Returns:
        (answers,) bool.
    """
    _, spread = _centred(rewards.double(), groups)
    return (spread > 0) & scored(rewards)


def _sums(values: Tensor, groups: Tensor) -> Tensor:
    """Sum over the group of each, (answers,)."""
    size = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(size).index_add_(0, groups, values)[groups]


def _centred(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values less their group's mean, and its deviation, (answers,) both; 0 where there is nothing to compare with."""
    known = scored(values)
    counts = _sums(known.double(), groups)
    filled = torch.where(known, values, 0.0)
    differences = torch.where(known, values - _sums(filled, groups) / counts.clamp(min=1.0), 0.0)
    size = int(groups.max()) + 1 if len(groups) else 0
    bounds = [
        torch.full((size,), limit, dtype=values.dtype).scatter_reduce_(
            0, groups, torch.where(known, values, limit), reduction
        )[groups]
        for limit, reduction in ((-math.inf, "amax"), (math.inf, "amin"))
    ]
    compared = (counts > 1) & (bounds[0] > bounds[1])
    spread = (_sums(differences**2, groups) / (counts - 1).clamp(min=1.0)).sqrt()
    zero = torch.zeros_like(values)
    return torch.where(compared, differences, zero), torch.where(compared, spread, zero)


def _equal(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _weights(weights: Sequence[float] | None, rewards: Tensor) -> Tensor:
    found = torch.ones(rewards.shape[1]) if weights is None else torch.tensor(weights, dtype=torch.float64)
    if len(found) != rewards.shape[1]:
        raise InvalidRun(
            f"reward weights: {len(found)} for {rewards.shape[1]} functions.", remedy="one for each, in their order"
        )
    return found.to(rewards)
