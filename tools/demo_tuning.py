"""The second half of `make demo`: LoRA on real text by the `sft` recipe, and what becomes of the adapter.

    fine-tune   the run that `bestiary sft FOLDER/config.yaml` repeats; the loss on held-out modules has to fall
    merge       adapter and base as one checkpoint, in float32
    adapter     the exported adapter in PEFT on transformers' model: the logits of ours, and of the merged checkpoint

The text is the docstrings of Python's standard library, one document a module; whole packages are held out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools import stdlib_text
from bestiary.tools.demo_steps import LineWatcher, Step, StepFailed, megabytes

if TYPE_CHECKING:
    from bestiary.training.config import RunConfig

NEEDS = {"yaml": "data", "pyarrow": "data", "fsspec": "data", "peft": "peft"}
"""Packages of the fine-tuning, and the extra that brings each."""

MOVES = 100
"""How many times further the adapter has to move the logits than two implementations of it lie apart."""


class PackageMissing(BestiaryError):
    """A package that the fine-tuning needs and that is not installed.

    Remedy: install the extra that the message names, or `make demo`.
    """


@dataclass(frozen=True)
class Tuning:
    """How long and how much; the rest are the recipe's defaults.

    Attributes:
        steps: of the optimiser.   length: tokens of each.   held_out: packs of `length` that are judged.
        rank: of the adapters.   lr: at the top of the cosine.
    """

    steps: int = 32
    length: int = 512
    held_out: int = 6
    rank: int = 8
    lr: float = 5e-4


class Watcher(LineWatcher):
    """A tracker that shows the line of each step, and keeps speeds and evaluations.

    Args:
        describe: is given the line.
    """

    def __init__(self, describe: Callable[[str], None]) -> None:
        super().__init__(describe)
        self.held_out: list[float] = []
        self.losses: list[float] = []
        self.speeds: list[float] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show and keep."""
        from bestiary.training.progress import step_line

        self.describe(step_line(step, self.steps, values))
        kept = {"eval/loss": self.held_out, "loss": self.losses, "tokens_per_s": self.speeds}
        for name, figures in kept.items():
            if name in values:
                figures.append(values[name])


def check_packages() -> None:
    """Whether the fine-tuning can run here.

    Raises:
        PackageMissing: names the extra to install.
    """
    for module, extra in NEEDS.items():
        if find_spec(module) is None:
            raise PackageMissing(
                f"the package {module}, which fine-tuning needs, is not installed.",
                remedy=f"make demo, or: pip install 'bestiary[{extra}]'",
            )


def run_config(base: Path, folder: Path, tuning: Tuning) -> RunConfig:
    """The run: `base` with adapters on all its linear layers, on the documents in `folder`, in float32."""
    from bestiary.training.config import RunConfig

    def source(name: str) -> dict[str, Any]:
        return {"name": name, "files": str(folder / f"{name}.jsonl"), "kind": "text"}

    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"src": str(base)},
            "data": {
                "tokenizer": {"src": str(base)},
                "sources": [source("modules")],
                "pack_length": tuning.length,
                "overflow": "split",
            },
            "lora": {"r": tuning.rank, "alpha": 2 * tuning.rank},
            "optim": {"lr": tuning.lr, "warmup": 0.1},
            "precision": {"parameters": "float32"},
            "loop": {
                "steps": tuning.steps,
                "workers": 0,
                "evaluation": {
                    "sources": [source("held-out")],
                    "every": tuning.steps,
                    "packs": tuning.held_out,
                    "at_start": True,
                },
            },
            "checkpoint": {"every": None},
            "out": str(folder),
        }
    )


