"""Two computations of the same policy disagree: how much, and what to do about it.

The engine that samples (other kernels, another precision, weights of an earlier step) gives log-probabilities that are
not those the trainer computes for the same tokens. `parity` measures that; `Correction` weighs tokens with
u = π_old / π_rollout, the old policy being the trainer's at the time of sampling; `on_policy` drops sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.names import known
from bestiary.training.rl.stream import FAR, Stream

CorrectionKind = Literal["tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]

# ------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Parity:
    """Sums over sampled tokens of δ = log π_policy − log π_rollout, so that parts of a batch add up.

    Attributes:
        tokens: compared.   total, absolute: Σ δ, Σ |δ|.   largest: max |δ|.
        multiplicative: Σ e^|δ|.   forward, backward: Σ of the never-negative estimates e^δ − δ − 1 and e^−δ + δ − 1.
        weight, weight_square: Σ e^δ, Σ e^2δ.
    """

    tokens: int = 0
    total: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    multiplicative: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0

    def __add__(self, other: Parity) -> Parity:
        sums = {name: value + vars(other)[name] for name, value in vars(self).items()}
        return Parity(**{**sums, "largest": max(self.largest, other.largest)})

    def figures(self) -> dict[str, float]:
        """What is logged.

        * mismatch/mean, mismatch/max: of |δ|; TRL's `sampling_logp_difference`.
        * mismatch/mult_error: mean e^|δ|, 1 where they agree; NeMo-RL's `token_mult_prob_error`, which it wants below
          1.05 before it admits a model.
        * mismatch/kl: mean −δ, of KL(π_rollout ‖ π_policy), unbiased and noisy; verl's `rollout_corr/kl`.
        * mismatch/kl3: mean e^δ − δ − 1, of the same; verl's `k3_kl`, NeMo-RL's `gen_kl_error`.
        * mismatch/kl3_reverse: mean e^−δ + δ − 1, NeMo-RL's `policy_kl_error`.
        * mismatch/ess: (Σ u)² / (n Σ u²), the share of samples that is left after weighing by u; verl's
          `rollout_is_eff_sample_size` is this of weights that were clamped.

        No tokens: all figures as if they agreed.
        """
        count = max(1, self.tokens)
        share = sample_share(self.weight / count, self.weight_square / count) if self.tokens else 1.0
        return {
            "mismatch/mean": self.absolute / count,
            "mismatch/max": self.largest,
            "mismatch/mult_error": self.multiplicative / count if self.tokens else 1.0,
            "mismatch/kl": 0.0 - self.total / count,
            "mismatch/kl3": self.forward / count,
            "mismatch/kl3_reverse": self.backward / count,
            "mismatch/ess": share,
        }


def parity(policy: Tensor, rollout: Tensor, trained: Tensor) -> Parity:
    """How far two lists of log-probabilities are apart.

    Args:
        policy, rollout: of one shape, of the same tokens at the same temperature.   trained: bool, where to look.
    Raises:
        InvalidRun: shapes differ, or a value that is compared is not finite.
    """
    if not policy.shape == rollout.shape == trained.shape:
        raise InvalidRun(
            f"log-probabilities {tuple(policy.shape)}, {tuple(rollout.shape)} and mask {tuple(trained.shape)}.",
            remedy="one value of each for every token",
        )
    delta = (policy.detach().double() - rollout.detach().double())[trained]
    if not bool(delta.isfinite().all()):
        place = int((~delta.isfinite()).nonzero()[0])
        raise InvalidRun(
            f"token {place} of {len(delta)} compared has a log-probability that is not finite "
            f"(policy {float(policy[trained][place]):g}, rollout {float(rollout[trained][place]):g}).",
            remedy="the engine must give the log-probability of every token that it sampled",
        )
    if not len(delta):
        return Parity()
    held = delta.clamp(-FAR, FAR)
    ratio = held.exp()
    return Parity(
        tokens=len(delta),
        total=float(delta.sum()),
        absolute=float(delta.abs().sum()),
        largest=float(delta.abs().max()),
        multiplicative=float(held.abs().exp().sum()),
        forward=float((ratio - held - 1.0).sum()),
        backward=float((1.0 / ratio + held - 1.0).sum()),
        weight=float(ratio.sum()),
        weight_square=float((ratio**2).sum()),
    )


def sample_share(mean: float, mean_square: float) -> float:
    """Kish's effective sample size of weights, as a share: mean² / mean of squares; 0 where all weights are 0."""
    return mean**2 / mean_square if mean_square > 0 else 0.0


