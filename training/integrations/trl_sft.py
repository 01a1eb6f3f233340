"""Supervised fine-tuning with TRL's SFTTrainer.

Rows of the data file: {"prompt": "…", "completion": "…"}, of which the completion is trained, or {"text": "…"}, or
{"messages": […]} with a chat template. `--packing` packs them to `--max-length` tokens.

    python -m bestiary.training.integrations.trl_sft --help
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from bestiary.training.integrations.example import load
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.script import dataset, finish, parser, settings
from bestiary.training.integrations.transformers_trainer import DecoderTrainer
from bestiary.training.integrations.trl_head import decoder_of, use_our_head

with needs("trl", "bestiary[trl]"):
    from trl import SFTConfig, SFTTrainer


class DecoderSFTTrainer(DecoderTrainer, SFTTrainer):
    """`SFTTrainer` for a `Decoder`: its loss comes from the model's own head (`trl_head`), and see `DecoderTrainer`.

    SFTTrainer asks for the router's loss in every call and also in the config of a MoE model, which is an architecture
    field and would be exported: there it is set back.
    """

    def __init__(self, model: nn.Module, *arguments: Any, **named: Any) -> None:
        super().__init__(model, *arguments, **named)
        decoder = decoder_of(self.model)
        if decoder.decoder_config.moe is not None:
            decoder.config.output_router_logits = decoder.decoder_config.output_router_logits
        use_our_head(decoder, entropy=True, top1=True)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the script; returns the folder of the finished checkpoint."""
    command = parser("trl_sft", "Supervised fine-tuning with TRL's SFTTrainer.", data='{"prompt": …, "completion": …}')
    command.add_argument("--packing", action="store_true", help="pack rows to --max-length tokens")
    given = command.parse_args(arguments)
    trainer = DecoderSFTTrainer(
        model=load(given.model, given.lora),
        args=SFTConfig(**settings(given), max_length=given.max_length, packing=given.packing),
        train_dataset=dataset(given.data),
        processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
    )
    return finish(trainer, given)


if __name__ == "__main__":
    main()
