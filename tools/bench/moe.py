"""A block of routed experts in Qwen3-MoE's shape, forward and backward, fp32, against transformers' grouped_mm.

2048 tokens, hidden 2048, 16 experts of width 768, 4 of them a token: router, dispatch, experts, weighted combination,
gradients of the input and of every weight. Both sides hold the same weights and start from the same gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.bench import compare, measure

SHAPE = {"tokens": 2048, "hidden": 2048, "width": 768, "experts": 16, "top_k": 4}
TINY = {"tokens": 32, "hidden": 64, "width": 32, "experts": 4, "top_k": 2}

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.moe
  python -m bestiary.tools.bench.moe --rounds 6 --reps 3 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """The one block."""
    shape = TINY if quick else SHAPE
    rows = shape["tokens"] * shape["top_k"]
    arms = {way: compare.Arm(job={"way": way, "shape": shape}) for way in ("ours", "transformers")}
    flops = 6.0 * rows * 3 * shape["hidden"] * shape["width"]
    return [compare.Case(name="block", arms=arms, flops=flops, tokens=shape["tokens"])]


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: a warm-up of 64 tokens, then the timed block."""
    import torch

    shape = job["shape"]
    block = {"ours": _ours, "transformers": _transformers}[job["way"]](shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
            block.get_parameter(name).normal_(0.0, 0.02, generator=generator)
    x = torch.randn(1, shape["tokens"], shape["hidden"], generator=generator).requires_grad_()
    direction = torch.randn(x.shape, generator=generator)

    def step(count: int) -> float:
        out = block(x[:, :count])
        out = out[0] if isinstance(out, tuple) else out
        out.backward(direction[:, :count])
        return float(out.detach().norm())

    def forget() -> None:
        x.grad = None
        block.zero_grad(set_to_none=True)

    step(min(64, shape["tokens"]))
    forget()
    size = step(shape["tokens"])
    gradient = torch.stack([parameter.grad.norm() for parameter in block.parameters()]).norm()
    held = (x.numel() + sum(parameter.numel() for parameter in block.parameters())) * x.element_size()
    sample = compare.timed(lambda: step(shape["tokens"]), job, held=held, forget=forget)
    return {**sample, "check": size * float(gradient)}


def _ours(shape: Mapping[str, int]) -> Any:
    from bestiary.models import Qwen3MoE
    from bestiary.models.config import MoE, Router, RouterKind
    from bestiary.models.layers.moe import MoEBlock

    base = Qwen3MoE.sizes["30b-a3b"]
    router = Router(kind=RouterKind.SOFTMAX_TOPK, top_k=shape["top_k"], normalize=True)
    moe = MoE(num_experts=shape["experts"], intermediate_size=shape["width"], router=router)
    return MoEBlock(base.with_(hidden_size=shape["hidden"], moe=moe), moe, "mlp")


def _transformers(shape: Mapping[str, int]) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape["hidden"],
        moe_intermediate_size=shape["width"],
        num_experts=shape["experts"],
        num_experts_per_tok=shape["top_k"],
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeSparseMoeBlock(config)


BENCH = compare.Bench(name="moe", about=__doc__, example=EXAMPLE, cases=cases, work=work)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
