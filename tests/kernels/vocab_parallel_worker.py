"""One rank of a vocabulary-parallel run, started with RANK WORLD STORE INPUTS OUTPUT.

INPUTS holds a list of jobs, OUTPUT gets a dictionary of results for each; both are files of `torch.save`.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bestiary.kernels import vocab_tiles
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.dispatch import record
from bestiary.kernels.divergence import TeacherHead, TopK, linear_divergence
from bestiary.kernels.errors import BestiaryError
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.selected import linear_selected_log_prob
from bestiary.kernels.triton_runtime import INTERPRETED

Job = dict[str, Any]
Results = dict[str, Tensor | str]


def run(job: Job, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: TeacherHead, **more: Any) -> Results:
    """Values of the function that `job` names; a scalar made of all of them is differentiated.

    Args:
        teacher: of "divergence"; with `top_k` in the job its words and their log-probabilities take its place.
        more: `group`, where there is one.
    """
    target, options = job["target"], job["options"]
    mix = torch.arange(1.0, len(target) + 1, dtype=hidden.dtype)
    if job["function"] == "log_prob":
        out = linear_log_prob(hidden, weight, target, bias=bias, **options, **more)
        columns = {name: column for name, column in out._asdict().items() if column is not None}
        sum(mix @ column for name, column in columns.items() if name != "top1").backward()
        return {name: column.detach() for name, column in columns.items()}
    if job["function"] == "selected":
        chosen = linear_selected_log_prob(hidden, weight, job["words"], bias=bias, **options, **more)
        (mix @ chosen.log_prob.masked_fill(job["words"] < 0, 0.0)).sum().add(mix @ chosen.log_rest).backward()
        return {name: column.detach() for name, column in chosen._asdict().items()}
    if job["function"] == "divergence":
        other = TopK(job["words"], job["top_k"]) if "top_k" in job else teacher
        loss = linear_divergence(hidden, weight, other, bias=bias, mask=target != -100, **options, **more)
    else:
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, **options, **more)
    (mix[: loss.numel()].view_as(loss) * loss).sum().mul(0.7).backward()
    return {"loss": loss.detach()}


def by_group(job: Job, rank: int) -> Results:
    """The weight's rows split by hand, in parts of the given sizes."""
    ours = slice(sum(job["sizes"][:rank]), sum(job["sizes"][: rank + 1]))
    hidden, weight = job["hidden"].clone().requires_grad_(), job["weight"][ours].clone().requires_grad_()
    bias = job["bias"][ours].clone().requires_grad_()
    whole = TeacherHead(*job["teacher"])
    teacher = whole._replace(weight=whole.weight[ours], bias=whole.bias[ours])
    out = run(job, hidden, weight, bias, teacher, group=dist.group.WORLD)
    return {**out, "of_hidden": hidden.grad, "of_weight": weight.grad, "of_bias": bias.grad}


def by_dtensor(job: Job, world: int) -> Results:
    """The weight as a DTensor split on dim 0; hidden states replicated, or split over tokens (sequence parallelism)."""
    mesh = init_device_mesh("cpu", (world,))
    weight, bias = (distribute_tensor(job[name], mesh, [Shard(0)]).requires_grad_() for name in ("weight", "bias"))
    hidden = distribute_tensor(job["hidden"], mesh, [job["placement"]]).requires_grad_()
    placements = (job["placement"], Shard(0), Shard(0))
    teacher = (distribute_tensor(x, mesh, [place]) for x, place in zip(job["teacher"], placements, strict=True))
    out = run(job, hidden, weight, bias, TeacherHead(*teacher))
    grads = {"of_hidden": hidden.grad, "of_weight": weight.grad, "of_bias": bias.grad}
    assert all(isinstance(gradient, DTensor) for gradient in grads.values())
    assert weight.grad.placements == (Shard(0),)
    return {**out, **{name: gradient.full_tensor() for name, gradient in grads.items()}}


class Head(nn.Module):
    """What FSDP wraps: it gathers the weight before the forward pass."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, hidden: Tensor, target: Tensor, items: int) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, target, num_items=items)


def by_fsdp(job: Job, rank: int, world: int) -> Results:
    """Each rank has tokens of its own; gradients are averaged."""
    mesh = init_device_mesh("cpu", (world,))
    head = fully_shard(Head(job["weight"]), mesh=mesh)
    mine = torch.arange(len(job["target"])).tensor_split(world)[rank]
    items = int((job["target"] != -100).sum())
    loss = head(job["hidden"][mine], job["target"][mine], items)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total, "of_weight": head.weight.grad.full_tensor() * world}


def refused(job: Job, world: int) -> Results:
    """Names of the errors of calls that cannot mean one thing."""
    mesh = init_device_mesh("cpu", (world,))
    hidden, target = job["hidden"], job["target"]
    split = distribute_tensor(job["weight"], mesh, [Shard(0)])
    columns = distribute_tensor(job["weight"][:, :2].contiguous(), mesh, [Shard(1)])
    calls = {
        "plain hidden states": (hidden, split, {}),
        "split columns": (distribute_tensor(hidden[:, :2].contiguous(), mesh, [Replicate()]), columns, {}),
        "plain bias": (distribute_tensor(hidden, mesh, [Replicate()]), split, {"bias": job["bias"]}),
        "split tokens": (distribute_tensor(hidden, mesh, [Shard(0)]), job["weight"], {}),
    }
    found: Results = {}
    for name, (h, w, more) in calls.items():
        try:
            linear_log_prob(h, w, target, **more)
            found[name] = "accepted"
        except BestiaryError as error:
            found[name] = f"{type(error).__name__}: {error}"
    whole, placed = TeacherHead(*job["teacher"][:2]), distribute_tensor(hidden, mesh, [Replicate()])
    for name, teacher in (
        ("teacher in one piece", whole),
        ("teacher in columns", whole._replace(weight=distribute_tensor(whole.weight, mesh, [Shard(1)]))),
    ):
        try:
            linear_divergence(placed, split, teacher)
            found[name] = "accepted"
        except BestiaryError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def narrowed(value: Any) -> Any:
    """Triton's interpreter takes fp32."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def main() -> None:
    """Joins the group, runs every job, writes the results."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    vocab_tiles.COLUMNS, vocab_tiles.ROWS = 64, 2  # several chunks, each with its collective, of several tiles
    vocab_tiles.HELD_BYTES, vocab_tiles.HELD_ROWS = 1, (4, 4, 4)
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
    jobs: list[Job] = torch.load(sys.argv[4], weights_only=False)
    if INTERPRETED:
        from bestiary.kernels import triton_log_prob, triton_log_prob_tiles

        triton_log_prob.COLUMNS, triton_log_prob.ROWS, triton_log_prob_tiles.BLOCK = 128, 5, 64
        triton_log_prob.HELD_BYTES, triton_log_prob.HELD_ROWS = 0, (4, 4)
        jobs = [{name: narrowed(value) for name, value in job.items()} for job in jobs]
    ways = {
        "group": lambda job: by_group(job, rank),
        "dtensor": lambda job: by_dtensor(job, world),
        "fsdp": lambda job: by_fsdp(job, rank, world),
        "refused": lambda job: refused(job, world),
    }
    with record() as log:
        torch.save([ways[job["way"]](job) for job in jobs], sys.argv[5])
    assert not INTERPRETED or {ran for operation, ran in log if operation == "log_prob"} == {"triton"}
    dist.destroy_process_group()
