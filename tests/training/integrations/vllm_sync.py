"""A process with one vLLM engine that TRL starts: how far its log-probabilities are from the policy's at each stage.

Run as `python vllm_sync.py FOLDER RESULT`; the result is a JSON file.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from bestiary.models import AutoDecoder, LoRAConfig
from bestiary.training.integrations.trl_grpo import reload, send_hub_tensors

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def main(folder: str, result: str) -> None:
    policy = AutoDecoder.from_pretrained(
        folder, dtype=torch.float32, lora=LoRAConfig(r=3, alpha=6, targets=("*_proj",))
    )
    # TRL has no arguments for these: vLLM would compile the model, in bfloat16.
    vllm_generation.LLM = partial(
        vllm_generation.LLM, enforce_eager=True, dtype="float32", kv_cache_memory_bytes=1 << 26
    )
    engine = VLLMGeneration(
        model=policy,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(folder),
        max_model_length=32,
        max_num_seqs=4,
        max_completion_length=6,
    )

    def apart() -> float:
        """The largest difference of a sampled token's log-probability, vLLM's against ours."""
        _, completions, answers, _ = engine.generate(PROMPTS, None, 1)
        worst = 0.0
        for prompt, completion, answer in zip(PROMPTS, completions, answers, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                ours = policy(ids, labels=ids).log_probs[0, len(prompt) - 1 : -1]
            worst = max(worst, float((ours - torch.tensor(answer)[:, 0]).abs().max()))
        return worst

    def step(seed: int) -> None:
        """Adapters move."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    def refusal(send) -> str | None:
        """What is raised."""
        try:
            send()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    trl_walk = engine._iter_named_params
    found = {"start": apart()}
    step(1)
    found["stale"] = apart()
    found["sync of TRL"] = refusal(engine.sync_weights)
    send_hub_tensors(engine, policy)
    engine.sync_weights()
    found["first sync"] = apart()
    step(2)
    engine.sync_weights()
    found["second sync"] = apart()
    adapted, policy = policy, AutoDecoder.from_pretrained(folder, dtype=torch.float32)
    step(3)
    engine.model = policy
    found["experts by TRL's walk"] = refusal(lambda: reload(engine, trl_walk()))
    if found["experts by TRL's walk"] is None:
        found["experts apart"] = apart()
    engine.model = adapted
    found["adapters by TRL's walk"] = refusal(lambda: reload(engine, trl_walk()))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
