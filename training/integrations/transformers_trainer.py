"""`transformers.Trainer`. Extra: `accelerate`.

python -m bestiary.training.integrations.transformers_trainer --help
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bestiary.bridges.streaming import stored_parameters
from bestiary.models import Decoder
from bestiary.models.protocol import bridge_of
from bestiary.training.errors import CheckpointRefused
from bestiary.training.integrations.example import collate, load, read_rows
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.script import finish, parser, settings

with needs("accelerate", "bestiary[accelerate]"):
    import accelerate  # noqa: F401  # transformers' Trainer is not there without it
    from transformers import Trainer, TrainingArguments


class DecoderTrainer(Trainer):
    """`transformers.Trainer` whose checkpoints are Hugging Face checkpoints of a `Decoder`.

    Training needs nothing of this. Trainer writes a model that is not its own as a bare `model.safetensors`, in our
    parameters' names and without a config. Here every `checkpoint-N` is what `save_pretrained` writes, a PEFT folder
    with our LoRA on, beside Trainer's optimiser, schedule and random states, and `resume_from_checkpoint` reads it back
    bit for bit. Put it in front of another trainer that derives from Trainer, and that one does the same:
    `class DecoderSFTTrainer(DecoderTrainer, SFTTrainer)`.

    Evaluation asks for the loss of rows that have every argument with "label" in its name: of `labels` and
    `shift_labels`, which our forward pass has too, the first is enough. `compute_metrics` is given log-probabilities.

    A model that is no `Decoder` (PEFT around one, transformers' own) is saved and read as Trainer does.
    Under FSDP and DeepSpeed Trainer does not come here; there use `bestiary sft`.
    """

    label_names: list[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.label_names = [name for name in self.label_names if name != "shift_labels"]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, Decoder):
            super()._save(output_dir, state_dict)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        model.save_pretrained(folder, overwrite=True)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        decoder = self.accelerator.unwrap_model(self.model if model is None else model)
        if isinstance(decoder, Decoder):
            load_weights(decoder, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.accelerator.unwrap_model(self.model), Decoder):
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()


@torch.no_grad()
def load_weights(decoder: Decoder, folder: Path) -> None:
    """Put the weights of a checkpoint into a model, one parameter in memory at a time; of a PEFT folder the adapters.

    Raises:
        CheckpointRefused: a checkpoint of another architecture; nothing is changed.
        bestiary.bridges.errors: missing or corrupt files, adapters elsewhere.
    """
    if decoder.decoder_config.lora is not None:
        decoder.load_adapter(folder)
        return
    with stored_parameters(bridge_of(decoder.decoder_config.model_type), folder) as (stored, values):
        theirs, ours = _shapes(stored), _shapes(decoder)
        if theirs != ours:
            name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
            raise CheckpointRefused(
                f"{name} is {theirs.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} in the model.",
                read_from=str(folder),
                remedy="resume the model that was saved, or train into another folder",
            )
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])


def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the script; returns the folder of the finished checkpoint."""
    given = parser("transformers_trainer", "Fine-tune with transformers.Trainer.").parse_args(arguments)
    trainer = DecoderTrainer(
        model=load(given.model, given.lora),
        args=TrainingArguments(**settings(given)),
        train_dataset=read_rows(given.data, given.model),
        data_collator=collate,
        processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
    )
    return finish(trainer, given)


if __name__ == "__main__":
    main()
