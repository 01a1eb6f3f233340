"""Preference optimisation with TRL's DPOTrainer.

Rows of the data file: {"prompt": "…", "chosen": "…", "rejected": "…"}. The reference is the checkpoint itself: with
`--lora` the policy without its adapters, else a frozen copy of it.

    python -m bestiary.training.integrations.trl_dpo --help
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.example import load
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.script import dataset, finish, parser, settings
from bestiary.training.integrations.transformers_trainer import DecoderTrainer
from bestiary.training.integrations.trl_head import decoder_of, reference_of, use_our_head

with needs("trl", "bestiary[trl]"):
    from datasets import Dataset
    from peft import PeftModel
    from trl import DPOConfig, DPOTrainer


ROW = '{"prompt": …, "chosen": …, "rejected": …}'


class DecoderDPOTrainer(DecoderTrainer, DPOTrainer):
    """`DPOTrainer` for a `Decoder`: policy and reference score by their own heads (`trl_head`); see `DecoderTrainer`.

    Without `ref_model` DPOTrainer would load transformers' model of the same checkpoint, and round otherwise than the
    policy. Here it is a copy of the policy, or with LoRA the policy itself. Of PEFT's adapters TRL makes the reference.

    Raises:
        InvalidRun: an option that asks for what the head does not compute, or for a synced reference with LoRA.
    """

    ref_model: Any
    _by_our_heads = False

    def __init__(self, model: nn.Module, ref_model: nn.Module | None = None, *, args: DPOConfig, **named: Any) -> None:
        if args.use_weighting:
            raise InvalidRun("use_weighting = True needs Σ p² of every token.", remedy="use_weighting=False")
        if ref_model is None and not isinstance(model, PeftModel):
            ref_model = reference_of(decoder_of(model), synced=args.sync_ref_model)
        super().__init__(model, ref_model, args=args, **named)
        self._score_by_our_heads()

    def _score_by_our_heads(self) -> None:
        if self._by_our_heads:
            return
        if self.ref_model is not None:
            use_our_head(self.ref_model)  # takes away the forward that the constructor prepared, and its autocast
            if not self.is_fsdp_enabled:
                self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)
        use_our_head(self.model, entropy=True, top1=True, logit_mean=True)
        self._by_our_heads = True

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self._score_by_our_heads()  # precompute_ref_log_probs: still inside the constructor
        return super()._precompute_ref_logps(dataset, name, batch_size)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the script; returns the folder of the finished checkpoint."""
    command = parser(
        "trl_dpo", "Preference optimisation with TRL's DPOTrainer.", data='{"prompt": …, "chosen": …, "rejected": …}'
    )
    command.add_argument("--beta", type=float, default=0.1, help="how far from the reference costs how much (0.1)")
    given = command.parse_args(arguments)
    trainer = DecoderDPOTrainer(
        model=load(given.model, given.lora),
        args=DPOConfig(**settings(given), max_length=given.max_length, beta=given.beta),
        train_dataset=dataset(given.data),
        processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
    )
    return finish(trainer, given)


if __name__ == "__main__":
    main()
