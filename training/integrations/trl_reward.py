"""A reward model with TRL's RewardTrainer and our score head.

Rows of the data file: {"prompt": "…", "chosen": "…", "rejected": "…"}. A causal checkpoint gives the backbone, the
score head is drawn by `--seed`; what is written is transformers' `…ForSequenceClassification` with one label.

    python -m bestiary.training.integrations.trl_reward --help
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from bestiary.models import AutoDecoder
from bestiary.training.integrations.example import adapters
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.script import dataset, finish, parser, settings
from bestiary.training.integrations.transformers_trainer import DecoderTrainer

with needs("trl", "bestiary[trl]"):
    from trl import RewardConfig, RewardTrainer


ROW = '{"prompt": …, "chosen": …, "rejected": …}'


class DecoderRewardTrainer(DecoderTrainer, RewardTrainer):
    """`RewardTrainer` for a `Decoder` with a score head; see `DecoderTrainer`.

    RewardTrainer hands the column `margin`, which its loss reads, to the model too; ours refuses names that it does not
    know. Documents end where the attention mask ends, also where their last token is the pad token (`layers/score.py`).
    """

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """RewardTrainer's, of a model that is not shown the margins."""

        def without_margin(margin: Tensor | None = None, **named: Any) -> Any:
            return model(**named)

        return super().compute_loss(without_margin, inputs, return_outputs, num_items_in_batch)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the script; returns the folder of the finished checkpoint."""
    command = parser(
        "trl_reward", "A reward model with TRL's RewardTrainer.", data='{"prompt": …, "chosen": …, "rejected": …}'
    )
    command.add_argument("--seed", type=int, default=0, help="of a fresh score head (0)")
    given = command.parse_args(arguments)
    torch.manual_seed(given.seed)
    trainer = DecoderRewardTrainer(
        model=AutoDecoder.from_pretrained(given.model, dtype=torch.float32, lora=adapters(given.lora), head="score"),
        args=RewardConfig(**settings(given), max_length=given.max_length, seed=given.seed),
        train_dataset=dataset(given.data),
        processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
    )
    return finish(trainer, given)


if __name__ == "__main__":
    main()
