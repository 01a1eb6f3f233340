"""Distillation losses: divergences between a student's and a teacher's next words, (N, V) logits never existing."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from bestiary.kernels import divergence_chunked
from bestiary.kernels.dispatch import choose
from bestiary.kernels.divergence_chunked import Settings, Teacher
from bestiary.kernels.divergence_terms import Kind, Measure
from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.log_prob import uncompiled
from bestiary.kernels.log_prob_reference import LOGITS_PER_CHUNK, logits_of
from bestiary.kernels.log_prob_terms import LogitMap
from bestiary.kernels.precision import at_least_fp32
from bestiary.kernels.selected import selected_log_prob
from bestiary.kernels.vocab_parallel import Local, localised

Tail = Literal["bucket", "renormalise"]


class TeacherHead(NamedTuple):
    """A teacher by its last hidden states (N, H_t) and head (V, H_t), over the student's vocabulary.

    bias, divisor, softcap: of its logits, as `linear_log_prob` has them; the temperature is the student's.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    divisor: float = 1.0
    softcap: float | None = None


class TopK(NamedTuple):
    """A teacher by the log-probabilities (N, k) it gave to words (N, k), −1 for no word.

    They were computed at the temperature that is asked for.
    tail: "bucket": all other words are one word, on both sides, so the divergence is a lower bound of the full one.
        "renormalise": the words named are all there are.
    """

    words: Tensor
    log_prob: Tensor
    tail: Tail = "bucket"


@dataclass(frozen=True, eq=False)
class Distillation:
    """A teacher, and which divergence from it is wanted; see `linear_divergence`.

    A dataclass, and so a leaf of torch's trees: wrappers that cast what a model is called with leave the teacher alone.
    """

    teacher: TeacherHead | TopK
    kind: Kind = "forward_kl"
    beta: float = 0.5