def fine_tune(step: Step, base: Path, folder: Path, tuning: Tuning, describe: Callable[[str], None]) -> Path:
    """Trains anew in `folder`; returns the exported adapter.

    Raises:
        StepFailed: the held-out loss did not fall, or the run did not reach its end.
    """
    from bestiary.training.checkpoint import CHECKPOINTS
    from bestiary.training.run import run

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CHECKPOINTS).is_dir():  # of an earlier demo: this one would go on at its end
        shutil.rmtree(folder / CHECKPOINTS)
    parts = dict(zip(("modules", "held-out"), stdlib_text.documents(), strict=True))
    for name, texts in parts.items():
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    watcher = Watcher(describe)
    outcome = run(run_config(base, folder, tuning), also=(watcher,))
    if outcome.export is None or len(watcher.held_out) != 2:
        raise StepFailed(f"the run ended at step {outcome.step} of {outcome.steps}: {outcome.stopped}.")
    before, after = watcher.held_out
    step.figures = {
        "tokens": tuning.steps * tuning.length,
        "tokens_per_s": sorted(watcher.speeds)[len(watcher.speeds) // 2],
        "demo/held_out_before": before,
        "demo/held_out_after": after,
    }
    step.result = (
        f"held-out loss {before:.3f} → {after:.3f} (perplexity {math.exp(before):.1f} → {math.exp(after):.1f}) in "
        f"{outcome.steps} steps of {tuning.length} tokens, LoRA r = {tuning.rank}; {len(parts['modules'])} modules, "
        f"{len(parts['held-out'])} held out"
    )
    if not after < before:
        raise StepFailed(
            f"the loss on held-out modules did not fall: {before:.4f} before, {after:.4f} after {outcome.steps} steps.",
            read_from=str(folder / "metrics.jsonl"),
            remedy=f"bestiary plot {folder} shows the steps",
        )
    return outcome.export


def merge(adapter: Path, target: Path) -> Path:
    """The adapter and the base that it names as one float32 checkpoint, with the run's tokenizer."""
    import torch
    from transformers import AutoTokenizer

    from bestiary.models import AutoDecoder

    AutoDecoder.from_pretrained(adapter, dtype=torch.float32).save_pretrained(target, merge=True, overwrite=True)
    AutoTokenizer.from_pretrained(adapter, trust_remote_code=False).save_pretrained(target)
    return target


def compare_adapter(step: Step, base: Path, adapter: Path, merged: Path, ids: Any) -> None:
    """The adapter in ours, in PEFT on transformers' model of `base`, and merged: the same logits in float32.

    Args:
        ids: (1, T) token ids.
    Raises:
        StepFailed: two of them lie apart, or the adapter does nothing.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from bestiary.models import AutoDecoder
    from bestiary.verify.gates import OFFICIAL
    from bestiary.verify.measure import max_over_std

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, adapter).eval()(ids).logits
        del plain
        ours = AutoDecoder.from_pretrained(adapter, dtype=torch.float32).eval()(ids).logits
        apart = {"ours": max_over_std(ours, theirs)}
        del ours
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
        apart["the merged checkpoint"] = max_over_std(whole(ids).logits, theirs)
    moved = max_over_std(before, theirs)
    gate, worst = OFFICIAL["V8.max"], max(apart.values())
    step.figures = {"tokens": ids.shape[1], "demo/logits_apart": worst, "demo/logits_moved": moved}
    step.result = (
        f"{megabytes(adapter):.0f} MB; in PEFT on transformers' model its logits are {apart['ours']:.1e} from ours and "
        f"{apart['the merged checkpoint']:.1e} from the merged checkpoint's (gate {gate.limit:g}); it moves them by "
        f"{moved:.2g}"
    )
    for name, figure in apart.items():
        if not gate.holds(figure):
            raise StepFailed(
                f"the adapter in PEFT has other logits than {name}: {figure:.3g} of their spread, gate {gate.limit:g}.",
                read_from=str(adapter),
            )
    if not moved > MOVES * worst:
        raise StepFailed(
            f"the adapter moves the logits by {moved:.3g} of their spread, and implementations of it lie {worst:.3g} "
            "apart: that they agree says nothing.",
            read_from=str(adapter),
        )
