"""Log-probabilities under a constraint: of a word among those that may come, and of no others."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bestiary.kernels.errors import InvalidArgument
from bestiary.kernels.log_prob import checked, uncompiled
from bestiary.kernels.log_prob_terms import LogitMap, LogProb
from bestiary.kernels.selected import NO_WORD, selected_log_prob


@uncompiled
def linear_allowed_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    allowed: Tensor,
    *,
    bias: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    group: ProcessGroup | None = None,
) -> LogProb:
    """Log-probability of `target` under a linear head whose next word is one of those allowed.

        log p(y | h, y ∈ A) = z_y − log Σ_{a ∈ A} exp z_a

    Taken of the words' log-probabilities among all, so the logits are those of `linear_log_prob` in every respect; how
    unlikely the words of A are together costs no digits.

    Args:
        hidden, weight, bias, divisor, softcap, temperature, group: as `linear_log_prob`.
        target: (N,) integers among the words allowed in its row, or `ignore_index`.
        allowed: (N, k) integers in [0, V), none twice in a row; −1 stands for no word. Rows of ignored targets are not
            read.
        entropy: −Σ p log p over the words allowed.
    Returns:
        `LogProb`, differentiable with respect to hidden, weight and bias. Its `lse` is the logarithm of the share that
        the words allowed have of all probability.
    Raises:
        InvalidArgument: shapes that do not fit, a word named twice, a target that is not allowed; names the row.
        LabelOutOfRange: a word or target outside the vocabulary.
    Cost:
        As `linear_selected_log_prob`, of the rows that count.
    """
    local = checked(hidden, weight, target, bias, ignore_index, group)
    if allowed.shape[:-1] != target.shape or allowed.is_floating_point():
        raise InvalidArgument(
            f"allowed is {tuple(allowed.shape)} {allowed.dtype} for {len(target)} targets.",
            remedy="pass (N, k) integers, −1 where there is no further word",
        )
    index = (local.target != ignore_index).nonzero().squeeze(-1)
    words, wanted = allowed[index].long(), local.target[index]
    here = words == wanted[:, None]
    lacking = ~here.any(-1)
    if lacking.any():
        row = int(lacking.nonzero()[0])
        raise InvalidArgument(
            f"target {int(wanted[row])} of row {int(index[row])} is not among the "
            f"{int((words[row] != NO_WORD).sum())} words allowed there.",
            remedy="the words that it was chosen from",
        )
    chosen = local._replace(hidden=local.hidden[index], target=words)
    found = selected_log_prob(chosen, LogitMap(divisor, softcap, temperature)).log_prob
    share = found.logsumexp(-1)
    among = found - share[:, None]
    place = here.to(torch.int8).argmax(-1, keepdim=True) if words.shape[1] else words

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(target)).index_put((index,), values)

    return LogProb(
        spread(among.gather(-1, place).sum(-1)),
        spread(share),
        spread(-(among.exp() * among.masked_fill(words == NO_WORD, 0.0)).sum(-1)) if entropy else None,
    )
