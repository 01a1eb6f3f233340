"""Sliding-window attention over packed documents, forward and backward, fp32, against SDPA with a dense mask.

4096 tokens in 16 documents of unequal length, window 512, Gemma 3 270M's heads (4 query, 1 key/value, of 256). The
other side is transformers' own sdpa function under the dense mask that its models build for packed rows. Masks are
built before the timing, as a model builds them once for all its layers; their memory counts, their time is
`mask_seconds`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.bench import compare, measure, process

SHAPE = {"tokens": 4096, "documents": 16, "window": 512, "heads": 4, "kv": 1, "dim": 256}
TINY = {"tokens": 128, "documents": 4, "window": 16, "heads": 4, "kv": 1, "dim": 16}

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.attention
  python -m bestiary.tools.bench.attention --rounds 6 --reps 3 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """The one row; FLOPs of the pairs that the masks leave."""
    shape = TINY if quick else SHAPE
    arms = {way: compare.Arm(job={"way": way, "shape": shape}) for way in ("ours", "transformers")}
    pairs = sum(_pairs(length, shape["window"]) for length in document_lengths(shape["tokens"], shape["documents"]))
    flops = 12.0 * shape["heads"] * shape["dim"] * pairs
    return [compare.Case(name="sliding and packed", arms=arms, flops=flops, tokens=shape["tokens"])]


def document_lengths(tokens: int, documents: int) -> list[int]:
    """Lengths that rise from short to long and fill the row: the n-th has about n shares of it."""
    shares = documents * (documents + 1) // 2
    lengths = [tokens * (index + 1) // shares for index in range(documents)]
    lengths[-1] += tokens - sum(lengths)
    return lengths


def _pairs(length: int, window: int) -> int:
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: the mask, a warm-up, the timed call."""
    import torch

    shape = job["shape"]
    tokens, heads, kv, dim = (shape[name] for name in ("tokens", "heads", "kv", "dim"))
    lengths = torch.tensor(document_lengths(tokens, shape["documents"]))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, length: int) -> Any:
        """(1, heads, T, d), laid out as the projections of a model leave it."""
        return torch.randn(1, length, count, dim, generator=generator).transpose(1, 2)

    q, k, v = (draw(n, tokens).requires_grad_() for n in (heads, kv, kv))
    direction = draw(heads, tokens)
    # One document as long as the window: libraries then have the buffers that they keep for good, on either side.
    few = shape["window"]
    warm = [draw(n, few).requires_grad_() for n in (heads, kv, kv)]
    attend = {"ours": _ours, "transformers": _transformers}[job["way"]]
    attend(torch.zeros_like(documents[:, :few]), shape)(*warm).sum().backward()
    del warm
    process.settle()
    before = process.resident()
    start = time.perf_counter()
    function = attend(documents, shape)
    mask_seconds = time.perf_counter() - start

    def step() -> float:
        out = function(q, k, v)
        out.backward(direction)
        return float(out.detach().norm())

    def forget() -> None:
        q.grad = k.grad = v.grad = None

    size = step()
    gradient = torch.stack([tensor.grad.norm() for tensor in (q, k, v) if tensor.grad is not None]).norm()
    sample = compare.timed(step, job, above=before, forget=forget)
    return {**sample, "mask_seconds": mask_seconds, "check": size * float(gradient)}


def _ours(documents: Any, shape: Mapping[str, int]) -> Any:
    from bestiary.kernels.attention import MaskSpec, attention

    tokens = documents.shape[1]
    mask = MaskSpec(q_len=tokens, kv_len=tokens, window=shape["window"], documents=documents)
    return lambda q, k, v: attention(q, k, v, mask, scale=shape["dim"] ** -0.5)


def _transformers(documents: Any, shape: Mapping[str, int]) -> Any:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tokens = documents.shape[1]
    position = torch.arange(tokens)
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < shape["window"])
    mask = (visible & (documents[0][:, None] == documents[0][None, :]))[None, None]
    module: Any = torch.nn.Module()
    module.num_key_value_groups = shape["heads"] // shape["kv"]

    def run(q: Any, k: Any, v: Any) -> Any:
        out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=shape["dim"] ** -0.5, is_causal=True)
        return out.transpose(1, 2)

    return run


BENCH = compare.Bench(name="attention", about=__doc__, example=EXAMPLE, cases=cases, work=work)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
