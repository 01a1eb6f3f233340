"""The language-model head: logits, or log-probabilities through the log-prob core."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.kernels.allowed import linear_allowed_log_prob
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.divergence import Distillation, TeacherHead, linear_divergence
from bestiary.kernels.head import head_logits
from bestiary.kernels.log_prob import LogProb, linear_log_prob
from bestiary.models.config import DecoderConfig


class Head(nn.Module):
    """weight (V, H), one Parameter with the embedding when the config ties them. Nobody reads it from outside."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = config.hidden_size, config.vocab_size
        self.divisor, self.softcap = config.logits_divisor, config.final_logit_softcap
        self.tied = config.tie_word_embeddings
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        entropy: bool = False,
        top1: bool = False,
        logit_mean: bool = False,
        allowed: Tensor | None = None,
        loss: bool = False,
        num_items: Tensor | float | None = None,
        distillation: Distillation | None = None,
        as_teacher: bool = False,
    ) -> Tensor | LogProb | tuple[Tensor, LogProb] | TeacherHead:
        """Logits (..., V) of hidden (..., H); with `targets` (...,) a flat `LogProb` of them, no logits.

        entropy, top1, logit_mean: more columns of it (`loss` has no logit_mean).
        With `allowed` (..., k) among those words, −1 for none; then entropy is the only further column.
        With `loss` the pair (−Σ log p / num_items, `LogProb` without a graph), at three quarters of the cost.
        num_items None: the number of targets.
        With `distillation` the divergences (N,), with `loss` Σ / num_items, of the tokens that have a target.
        With `as_teacher` hidden states and weight for a student's `distillation`, without a graph.
        """
        if as_teacher:
            flat = hidden.detach().reshape(-1, hidden.shape[-1])
            return TeacherHead(flat, self.weight.detach(), None, self.divisor, self.softcap)
        if distillation is not None:
            return linear_divergence(
                hidden.reshape(-1, hidden.shape[-1]),
                self.weight,
                distillation.teacher,
                kind=distillation.kind,
                beta=distillation.beta,
                divisor=self.divisor,
                softcap=self.softcap,
                temperature=temperature,
                mask=None if targets is None else targets.reshape(-1) != ignore_index,
                reduction="mean" if loss else "none",
                num_items=num_items,
            )
        if targets is None:
            return head_logits(hidden, self.weight, divisor=self.divisor, softcap=self.softcap)
        rows = (hidden.reshape(-1, hidden.shape[-1]), self.weight, targets.reshape(-1))
        options: dict[str, Any] = {
            "divisor": self.divisor,
            "softcap": self.softcap,
            "temperature": temperature,
            "ignore_index": ignore_index,
            "entropy": entropy,
            "top1": top1,
        }
        if allowed is not None:
            return linear_allowed_log_prob(
                *rows,
                allowed.reshape(-1, allowed.shape[-1]),
                divisor=self.divisor,
                softcap=self.softcap,
                temperature=temperature,
                ignore_index=ignore_index,
                entropy=entropy,
            )
        if loss:
            return linear_cross_entropy(*rows, **options, num_items=num_items, return_log_prob=True)
        return linear_log_prob(*rows, **options, logit_mean=logit_mean)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The weight; where it is the embedding's, a walk that takes each module's own (`recurse=False`) finds nothing.

        torch's distributed checkpoint walks so and expects of `state_dict` every name that it finds, FSDP2 walks so to
        hand each Parameter to one group.
        """
        if self.tied and remove_duplicate and not recurse:
            return iter(())
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        # A copy of the whole model copies the embedding first. A copy of the head alone (PEFT's modules_to_save) stands
        # for itself: its weight trains apart and must be saved.
        alone = id(self.weight) not in memo
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        copied.tied = self.tied and not alone
        return copied

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tied={self.tied}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.tied:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.tied and prefix + "weight" in missing_keys:
            missing_keys.remove(prefix + "weight")
