"""verl: its FSDP engine with our decoder inside, for CPU and CUDA. One process on CPU, without Ray:

    VERL_PLATFORM=cpu python -m bestiary.training.integrations.verl_engine --help

In a run of verl: `strategy: fsdp2` of actor and reference, VERL_USE_EXTERNAL_MODULES=<this module>, and
VERL_ENGINE_VENDOR=bestiary, under which the engine is registered. verl 0.9.1 is installed without its dependencies,
which pin an old transformers (`tools/requirements/verl.txt`). With adapters also `model.lora.merge: True`, or verl
starts its rollout engine for adapters sent apart; `checkpoint_engine.backend` naive or nccl, for delta_sharded reads
shards by our own names.

verl's own are the micro-batches, losses, optimiser, schedule, checkpoints and metrics. Ours are the model (built on
meta, spread by `parallelize`, read slice by slice), adapters inside it, a forward pass that gives log-probabilities
and entropy without logits, and the weights that leave for a rollout engine: hub names and shapes, adapters merged.

On CPUs VERL_PLATFORM=cpu asks for the platform in `verl_platform`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bestiary.kernels.dispatch import as_trained
from bestiary.models import AutoDecoder, Decoder, LoRAConfig
from bestiary.models.lora import adapters_off
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations.example import Batch, Steps, parser, read_rows
from bestiary.training.integrations.needs import needs
from bestiary.training.integrations.verl_platform import INSTALL
from bestiary.training.parallel import Precision, build_mesh, parallelize
from bestiary.training.processes import processes

VENDOR = "bestiary"

with needs("verl", INSTALL), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines for libraries that are not there
    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_name
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, build_optimizer
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.fsdp.utils import unfuse_moe_params
    from verl.workers.utils.losses import sft_loss


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=["cuda", "cpu"], vendor=VENDOR)
class BestiaryEngine(FSDPEngineWithLMHead):
    """verl's engine for language models; what is not here is verl's."""

    module: Decoder

    def _build_module(self) -> Decoder:
        """The model, spread already: each process reads its slices and no process holds all of it."""
        asked, fsdp = self.engine_config, self.model_config
        size, world = asked.fsdp_size, dist.get_world_size()
        whole = size < 0 or size >= world
        mesh = build_mesh(
            replicate=1 if whole else world // size, shard=-1 if whole else size, device_type=get_device_name()
        )
        policy = dict(asked.mixed_precision or {})
        compute, reduce = (_dtype(policy.get(name, default)) for name, default in _POLICY)
        spread = partial(
            parallelize,
            mesh=mesh,
            precision=Precision(compute=compute, reduce=reduce),
            reshard_after_forward=asked.reshard_after_forward,
        )
        dtype = _dtype(asked.model_dtype or ("bf16" if asked.forward_only else "fp32"))
        model = AutoDecoder.from_pretrained(fsdp.local_path, dtype=dtype, lora=_adapters(fsdp), mesh=spread)
        if fsdp.enable_gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model

    def _build_lora_module(self, module: Decoder) -> Decoder:
        """Adapters are part of the model."""
        return module

    def _build_fsdp_module(self, module: Decoder) -> Decoder:
        """It is spread; FSDP2 casts, so nothing is left to autocast."""
        self._autocast_dtype, self.scaler = torch.float32, None
        return module

    def _build_optimizer(self, module: Decoder) -> torch.optim.Optimizer:
        """Over what trains."""
        made: torch.optim.Optimizer = build_optimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad], self.optimizer_config
        )
        return made

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's packed row (input_ids, position_ids, temperature, shift_labels), and whether the entropy is wanted."""
        tensordict_utils.assign_non_tensor(micro_batch, use_fused_kernels=True)
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        wanted = tensordict_utils.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        return inputs | {"return_entropy": wanted}, arguments

    def forward_step(self, *arguments: Any, **named: Any) -> Any:
        """verl's; old log-probabilities and the reference's, without gradients, have the bits of training."""
        with as_trained():
            return super().forward_step(*arguments, **named)

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Every weight by its hub name, gathered, adapters folded in; experts apart, as rollout engines read them.

        Args:
            options: of verl, about adapters sent by themselves; they are folded in always.
        Raises:
            InvalidRun: adapters, and a rollout engine that was started for adapters sent apart.
        """
        if self.module.decoder_config.lora is not None and not self.model_config.lora.get("merge", False):
            raise InvalidRun(
                "model.lora.merge = False: the rollout engine waits for adapters, and merged weights are sent.",
                remedy="model.lora.merge=True",
            )
        return unfuse_moe_params(self.module.named_hf_tensors(), self.model_config.hf_config.model_type), None

    def get_per_tensor_param_shard(self, **options: Any) -> NoReturn:
        """Refused, and with it verl's two methods that read it: shards have our own names, and adapters beside them.

        Raises:
            InvalidRun: always.
        """
        raise InvalidRun(
            'checkpoint_engine.backend = "delta_sharded" sends shards of our parameters; no rollout engine reads them.',
            remedy="checkpoint_engine.backend naive or nccl",
        )

    def disable_adapter(self) -> AbstractContextManager[object]:
        """The model without its adapters: the reference of a policy that trains them."""
        return adapters_off(self.module)


_POLICY = (("param_dtype", "bf16"), ("reduce_dtype", "fp32"))
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InvalidRun(f"dtype {name!r} of the engine.", remedy='"fp32" or "bf16"; fp16 would need a loss scaler')
    return _DTYPES[name]


def _adapters(asked: HFModelConfig) -> LoRAConfig | str | None:
    if asked.lora_adapter_path is not None:
        return str(asked.lora_adapter_path)
    if asked.lora_rank == 0:
        return None
    targets = ("*_proj",) if asked.target_modules == "all-linear" else tuple(asked.target_modules)
    return LoRAConfig(r=asked.lora_rank, alpha=asked.lora_alpha, targets=targets)


def engine(
    src: str, *, lr: float = 1e-4, lora: int | None = None, dtype: str = "fp32", steps: int = 100
) -> FSDPEngineWithLMHead:
    """An engine as verl's workers make one from their configuration.

    Args:
        dtype: of parameters and computation.
    Raises:
        InvalidRun: no GPU, and verl was not told to go without.
    """
    if get_device_name() == "cuda" and not torch.cuda.is_available():
        raise InvalidRun("verl's platform is CUDA, and there is no GPU.", remedy="VERL_PLATFORM=cpu in the environment")
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
    made: FSDPEngineWithLMHead = EngineRegistry.new(
        "language_model",
        "fsdp2",
        HFModelConfig(
            path=src,
            load_tokenizer=False,
            override_config={"attn_implementation": "eager"},  # of a transformers model that is never built
            lora_rank=lora or 0,
            lora_alpha=2 * (lora or 0),
            lora={"merge": True},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype=dtype,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": dtype},
            use_torch_compile=False,  # of verl's entropy, which is not used
        ),
        FSDPOptimizerConfig(lr=lr, total_training_steps=steps, weight_decay=0.01, clip_grad=1.0),
        CheckpointConfig(),
    )
    made.initialize()
    return made


def packed(batches: Sequence[Batch]) -> TensorDict:
    """The rows of one optimiser step as verl takes them: nested, with a mask of the tokens that are predicted."""
    ids, masks, places = [], [], []
    for batch in batches:
        for tokens, real, labels in zip(*(batch[n] for n in ("input_ids", "attention_mask", "labels")), strict=True):
            length = int(real.sum())
            ids.append(tokens[:length])
            masks.append((labels[:length] != -100).long())
            masks[-1][0] = 0  # nothing before it predicts it
            places.append(torch.arange(length))
    columns = {"input_ids": ids, "loss_mask": masks, "position_ids": places}
    data = TensorDict(
        {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()},
        batch_size=[len(ids)],
    )
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(ids) // len(batches),
    )
    return data


def train(engine: FSDPEngineWithLMHead, steps: Steps, out: Path, *, resume: bool = False) -> list[float]:
    """SFT until the last of `steps`, and a checkpoint of verl's; this process's share of each loss that was made here.

    Args:
        steps: of all processes; each takes its share, and the mean of their losses is the step's.
    """
    steps = replace(steps, rank=engine.get_data_parallel_rank(), size=engine.get_data_parallel_size())
    first, losses = 0, []
    if resume:
        newest = max(out.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
        engine.load_checkpoint(str(newest))
        first = int(newest.name.rpartition("_")[2])
    for step in range(first, len(steps)):
        with engine.train_mode():
            found = engine.train_batch(packed(steps[step]), partial(sft_loss, None))
        engine.lr_scheduler_step()
        losses.append(sum(found["loss"]))
    engine.save_checkpoint(str(out / f"global_step_{len(steps)}"), global_step=len(steps))
    return losses


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    asked = parser(
        "Train a bestiary model with verl's FSDP engine.",
        command="VERL_PLATFORM=cpu python -m bestiary.training.integrations.verl_engine",
    ).parse_args(arguments)
    with processes(timeout_s=600):
        torch.manual_seed(0)
        made = engine(asked.model, lr=asked.lr, lora=asked.lora, steps=asked.steps)
        steps = Steps(read_rows(asked.data, asked.model), asked.batch, asked.accumulate, asked.steps)
        losses = train(made, steps, asked.out, resume=asked.resume)
        made.module.save_pretrained(asked.out / "hf", overwrite=True)  # all processes call it
        print("loss " + " ".join(f"{loss:.4f}" for loss in losses))  # noqa: T201
        del made  # its model's wrappers hold threads of the group


if __name__ == "__main__":
    main()
