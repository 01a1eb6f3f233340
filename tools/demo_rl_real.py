"""`make demo-rl-real`: reinforcement learning on the real Gemma 3 270M with LoRA, offline, on two cores.

    imitate    `bestiary sft` with LoRA on answers most of which name a wrong word
    learn      `bestiary grpo` trains the adapters on: sampled by the embedded engine, judged by a verifier
    judge      answers to held-out prompts, before and after, and the rewards of training

Once a seed, for three seeds: each has to gain 0.3 in mean reward, on held-out prompts and in training. A run ends when
its reward in training has risen by 0.45.

The task is to name the last word of a sentence; the sentences are from the docstrings of Python's standard library:

    Sentence: Return the name of the file.
    Last word: file

Without the imitation the weights, which somebody else quantised to 4 bits, hardly ever give an answer of that form, and
there is no reward to learn from.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bestiary.tools import assets, demo_tuning, stdlib_text
from bestiary.tools.demo_rl_trial import (
    DEMONSTRATIONS,
    GOAL,
    HELD_OUT,
    PROMPTS,
    Row,
    Task,
    conduct,
    parser_of,
    write_rows,
)

ASSET = "gemma-3-270m"
SENTENCE = re.compile(r"[A-Z][a-z]+(?: [a-z]+){4,9}\.")

EXAMPLES = """\
examples:
  make demo-rl-real                                   installs what it needs first
  python -m bestiary.tools.demo_rl_real --seeds 1     one seed
  python -m bestiary.tools.demo_rl_real --json -      the result on stdout

exit codes: 0 every seed gained 0.3, 1 one did not, 7 usage or environment (packages not installed)"""


@dataclass(frozen=True, kw_only=True)
class Naming(Task):
    """How much of everything, beside what every `Task` has.

    Attributes:
        demonstrations: answers to imitate.   careless: share of them that name another word.
        rank: of the adapters.   length: tokens of a step of imitation.
        warm_steps, warm_rate: of the imitation.
    """

    demonstrations: int = 400
    careless: float = 0.6
    held_out: int = 64
    rank: int = 8
    length: int = 384
    warm_steps: int = 20
    warm_rate: float = 1e-3
    rounds: int = 24
    round_prompts: int = 8
    answers: int = 6
    rate: float = 2e-4
    title: str = "Mean reward: the last word of a sentence, Gemma 3 270M with LoRA"
    schema: str = "bestiary.demo_rl_real/1"
    max_tokens: int = 6
    rows: int = 128

    def write(self, folder: Path, seed: int) -> None:
        """See `Task`."""
        demo_tuning.check_packages()
        drawn = random.Random(seed)
        every = [*sentences()]
        drawn.shuffle(every)
        shown, asked = every[: self.demonstrations], every[self.demonstrations :]
        write_rows(folder / DEMONSTRATIONS, [_row(one, _word(one, self.careless, drawn)) for one in shown])
        rows = [_row(one, _word(one, 0.0, drawn)) for one in asked]
        write_rows(folder / HELD_OUT, rows[: self.held_out])
        write_rows(folder / PROMPTS, rows[self.held_out :])

    def imitation(self, folder: Path, out: Path, seed: int) -> dict[str, Any]:
        """See `Task`."""
        return self._of(assets.checkpoint(ASSET), folder / DEMONSTRATIONS, seed) | {
            "recipe": "sft",
            "lora": {"r": self.rank, "alpha": 2 * self.rank},
            "optim": {"lr": self.warm_rate, "warmup": 0.1},
            "loop": {"steps": self.warm_steps, "workers": 0, "seed": seed},
            "checkpoint": {"every": None},
            "out": str(out),
        }

    def learning(self, base: Path, folder: Path, seed: int) -> dict[str, Any]:
        """See `Task`: the adapters of the imitation train on."""
        given = self.common(folder, seed)
        return given | self._of(base, folder / PROMPTS, seed) | {"loop": given["loop"] | {"callbacks": [GOAL]}}

    def _of(self, base: Path, file: Path, seed: int) -> dict[str, Any]:
        """What both files share: model and data, in float32."""
        return {
            "model": {"src": str(base)},
            "data": {
                "tokenizer": {"src": str(base)},
                "sources": [{"name": "sentences", "files": str(file), "kind": "completion"}],
                "pack_length": self.length,
                "seed": seed,
            },
            "precision": {"parameters": "float32"},
        }


@cache
def sentences() -> tuple[str, ...]:
    """First sentences of docstrings, of 5 to 10 plain words; each once, in the order of the library."""
    found: dict[str, None] = {}
    for one in stdlib_text.docstrings():
        first = " ".join(one.text.split("\n\n")[0].split())
        if SENTENCE.fullmatch(first):
            found[first] = None
    return tuple(found)


def _row(sentence: str, word: str) -> Row:
    return {"prompt": f"Sentence: {sentence}\nLast word:", "completion": f" {word}"}


def _word(sentence: str, careless: float, drawn: random.Random) -> str:
    """The last word, or with probability `careless` another one."""
    words = sentence.rstrip(".").split()
    others = [word for word in words if word != words[-1]]
    return drawn.choice(others) if drawn.random() < careless else words[-1]


def main(argv: Sequence[str] | None = None, sizes: Naming | None = None) -> int:
    """Runs the demo; returns its exit code.

    Args:
        sizes: of everything; None: those that the demo is for.
    """
    args = parser_of("bestiary.tools.demo_rl_real", __doc__, EXAMPLES, "demo-rl-real").parse_args(argv)
    return conduct(sizes or Naming(), args.out, args.seeds, args.json)


if __name__ == "__main__":
    sys.exit(main())
