"""Our head in TRL's trainers for language models (SFT, DPO, GRPO).

TRL replaces `model.forward` by one that runs the backbone, takes the weight of the head and computes log-probabilities
with a kernel of its own. Ours has another backbone call and a head whose weight nobody reads from outside, so that
forward stops at once; and were it to run, what the head does to logits would be up to TRL's reading of the config.
`use_our_head` puts the model's own log-prob core in its place, with the output that TRL's trainers read.
"""

from __future__ import annotations

from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.kernels.dispatch import as_trained
from bestiary.models import Decoder
from bestiary.models.inputs import read_inputs, shifted
from bestiary.models.lora import adapters_off
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.needs import needs

with needs("trl", "bestiary[trl]"):
    from peft import PeftModel
    from trl.trainer.utils import FusedCausalLMOutput


def decoder_of(model: nn.Module) -> Decoder:
    """The decoder itself, or the one that PEFT wraps.

    Raises:
        InvalidRun: neither.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, Decoder):
        raise InvalidRun(
            f"the model is a {type(inner).__name__}.",
            remedy='AutoDecoder.from_pretrained(…, backend="native"); transformers\' own models need nothing of this',
        )
    return inner


def use_our_head(
    model: nn.Module, *, temperature: float = 1.0, entropy: bool = False, top1: bool = False, logit_mean: bool = False
) -> None:
    """Answer `model(…, labels=…, fused_lm_head=True)` by the model's own log-prob core; other calls as ever.

    Call it after the trainer's constructor, which puts TRL's forward there; a reference is prepared again after it.

    Args:
        model: a `Decoder`, PEFT around one, or `AdaptersOff`.
        temperature: divides the logits.
        entropy, top1, logit_mean: columns of the answer beside the log-probabilities; TRL's names are `entropy`,
            `is_top1` and `mean_logits`. `log_sum_sq_probs` (weighted DPO) there is not.
    """
    if isinstance(model, AdaptersOff):
        use_our_head(model.policy, temperature=temperature, entropy=entropy, top1=top1, logit_mean=logit_mean)
        model.forward = MethodType(AdaptersOff.forward, model)  # type: ignore[method-assign]  # in place of TRL's
        model._is_accelerate_prepared = False  # type: ignore[assignment]
        return
    columns = {"entropy": entropy, "top1": top1, "logit_mean": logit_mean}

    def forward(self: Decoder, *arguments: Any, fused_lm_head: bool = False, **named: Any) -> Any:
        if not fused_lm_head:
            return Decoder.forward(self, *arguments, **named)
        return _scored(self, *arguments, **named, temperature=temperature, columns=columns)

    decoder = decoder_of(model)
    decoder.forward = MethodType(forward, decoder)  # type: ignore[method-assign]
    decoder._is_accelerate_prepared = False  # type: ignore[assignment]  # its autocast went with the old forward


def _scored(
    decoder: Decoder,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    output_router_logits: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    *,
    temperature: float,
    columns: dict[str, bool],
    **ignored: Any,
) -> FusedCausalLMOutput:
    """What TRL's forward returns: columns (B, T − 1) of `labels`, (B, T) of `shift_labels`, 0 where ignored."""
    unknown = set(ignored) - {"use_cache", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    if unknown or ignored.get("use_cache"):
        raise InvalidRun(
            f"fused_lm_head=True together with {', '.join(sorted(unknown)) or 'use_cache'}.",
            remedy="drop it: the model does not read it here",
        )
    inputs = read_inputs(input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, None)
    targets = shift_labels if shift_labels is not None else shifted(labels, inputs.documents)
    if targets is None:
        raise InvalidRun("fused_lm_head=True without labels.", remedy="labels or shift_labels say what is scored")
    with as_trained():  # the reference, and the policy before its update, are scored without gradients
        hidden, router_logits = decoder.model(inputs)
        core = decoder.lm_head(hidden, targets, temperature=temperature, **columns)
    shown = slice(None, targets.shape[1] - (shift_labels is None))

    def laid_out(column: Tensor | None) -> Tensor | None:
        return None if column is None else column.view_as(targets)[:, shown]

    mask, log_probs = (targets != -100)[:, shown], laid_out(core.log_prob)
    items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    output: dict[str, Any] = {"loss": -core.log_prob.sum() / items, "aux_loss": None}
    wanted = decoder.decoder_config.output_router_logits if output_router_logits is None else output_router_logits
    if wanted and router_logits:
        decoder.add_router_loss(output, router_logits, None if attention_mask is None else attention_mask.reshape(-1))
    return FusedCausalLMOutput(
        loss=output["loss"],
        log_probs=log_probs,
        entropy=laid_out(core.entropy),
        mean_logits=laid_out(core.logit_mean),
        is_top1=None if core.top1 is None else laid_out(core.top1 == targets.reshape(-1)),
        label_mask=mask,
        aux_loss=output["aux_loss"],
    )


class AdaptersOff(nn.Module):
    """The policy without its adapters, as the reference model of a preference or GRPO trainer: no second model.

    Its parameters are the policy's own, so nothing may be copied into it (`sync_ref_model`).
    """

    def __init__(self, policy: Decoder) -> None:
        super().__init__()
        self.policy = policy
        self.config = policy.config

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The policy's answer inside `adapters_off`, without a graph, in the policy's own mode of training."""
        with torch.no_grad(), adapters_off(self.policy):
            return self.policy(*arguments, **named)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """The policy's, which TRL switches off around a reference pass."""
        return self.policy.is_gradient_checkpointing


def reference_of(policy: Decoder, *, synced: bool) -> nn.Module:
    """Whom a policy is compared with: itself without adapters, or a frozen copy of what it is now.

    Args:
        synced: whether the trainer will copy the policy into the reference now and then.
    Raises:
        InvalidRun: `synced`, and the policy is its own reference.
    """
    if policy.decoder_config.lora is not None:
        if synced:
            raise InvalidRun(
                "sync_ref_model = True with LoRA: the reference is the policy with its adapters off.",
                remedy="sync_ref_model=False, or train all weights",
            )
        return AdaptersOff(policy)
    return deepcopy(policy).requires_grad_(False).eval()
