"""`bestiary sft|dpo|kto|reward|distill`: a run from its file. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.tools.arguments import at_least

if TYPE_CHECKING:
    from bestiary.training.config import RunConfig

RECIPES = {
    "sft": "supervised fine-tuning on chats, completions, text or events",
    "dpo": "preference optimisation on pairs (sigmoid, ipo, hinge, robust, …)",
    "kto": "preference optimisation on single answers that are wanted or not",
    "reward": "a reward model from pairs or scores",
    "distill": "distillation from a teacher with the same vocabulary (loss.teacher), on the answers of the data or on "
    "those that the student samples (rollouts)",
}

EXAMPLES = """\
examples:
  bestiary {name} run.yaml
  bestiary {name} run.yaml optim.lr=2e-5 lora.r=16 out=runs/second
  bestiary {name} run.yaml --dry-run
  torchrun --nproc-per-node 8 -m bestiary.tools.cli {name} run.yaml data.streams=8
  accelerate launch --multi_gpu --num_processes 8 -m bestiary.tools.cli {name} run.yaml data.streams=8
  bestiary {name} run.yaml --ray 8 data.streams=8

run.yaml:
  model: {{src: Qwen/Qwen3-0.6B}}
  data:
    tokenizer: {{src: Qwen/Qwen3-0.6B}}
    sources: [{{name: mine, files: mine.jsonl, kind: {kind}}}]
  loop: {{steps: 200}}
  out: runs/first

The same command goes on from the newest resume point in `out`; SIGTERM writes one and ends.
exit codes: 0 done, 1 diverged, 4 refused as unsupported, 7 usage or environment"""

_KINDS = {"sft": "chat", "dpo": "preference", "kto": "unpaired", "reward": "preference", "distill": "chat"}


def add_training(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds one command a recipe to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    for name, what in RECIPES.items():
        command = add(commands, name, what, EXAMPLES.format(name=name, kind=_KINDS[name]))
        command.add_argument("config", metavar="CONFIG", type=Path, help="the run's file (YAML or JSON)")
        command.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="of the file, dotted: optim.lr=1e-5")
        command.add_argument("--dry-run", action="store_true", help="print the whole configuration, train nothing")
        command.add_argument(
            "--ray",
            metavar="N",
            type=at_least(1),
            help="in N actors of Ray (RAY_ADDRESS: a cluster; else this machine)",
        )
        add_place(command)
        if name == "distill":
            command.add_argument(
                "--on-policy",
                action="store_true",
                help="on answers that the student samples to all prompts: rollouts.share=1, the rest as in `rollouts`",
            )
            command.add_argument(
                "--store-teacher",
                metavar="FILE",
                type=Path,
                help="train nothing: write the data with the likeliest words of loss.teacher (.parquet or .jsonl), "
                "loss.options.top_k of each trained token (64), for runs without a teacher",
            )
        command.set_defaults(run=_run, store_teacher=None, on_policy=False)


def add_place(command: argparse.ArgumentParser) -> None:
    """Adds the flags that say which part of a Ray cluster `--ray N` gets."""
    command.add_argument(
        "--nodes", metavar="K", type=at_least(1), help="with --ray: N/K of the actors on each of K nodes"
    )
    command.add_argument(
        "--gpus",
        metavar="0|1",
        type=int,
        choices=(0, 1),
        help="with --ray: GPUs of each actor; default: if it has as many",
    )
    command.add_argument(
        "--cores", metavar="C", type=at_least(1), default=1, help="with --ray: CPU cores of each actor"
    )


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.training.config import load_run_config

    given = ["rollouts.share=1", *args.changes] if args.on_policy else args.changes
    config = load_run_config(args.config, given, recipe=args.command)
    quiet = args.json == "-"
    if args.dry_run:
        return _dry_run(config, args.ray, quiet=quiet)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if args.store_teacher is not None:
        return _store_teacher(config, args.store_teacher, quiet=quiet)
    from bestiary.training.progress import reporter
    from bestiary.training.run import run

    shown = (reporter(sys.stdout, quiet=quiet),)
    if args.ray is None:
        outcome = run(config, also=shown)
    else:
        from bestiary.training.launch import Placement, launch

        outcome = launch(config, Placement(args.ray, args.nodes, args.gpus, args.cores), also=shown)
    if not quiet:
        ended = f" ({outcome.stopped})" if outcome.stopped else ""
        print(f"step {outcome.step} of {outcome.steps}{ended} · {config.out}")
        if outcome.export is not None:
            print(f"export {outcome.export}")
    return {
        "out": str(config.out),
        "step": outcome.step,
        "steps": outcome.steps,
        "stopped": outcome.stopped,
        "resumed": outcome.resumed,
        "loss": outcome.loss,
        "evaluation": outcome.evaluation,
        "export": None if outcome.export is None else str(outcome.export),
    }


def _store_teacher(config: RunConfig, file: Path, *, quiet: bool) -> dict[str, Any]:
    """A teacher's likeliest words of all the data, in a file."""
    from bestiary.training.recipes.teacher_file import store_teacher

    found = store_teacher(config, file)
    if not quiet:
        left_out = f", {found.skipped} corrupt rows left out" if found.skipped else ""
        print(f"{file} · {found.rows} rows, {found.tokens} trained tokens, {found.words} words of each{left_out}")
        print(f"train on it with kind: distillation, files: {file} and no loss.teacher")
    return {
        "file": str(file),
        "rows": found.rows,
        "tokens": found.tokens,
        "words": found.words,
        "skipped": found.skipped,
    }


def _dry_run(config: RunConfig, processes: int | None, *, quiet: bool) -> dict[str, Any]:
    """The whole configuration and the estimate of a step, without reading a weight."""
    from bestiary.training.estimate import estimate

    found = estimate(config, processes=processes)
    if not quiet:
        print(config.yaml(), end="")
        print("\n".join(found.lines()))
    return {"config": config.model_dump(mode="json"), "estimate": found.as_json()}