@uncompiled
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead | TopK,
    *,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    bias: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    token_weights: Tensor | None = None,
    num_items: Tensor | float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Divergence of a linear head from a teacher.

        forward_kl   KL(t ‖ s) = Σ t (log t − log s)
        reverse_kl   KL(s ‖ t) = Σ s (log s − log t)
        jsd          β KL(t ‖ m) + (1 − β) KL(s ‖ m),   m = β t + (1 − β) s

    with s and t from both sides' logits divided by `temperature`, whose square is not multiplied in. The generalised
    Jensen–Shannon divergence is that of GKD (arXiv:2306.13649, equation 1).

    Args:
        hidden: (N, H).   weight: (V, H).   bias, divisor, softcap, temperature: as `linear_log_prob`.
        teacher: `TeacherHead` (no gradient flows into it) or `TopK`.
        beta: in (0, 1), for "jsd".
        mask: (N,) bool, tokens that count; others are never read.
        reduction: "none" (N,), 0 where masked; "sum"; "mean": Σ w_i D_i / Σ w_i, or / num_items.
        token_weights: w, (N,), without gradient.
        group: ranks that share the vocabulary, as in `linear_log_prob`; a `TeacherHead` is split as the student is, a
            `TopK` is the same on every rank.
    Returns:
        In at least fp32, differentiable with respect to hidden, weight and bias.
    Raises:
        InvalidArgument: shapes, vocabularies, placements or options that do not fit.
        LabelOutOfRange: a word of `TopK`.   UnsupportedDispatch: second-order gradients of the chunked implementation.
    Cost:
        `TeacherHead`: 6·N·H·V + 2·N·H_t·V FLOPs for a scalar, 8 and 4 with "none"; scratch: 2·R·V logits, at most
        256 MiB or 128 to 256 rows. `TopK`: as `linear_selected_log_prob`.
    """
    measure, logit_map = _measure(kind, beta), LogitMap(divisor, softcap, temperature)
    dtype = at_least_fp32(torch.promote_types(hidden.dtype, weight.dtype))
    _check(hidden, weight, bias, teacher, mask, token_weights, reduction, num_items)
    counted = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device) if mask is None else mask
    share = counted.to(dtype) if token_weights is None else token_weights.detach().to(dtype).where(counted, 0.0)
    if reduction == "mean":
        items = torch.as_tensor(share.sum() if num_items is None else num_items, dtype=dtype, device=share.device)
        share = share / items.where(items != 0, 1.0)
    index = None if mask is None else mask.nonzero().squeeze(-1)
    local = localised(hidden, weight, bias, counted, group)
    if isinstance(teacher, TopK):
        rows = slice(None) if index is None else index
        part = TopK(teacher.words[rows], teacher.log_prob[rows].detach().to(dtype), teacher.tail)
        found = selected_log_prob(local._replace(hidden=local.hidden[rows], target=part.words), logit_map)
        values = measure.plain(*_over_words(part, found.log_prob, found.log_rest))
        values = values if index is None else values.new_zeros(len(share)).index_put((index,), values)
        return share * values if reduction == "none" else (share * values).sum()
    other = _other(teacher, counted, group, local, temperature)
    student = (local.hidden, local.weight, local.bias)
    sharded = "its vocabulary is not split over ranks" if local.shard is not None else None
    if choose("divergence", {"chunked": None, "reference": sharded}) == "reference":
        values = _reference(student, logit_map, other, measure, index, dtype)
        return share * values if reduction == "none" else (share * values).sum()
    settings = Settings(logit_map, other, measure, index, dtype, local.vocab_size, local.shard)
    if reduction == "none":
        return share * divergence_chunked.divergence(student, None, settings)
    return divergence_chunked.divergence(student, share, settings)


def _other(
    teacher: TeacherHead, counted: Tensor, group: ProcessGroup | None, student: Local, temperature: float
) -> Teacher:
    """The teacher's part of the vocabulary on this rank, which must be the student's."""
    local = localised(teacher.hidden, teacher.weight, teacher.bias, counted, group)
    mine, other = ((x.vocab_size, len(x.weight), x.shard and x.shard.start) for x in (student, local))
    if mine != other:
        raise InvalidArgument(
            f"student and teacher hold {mine[1]} and {other[1]} of {mine[0]} and {other[0]} words on this rank.",
            remedy="split both heads over the ranks in the same parts",
        )
    return Teacher(local.hidden, local.weight, local.bias, LogitMap(teacher.divisor, teacher.softcap, temperature))


def _over_words(teacher: TopK, log_prob: Tensor, log_rest: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher over the words named and, with a bucket, all others as one."""
    given = teacher.log_prob.masked_fill(teacher.words < 0, -torch.inf)
    if teacher.tail == "renormalise":
        if (teacher.words < 0).all(-1).any():
            raise InvalidArgument("a token has no words, and tail = 'renormalise' counts no others.", remedy="mask it")
        return log_prob - log_prob.logsumexp(-1, keepdim=True), given - given.logsumexp(-1, keepdim=True)
    rest = (-given.exp().sum(-1)).log1p()  # by rounding NaN, or not −∞ where no word is left
    rest = rest.masked_fill(rest.isnan() | (log_rest.detach() == -torch.inf), -torch.inf)
    return torch.cat((log_prob, log_rest[:, None]), -1), torch.cat((given, rest[:, None]), -1)


