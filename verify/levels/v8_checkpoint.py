"""V8, checkpoint: the real weights in float32, streamed; each layer alone and the logits at the end."""

from __future__ import annotations

from functools import partial

import torch

from bestiary.verify.checkpoint_bench import Bench, spread
from bestiary.verify.checks import Check, Outcome, failed, holds, judged
from bestiary.verify.verdict import Exit

CHUNK = 64


def _finite(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    ok = ours.shape == theirs.shape and bool(torch.isfinite(ours).all())
    return holds(
        ok, Exit.NUMERIC, f"our logits are {tuple(ours.shape)}, Hugging Face's {tuple(theirs.shape)}, or not finite"
    )


def _max(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True))
    return judged(worst / spread(theirs), bench.gates["V8.max"])


def _kl(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    total = 0.0
    for a, b in zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True):
        p, q = b.double().log_softmax(-1), a.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return judged(total / len(theirs), bench.gates["V8.kl"])


def _top1(bench: Bench, name: str) -> Outcome:
    """Agreement of the most likely token where the reference's margin exceeds the noise that the gate allows."""
    ours, theirs = bench.logits(name)
    best = theirs.topk(2, dim=-1)
    noise = bench.gates["V8.max"].limit * float(theirs[:CHUNK].double().std())
    clear = best.values[:, 0] - best.values[:, 1] > noise
    if not bool(clear.any()):
        return failed(Exit.INCONCLUSIVE, "no position has a margin above the noise")
    agree = (ours.argmax(-1) == best.indices[:, 0])[clear]
    return judged(float(agree.double().mean()), bench.gates["V8.top1"])


def _long_enough(bench: Bench) -> Outcome:
    window = bench.config.sliding_window
    count = len(bench.token_ids)
    enough = window is None or count > window
    return (
        Outcome("passed")
        if enough
        else Outcome("inconclusive", Exit.INCONCLUSIVE, f"{count} tokens do not pass the window of {window}")
    )


def _part(bench: Bench, name: str, part: str) -> Outcome:
    return judged(bench.streamed().figures[f"{name}/{part}"], bench.gates["V8.layer"])


def plan(bench: Bench) -> list[Check]:
    """Each part teacher-forced and the logits free-running, from position 0 and from a far one."""
    checks = [Check("longer than the window", partial(_long_enough, bench))]
    for name in bench.input_names:
        checks += [Check(f"{name}/{part}", partial(_part, bench, name, part)) for part in bench.parts]
        checks += [
            Check(f"{name}/finite", partial(_finite, bench, name)),
            Check(f"{name}/max", partial(_max, bench, name)),
            Check(f"{name}/kl", partial(_kl, bench, name)),
            Check(f"{name}/top1", partial(_top1, bench, name)),
        ]
    return checks
