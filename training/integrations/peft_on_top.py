"""PEFT's adapters on our decoder, in a loop of plain torch. Extra: `peft`.

    python -m bestiary.training.integrations.peft_on_top --help

Our linear layers are `nn.Linear`s and carry transformers' names, so that `get_peft_model` finds what it finds there and
its adapter folder loads on transformers' model as it is. Kinds of adapters that PEFT knows and we do not train this
way; for plain LoRA `AutoDecoder.from_pretrained(…, lora=LoRAConfig(…))` is faster and covers experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bestiary.training.integrations.example import Steps, load, parser, read_rows, targets
from bestiary.training.integrations.needs import needs

with needs("peft", "bestiary[peft]"):
    from peft import LoraConfig, PeftModel, get_peft_model

OPTIMIZER = "optimizer.pt"


def wrapped(model: nn.Module, *, rank: int = 16, resume: Path | None = None) -> Any:
    """The model under PEFT: with fresh adapters on every projection, or with those of a folder, which go on training.

    Args:
        model: ours or transformers'.
    """
    if resume is not None:
        return PeftModel.from_pretrained(model, resume, is_trainable=True)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, config)


def train(model: Any, steps: Steps, out: Path, *, lr: float = 1e-4, resume: bool = False) -> list[float]:
    """Train until the last of `steps`; the loss of each step that was made here. OUT gets a PEFT folder.

    Args:
        model: of `wrapped`.
        resume: go on after the step at which the optimiser in OUT was saved.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    first, losses = 0, []
    if resume:
        state = torch.load(out / OPTIMIZER, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, len(steps)):
        batches = steps[step]
        items = targets(batches)
        parts = []
        for batch in batches:
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(parts).sum()))
    model.save_pretrained(out)
    torch.save({"optimizer": optimizer.state_dict(), "step": len(steps)}, out / OPTIMIZER)
    return losses


def export(model: Any, out: Path) -> None:
    """Fold the adapters in and write what transformers loads to OUT/hf; afterwards they are gone from the model."""
    model.merge_and_unload().save_pretrained(out / "hf", overwrite=True)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    asked = parser(
        "Train PEFT's adapters on a bestiary model.", command="python -m bestiary.training.integrations.peft_on_top"
    ).parse_args(arguments)
    torch.manual_seed(0)
    adapter = asked.out / "adapter"
    model = wrapped(load(asked.model), rank=asked.lora or 16, resume=adapter if asked.resume else None)
    steps = Steps(read_rows(asked.data, asked.model), asked.batch, asked.accumulate, asked.steps)
    losses = train(model, steps, adapter, lr=asked.lr, resume=asked.resume)
    export(model, asked.out)
    print("loss " + " ".join(f"{loss:.4f}" for loss in losses))  # noqa: T201


if __name__ == "__main__":
    main()
