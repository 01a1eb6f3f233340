"""`bestiary sft|dpo|kto|reward|distill`: a run from its file. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bestiary.training.config import RunConfig

RECIPES = {
    "sft": "supervised fine-tuning on chats, completions, text or events",
    "dpo": "preference optimisation on pairs (sigmoid, ipo, hinge, robust, …)",
    "kto": "preference optimisation on single answers that are wanted or not",
    "reward": "a reward model from pairs or scores",
    "distill": "distillation from a teacher with the same vocabulary (loss.teacher)",
}

EXAMPLES = """\
examples:
  bestiary {name} run.yaml
  bestiary {name} run.yaml optim.lr=2e-5 lora.r=16 out=runs/second
  bestiary {name} run.yaml --dry-run
  torchrun --nproc-per-node 8 -m bestiary.tools.cli {name} run.yaml data.streams=8

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
        command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.training.config import load_run_config

    config = load_run_config(args.config, args.changes, recipe=args.command)
    quiet = args.json == "-"
    if args.dry_run:
        return _dry_run(config, quiet=quiet)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    from bestiary.training.progress import reporter
    from bestiary.training.run import run

    outcome = run(config, also=(reporter(sys.stdout, quiet=quiet),))
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


def _dry_run(config: RunConfig, *, quiet: bool) -> dict[str, Any]:
    """The whole configuration and the estimate of a step, without reading a weight."""
    from bestiary.training.estimate import estimate

    found = estimate(config)
    if not quiet:
        print(config.yaml(), end="")
        print("\n".join(found.lines()))
    return {"config": config.model_dump(mode="json"), "estimate": found.as_json()}