# ------------------------------------------------------------------ correcting


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights of tokens from u = π_old / π_rollout.

    Attributes:
        kind: tis: truncated, u held in [low, high] (fengyao.notion.site/off-policy-rl; verl from above alone, at 2;
            OpenRLHF on both sides). mis: masked, u where it lies in [low, high] and 0 elsewhere. icepop: mis of tokens
            with both bounds (arXiv:2510.18855; there 0.5 and 5).
        level: token: u of each token. sequence: its product over the answer, at every token of it, as TRL's default
            `sequence_mask`, with 3, and verl's `sequence`. geometric: answers whose geometric mean of u lies in the
            bounds; tis weighs their tokens with that mean held in the bounds, mis with each token's own u, as
            OpenRLHF's `seq-mask-tis`.
        high, low: bounds.

    Bounds belong to what is weighed: 1 is agreement. TRL and verl give one upper bound and no lower one.

    Raises:
        InvalidRun: a bound outside its range; names it.
    """

    kind: CorrectionKind = "tis"
    level: CorrectionLevel = "token"
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        known(self.kind, get_args(CorrectionKind), "correction.kind")
        known(self.level, get_args(CorrectionLevel), "correction.level")
        if not self.high >= 1.0:
            raise InvalidRun(f"correction.high = {self.high:g}.", remedy="at least 1, which is agreement")
        if not 0.0 <= self.low <= 1.0:
            raise InvalidRun(f"correction.low = {self.low:g}.", remedy="in [0, 1]; 1 is agreement")
        if self.kind == "icepop" and self.level != "token":
            raise InvalidRun(f"correction.level = {self.level!r} of icepop.", remedy="token, or kind = mis")
        if self.kind == "icepop" and self.low == 0.0:
            raise InvalidRun("correction.low = 0 of icepop, which has two bounds.", remedy="0.5, or kind = mis")

    def weights(self, old: Tensor, rollout: Tensor, stream: Stream) -> Tensor:
        """(1, T) without a graph, 1 where nothing is trained.

        Args:
            old, rollout: (1, T), log-probabilities; `old` may be the policy's own, whose graph is left.
        """
        difference = stream.masked(old.detach() - rollout.detach())
        if self.level == "token":
            judged = difference
        elif self.level == "sequence":
            judged = stream.spread(stream.sums(difference))
        else:
            judged = stream.spread(stream.sums(difference) / stream.counts)
        bounded = judged.clamp(-FAR, FAR).exp()
        if self.kind == "tis":
            found = bounded.clamp(self.low, self.high)
        else:
            own = difference.clamp(-FAR, FAR).exp() if self.level == "geometric" else bounded
            found = torch.where((bounded >= self.low) & (bounded <= self.high), own, 0.0)
        return torch.where(stream.trained, found, 1.0)


def on_policy(old: Tensor, rollout: Tensor, stream: Stream, threshold: float) -> Tensor:
    """Which tokens stay under DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, equation 9), (1, T) bool.

    An answer is left out where its advantage is negative and the mean of log π_rollout − log π over its tokens is above
    the threshold: what the policy no longer says need not be unlearned. As TRL's `off_policy_mask_threshold`, which
    takes π at the current weights as well. Where advantages differ between the tokens of an answer, theirs decide, each
    for its token.

    Args:
        old: (1, T), of the current weights or those before the step.   threshold: above 0.
    Raises:
        InvalidRun: the threshold is not above 0.
    """
    if not (threshold > 0.0 and math.isfinite(threshold)):
        raise InvalidRun(f"off_policy = {threshold:g}.", remedy="above 0; None to leave it out")
    drift = stream.spread(stream.means((rollout - old).detach()))
    return (stream.advantages >= 0) | (drift <= threshold)
