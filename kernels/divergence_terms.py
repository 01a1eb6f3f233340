"""Divergences between two distributions over the vocabulary, word by word, and their slopes.

Each is a sum of terms that are never negative and vanish to second order where both agree: rounding of the logits
enters multiplied by the difference between student and teacher, not by one.

    KL(p ‖ q) = Σ p r + (q − p),  r = log p − log q            since Σ q = Σ p
    β KL(t ‖ m) + (1 − β) KL(s ‖ m) = Σ (1 − β) s d − m log m/t,  d = log s − log t,  log m/t = log(β + (1 − β) e^d)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_FAR = 60.0  # of a log-ratio of probabilities: what weighs less than e^−60 of the other counts for nothing

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Measure:
    """Which divergence; `beta`, the teacher's share of the mixture, matters for "jsd" alone."""

    kind: Kind
    beta: float

    def plain(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(…,) of log-probabilities (…, V), as it is defined; differentiable as often as wanted."""
        if self.kind == "forward_kl":
            return _kl(teacher, student)
        if self.kind == "reverse_kl":
            return _kl(student, teacher)
        nothing = (student == -torch.inf) & (teacher == -torch.inf)  # where the derivative of logaddexp is 0 / 0
        parts = (column.masked_fill(nothing, 0.0) for column in (student, teacher))
        mixture = self._mixture(*parts).masked_fill(nothing, -torch.inf)
        return self.beta * _kl(teacher, mixture) + (1.0 - self.beta) * _kl(student, mixture)

    def terms(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(R, C) of log-probabilities (R, C), to sum over the vocabulary."""
        s, t, d = student.exp(), teacher.exp(), student - teacher
        if self.kind == "forward_kl":
            return _bregman(t, s, -d)
        if self.kind == "reverse_kl":
            return _bregman(s, t, d)
        d = d.clamp_(-_FAR, _FAR)
        ratio = self._log_mixture(d)
        mine = ((1.0 - self.beta) * s * (d - ratio)).masked_fill_(s == 0, 0.0)
        return mine.sub_((self.beta * t * ratio).masked_fill_(t == 0, 0.0))

    def pull(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(R, C) terms of the mean over s that `slope` subtracts."""
        s = student.exp()
        return (s * self._own(student - teacher)).masked_fill_(s == 0, 0.0)

    def slope(self, student: Tensor, teacher: Tensor, pull: Tensor) -> Tensor:
        """(R, C) derivative by the student's logits; `pull` (R,) is the sum of its terms over the vocabulary."""
        s = student.exp()
        if self.kind == "forward_kl":
            return s - teacher.exp()
        return (s * (self._own(student - teacher) - pull[:, None])).masked_fill_(s == 0, 0.0)

    def _own(self, d: Tensor) -> Tensor:
        """What each s_c multiplies in the derivative: log s/t, or (1 − β) log s/m."""
        if self.kind != "jsd":
            return d
        d = d.clamp_(-_FAR, _FAR)
        return (1.0 - self.beta) * (d - self._log_mixture(d))

    def _mixture(self, student: Tensor, teacher: Tensor) -> Tensor:
        return torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))

    def _log_mixture(self, d: Tensor) -> Tensor:
        """log m/t, in two ways of which one is exact near d = 0 and the other far from it."""
        near = torch.log1p((1.0 - self.beta) * torch.expm1(d))
        beyond = self._mixture(d, torch.zeros_like(d))
        return near.where(d.abs() < 1.0, beyond)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """(…,) KL of log-probabilities; a word without probability under p counts for nothing, whatever q says."""
    nothing = p == -torch.inf
    return (p.exp() * (p - q).masked_fill(nothing, 0.0)).sum(-1)


def _bregman(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """p r + q − p with r = log p − log q."""
    correction = (p * torch.expm1(-r)).where(r.abs() < 1.0, q - p)
    return (p * r).masked_fill_(p == 0, 0.0).add_(correction)
