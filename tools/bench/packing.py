"""What batching costs in a real training step: packing on the fly against padding, sorting and packing beforehand.

Every arm trains a 4-layer Qwen3-shaped model (forward and backward) on the heavy-tailed T0 subset, tokenized by Qwen3's
tokenizer and template, in the same run. Figures are useful tokens (no padding) per second of wall time.

    ours          PackLoader: read, template, mask and pack in another process, while the step runs
    padded        as long as the longest of 16 documents; "8 ranks": of 8 documents, and the slowest of 8 ranks counts
    sorted        padded batches of 16 documents of about equal length, after tokenizing and sorting all of them
    flattening    transformers' DataCollatorWithFlattening, 16 documents
    trl bfd       TRL's packing of all documents beforehand and its padding-free collator
    alone         one document a call, in our model
    in memory     the same packs as `ours`, made beforehand
    a core to spare   both again, the step on one thread less than there are cores: what the packer costs a step that it
                  takes no core from, as on a machine whose GPU trains
    flat          ours and padded on documents of equal length, in our model, where there is nothing to gain

The four peers run in the model that they are used with, transformers' of the same shape. "in our model" are padded and
sorted batches in ours, without a goal: our blocks skip most of what padding costs, so there the batching alone gains
less. Of all sorted batches those are run that hold the tokens at equal steps of the sum, each for as many tokens; by
count, the few batches of the longest documents, which hold much of the text, would hardly be seen. Against sorted,
flattening and TRL the figure is over an epoch of the subset, with the time to the first step: for those that look at
all documents first, tokenizing them is in it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.packing --data ../shared/data/text --json out/bench-packing.json
  python -m bestiary.tools.bench.packing --documents 64 --subset 1000 --rounds 2

exit codes: 0 all goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""

RANKS = 8
FLAT_PACKS = 16  # of the control
SORTED = 8  # batches of sorted documents that are run
FILLED_S = 5.0  # after which a packer that was started again is as far ahead as it gets
SETTLED_S = 0.5  # after which the producer has filled its queue and is still
# goal, figure of ours over the other arm's, whether the time to the first step counts
GOALS: tuple[tuple[str, float, bool], ...] = (
    ("padded B=8, 8 ranks", 4.7, False),
    ("padded B=16", 4.3, False),
    ("sorted B=16", 1.15, True),
    ("flattening B=16", 1.6, True),
    ("trl bfd", 2.3, True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    parser = Parser("bestiary.tools.bench.packing", __doc__, EXAMPLE)
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the texts; default $BESTIARY_REFERENCE_DATA/text"
    )
    parser.add_argument(
        "--documents", type=at_least(64), default=128, help="that an arm trains on in a round (default 128)"
    )
    parser.add_argument("--subset", type=at_least(64), default=None, help="rows of the file (default all)")
    parser.add_argument("--rounds", type=at_least(2), default=2, help="measurements of each arm (default 2)")
    args = parser.parse_args(argv)
    folder = args.data or Path(os.environ.get("BESTIARY_REFERENCE_DATA", ".")) / "text"
    try:
        payload = compare(folder / "t0_subset.jsonl.gz", args.documents, args.subset, args.rounds)
    except (BestiaryError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 7
    write_json(args.json, payload)
    return int(payload["exit_code"])


def compare(file: Path, count: int, subset: int | None, rounds: int) -> dict[str, Any]:
    """All arms; the result as JSON values.

    Raises:
        AssetMissing: the tokenizer was not fetched. OSError: the texts are not there.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from bestiary.tools.bench import packing_arms as work
    from bestiary.tools.npm_assets import tokenizer_folder

    encode = work.encoder(tokenizer_folder("qwen3"))
    start = time.perf_counter()
    every = work.documents(file, encode, subset)
    first_step = {"tokenizing all": time.perf_counter() - start}
    total, some = sum(map(len, every)), every[:count]
    wanted = sum(map(len, some))

    start = time.perf_counter()
    live = work.loader(file, encode, streams=RANKS)
    packs = iter(live)
    taken = [next(packs)]
    first_step["ours"] = time.perf_counter() - start
    start = time.perf_counter()
    sorted_works = work.by_length(every, 16, SORTED)
    first_step["sorted B=16"] = first_step["tokenizing all"] + time.perf_counter() - start
    start = time.perf_counter()
    bfd = work.trl_bfd(every, max(2, round(wanted / work.PACK)))
    first_step["trl bfd"] = first_step["tokenizing all"] + time.perf_counter() - start
    first_step["flattening B=16"] = 0.0  # tokenizes as it goes; that time is left out of its steps, too

    ours, theirs = _step(work.our_model()), _step(work.their_model())
    steps = max(1, round(wanted / work.PACK / RANKS)) * RANKS
    flat = work.FoldedEncoder(encode.encode, work.FLAT)
    flat_documents = work.documents(file, flat, FLAT_PACKS * work.PACK // work.FLAT)
    flat_packs = work.packed(flat_documents)
    with closing(work.loader(file, encode, streams=RANKS)) as again:
        held = list(islice(again, 1 + steps))[1:]
    beginning = live.state_dict()

    def settled_packs() -> Iterator[Any]:
        """The packs after the first one, the same in each round, from a packer that is as far ahead as it gets."""
        live.load_state_dict(beginning)
        found = islice(live, steps)
        first = next(found)
        time.sleep(FILLED_S)
        return chain([first], found)

    arms: dict[str, Callable[[], measure.Sample]] = {
        "ours": lambda: _run(ours, settled_packs(), ranks=RANKS),
        "in memory": lambda: _settled(ours, held),
        "a core to spare, ours": lambda: _spared(lambda: _run(ours, settled_packs(), ranks=RANKS)),
        "a core to spare, in memory": lambda: _spared(lambda: _settled(ours, held)),
        "padded B=8, 8 ranks": lambda: _run(theirs, work.in_order(some, 8), ranks=RANKS),
        "padded B=16": lambda: _run(theirs, work.in_order(some, 16)),
        "sorted B=16": lambda: _run(theirs, sorted_works, equal=True),
        "flattening B=16": lambda: _run(theirs, work.flattened(some, 16)),
        "trl bfd": lambda: _run(theirs, bfd),
        "in our model: padded B=16": lambda: _run(ours, work.in_order(some, 16)),
        "in our model: sorted B=16": lambda: _run(ours, sorted_works, equal=True),
        "alone": lambda: _run(ours, work.alone(some)),
        "flat, ours": lambda: _run(ours, flat_packs),
        "flat, padded B=16": lambda: _run(ours, work.in_order(flat_documents, 16)),
    }
    for one in (taken[0], *held[:RANKS], work.padded(some[:8]), flat_packs[0], *work.in_order(flat_documents[:16], 16)):
        ours(one)
    theirs(bfd[0])
    samples = measure.alternate(arms, rounds, progress=_progress)
    for _ in islice(live, 40):  # slots of packs alone are cheap to count
        pass
    efficiency = live.given.efficiency
    live.close()
    summaries = measure.summarise(samples)
    goals = [
        measure.Goal(name="slot efficiency of ours", figure=efficiency, limit=0.99, at_least=True),
        *(_goal(samples, other, limit, first_step if epoch else {}, total) for other, limit, epoch in GOALS),
        _ratio("flat control: ours / padded B=16", samples["flat, ours"], samples["flat, padded B=16"], 0.98),
        _overlap(samples, "a core to spare, "),
    ]
    control = summaries["in memory"]["useful_per_s"]
    code = measure.exit_code(goals, control)
    print(f"{'':28}{'useful/s':>10}{'slots used':>12}{'first step':>12}")
    for name, quantities in summaries.items():
        rate, used = quantities["useful_per_s"], quantities["slot_efficiency"]
        print(f"  {name:<26}{rate.median:10,.0f}{used.median:12.1%}{first_step.get(name, 0.0):11.1f}s")
    stood = summaries["ours"]["waited_s"]
    print(f"  the trainer waited {stood.median:.3f} s for {steps} packs")
    both = _overlap(samples)
    print(
        f"  on all cores, the packer's own work in it: {both.name} {both.figure:.3f} ({both.low:.3f}–{both.high:.3f})"
    )
    measure.print_goals(goals, control, code)
    return measure.report(
        "packing",
        summaries,
        goals,
        code,
        samples=samples,
        first_step_s=first_step,
        documents=len(every),
        tokens=total,
        versions=measure.versions("torch", "transformers", "trl", "tokenizers"),
    )


def _step(model: Any) -> Callable[[Any], float]:
    """Seconds of one forward and backward pass."""

    def run(work: Any) -> float:
        start = time.perf_counter()
        model(**work.arguments).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return time.perf_counter() - start

    return run


def _run(
    step: Callable[[Any], float], works: Iterator[Any] | Sequence[Any], *, ranks: int = 1, equal: bool = False
) -> measure.Sample:
    """Steps of all micro-batches; with ranks, each global step lasts as long as its slowest rank.

    The time that `next` stands still is in it.

    Args:
        equal: each micro-batch stands for as many useful tokens, however many are in it.
    """
    useful = slots = 0.0
    seconds, stood, group = 0.0, 0.0, []
    works = iter(works)
    while True:
        start = time.perf_counter()
        work = next(works, None)
        if work is None:
            break
        waited = time.perf_counter() - start
        share = 1 / work.useful if equal else 1.0
        stood += waited
        group.append((waited + step(work)) * share)
        useful, slots = useful + work.useful * share, slots + work.arguments["input_ids"].numel() * share
        if len(group) == ranks:
            seconds, group = seconds + max(group) * ranks, []
    seconds += max(group, default=0.0) * len(group)
    return {
        "useful_per_s": useful / seconds,
        "slot_efficiency": useful / slots,
        "seconds_per_slot": seconds / slots,
        "waited_s": stood,
    }


def _spared(run: Callable[[], measure.Sample]) -> measure.Sample:
    """With one thread of torch less than there are cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    try:
        return run()
    finally:
        torch.set_num_threads(threads)


def _settled(step: Callable[[Any], float], works: Sequence[Any]) -> measure.Sample:
    time.sleep(SETTLED_S)
    return _run(step, works, ranks=RANKS)


def _goal(
    samples: dict[str, list[measure.Sample]], other: str, limit: float, first_step: dict[str, float], tokens: int
) -> measure.Goal:
    """Ours over another arm; with times to the first step, over an epoch of all documents."""

    def rates(name: str) -> list[float]:
        waited = first_step.get(name, 0.0)
        return [tokens / (waited + tokens / sample["useful_per_s"]) for sample in samples[name]]

    figure = measure.Summary.of([ours / theirs for ours, theirs in zip(rates("ours"), rates(other), strict=True)])
    return measure.Goal(
        name=f"ours / {other}" + ", an epoch with its first step" * bool(first_step),
        figure=figure.median,
        limit=limit,
        at_least=True,
        low=figure.low,
        high=figure.high,
    )


def _ratio(name: str, ours: Sequence[measure.Sample], theirs: Sequence[measure.Sample], limit: float) -> measure.Goal:
    each = [one["useful_per_s"] / other["useful_per_s"] for one, other in zip(ours, theirs, strict=True)]
    figure = measure.Summary.of(each)
    return measure.Goal(name=name, figure=figure.median, limit=limit, at_least=True, low=figure.low, high=figure.high)


def _overlap(samples: dict[str, list[measure.Sample]], kind: str = "") -> measure.Goal:
    each = zip(samples[f"{kind}ours"], samples[f"{kind}in memory"], strict=True)
    figure = measure.Summary.of([live["seconds_per_slot"] / held["seconds_per_slot"] for live, held in each])
    return measure.Goal(
        name=f"{kind}step with the packer beside it / from memory",
        figure=figure.median,
        limit=1.02,
        low=figure.low,
        high=figure.high,
    )


def _progress(round_: int, arm: str, sample: measure.Sample) -> None:
    print(f"round {round_} {arm}: {sample['useful_per_s']:,.0f} useful tokens/s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
