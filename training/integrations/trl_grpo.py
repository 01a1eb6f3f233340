"""Reinforcement learning with TRL's GRPOTrainer, completions by the model itself or by vLLM.

Rows of the data file: {"prompt": "…", …}. `--reward` names a Python function `module:name` that gets prompts,
completions and the other columns as lists and returns a number a completion; without it, a completion that contains the
row's `answer` earns 1.

    python -m bestiary.training.integrations.trl_grpo --help
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from bestiary.models import Decoder
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.example import load
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.script import dataset, finish, parser, settings
from bestiary.training.integrations.transformers_trainer import DecoderTrainer
from bestiary.training.integrations.trl_head import decoder_of, reference_of, use_our_head
from bestiary.training.rl.vllm_reload import reload

with needs("trl", "bestiary[trl]"):
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer.callbacks import SyncRefModelCallback

Reward = Callable[..., list[float]]


class DecoderGRPOTrainer(DecoderTrainer, GRPOTrainer):
    """`GRPOTrainer` for a `Decoder`; see `DecoderTrainer`.

    The policy scores by its own head (`trl_head`); so does the reference, a copy of the policy in place of
    transformers' model, or with LoRA the policy without its adapters. vLLM is sent hub tensors (`send_hub_tensors`).

    Raises:
        InvalidRun: `cast_lm_head_to_fp32`, which would rewrite the head; or a synced reference with LoRA.
    """

    ref_model: Any

    def __init__(self, model: nn.Module, *arguments: Any, args: GRPOConfig, **named: Any) -> None:
        if args.cast_lm_head_to_fp32:
            raise InvalidRun(
                "cast_lm_head_to_fp32 = True rewrites the head.",
                remedy="cast_lm_head_to_fp32=False: ours computes logits in float32 in any case",
            )
        super().__init__(model, *arguments, args=args, **named)
        if self.ref_model is not None:
            reference = reference_of(decoder_of(self.model), synced=args.sync_ref_model)
            use_our_head(reference, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, SyncRefModelCallback):
                    callback.ref_model = self.ref_model
        use_our_head(self.model, temperature=self.temperature, entropy=True)
        if self.use_vllm and isinstance(self.model, Decoder):  # PEFT's adapters are merged by TRL's own walk
            send_hub_tensors(self.vllm_generation, self.model)


def send_hub_tensors(generation: VLLMGeneration, decoder: Decoder) -> None:
    """Make TRL send vLLM what `named_hf_tensors` yields, in place of its walk over `named_parameters`.

    vLLM reads checkpoints, in their names and layouts, adapters added to their weights. TRL's walk sends parameters as
    we hold them: adapters of ours stop vLLM, and experts stacked in another order than the checkpoint's (GPT-OSS) need
    not. In the same process the tensors go through `reload`.
    """
    generation._iter_named_params = decoder.named_hf_tensors

    def sync_weights() -> None:
        if generation.enable_sleep_mode:
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        worker = generation.llm.llm_engine.model_executor.driver_worker
        reload(worker, decoder.named_hf_tensors())
        generation.llm.reset_prefix_cache()

    if generation.mode == "colocate":
        generation.sync_weights = sync_weights


def contains_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for a completion that contains the row's `answer`, else 0."""
    return [float(wanted in completion) for completion, wanted in zip(completions, answer, strict=True)]


def reward_of(name: str | None) -> Reward:
    """The function `module:name`, or `contains_answer`.

    Raises:
        InvalidRun: no such module or function.
    """
    if name is None:
        return contains_answer
    module, _, function = name.partition(":")
    try:
        found: Reward = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRun(f"reward = {name!r}: {error}.", remedy="module:name of an importable function") from error
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the script; returns the folder of the finished checkpoint."""
    command = parser("trl_grpo", "Reinforcement learning with TRL's GRPOTrainer.", data='{"prompt": …, "answer": …}')
    command.add_argument("--reward", help="module:name of the reward function")
    command.add_argument("--group", type=int, default=4, help="completions of a prompt (4); divides batch × accumulate")
    command.add_argument("--max-new-tokens", type=int, default=256, help="of a completion (256)")
    command.add_argument("--beta", type=float, default=0.0, help="weight of the divergence from the reference (0)")
    command.add_argument("--vllm", action="store_true", help="completions by vLLM in this process")
    given = command.parse_args(arguments)
    config = GRPOConfig(
        **settings(given),
        num_generations=given.group,
        max_completion_length=given.max_new_tokens,
        beta=given.beta,
        use_vllm=given.vllm,
        vllm_mode="colocate",
        vllm_max_model_length=given.max_length,
    )
    trainer = DecoderGRPOTrainer(
        load(given.model, given.lora),
        reward_funcs=reward_of(given.reward),
        args=config,
        train_dataset=dataset(given.data),
        processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left", trust_remote_code=False),
    )
    return finish(trainer, given)


if __name__ == "__main__":
    main()
