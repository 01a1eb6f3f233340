"""Activation checkpointing: what each way keeps in memory, and what it computes again, by torch's own counters.

Forward and backward pass of a decoder of Gemma 3 270M's shape with a small vocabulary, fp32, random weights. The peak
is the most bytes that torch's allocator held, weights and gradients included; beside it the estimate that `--dry-run`
prints, without the optimiser, and the FLOPs that are repeated. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from bestiary.models import Decoder, DecoderConfig, Gemma3
from bestiary.models.context import ContextSlice
from bestiary.models.recomputation import Checkpointing, Part
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.training.estimate import estimate_step
from bestiary.training.memory import GIB

VOCAB = 4096
EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.recompute                        T = 2048
  python -m bestiary.tools.bench.recompute --tokens 8192 --layers 4 --json -"""


@dataclass(frozen=True)
class Row:
    """One way to checkpoint.

    Attributes:
        peak, estimate: bytes.   flops: of the step's products.   repeated: those of them computed a second time.
    """

    way: str
    peak: int
    estimate: int
    flops: int
    repeated: int


def ways(layers: int) -> dict[str, Checkpointing | None]:
    """By name: none, every part, and half of the blocks in two ways."""
    found: dict[str, Checkpointing | None] = {"none": None}
    found |= {str(part): Checkpointing(part=part) for part in Part}
    found["full, every 2nd"] = Checkpointing(every=2)
    found["full, first half"] = Checkpointing(first=max(layers // 2, 1))
    return found


def peak_of_a_step(
    config: DecoderConfig, tokens: int, *, update: bool = True, context: ContextSlice | None = None
) -> int:
    """The most bytes that torch held in a step in fp32, model included; with `update` AdamW and its states too.

    Args:
        context: the slice of the row that is computed; None: all of it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        model = Decoder(config, dtype=torch.float32).train()
        ids = torch.randint(config.vocab_size, (1, tokens))
        model(ids, labels=ids, context_slice=context).loss.backward()
        if update:
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]).step()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measured(config: DecoderConfig, tokens: int) -> list[Row]:
    """Every way."""
    rows = []
    for way, checkpointing in ways(config.num_hidden_layers).items():
        changed = config.with_(activation_checkpointing=checkpointing or False)
        wanted = estimate_step(changed, tokens=tokens, dtype=torch.float32)
        flops = wanted.flops
        peak = peak_of_a_step(changed, tokens, update=False)
        rows.append(Row(way, peak, wanted.total - wanted.optimiser, flops.model, flops.hardware - flops.model))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 0."""
    parser = Parser("bestiary.tools.bench.recompute", __doc__, EXAMPLE)
    parser.add_argument("--tokens", type=at_least(1), default=2048, help="of the row (default 2048)")
    parser.add_argument("--layers", type=at_least(1), default=6, help="of the decoder (default 6)")
    args = parser.parse_args(argv)
    full = Gemma3.sizes["270m"]
    config = full.with_(vocab_size=VOCAB, num_hidden_layers=args.layers, layer_types=full.layer_types[: args.layers])
    rows = measured(config, args.tokens)
    if args.json != "-":
        print(f"{'way':<18}{'peak GiB':>10}{'estimate':>10}{'repeated':>10}")
        for row in rows:
            share = row.repeated / row.flops
            print(f"{row.way:<18}{row.peak / GIB:>10.3f}{row.estimate / GIB:>10.3f}{share:>10.1%}")
    write_json(args.json, {"tokens": args.tokens, "layers": args.layers, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
