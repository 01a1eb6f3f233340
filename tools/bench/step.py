"""A fine-tuning step (forward and backward, no optimiser) of Gemma 3 270M's shape, batch 1, fp32, against transformers.

    full          every weight trains, every token is a target; also TRL's SFT loss (its CPU path), if trl is installed
    compiled      the same, transformers through torch.compile, ours with compiled blocks
    half masked   the same, half of the tokens masked in turns, as chat data has them
    lora          r = 16 on every linear layer, head and embedding frozen, against PEFT and TRL + PEFT

Each sample is a fresh process that loads the same random checkpoint, warms up on a short row (compiled arms on the
whole one) and times one step. Extra memory is the peak of that step above what is resident with the model loaded. The
control arm's square fp32 product gives the peak rate that model FLOPs are a share of: linear layers and head at 6 FLOPs
a weight and token (4 where a weight is frozen), attention by visible pairs alone, no recomputation counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.bench import compare, measure, process
from bestiary.tools.bench.checkpoints import GEMMA3, linear_parameters, visible_pairs, write_gemma3
from bestiary.tools.bench.compare import COMPILER
from bestiary.tools.bench.goals import TRL, TRL_PEFT

RANK = 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_NOTE = "TRL is its loss on transformers' model without its trainer; without a GPU it runs torch code, not Triton."

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.step                        T = 1024
  python -m bestiary.tools.bench.step --full --json -        T = 2048 too
  python -m bestiary.tools.bench.step --only "full T=1024" --rounds 4 --profile out/step.txt

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """Every case at T = 1024, with `full` all but LoRA at 2048 too."""
    size = "tiny" if quick else "270m"

    def arm(way: str, tokens: int, needs: tuple[str, ...] = (), **more: Any) -> compare.Arm:
        job = {"way": way, "tokens": 64 if quick else tokens, "folder": str(folder / size), **more}
        return compare.Arm(job=job, needs=needs)

    found = []
    for tokens in (1024, 2048) if full else (1024,):
        names = {
            "full": {"ours": arm("ours", tokens), "transformers": arm("transformers", tokens)}
            | {TRL: arm("trl", tokens, ("trl", "accelerate"))},
            "compiled": {way: arm(way, tokens, (COMPILER,), compiled=True) for way in ("ours", "transformers")},
            "half masked": {way: arm(way, tokens, masked=True) for way in ("ours", "transformers")},
        }
        if tokens == 1024:
            names["lora"] = {
                "ours": arm("ours", tokens, lora=True),
                "transformers + peft": arm("transformers", tokens, ("peft",), lora=True),
                TRL_PEFT: arm("trl", tokens, ("trl", "accelerate", "peft"), lora=True),
            }
        used = 64 if quick else tokens
        for name, arms in names.items():
            targets = used // 2 if name == "half masked" else used
            found.append(
                compare.Case(
                    name=f"{name} T={tokens}",
                    arms=arms,
                    flops=model_flops(GEMMA3[size], used, targets, lora=name == "lora"),
                    tokens=used,
                    note=PEFT_NOTE if name in {"full", "lora"} else "",
                )
            )
    return found


def model_flops(shape: dict[str, int], tokens: int, targets: int, *, lora: bool = False) -> float:
    """Floating-point operations of one step: forward once, backward twice where both gradients are wanted.

    Args:
        tokens: of the row.   targets: of them, those the head has to see.   lora: base and head frozen.
    """
    linear, factor = linear_parameters(shape), 4 if lora else 6
    attention = 12 * shape["dim"] * shape["heads"] * visible_pairs(shape, tokens)
    return float(factor * (tokens * linear + targets * shape["hidden"] * shape["vocab"]) + attention)


def prepare(folder: Path, quick: bool) -> None:
    """The checkpoint that every arm loads."""
    size = "tiny" if quick else "270m"
    write_gemma3(folder / size, size)


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: load, warm up, one timed step."""
    import torch

    torch.manual_seed(0)
    load = {"ours": _ours, "transformers": _transformers, "trl": _trl}[job["way"]]
    model, loss_of = load(job)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.get("compiled"):
        if job["way"] == "ours":
            for layer in model.model.layers:
                layer.compile()
        else:
            model.compile()
    ids, labels = batch(job)

    def step(length: int) -> float:
        loss = loss_of(ids[:, :length], labels[:, :length])
        loss.backward()
        return float(loss.detach())

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    process.settle()
    loaded = process.resident()
    loss = step(ids.shape[1] if job.get("compiled") else min(64, ids.shape[1]))
    gradient = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    sample = compare.timed(lambda: step(ids.shape[1]), job, above=loaded, forget=forget)
    # With LoRA the gradients depend on each library's random A.
    return {**sample, "check": loss if job.get("lora") else float(gradient), "loss": loss}


def batch(job: Mapping[str, Any]) -> tuple[Any, Any]:
    """Random token ids (1, T) and labels: the ids, or with `masked` every second of 16 turns alone."""
    import torch

    size = Path(job["folder"]).name
    tokens = job["tokens"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, GEMMA3[size]["vocab"], (1, tokens), generator=generator)
    if not job.get("masked"):
        return ids, ids
    turn = torch.arange(tokens) // max(tokens // 16, 1)
    return ids, ids.masked_fill(turn[None] % 2 == 0, -100)


Loaded = tuple[Any, Callable[[Any, Any], Any]]


def _ours(job: Mapping[str, Any]) -> Loaded:
    import torch

    from bestiary.models import AutoDecoder, LoRAConfig

    lora = LoRAConfig(r=RANK, alpha=2 * RANK, targets=LINEARS) if job.get("lora") else None
    model = AutoDecoder.from_pretrained(job["folder"], dtype=torch.float32, lora=lora)
    return model, lambda ids, labels: model(input_ids=ids, labels=labels).loss


def _transformers(job: Mapping[str, Any]) -> Loaded:
    model = _with_peft(_plain(job), job)
    return model, lambda ids, labels: model(input_ids=ids, labels=labels, use_cache=False).loss


def _trl(job: Mapping[str, Any]) -> Loaded:
    """What trl's SFTTrainer does with a batch: its fused head, asked for the metrics it logs as well."""
    from trl.trainer.utils import add_fused_lm_head

    plain = _plain(job)
    add_fused_lm_head(plain, outputs=("log_probs", "entropy", "is_top1"))
    model = _with_peft(plain, job)
    return model, lambda ids, labels: model(input_ids=ids, labels=labels, fused_lm_head=True).loss


def _plain(job: Mapping[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32, attn_implementation="sdpa")


def _with_peft(model: Any, job: Mapping[str, Any]) -> Any:
    if not job.get("lora"):
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(LINEARS)))


BENCH = compare.Bench(
    name="step",
    about=__doc__,
    example=EXAMPLE,
    cases=cases,
    work=work,
    packages=("torch", "transformers", "peft", "trl", "bestiary"),
    prepare=prepare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
