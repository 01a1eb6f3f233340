"""The recipe of reinforcement learning: packs of experiences to the sum that the loop divides."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bestiary.models import Decoder
from bestiary.training.data.packing import Pack
from bestiary.training.data.samples import Kind
from bestiary.training.data.tokens import IGNORED
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import Batch, LossSum
from bestiary.training.recipes.documents import document_batch, model_inputs, on, router_term
from bestiary.training.rl.algorithms import Algorithm, named
from bestiary.training.rl.losses import figure, policy_loss
from bestiary.training.rl.mismatch import Correction, on_policy
from bestiary.training.rl.packing import ExperiencePack
from bestiary.training.rl.records import Values
from bestiary.training.rl.shared_prompts import scored
from bestiary.training.rl.stream import FAR, Stream


class PolicyGradient:
    """Args:
    algorithm: of `algorithms`, or its name.
    correction: of what the sampling engine computes otherwise than the policy; None: none.
    off_policy: leave out answers with a negative advantage whose mean log π_rollout − log π is above this
        (`mismatch.on_policy`, against the current weights); None: none.
    anchor: whom the importance ratio is against. old: the policy before the step, by the trainer's computation, or
        itself where the experiences hold no `old_log_probs`. rollout: the log-probabilities of the engine (verl's
        bypass mode), whose ratio is then its own correction.
    entropy: measure the entropy of the policy at each trained token, also where the objective does not ask for it.

    The divergence from the reference is measured where the algorithm asks for one, in the loss or in the reward.
    The temperature is that at which the experiences were sampled; where they were constrained, log-probabilities and
    entropy are those of the distribution over what was allowed. A sequence is a document with a trained token.

    Raises:
        InvalidRun: an unknown algorithm, one that lacks its max_tokens, or a correction beside the anchor that is one.
    """

    name = "policy_gradient"
    kinds: frozenset[Kind] = frozenset({"prompt"})

    def __init__(
        self,
        algorithm: Algorithm | str = "grpo",
        *,
        correction: Correction | None = None,
        off_policy: float | None = None,
        anchor: Literal["old", "rollout"] = "old",
        entropy: bool = True,
    ) -> None:
        self.algorithm = named(algorithm) if isinstance(algorithm, str) else algorithm
        self.objective = self.algorithm.objective
        self.unit: Literal["tokens", "sequences"] = self.objective.unit
        _ = self.objective.divisor  # missing: said before anything is sampled
        if anchor not in ("old", "rollout"):
            raise InvalidRun(f"anchor = {anchor!r}.", remedy="old or rollout")
        if anchor == "rollout" and correction is not None:
            raise InvalidRun(
                f"correction.kind = {correction.kind} with anchor = rollout, which corrects the same difference.",
                remedy="anchor = old, or no correction",
            )
        self.correction, self.off_policy, self.anchor = correction, off_policy, anchor
        self._reference = self.objective.kl_coef or self.algorithm.advantage.kl_coef
        self._entropy = entropy or self.objective.entropy_coef > 0

    def batch(self, pack: Pack) -> Batch:
        """`document_batch` with the columns of the pack, (1, T), each at the position that predicts its token.

        Raises:
            InvalidRun: no pack of experiences, or the algorithm asks for a reference that they do not have.
        """
        if not isinstance(pack, ExperiencePack):
            raise InvalidRun(
                f"a pack of class {type(pack).__name__} under {self.name}, which trains on what a policy sampled.",
                remedy="bestiary.training.rl.packing.pack",
            )
        if self._reference and pack.reference_log_probs is None and pack.documents:
            raise InvalidRun(
                f"kl_coef = {self._reference:g} and the experiences hold no reference_log_probs.",
                remedy="kl_coef = 0, or packing.with_log_probs(reference, …, 'reference_log_probs')",
            )
        found = document_batch(pack) | pack.chosen_among() | {"temperature": pack.temperature, "shared": pack.shared}
        for name in ("rollout_log_probs", "advantages", "old_log_probs", "reference_log_probs"):
            values: Values | None = getattr(pack, name)
            if name == "reference_log_probs":
                if not self._reference:
                    continue
                # Figures have the same names in every process, also in one that has padding alone.
                values = np.zeros(len(pack.labels), np.float32) if values is None else values
            if values is not None:
                found[name] = torch.from_numpy(np.append(values[1:], values.dtype.type(0)))[None]
        return found

    def count(self, batch: Batch) -> int:
        """Trained tokens, or documents with one."""
        targets: Tensor = batch["targets"]
        return int(targets.sum()) if self.unit == "tokens" else int((targets > 0).sum())

    def loss(self, model: Decoder, batch: Batch) -> LossSum:
        """Sum over the tokens or sequences.

        Metrics: those of `losses.policy_loss`, and of the difference δ = log π − log π_rollout of the anchor policy's
        own computation: mismatch_mean |δ|, mismatch_mult_error e^|δ|, mismatch_kl −δ, mismatch_kl3 e^δ − δ − 1;
        off_policy, the share that is left out. `mismatch.Parity.figures` says what they are called elsewhere.
        """
        given = model_inputs(batch, model, "shift_labels", *({"allowed"} & batch.keys()))
        asked = {"return_entropy": True} if self._entropy else {}
        found = scored(model, given, batch["shared"], temperature=batch["temperature"], **asked)
        log_probs: Tensor = found["log_probs"]

        def column(name: str) -> Tensor | None:
            return on(batch[name], log_probs.device).to(log_probs.dtype) if name in batch else None

        rollout, advantages, stored = column("rollout_log_probs"), column("advantages"), column("old_log_probs")
        assert rollout is not None
        assert advantages is not None
        own = log_probs.detach() if stored is None else stored
        stream = Stream(
            log_probs,
            rollout if self.anchor == "rollout" else own,
            advantages,
            given["shift_labels"] != IGNORED,
            on(batch["document"], log_probs.device),
            int(batch["documents"]),
        )
        weights = None if self.correction is None else self.correction.weights(own, rollout, stream)
        more: dict[str, Tensor] = {}
        if self.off_policy is not None:
            kept = on_policy(log_probs, rollout, stream, self.off_policy)
            weights = kept.to(log_probs.dtype) if weights is None else weights * kept
            more["off_policy"] = ~kept
        delta = stream.masked(own - rollout)
        held = delta.clamp(-FAR, FAR)
        more |= {
            "mismatch_mean": delta.abs(),
            "mismatch_mult_error": held.abs().exp(),
            "mismatch_kl": -delta,
            "mismatch_kl3": held.exp() - held - 1.0,
        }
        made = policy_loss(
            stream,
            self.objective,
            weights=weights,
            reference=column("reference_log_probs"),
            entropy=found.entropy,
        )
        figures = {name: figure(values, stream, self.objective) for name, values in more.items()}
        return LossSum(made.total + router_term(model, found, self.count(batch)), {**made.metrics, **figures})