def _reference(
    student: tuple[Tensor, Tensor, Tensor | None],
    logit_map: LogitMap,
    teacher: Teacher,
    measure: Measure,
    index: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(N,) in plain torch, by checkpointed chunks of tokens, differentiable as often as wanted."""
    hidden, weight, bias = student
    heads = (weight.to(dtype), bias, teacher.weight.to(dtype), teacher.bias)

    def chunk(h: Tensor, other: Tensor, w: Tensor, b: Tensor | None, w_t: Tensor, b_t: Tensor | None) -> Tensor:
        ours = logits_of(h.to(dtype), w, b, logit_map).log_softmax(-1)
        return measure.plain(ours, logits_of(other.to(dtype), w_t, b_t, teacher.map).log_softmax(-1))

    rows, size = (slice(None) if index is None else index), max(1, LOGITS_PER_CHUNK // weight.shape[0])
    parts = zip(hidden[rows].split(size), teacher.hidden[rows].split(size), strict=True)
    values = torch.cat([checkpoint(chunk, h, other, *heads, use_reentrant=False) for h, other in parts])
    return values if index is None else values.new_zeros(len(hidden)).index_put((index,), values)


def _measure(kind: Kind, beta: float) -> Measure:
    if kind not in get_args(Kind):
        raise InvalidArgument(f"kind = {kind!r}.", remedy='one of "forward_kl", "reverse_kl", "jsd"')
    if kind == "jsd" and not 0.0 < beta < 1.0:
        raise InvalidArgument(
            f"beta = {beta} is outside (0, 1).", remedy='its limits are kind = "forward_kl" (0) and "reverse_kl" (1)'
        )
    return Measure(kind, beta)


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: TeacherHead | TopK,
    mask: Tensor | None,
    token_weights: Tensor | None,
    reduction: str,
    num_items: Tensor | float | None,
) -> None:
    tensors = {"hidden": hidden, "weight": weight}
    tensors |= {f"teacher.{name}": tensor for name, tensor in zip(teacher._fields[:2], teacher[:2], strict=True)}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            raise InvalidArgument(f"{name} is {tuple(tensor.shape)}.", remedy="pass two dimensions")
    if hidden.shape[1] != weight.shape[1] or len(teacher[0]) != len(hidden):
        raise InvalidArgument(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}, the teacher's {tuple(teacher[0].shape)}.",
            remedy="pass (N, H), (V, H) and N rows of the teacher",
        )
    biases = [("bias", bias, weight)]
    if isinstance(teacher, TeacherHead):
        biases.append(("teacher.bias", teacher.bias, teacher.weight))
    for name, given, head in biases:
        if given is not None and given.shape != head.shape[:1]:
            raise InvalidArgument(f"{name} is {tuple(given.shape)}.", remedy=f"pass ({head.shape[0]},)")
    if isinstance(teacher, TeacherHead) and (
        teacher.weight.shape[0] != weight.shape[0] or teacher.weight.shape[1] != teacher.hidden.shape[1]
    ):
        raise InvalidArgument(
            f"the teacher's head is {tuple(teacher.weight.shape)} for hidden states of {tuple(teacher.hidden.shape)} "
            f"and a student of {weight.shape[0]} words.",
            remedy="both must share a vocabulary: cut rows that one of them does not have",
        )
    if isinstance(teacher, TopK) and (
        teacher.words.shape != teacher.log_prob.shape or teacher.tail not in get_args(Tail)
    ):
        raise InvalidArgument(
            f"TopK of words {tuple(teacher.words.shape)}, log_prob {tuple(teacher.log_prob.shape)}, "
            f"tail {teacher.tail!r}.",
            remedy='pass two tensors of one shape and tail "bucket" or "renormalise"',
        )
    for name, column in (("mask", mask), ("token_weights", token_weights)):
        if column is not None and column.shape != hidden.shape[:1]:
            raise InvalidArgument(f"{name} is {tuple(column.shape)}.", remedy=f"pass ({len(hidden)},)")
    if mask is not None and mask.dtype != torch.bool:
        raise InvalidArgument(f"mask is {mask.dtype}.", remedy="pass bool: labels != -100")
    if reduction not in ("mean", "sum", "none") or (num_items is not None and reduction != "mean"):
        raise InvalidArgument(
            f"reduction = {reduction!r}, num_items = {num_items}.",
            remedy='one of "mean", "sum", "none"; num_items goes with "mean"',
        )
