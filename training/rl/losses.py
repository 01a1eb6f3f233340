"""Policy losses over packed answers: sums by the contract of `bestiary.training.recipes.base`, never means.

A loss is built from three choices, which `Objective` holds and `algorithms` gives names to:

1. what a token costs (`KINDS`), r being the importance ratio at the objective's level and A the advantage,
2. what is added to it: the divergence from a reference, an entropy bonus,
3. how tokens are added up (`aggregated`), and so what the loop divides by.

Corrections of a mismatch between the engine that sampled and the policy (`mismatch`) weigh the first term. A token that
they weigh with 0 still counts in what the loop divides by, as in TRL; verl's rejection takes it out of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import LossSum
from bestiary.training.recipes.names import known
from bestiary.training.rl.divergence import Estimate, divergence
from bestiary.training.rl.stream import Level, Stream

Kind = Literal["clip", "cispo", "importance", "log_prob"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
_LONGEST = "the longest answer that is sampled, the same for the whole run"
UNITS: Mapping[str, Literal["tokens", "sequences"]] = {
    "token_mean": "tokens",
    "sequence_mean": "sequences",
    "sequence_sum": "sequences",
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A policy loss as data.

    Attributes:
        kind: what a token costs, of `KINDS`.
        level: of the importance ratio, see `Stream.log_ratio`.
        clip_low, clip_high: the ratio is held in [1 − clip_low, 1 + clip_high]. Distances from 1 for every kind; TRL's
            `epsilon_high` of CISPO is the bound itself.
        dual_clip: with a negative advantage no token costs more than −dual_clip · A; None: no such bound.
        aggregation: token_mean: over all trained tokens of the step. sequence_mean: over answers, of the mean over
            each one's tokens. sequence_sum: over answers, of the sum over each one's tokens divided by `max_tokens`.
        max_tokens: of sequence_sum, a constant of the run. Dr.GRPO's is the longest answer allowed, and so is TRL's;
            verl divides by the width of its mask unless `loss_scale_factor` is given, so by what the longest answer of
            the micro-batch was padded to.
        kl, kl_coef: estimate of the divergence from the reference, and its weight; 0: no reference.
        kl_weighted: multiply the estimate by the importance ratio, with its gradient (TRL 1.16).
        entropy_coef: weight of the entropy, which is subtracted.

    Raises:
        InvalidRun: a value outside its range; names the field.
    """

    kind: Kind = "clip"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token_mean"
    max_tokens: int | None = None
    kl: Estimate = "k3"
    kl_coef: float = 0.0
    kl_weighted: bool = False
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in (("kind", Kind), ("level", Level), ("aggregation", Aggregation), ("kl", Estimate)):
            known(vars(self)[name], get_args(choices), f"objective.{name}")
        if not 0.0 <= self.clip_low <= 1.0:
            raise InvalidRun(f"clip_low = {self.clip_low:g}.", remedy="in [0, 1]: a ratio is never below 0")
        if not self.clip_high >= 0.0:
            raise InvalidRun(f"clip_high = {self.clip_high:g}.", remedy="at least 0; inf for no bound")
        if self.dual_clip is not None and not self.dual_clip > 1.0 + self.clip_high:
            raise InvalidRun(
                f"dual_clip = {self.dual_clip:g} with clip_high = {self.clip_high:g}.",
                remedy="above 1 + clip_high, 3 is usual; or leave it out",
            )
        if self.dual_clip is not None and self.kind != "clip":
            raise InvalidRun(f"dual_clip = {self.dual_clip:g}, which {self.kind} does not read.", remedy="leave it out")
        if self.kind == "log_prob" and self.level != "token":
            raise InvalidRun(f"level = {self.level!r} of log_prob, which has no ratio.", remedy="level = token")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRun(f"max_tokens = {self.max_tokens}.", remedy=_LONGEST)
        if self.kl_coef < 0.0 or self.entropy_coef < 0.0:
            raise InvalidRun(f"kl_coef = {self.kl_coef:g}, entropy_coef = {self.entropy_coef:g}.", remedy="at least 0")
        if self.kl_coef and self.kl == "k1" and not self.kl_weighted:
            raise InvalidRun(
                "kl = k1 in the loss: the mean of its gradient is 0.",
                remedy="k1+ (its value, the gradient of k2), or k3",
            )

    @property
    def divisor(self) -> int:
        """What sequence_sum divides the sum of an answer by; 1 for other aggregations.

        Raises:
            InvalidRun: `max_tokens` is missing: a constant that nobody chose is a learning rate that nobody chose.
        """
        if self.aggregation != "sequence_sum":
            return 1
        if self.max_tokens is None:
            raise InvalidRun("max_tokens is missing: aggregation = sequence_sum divides by it.", remedy=_LONGEST)
        return self.max_tokens

    @property
    def unit(self) -> Literal["tokens", "sequences"]:
        """What the loop divides by."""
        return UNITS[self.aggregation]


