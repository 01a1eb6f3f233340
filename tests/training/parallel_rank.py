"""What one rank of `test_parallel` does: a step on its share of the batch, for each model on each mesh."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bestiary.models import Decoder, LoRAConfig
from bestiary.models.config import MLA, QKNorm, QKNormSpan, Router, RouterKind, SharedExpert
from bestiary.models.context import ContextSlice
from bestiary.models.recomputation import Checkpointing, Part
from bestiary.models.sharding import whole
from bestiary.training.checkpoint_reader import ResumePointReader
from bestiary.training.config import OptimSection
from bestiary.training.errors import ParallelRefused
from bestiary.training.optim import Optimisers
from bestiary.training.optim_8bit import AdamW8bit
from bestiary.training.parallel import build_mesh, clip_grad_norm, data_parallel, parallelize
from bestiary.training.parallel_context import Context
from tests.models.tiny import tiny, tiny_config, tokens

WORLD, ROWS, LENGTH, BOUND = 2, 4, 13, 0.05
IDS = tokens(ROWS, LENGTH)
STARTS = ((0, 5, 6), (0, 9), (0, 2, 4, 11), (0,))  # of the documents packed into each row
QWEN3, QWEN3_MOE = tiny_config("qwen3"), tiny_config("qwen3_moe")
LATENT = MLA(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=12, v_head_dim=10, norm_eps=1e-6, q_lora_rank=14)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # what the four families do not have
    "norm over all heads": ("qwen3", {"attention": replace(QWEN3.attention, qk_norm=QKNorm(span=QKNormSpan.FULL))}),
    "latent": (
        "qwen3",
        {
            "attention": replace(QWEN3.attention, num_kv_heads=4, head_dim=20, qk_norm=None, mla=LATENT),
            "rope": replace(QWEN3.rope, rotary_dim=12),
        },
    ),
    "shared expert, groups": (
        "qwen3_moe",
        {
            "moe": replace(
                QWEN3_MOE.moe,
                router=Router(kind=RouterKind.SIGMOID, top_k=3, num_groups=4, topk_groups=2, normalize=True),
                shared=SharedExpert(intermediate_size=24, gated=True),
            )
        },
    ),
}
ONE_OF_EXPERTS = {"num_hidden_layers": 1, "layer_types": QWEN3_MOE.layer_types[:1], "dense_layers": ()}
NINE = replace(tiny_config("gpt_oss").moe, num_experts=9)  # which two ranks split over another dimension
FAMILIES = ("qwen3", "gemma3", "qwen3_moe", "gpt_oss")
MESHES: dict[str, dict[str, int]] = {
    "sharded": {"shard": 2},
    "replicated": {"replicate": 2, "shard": 1},
    "tensor": {"tensor": 2},
    "expert": {"expert": 2},
    "context": {"context": 2},
    # of four processes
    "replicated and sharded": {"replicate": 2, "shard": 2},
    "tensor and sharded": {"tensor": 2, "shard": 2},
    "tensor and replicated": {"tensor": 2, "replicate": 2, "shard": 1},
    "tensor and expert": {"tensor": 2, "expert": 2},
    "expert and sharded": {"expert": 2, "shard": 2},
    "context and sharded": {"context": 2, "shard": 2},
    "context and tensor": {"context": 2, "tensor": 2},
    "context and expert": {"context": 2, "expert": 2},
}


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    family: str
    mesh: str
    lora: bool = False
    tied: bool = False
    again: Part | None = None
    compiled: bool = False

    def model(self, eager: bool = False) -> Decoder:
        """The same one on every rank, of two layers: one of each kind of attention where there are two.

        `eager`: not compiled, whatever the case says.
        """
        family, changes = {**VARIANTS, "nine experts": ("gpt_oss", {"moe": NINE})}.get(self.family, (self.family, {}))
        layers = ONE_OF_EXPERTS if self.compiled and family == "qwen3_moe" else two_layers(family)
        targets = ("*_proj*", "mlp.gate") if family == "qwen3_moe" else ("*_proj*",)
        lora = LoRAConfig(r=4, alpha=8, targets=targets) if self.lora else None
        again = Checkpointing(part=self.again) if self.again else False
        model = tiny(
            family,
            **changes,
            **layers,
            lora=lora,
            tie_word_embeddings=self.tied,
            vocab_size=206,
            activation_checkpointing=again,
            compile_blocks=self.compiled and not eager,
        )
        for layer in model.model.layers if self.compiled and not eager else ():
            layer.compile(backend="aot_eager")  # every graph, without a C++ compiler's minute
        return model

    def __str__(self) -> str:
        more = ("lora" * self.lora, "tied" * self.tied, self.again or "", "compiled" * self.compiled)
        return "-".join((self.family, self.mesh, *filter(None, more)))


CASES = tuple(
    Case(family, mesh, lora, tied)
    for mesh in ("sharded", "replicated", "tensor", "expert", "context")
    for family in FAMILIES
    for lora, tied in ((False, True), (True, False))
    if not (mesh == "expert" and family in ("qwen3", "gemma3"))
)
CASES += tuple(  # a head of its own is the same for every family
    Case(family, mesh)
    for mesh, family in (
        ("sharded", "qwen3"),
        ("replicated", "gemma3"),
        ("tensor", "gpt_oss"),
        ("expert", "qwen3_moe"),
        ("context", "gemma3"),
    )
)
CASES += tuple(Case(family, "tensor", lora) for family in VARIANTS for lora in (False, True))
CASES += tuple(Case("nine experts", "sharded", lora) for lora in (False, True))
CASES += tuple(Case("shared expert, groups", mesh) for mesh in ("sharded", "expert"))
CASES += (
    Case("qwen3_moe", "sharded", again=Part.SELECTIVE),
    Case("qwen3_moe", "expert", lora=True, again=Part.MLP),
    Case("gpt_oss", "tensor", again=Part.SELECTIVE),
    Case("gpt_oss", "tensor", compiled=True),
    Case("qwen3_moe", "expert", lora=True, compiled=True),
    Case("latent", "context"),
    Case("gemma3", "context", again=Part.SELECTIVE),
    Case("gpt_oss", "context", again=Part.FULL),
    Case("gpt_oss", "context", compiled=True),
)


def two_layers(family: str) -> dict[str, Any]:
    """The neighbours at which the kind of attention changes, or the first two."""
    types = tiny_config(family).layer_types
    second = next((index for index in range(1, len(types)) if types[index] is not types[index - 1]), 1)
    return {"num_hidden_layers": 2, "layer_types": types[second - 1 : second + 1]}


def positions() -> Tensor:
    """(ROWS, LENGTH), restarting where a document does."""
    rows = torch.arange(LENGTH).repeat(ROWS, 1)
    for row, starts in zip(rows, STARTS, strict=True):
        for start in starts:
            row[start:] = torch.arange(LENGTH - start)
    return rows


def step(model: Decoder, rows: slice, scale: float, context: ContextSlice | None = None) -> dict[str, Any]:
    """Loss and log-probabilities of these rows of the batch, the gradients left in the model."""
    given = {} if context is None else {"context_slice": context}
    out = model(IDS[rows], position_ids=positions()[rows], labels=IDS[rows], num_items_in_batch=1, **given)
    (out.loss * scale).backward()
    return {"loss": out.loss.detach().clone()}


def scored(model: Decoder, rows: slice) -> Tensor:
    """(B, T, V + 1): logits and log-probabilities; what flows back from the latter is in the gradients."""
    targets = IDS[rows].roll(-1, 1)
    out = model(IDS[rows], position_ids=positions()[rows], shift_labels=targets, return_logits=True)
    weights = torch.linspace(0.5, 1.5, targets.shape[1], dtype=out.log_probs.dtype)
    ((out.log_probs * weights).sum() + out.logits[..., ::7].square().mean()).backward()
    return torch.cat((out.logits.detach(), out.log_probs.detach()[..., None]), -1)


def units() -> int:
    """Targets of the whole batch: every token but the first of each document."""
    return ROWS * LENGTH - sum(len(starts) for starts in STARTS)


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Whole gradients by name."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def mesh_of(name: str) -> DeviceMesh:
    """One a name and run: it takes a group of processes for each dimension, with threads and sockets."""
    return build_mesh(**MESHES[name])


def result(case: Case) -> dict[str, Any]:
    """Of one case; what is summed over data is that of all ranks."""
    mesh = mesh_of(case.mesh)
    data = data_parallel(mesh)
    if case.compiled:
        torch._dynamo.reset()
    model = parallelize(case.model(), mesh)
    share = ROWS // data.size
    rows = slice(data.rank * share, (data.rank + 1) * share)
    context = Context.of(mesh)
    if context is None:
        found = step(model, rows, data.size / units())
    else:
        found = step(model, rows, data.size * context.size / units(), context.slice_of(LENGTH, IDS.device))
        found["loss"] = context.total(found["loss"])
    if data.group is not None:
        dist.all_reduce(found["loss"], group=data.group)
    found["gradients"] = gradients(model)
    found["norm"] = clip_grad_norm(model, BOUND)
    found["clipped"] = gradients(model)
    if case.mesh == "tensor":
        model.zero_grad()
        found["scored"] = scored(model, rows)
        found["of_scored"] = gradients(model)
    return found


def stepped(mesh: str | None, name: str) -> dict[str, Tensor]:
    """Weights after one step of an optimiser on the whole batch; None: in one process."""
    model = tiny("qwen3", vocab_size=206)
    rows = slice(None)
    if mesh is not None:
        made = mesh_of(mesh)
        data, share = data_parallel(made), ROWS // data_parallel(made).size
        model, rows = parallelize(model, made), slice(data.rank * share, (data.rank + 1) * share)
    optimiser = Optimisers(model, OptimSection(name=name, weight_decay=0.1), 1e-3)
    step(model, rows, (1 if mesh is None else data.size) / units())
    optimiser.step()
    return {key: whole(parameter.detach()).clone() for key, parameter in model.named_parameters()}


def saved_uneven(folder: Path) -> str:
    """A score head of which one process holds all and the other nothing, its states of eight bits in a checkpoint."""
    head = torch.nn.Linear(4096, 1, bias=False)
    fully_shard(head, mesh=build_mesh(shard=WORLD)["shard"])
    groups = [{"params": list(head.parameters()), "weight_decay": 0.0}]
    optimiser = AdamW8bit(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    head(torch.ones(2, 4096)).sum().backward()
    optimiser.step()
    tensors = {f"{at}.{name}": value for at, own in enumerate(optimiser.state.values()) for name, value in own.items()}
    checkpoint.save(tensors, checkpoint_id=folder)
    return " ".join(sorted(ResumePointReader(folder).read_metadata().state_dict_metadata))


def refusals() -> dict[str, str]:
    """Messages of calls that cannot be served."""
    tensor, plain = {"tensor": 2}, {"num_heads": 3, "num_kv_heads": 3}
    odd = replace(QWEN3.attention, **plain)
    calls: dict[str, Callable[[], Any]] = {
        "a mesh of 4 on 2 processes": lambda: build_mesh(shard=4),
        "a tensor size that is no divisor": lambda: build_mesh(tensor=3),
        "3 heads": lambda: parallelize(tiny("qwen3", vocab_size=206, attention=odd), build_mesh(**tensor)),
        "an odd vocabulary": lambda: parallelize(tiny("qwen3", vocab_size=203), build_mesh(**tensor)),
        "an odd MLP": lambda: parallelize(tiny("qwen3", vocab_size=206, intermediate_size=77), build_mesh(**tensor)),
        "9 experts": lambda: parallelize(tiny("gpt_oss", moe=NINE), build_mesh(expert=2)),
        "experts of a dense model": lambda: parallelize(tiny("qwen3"), build_mesh(expert=2)),
        "twice": lambda: parallelize(parallelize(tiny("qwen3"), build_mesh()), build_mesh()),
        "not ours": lambda: parallelize(torch.nn.Linear(2, 2), build_mesh()),  # type: ignore[arg-type]
        "a module without a style": lambda: parallelize(replaced(), build_mesh(**tensor)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "accepted"
        except ParallelRefused as error:
            found[name] = str(error)
    return found


def replaced() -> Decoder:
    """A model one of whose modules is somebody else's."""
    model = tiny("qwen3", vocab_size=206)
    model.model.layers[1].extra = torch.nn.Linear(2, 2)
    return model


def run(rank: int, store: Path) -> dict[str, dict[str, Any]]:
    """Every case."""
    shared, patience = dist.FileStore(str(store), WORLD), timedelta(seconds=60)  # the other one may die
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=WORLD, timeout=patience)
    try:
        eight = {mesh: stepped(mesh, "adamw8bit") for mesh in ("sharded", "tensor")}
        uneven = {"names": saved_uneven(store.with_suffix(".uneven"))}
        return {
            "refused": refusals(),
            "stepped": eight,
            "uneven": uneven,
            **{str(case): result(case) for case in CASES},
        }
    finally:
        mesh_of.cache_clear()
        gc.collect()  # wrappers lie in cycles and hold threads of the group: they go before it does
        dist.destroy_process_group()


def main(store: str) -> None:
    """A rank that is not the first."""
    torch.set_num_threads(1)
    run(1, Path(store))
