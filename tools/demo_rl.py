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

from bestiary.tools.demo_rl_sorting import Sorting
from bestiary.tools.demo_rl_trial import conduct, parser_of

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
    parser = parser_of("bestiary.tools.demo_rl", __doc__, EXAMPLES, "demo-rl")
    parser.add_argument(
        "--engine", choices=("embedded", "vllm"), default="embedded", help="that samples (default %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.engine == "vllm":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return conduct(replace(sizes or Sorting(), engine=args.engine), args.out, args.seeds, args.json)


if __name__ == "__main__":
    sys.exit(main())
