"""`bestiary grpo`: reinforcement learning from a run's file. Heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  PYTHONPATH=. bestiary grpo run.yaml                (finds my_rewards.py beside it)
  bestiary grpo run.yaml algorithm.name=dapo rollouts.n=16 out=runs/second
  bestiary grpo run.yaml placement.policy=4 placement.rollout=4 'placement.together=[rollout]'   (on Ray)
  bestiary grpo run.yaml --dry-run

run.yaml:
  model: {src: Qwen/Qwen3-0.6B}
  data:
    tokenizer: {src: Qwen/Qwen3-0.6B}
    sources: [{name: sums, files: sums.jsonl, kind: prompt}]
  rewards:
    functions: [{name: right, function: my_rewards:right}]
  rollouts: {max_tokens: 64, n: 8}
  loop: {steps: 100, prompts: 8}
  out: runs/sums

my_rewards.py:
  def right(answers):  # bestiary.training.rl.answer.Answer, whose `row` is the prompt's in the data
      return [float(one.row["answer"] in one.text) for one in answers]

The same command goes on from the newest resume point in `out`; SIGTERM writes one and ends.
exit codes: 0 done, 1 diverged, 4 refused as unsupported, 7 usage or environment"""


def add_rl(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `grpo` to the subparsers of `bestiary`.

    Args:
        add: makes a subcommand from (subparsers, name, what, examples).
    """
    what = "reinforcement learning from rewards (grpo, dapo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus, …)"
    command = add(commands, "grpo", what, EXAMPLES)
    command.add_argument("config", metavar="CONFIG", type=Path, help="the run's file (YAML or JSON)")
    command.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="of the file, dotted: optim.lr=1e-5")
    command.add_argument("--dry-run", action="store_true", help="print the whole configuration, train nothing")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from bestiary.training.estimate import estimate
    from bestiary.training.rl.config import load_grpo_config

    config = load_grpo_config(args.config, args.changes)
    quiet = args.json == "-"
    if args.dry_run:
        found = estimate(config)
        if not quiet:
            print(config.yaml(), end="")
            print("\n".join(found.lines()))
        return {"config": config.model_dump(mode="json"), "estimate": found.as_json()}
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    from bestiary.training.progress import reporter
    from bestiary.training.rl.grpo import run

    outcome = run(config, also=(reporter(sys.stdout, quiet=quiet),))
    if not quiet:
        ended = f" ({outcome.stopped})" if outcome.stopped else ""
        print(f"round {outcome.round} of {outcome.rounds}{ended} · {config.out}")
        if outcome.export is not None:
            print(f"export {outcome.export}")
    return {
        "out": str(config.out),
        "round": outcome.round,
        "rounds": outcome.rounds,
        "version": outcome.version,
        "stopped": outcome.stopped,
        "resumed": outcome.resumed,
        "reward": outcome.reward,
        "export": None if outcome.export is None else str(outcome.export),
    }
