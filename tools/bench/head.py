"""The head over a vocabulary that is no multiple of 64: three ways to the same (N, V) logits, forward and backward.

    plain    F.linear with the (V, H) weight as it is: unaligned columns
    view     the weight is the first V rows of a zero-tailed (ceil64(V), H) storage, used whole; padded columns are cut
    tile     the last V mod 64 rows through one zero-padded tile: what `bestiary.kernels.head` does
    control  F.linear over floor64(V) rows, a little less work than any of them: how steady the machine is

The design asks: if the tile alone is as fast as the padded view, keep only the tile. That is the goal here, per shape.
All arms give contiguous logits, and backward starts from a fixed gradient, so that it costs the two products alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels.head import TILE, head_logits
from bestiary.tools.arguments import Parser, at_least, write_json
from bestiary.tools.bench import measure

AS_FAST = 1.05  # tile / view

# tokens, hidden, vocabulary: a small model's head, Gemma 3 270M's with an image token more, a wide one
SHAPES = ((1024, 1024, 32003), (128, 640, 262145), (256, 2560, 50257))

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.head
  python -m bestiary.tools.bench.head --shape 512x1024x100277 --rounds 9 --json -

exit codes: 0 the tile is as fast as the padded view, 1 it is not, 5 too noisy to tell"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = Parser("bestiary.tools.bench.head", __doc__, EXAMPLE)
    parser.add_argument("--shape", type=_shape, action="append", help="TOKENSxHIDDENxVOCAB, repeatable")
    parser.add_argument("--rounds", type=at_least(2), default=7, help="at least 2 (default 7)")
    args = parser.parse_args(argv)

    versions = measure.versions("torch", "bestiary")
    quiet = args.json == "-"
    if not quiet:
        print(", ".join(f"{name} {number}" for name, number in versions.items()), f"threads {torch.get_num_threads()}")
    results, codes = [], []
    for tokens, hidden, vocab in args.shape or SHAPES:
        samples = measure.alternate(arms(tokens, hidden, vocab), args.rounds)
        summaries = measure.summarise(samples)
        goals = [
            measure.Goal(
                name=f"tile / view, {what}, N={tokens} H={hidden} V={vocab}",
                figure=summaries["tile"][what].median / summaries["view"][what].median,
                limit=AS_FAST,
            )
            for what in ("forward_s", "total_s")
        ]
        codes.append(measure.exit_code(goals, summaries["control"]["total_s"]))
        results.append(measure.report("head.shape", summaries, goals, codes[-1], shape=[tokens, hidden, vocab]))
        if not quiet:
            _print_table(summaries, f"N={tokens} H={hidden} V={vocab} (V mod 64 = {vocab % TILE})")
            measure.print_goals(goals, summaries["control"]["total_s"], codes[-1])
    code = max(codes)
    payload = {"schema": "bestiary.bench.head/1", "exit_code": code, "versions": versions, "shapes": results}
    write_json(args.json, payload)
    return code


def arms(tokens: int, hidden: int, vocab: int, seed: int = 0) -> dict[str, Callable[[], measure.Sample]]:
    """One measuring function per way; all see the same weight, input and loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).requires_grad_()
    direction = torch.randn(tokens, vocab, generator=generator)
    storage = torch.zeros(-(-vocab // TILE) * TILE, hidden)
    storage[:vocab] = weight.detach()
    padded = storage[:vocab].requires_grad_()  # a leaf that shares the zero-tailed storage
    aligned = vocab // TILE * TILE
    whole = weight.detach()[:aligned].clone().requires_grad_()

    def arm(logits: Callable[[], Tensor], leaf: Tensor, columns: int) -> Callable[[], measure.Sample]:
        return lambda: _measure(logits, (x, leaf), direction[:, :columns])

    return {
        "plain": arm(lambda: F.linear(x, weight), weight, vocab),
        "view": arm(lambda: _PaddedView.apply(x, padded, storage), padded, vocab),
        "tile": arm(lambda: head_logits(x, weight), weight, vocab),
        "control": arm(lambda: F.linear(x, whole), whole, aligned),
    }


class _PaddedView(torch.autograd.Function):
    """Logits through the zero-tailed storage: one aligned product, then the real columns copied out."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, weight: Tensor, storage: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, storage)[:, : weight.shape[0]].contiguous()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        hidden, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient @ weight, gradient.t() @ hidden, None


def _measure(logits: Callable[[], Tensor], leaves: Sequence[Tensor], direction: Tensor) -> measure.Sample:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    result = logits()
    middle = time.perf_counter()
    torch.autograd.grad(result, leaves, direction)
    end = time.perf_counter()
    return {"forward_s": middle - start, "backward_s": end - middle, "total_s": end - start}


def _shape(text: str) -> tuple[int, int, int]:
    tokens, hidden, vocab = (int(part) for part in text.split("x"))
    return tokens, hidden, vocab


def _print_table(summaries: dict[str, dict[str, measure.Summary]], title: str) -> None:
    print(f"\n{title}\n  {'arm':<10}{'forward s':>11}{'backward s':>12}{'total s':>9}{'spread':>8}{'/ plain':>9}")
    for arm, rows in summaries.items():
        ratio = rows["total_s"].median / summaries["plain"]["total_s"].median
        print(
            f"  {arm:<10}{rows['forward_s'].median:11.3f}{rows['backward_s'].median:12.3f}"
            f"{rows['total_s'].median:9.3f}{rows['total_s'].spread:8.1%}{ratio:9.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
