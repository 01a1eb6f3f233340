"""An engine without a model, and an environment that plays by numbers: answers are functions of what they may be."""

from __future__ import annotations

import random
import threading
import time

import numpy as np

from bestiary.training.rl.environments import Heard
from bestiary.training.rl.rollout import Rollout, check_prompts, seed_of

CONTEXT = 40
STOP = 0


class ScriptedEngine:
    """Its words depend on version, prompt and seed; `faults` are raised in place of the calls of these numbers."""

    def __init__(self, faults=None, wait_s=0.0, constrained=False):
        self.constrained = constrained
        self.version, self.calls, self.closed = 0, [], False
        self.faults, self.wait_s, self.may = dict(faults or {}), wait_s, threading.Event()
        self.may.set()

    def generate(self, prompts, sampling, *, keys=None):
        check_prompts(prompts, sampling, context=CONTEXT)
        self.calls.append([tuple(one) for one in prompts])
        self.may.wait(10)
        time.sleep(self.wait_s)
        if len(self.calls) in self.faults:
            raise self.faults[len(self.calls)]
        return [
            self._answer(place, tuple(prompt), sampling, seed_of(sampling.seed, key, answer))
            for place, (prompt, key) in enumerate(zip(prompts, keys or range(len(prompts)), strict=True))
            for answer in range(sampling.n)
        ]

    def _answer(self, place, prompt, sampling, seed):
        drawn = random.Random(repr((self.version, prompt, seed)))
        words, stopped = [], False
        while len(words) < sampling.max_tokens and not stopped:
            words.append(drawn.randrange(0, 6))
            stopped = words[-1] in sampling.stop_ids
        log_probs = np.array([-drawn.random() for _ in words], np.float32)
        ids = np.array(words, np.int32)
        allowed = np.stack([ids, *[ids + 1] * drawn.randrange(3)], 1) if self.constrained else None
        return Rollout(place, ids, log_probs, "stop" if stopped else "length", self.version, allowed)

    def close(self):
        self.closed = True


class Counting:
    """Says two ids to every answer until one has more than two words; pays what it heard. Waits as its seed says."""

    open = 0

    def __init__(self, wait_s=0.0):
        self.wait_s = wait_s
        Counting.open += 1

    def reset(self, prompt, *, seed):
        self.drawn = random.Random(seed)
        return [*prompt.ids, self.drawn.randrange(10, 20)]

    def step(self, said):
        time.sleep(self.drawn.random() * self.wait_s)
        done = len(said.ids) > 2
        return Heard(
            ids=() if done else (20 + said.turn, 30),
            done=done,
            rewards={"heard": float(sum(said.ids))},
            extra={"last": said.turn},
        )

    def cut_off(self):
        return {"heard": 100.0}

    def close(self):
        Counting.open -= 1
