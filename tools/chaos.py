"""`make chaos`: a run on Ray whose processes are killed, seeded, one after the other, and what is left of it.

    python -m bestiary.tools.chaos --kills 20 --seed 0

Every role dies at least kills / 5 times, at a random moment of a round. The run must end with every prompt trained
exactly once, by the names that the policy's optimiser steps left in its last resume point; or stop with a resume point
that the same command goes on from, which is what this one then does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bestiary.training.errors import RoleLost

ROLES = ("policy", "rollout", "reference", "reward", "environment")
PROMPTS, FIRST = 3, 2  # of a round; round behind which the first one dies
PLACEMENT: Mapping[str, Any] = {
    "policy": 2,
    "rollout": 2,
    "reference": 1,
    "reward": 1,
    "environment": 1,
    "together": ["rollout", "reference"],
    "timeout_s": 120,
}


@dataclass
class Killed:
    """A process that was killed.

    Attributes:
        after: rounds made.   role, member, pid: whose.   delay_s: behind the end of that round.
    """

    after: int
    role: str
    member: int
    pid: int
    delay_s: float


@dataclass
class Killer:
    """A callback of the controller's that kills a process behind every so many'th round.

    Args:
        roles: whose process dies, one after the other.   every: rounds.   seed: of members and moments.
    """

    roles: Sequence[str]
    every: int = 1
    seed: int = 0
    done: list[Killed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._left = list(self.roles)
        self._last = time.monotonic()
        self._timers: list[threading.Thread] = []

    def on_step(self, controller: Any, values: Mapping[str, float]) -> None:
        """See `controller.Callback`."""
        took, self._last = time.monotonic() - self._last, time.monotonic()
        if controller.round < FIRST or (controller.round - FIRST) % self.every or not self._left:
            return
        role = self._left.pop(0)
        delay = self._random.random() * min(took, 5.0)
        group = groups_of(controller)[role]
        member = self._random.randrange(group.size)
        work = threading.Thread(target=self._kill, args=(controller.round, role, group, member, delay), daemon=True)
        self._timers.append(work)
        work.start()

    def on_end(self, controller: Any) -> None:
        """See `controller.Callback`."""
        for work in self._timers:
            work.join()

    def _kill(self, after: int, role: str, group: Any, member: int, delay: float) -> None:
        time.sleep(delay)
        for _ in range(300):  # while it is being started again there is nothing to kill
            pid = group.pids[member]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                time.sleep(0.1)
            else:
                self.done.append(Killed(after, role, member, pid, delay))
                return


def groups_of(controller: Any) -> dict[str, Any]:
    """Processes of every role."""
    roles = controller.roles
    return {
        "policy": roles.policy.group,
        "rollout": roles.sampler.engine.group,
        "reference": roles.reference.group,
        "reward": roles.scorer.group,
        "environment": roles.sampler.environments.group,
    }


_KILLER: Killer | None = None


def killer() -> Killer:
    """The one of this process, as `loop.callbacks` names it."""
    assert _KILLER is not None
    return _KILLER


def write_run(folder: Path, rounds: int, **changes: Any) -> Path:
    """A tiny model with its tokenizer, prompts, and the file of a run over them.

    Args:
        changes: sections of the file.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bestiary.models import Qwen3

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    full = Qwen3.sizes["0.6b"]
    config = full.with_(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=full.layer_types[:2],
        max_position_embeddings=64,
        attention=replace(full.attention, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25),
        rope=replace(full.rope, rotary_dim=16),
        tie_word_embeddings=False,
    )
    model = Qwen3(config, dtype=torch.float64)
    model.init_weights(0)
    model.save_pretrained(folder / "model", overwrite=True)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder / "model"
    )
    rows = [{"prompt": f"w{n % 60} w{n * 7 % 60} w{n * 13 % 60}", "completion": "w0"} for n in range(rounds * PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "model": {"src": "model"},
        "data": {
            "tokenizer": {"src": str(folder / "model")},
            "sources": [{"name": "words", "files": "prompts.jsonl", "kind": "completion"}],
            "pack_length": 48,
            "epochs": 1,
        },
        "environment": {"name": "bestiary.tools.chaos_world:Twice"},
        "rewards": {"functions": [{"name": "even", "function": "bestiary.tools.chaos_world:even"}]},
        "rollouts": {"max_tokens": 6, "n": 4, "temperature": 0.9},
        "algorithm": {"options": {"kl_coef": 0.01}, "entropy": False},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
        "loop": {"prompts": PROMPTS},
        "checkpoint": {"every": 1},
        "placement": dict(PLACEMENT),
        "out": str(folder / "out"),
        **changes,
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder / "run.json"


def trained(out: Path) -> Counter[str]:
    """Names of prompts to the optimiser steps that they were in, as the newest resume point holds them."""
    from bestiary.training.checkpoint import STATE, saved_steps
    from bestiary.training.rl.policy import trained_in

    folder = out / "checkpoints"
    state = json.loads((folder / f"step-{saved_steps(folder)[-1]:08d}" / STATE).read_text(encoding="utf-8"))
    return Counter(trained_in(state["data"]))


def under_fire(file: Path, roles: Sequence[str], *, every: int = 1, seed: int = 0) -> tuple[Any, Killer, int]:
    """Run a file while processes die; the outcome, who died, and how often it stopped and was started again."""
    global _KILLER
    from bestiary.training.rl.config import load_grpo_config
    from bestiary.training.rl.grpo import run

    _KILLER = Killer(roles, every=every, seed=seed)
    config = load_grpo_config(file, ["loop.callbacks=[bestiary.tools.chaos:killer]"])
    stops = 0
    while True:
        try:
            return run(config), _KILLER, stops
        except RoleLost as error:
            if stops == 3:
                raise
            stops += 1
            print(f"stopped: {error.what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where every prompt was trained exactly once."""
    parser = argparse.ArgumentParser(prog="python -m bestiary.tools.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="processes, shared evenly by the roles")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the members and the moments")
    parser.add_argument("--every", type=int, default=2, metavar="ROUNDS", help="between two of them")
    parser.add_argument("--staleness", type=int, default=0, metavar="ROUNDS", help="that sampling may be ahead")
    asked = parser.parse_args(arguments)
    roles = [ROLES[number % len(ROLES)] for number in range(asked.kills)]
    random.Random(asked.seed).shuffle(roles)
    rounds = FIRST + asked.every * asked.kills + 2
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        file = write_run(Path(place), rounds, loop={"prompts": PROMPTS, "staleness": asked.staleness})
        outcome, done, stops = under_fire(file, roles, every=asked.every, seed=asked.seed)
        counts = trained(Path(place) / "out")
    for one in done.done:
        print(f"round {one.after:3d} + {one.delay_s:4.1f} s  {one.role} {one.member} (process {one.pid})")
    per_role = Counter(one.role for one in done.done)
    wrong = {name: count for name, count in counts.items() if count != 1}
    whole = outcome.round == outcome.rounds == rounds and len(counts) == rounds * PROMPTS and not wrong
    print(
        f"{len(done.done)} processes killed ({', '.join(f'{role} {per_role[role]}' for role in ROLES)}), "
        f"stopped and resumed {stops} times: {len(counts)} of {rounds * PROMPTS} prompts trained, "
        f"{len(wrong)} of them not exactly once; {time.monotonic() - start:.0f} s"
    )
    return 0 if whole and all(per_role[role] >= asked.kills // len(ROLES) for role in ROLES) else 1


if __name__ == "__main__":
    from bestiary.tools import chaos  # the module that `loop.callbacks` names, and not a second one

    sys.exit(chaos.main())
