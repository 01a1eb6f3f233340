"""The log-prob core alone: a linear head and its cross-entropy, forward and backward with dX and dW, fp32.

    ours         bestiary.kernels.cross_entropy.linear_cross_entropy
    naive        logits, then F.cross_entropy: what transformers does
    torch auto   F.linear_cross_entropy with its default options (measured in one round alone)
    torch 256    the same with chunks of 256 rows
    trl          trl's chunked log-prob function, if trl is installed: its torch code, since there is no GPU

Scratch is the peak of a call above its inputs, without dX and dW. After the timing, each arm computes a small problem
in fp32 and in bf16; the errors of loss, dX and dW are against float64 on the same rounded inputs (relative, dX and dW
in the Frobenius norm).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.bench import compare, measure
from bestiary.tools.bench.goals import TRL

SHAPES = {"2048x640x262144": (2048, 640, 262144), "1024x2048x151936": (1024, 2048, 151936)}
TINY = (64, 32, 1003)
SMALL = (256, 128, 4096)  # of the comparison with float64: bf16 products are emulated on CPUs

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.log_prob
  python -m bestiary.tools.bench.log_prob --only 151936 --rounds 4 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""

Loss = Callable[[Any, Any, Any], Any]  # hidden (N, H), weight (V, H), target (N,) → scalar


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """Both shapes; with `full` torch's default in every round."""
    found = []
    for name, shape in SHAPES.items():
        used = TINY if quick else shape
        arms = {arm: compare.Arm(job={"way": arm, "shape": used}) for arm in ("ours", "naive", "torch 256")}
        if name == "2048x640x262144":
            arms["torch auto"] = compare.Arm(job={"way": "torch auto", "shape": used}, once=not full)
            arms[TRL] = compare.Arm(job={"way": "trl", "shape": used}, needs=("trl",))
        rows, hidden, vocab = used
        note = "torch auto ran in the first round alone (--full: in all)" if "torch auto" in arms and not full else ""
        flops = 6.0 * rows * hidden * vocab
        found.append(compare.Case(name=name, arms=arms, flops=flops, tokens=rows, note=note))
    return found


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: a warm-up of 32 rows, a timed call, then the errors."""
    loss_of = WAYS[job["way"]]()
    rows, hidden, vocab = job["shape"]
    x, weight, target = problem(rows, hidden, vocab)
    losses = []

    def step(count: int) -> None:
        loss = loss_of(x[:count], weight, target[:count])
        loss.backward()
        losses.append(float(loss.detach()))

    def forget() -> None:
        x.grad = weight.grad = None

    step(min(32, rows))
    held = (x.numel() + weight.numel()) * x.element_size()
    sample = compare.timed(lambda: step(rows), job, held=held, forget=forget)
    return {**sample, **errors(loss_of, SMALL if rows > SMALL[0] else (rows, hidden, vocab)), "check": losses[1]}


def problem(rows: int, hidden: int, vocab: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Hidden states of unit size, a weight that gives logits of about unit size, targets."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator).requires_grad_()
    weight = torch.empty(vocab, hidden).normal_(0.0, hidden**-0.5, generator=generator).requires_grad_()
    return x, weight, torch.randint(0, vocab, (rows,), generator=generator)


def errors(loss_of: Loss, shape: tuple[int, int, int]) -> measure.Sample:
    """Errors of loss, dX and dW in fp32 and bf16 against float64, on inputs rounded to that dtype first."""
    import torch

    found: measure.Sample = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, target = problem(*shape, seed=1)
        rounded = [tensor.detach().to(dtype) for tensor in (x, weight)]
        exact = _outcome(naive(), [tensor.double() for tensor in rounded], target)
        computed = _outcome(loss_of, rounded, target)
        name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        for what, is_, wanted in zip(("loss", "dX", "dW"), computed, exact, strict=True):
            found[f"error {name} {what}"] = float((is_.double() - wanted).norm() / wanted.norm())
    return found


def _outcome(loss_of: Loss, inputs: Sequence[Any], target: Any) -> list[Any]:
    x, weight = (tensor.clone().requires_grad_() for tensor in inputs)
    loss = loss_of(x, weight, target)
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


# ------------------------------------------------------------------ the ways


def ours() -> Loss:
    """The scalar loss of the core: gradients in the forward pass."""
    from bestiary.kernels.cross_entropy import linear_cross_entropy

    return lambda x, weight, target: linear_cross_entropy(x, weight, target)


def naive() -> Loss:
    """All logits, widened to fp32 at least, then the cross-entropy."""
    import torch
    import torch.nn.functional as F

    def loss(x: Any, weight: Any, target: Any) -> Any:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    return loss


def torch_auto() -> Loss:
    """torch's own, with the options it picks."""
    import torch.nn.functional as F
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return lambda x, weight, target: F.linear_cross_entropy(x, weight, target, options=LinearCrossEntropyOptions())


def torch_256() -> Loss:
    """torch's own, 256 rows at a time."""
    import torch.nn.functional as F
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=256)
    return lambda x, weight, target: F.linear_cross_entropy(x, weight, target, options=options)


def trl() -> Loss:
    """trl's function without the extra outputs, at the vocabulary chunk that its trainers use."""
    from trl.kernels import ChunkedLogProbFunction

    return lambda x, weight, target: (
        -ChunkedLogProbFunction.apply(x, weight, None, target, 1.0, TRL_CHUNK, None, 1.0, ("log_probs",))[0].mean()
    )


TRL_CHUNK = 32768
WAYS: dict[str, Callable[[], Loss]] = {
    "ours": ours,
    "naive": naive,
    "torch auto": torch_auto,
    "torch 256": torch_256,
    "trl": trl,
}

BENCH = compare.Bench(
    name="log_prob",
    about=__doc__,
    example=EXAMPLE,
    cases=cases,
    work=work,
    packages=("torch", "trl", "bestiary"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