class Terms(NamedTuple):
    """What tokens cost, and where a bound took effect, (1, T) each; the bounds bool.

    low, high: the ratio is outside and its gradient is cut. dual: the bound on negative advantages.
    """

    values: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clip(stream: Stream, objective: Objective) -> Terms:
    """−min(r A, clip(r) A): PPO (arXiv:1707.06347, equation 7); A < 0: at most −dual_clip · A (arXiv:1912.09729).

    TRL's `delta`, which holds r from above before the minimum, is the same bound.
    """
    ratio, advantages = stream.log_ratio(objective.level).exp(), stream.advantages
    held = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    values = -torch.minimum(ratio * advantages, held * advantages)
    dual = torch.zeros_like(stream.trained)
    if objective.dual_clip is not None:
        values = torch.where(advantages < 0, torch.minimum(values, -objective.dual_clip * advantages), values)
        dual = (advantages < 0) & (ratio > objective.dual_clip)
    low = (advantages < 0) & (ratio < 1.0 - objective.clip_low)
    high = (advantages > 0) & (ratio > 1.0 + objective.clip_high)
    return Terms(values, ratio, low, high, dual)


def cispo(stream: Stream, objective: Objective) -> Terms:
    """−sg(clip(r)) A log π: CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): every token keeps a gradient."""
    ratio = stream.log_ratio(objective.level).exp()
    bounds = (1.0 - objective.clip_low, 1.0 + objective.clip_high)
    values = -ratio.clamp(*bounds).detach() * stream.advantages * stream.masked(stream.log_probs)
    return Terms(values, ratio, ratio < bounds[0], ratio > bounds[1], torch.zeros_like(stream.trained))


def importance(stream: Stream, objective: Objective) -> Terms:
    """−r A, without any bound: the policy gradient of samples of another policy."""
    ratio = stream.log_ratio(objective.level).exp()
    none = torch.zeros_like(stream.trained)
    return Terms(-ratio * stream.advantages, ratio, none, none, none)


def log_prob(stream: Stream, objective: Objective) -> Terms:
    """−A log π: REINFORCE, right for samples of this policy alone (or weighed by `mismatch.Correction`)."""
    none = torch.zeros_like(stream.trained)
    ratio = stream.log_ratio().exp()
    return Terms(-stream.advantages * stream.masked(stream.log_probs), ratio, none, none, none)


KINDS: Mapping[str, Callable[[Stream, Objective], Terms]] = {
    "clip": clip,
    "cispo": cispo,
    "importance": importance,
    "log_prob": log_prob,
}


def aggregated(values: Tensor, stream: Stream, objective: Objective) -> Tensor:
    """The sum over a micro-batch that, divided by the units of the whole step, is the objective's mean.

    Args:
        values: (1, T).
    Returns:
        (), with a graph even where nothing is trained.
    """
    if objective.aggregation == "sequence_mean":
        return stream.means(values).sum()
    return stream.masked(values).sum() / objective.divisor


def policy_loss(
    stream: Stream,
    objective: Objective,
    *,
    weights: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossSum:
    """The sum of a micro-batch, and figures of it.

    Metrics are sums over trained tokens where the unit is tokens, and sums of the answers' token means where it is
    sequences (also for `sequence_sum`, whose constant is no count): divided by the units, they are means either way.

    * clip_low, clip_high, clip_dual: shares of tokens.   ratio, ratio_square.
    * approx_kl: old − log π, and approx_kl3: r − 1 − log r at token level, of KL(π_old ‖ π).
    * policy_loss: without what is added.   advantage, log_prob.
    * with `weights`: weight, weight_square, weight_zero (`mismatch.sample_share` makes a share of samples of them).
    * with `reference`: kl.   with `entropy`: entropy.

    Args:
        weights: (1, T), of `mismatch`, without a graph.   reference: (1, T), log-probabilities, without one.
        entropy: (1, T).
    Raises:
        InvalidRun: the objective asks for a reference or an entropy that is not given.
    """
    terms = KINDS[objective.kind](stream, objective)
    values = terms.values if weights is None else terms.values * weights
    token = stream.log_ratio().detach()
    figures = {
        "policy_loss": values,
        "advantage": stream.advantages,
        "log_prob": stream.log_probs,
        "ratio": terms.ratio,
        "ratio_square": terms.ratio**2,
        "clip_low": terms.low,
        "clip_high": terms.high,
        "clip_dual": terms.dual,
        "approx_kl": -token,
        "approx_kl3": token.exp() - 1.0 - token,
    }
    if weights is not None:
        figures |= {"weight": weights, "weight_square": weights**2, "weight_zero": weights == 0}
    if reference is not None:
        figures["kl"] = divergence(stream.masked(stream.log_probs), stream.masked(reference), objective.kl)
    if entropy is not None:
        figures["entropy"] = entropy
    if objective.kl_coef:
        _check_given(reference, "kl_coef", objective.kl_coef, "reference")
        weighted = figures["kl"] * terms.ratio if objective.kl_weighted else figures["kl"]
        values = values + objective.kl_coef * weighted
    if objective.entropy_coef:
        _check_given(entropy, "entropy_coef", objective.entropy_coef, "entropy")
        values = values - objective.entropy_coef * figures["entropy"]
    return LossSum(
        aggregated(values, stream, objective),
        {name: figure(found, stream, objective) for name, found in figures.items()},
    )


def figure(values: Tensor, stream: Stream, objective: Objective) -> Tensor:
    """A metric: (1, T) → (), a sum that divided by a step's units is a mean over tokens, or over answers of those."""
    found = values.detach().to(stream.log_probs.dtype)
    return stream.masked(found).sum() if objective.unit == "tokens" else stream.means(found).sum()


def _check_given(value: Tensor | None, key: str, weight: float, name: str) -> None:
    if value is None:
        raise InvalidRun(f"{key} = {weight:g} and the batch has no {name}.", remedy=f"{key} = 0, or give it")
