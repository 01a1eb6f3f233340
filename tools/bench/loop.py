"""What the training loop adds to a bare step: Gemma 3 270M's shape, fp32, packed rows of 1024 tokens, `sft`.

    full    every weight trains
    lora    with --full: r = 16 on every linear layer, head and embedding frozen

The bare step is forward, backward, clipping and AdamW on a batch that lies ready. The loop is that of `bestiary sft`,
made from a run's configuration: it tokenizes and packs text in a process beside, counts, checks for what is not finite,
measures speed and memory, writes metrics.jsonl and prints its line. Both use one model and one optimiser in one process
and take turns on the same batches; a step of the loop is compared with the mean of the bare ones before and after it.
The learning rate is too small to change a weight, so both have to find the same loss.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools import stdlib_text
from bestiary.tools.bench import compare, measure
from bestiary.tools.bench.checkpoints import write_gemma3
from bestiary.tools.bench.step import RANK

if TYPE_CHECKING:
    from bestiary.training.config import RunConfig
    from bestiary.training.loop import Trainer
    from bestiary.training.recipes.base import Batch

TURNS = 3  # of both in a process, after one that warms up
DOCUMENTS = 300
STILL = 1e-20  # a learning rate that moves no weight
AGREE = 1e-4

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.loop
  python -m bestiary.tools.bench.loop --full --only lora --rounds 4 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


class StepsDiffer(BestiaryError):
    """The bare step and the loop did not compute the same.

    Remedy: run it again; if it stays, the loop computes something else: report it.
    """


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """Every weight trains; with `full` LoRA too."""
    size, tokens = ("tiny", 64) if quick else ("270m", 1024)
    made = []
    for name in ("full", "lora") if full else ("full",):
        job = {"folder": str(folder / size), "tokens": tokens, "lora": name == "lora", "workers": 0 if quick else 1}
        made.append(
            compare.Case(
                name=f"{name} T=1024",
                arms={"ours": compare.Arm(job=job, needs=("pyarrow", "fsspec", "PyYAML"))},
                tokens=tokens,
                note="overhead: seconds of the loop's step / of the bare one; the table has the loop's.",
            )
        )
    return made


def prepare(folder: Path, quick: bool) -> None:
    """A checkpoint with a tokenizer of bytes, and documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = folder / ("tiny" if quick else "270m")
    write_gemma3(place, place.name)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(place)
    rows = (json.dumps({"text": found.text}) for found in itertools.islice(stdlib_text.docstrings(), DOCUMENTS))
    (place / "text.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def run_config(job: Mapping[str, Any], out: Path, steps: int) -> RunConfig:
    """The run that is timed; what it does not say is the default."""
    from bestiary.training.config import RunConfig

    source = {"name": "text", "files": f"{job['folder']}/text.jsonl", "kind": "text"}
    content = {
        "recipe": "sft",
        "model": {"src": job["folder"]},
        "data": {
            "tokenizer": {"src": job["folder"]},
            "sources": [source],
            "pack_length": job["tokens"],
            "overflow": "split",
        },
        "optim": {"lr": STILL},
        "precision": {"parameters": "float32"},
        "loop": {"steps": steps, "workers": job["workers"]},
        "checkpoint": {"every": None, "export": False},
        "out": str(out),
    }
    return RunConfig.model_validate(content | ({"lora": {"r": RANK}} if job["lora"] else {}))


class Turns:
    """A callback: after each step of the loop the bare one on the same batch; keeps the seconds of both.

    Args:
        batches: those that the loop will take.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.looped: list[float] = []
        self.bare: list[float] = []
        self.since = time.perf_counter()

    def on_step(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """The loop's turn is over.

        Raises:
            StepsDiffer.
        """
        start = time.perf_counter()
        self.looped.append(start - self.since)
        loss = bare_step(trainer, self.batches[len(self.bare)])
        self.bare.append(time.perf_counter() - start)
        if not abs(loss - values["loss"]) <= AGREE * abs(loss):
            raise StepsDiffer(
                f"step {len(self.bare)}: the loss is {values['loss']:.6f} in the loop and {loss:.6f} bare."
            )
        self.since = time.perf_counter()

    def ratios(self) -> list[float]:
        """Of every step but the first, the loop's seconds to those of the bare steps around it."""
        around = itertools.pairwise(self.bare)
        return [2 * looped / sum(pair) for looped, pair in zip(self.looped[1:], around, strict=True)]


def bare_step(trainer: Trainer, batch: Batch) -> float:
    """Forward, backward, clipping, AdamW; returns the mean loss."""
    import torch

    units = int((batch["labels"] != -100).sum())
    loss = trainer.model(**batch, num_items_in_batch=units).loss
    loss.backward()
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, trainer.optim.max_grad_norm or math.inf)
    trainer.optimiser.step()
    trainer.optimiser.zero_grad()
    return float(loss.detach())


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: both take `TURNS` turns (times `reps`), after one that warms up."""
    from bestiary.training.memory import PeakMemory
    from bestiary.training.processes import processes
    from bestiary.training.progress import reporter
    from bestiary.training.run import packs_of, prepare
    from bestiary.training.tracking import RunInfo, trackers

    steps = 1 + TURNS * job["reps"]
    with tempfile.TemporaryDirectory(prefix="bestiary-bench-loop-") as temporary, processes(600.0) as here:
        config = run_config(job, Path(temporary), steps)
        trainer, _, tokenizer = prepare(config, here, PeakMemory(here.device))
        batches = [trainer.recipe.batch(pack) for pack in packs_of(config.data.plan(tokenizer), steps)]
        turns = Turns(batches)
        trainer.callbacks, trainer.saver = (turns,), None  # writing the last resume point is no part of a step
        trainer.log = trackers((), config.out, RunInfo("loop", steps=steps), also=(reporter(StringIO()),))
        try:
            trainer.fit()
        finally:
            trainer.log.close()
            trainer.loader.close()
    return {
        "seconds": measure.Summary.of(turns.looped[1:]).median,
        "bare_seconds": measure.Summary.of(turns.bare[1:]).median,
        "overhead": measure.Summary.of(turns.ratios()).median,
    }


BENCH = compare.Bench(
    name="loop",
    about=__doc__,
    example=EXAMPLE,
    cases=cases,
    work=work,
    packages=("torch", "transformers", "bestiary"),
    prepare=prepare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
