"""`make demo-rl`: reinforcement learning from nothing to a learned task, on two cores, in a few minutes.

    model      a Qwen3 of three small layers, random, one token a character
    imitate    `bestiary sft` on answers most of which have a mistake
    learn      `bestiary grpo` on further prompts: sampled by the embedded engine, judged by a verifier
    judge      answers to held-out prompts, before and after, and the rewards of training

Once a seed, for three seeds: each has to gain 0.3 in mean reward, on held-out prompts and in training. The task is
that of `bestiary.tools.demo_rl_sorting`. Results: rewards.png and the folders of the runs, with their files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bestiary.tools import assets
from bestiary.tools.arguments import Parser, at_least
from bestiary.tools.demo_rl_sorting import Sorting
from bestiary.tools.demo_rl_trial import conduct

EXAMPLES = """\
examples:
  make demo-rl                                    installs what it needs first
  python -m bestiary.tools.demo_rl --seeds 1      one seed
  python -m bestiary.tools.demo_rl --engine vllm  sampled by vLLM, whose weights are synced after every round
  python -m bestiary.tools.demo_rl --json -       the result on stdout

exit codes: 0 every seed gained 0.3, 1 one did not, 7 usage or environment (packages not installed)"""


def main(argv: Sequence[str] | None = None, sizes: Sorting | None = None) -> int:
    """Runs the demo; returns its exit code.

    Args:
        sizes: of everything; None: those that the demo is for.
    """
    parser = Parser("bestiary.tools.demo_rl", __doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, help="folder of results (default: out/demo-rl of the checkout)")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="how many, from 0 (default %(default)s)")
    parser.add_argument(
        "--engine", choices=("embedded", "vllm"), default="embedded", help="that samples (default %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.engine == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    out: Path = args.out or assets.output_folder() / "demo-rl"
    return conduct(replace(sizes or Sorting(), engine=args.engine), out, args.seeds, args.json)


if __name__ == "__main__":
    sys.exit(main())
