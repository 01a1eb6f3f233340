"""The log-prob core in plain torch operations: any device, any dtype, gradients of every order.

The definition that the other implementations are held to. Chunks of tokens are computed again in the backward pass.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bestiary.kernels.head import head_logits
from bestiary.kernels.log_prob_terms import LogitMap, LogProb, ScalarLoss, Setting

LOGITS_PER_CHUNK = 2**26  # 256 MiB of fp32 logits


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap) -> Tensor:
    """(R, V) in the inputs' dtype: cap(h Wᵀ / divisor + b) / temperature, in multiples of 64 columns."""
    logits = head_logits(hidden, weight, divisor=logit_map.divisor)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if logit_map.softcap is not None:
        logits = torch.tanh(logits / logit_map.softcap) * logit_map.softcap
    return logits if logit_map.temperature == 1.0 else logits / logit_map.temperature


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, setting: Setting) -> LogProb:
    """Per-token log-probabilities; arguments as checked by `linear_log_prob`."""
    wanted = setting.wanted
    hidden, weight = hidden.to(setting.dtype), weight.to(setting.dtype)
    index = (target != setting.ignore_index).nonzero().squeeze(-1)
    rows = max(1, LOGITS_PER_CHUNK // weight.shape[0])

    def chunk(h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(h.device.type, enabled=False):
            logits = logits_of(h, weight, bias, setting.logit_map)
        log_p = logits.log_softmax(-1)
        out = [log_p.gather(-1, y[:, None]).squeeze(-1), logits.logsumexp(-1)]
        if wanted.entropy:  # a logit of −∞ has p log p = 0, and no gradient
            out.append(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1))
        if wanted.top1:
            out.append(logits.argmax(-1))
        if wanted.logit_mean:
            out.append(logits.mean(-1) if wanted.mean_weights is None else logits @ wanted.mean_weights)
        return tuple(out)

    parts = [
        checkpoint(chunk, h, weight, bias, y, use_reentrant=False)
        for h, y in zip(hidden[index].split(rows), target[index].split(rows), strict=True)
    ]
    asked = {"entropy": wanted.entropy, "top1": wanted.top1, "logit_mean": wanted.logit_mean}
    names = ["log_prob", "lse", *(name for name, here in asked.items() if here)]
    columns = {name: torch.cat(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
    return LogProb(
        **{
            name: values.new_full(target.shape, -1 if name == "top1" else 0).index_put((index,), values)
            for name, values in columns.items()
        }
    )


def scalar_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: ScalarLoss, setting: Setting
) -> tuple[Tensor, LogProb]:
    """() loss, and log-probabilities without a graph."""
    out = log_prob(hidden, weight, bias, target, setting)
    return loss.terms(out).sum(), out.detached()
