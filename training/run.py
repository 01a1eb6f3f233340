"""From a run's file to a run: processes, data, model, recipe, optimiser, loop, resume points, export.

out/config.yaml       the whole configuration, defaults included, hub ids with their commits
out/tokenizer.json    fingerprint of the tokenizer
out/metrics.jsonl     figures of every step
out/checkpoints/      resume points
out/owner.json        who is at work in it, while somebody is (see `owner`)
out/export/           the result in Hugging Face's layout, with its tokenizer
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bestiary.bridges.fields import FLOAT_TYPES
from bestiary.bridges.hub import split_revision
from bestiary.kernels.system import cxx
from bestiary.models import AutoDecoder, Decoder
from bestiary.training.checkpoint import CHECKPOINTS, Checkpoints, saved_steps, seed_all
from bestiary.training.commits import commits_in, pinned
from bestiary.training.components import component
from bestiary.training.config import CommonConfig, ParallelSection, RolloutSection, RunConfig
from bestiary.training.contents import contents_in
from bestiary.training.control import Control, Interruption, named_failures
from bestiary.training.data.config import DataConfig
from bestiary.training.data.fingerprint import Fingerprint
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.packing import Pack
from bestiary.training.data.plan import Plan
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import InvalidRun
from bestiary.training.estimate import estimate
from bestiary.training.export import CONFIG, load_tokenizer, write_result
from bestiary.training.flops import StepFlops
from bestiary.training.loop import Trainer
from bestiary.training.memory import PeakMemory
from bestiary.training.metrics import Throughput
from bestiary.training.optim import Optimisers
from bestiary.training.owner import owned
from bestiary.training.parallel import DataParallel, Precision, build_mesh, clip_grad_norm, data_parallel, parallelize
from bestiary.training.parallel_context import Context
from bestiary.training.parallel_mesh import CONTEXT, mesh_shape
from bestiary.training.peaks import device_peak
from bestiary.training.processes import Processes, processes
from bestiary.training.recipes.base import Recipe
from bestiary.training.recipes.build import build, wanted_of
from bestiary.training.recipes.context import InContext
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.loader import RolloutLoader
from bestiary.training.rl.rollout import RolloutEngine, Sampling
from bestiary.training.tracking import RunInfo, Tracker, trackers

if TYPE_CHECKING:
    from bestiary.training.rl.beside import Beside

FINGERPRINT, EXPORT = "tokenizer.json", "export"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step, steps: reached, and of the whole run.   stopped: why before its end, or None.
        resumed: step that it went on from, or None.
        loss: of the last step.   evaluation: the best loss on held-out data, or None.
        export: folder of the result, or None.
    """

    step: int
    steps: int
    stopped: str | None
    resumed: int | None
    loss: float | None
    evaluation: float | None
    export: Path | None


def run(config: RunConfig, *, also: Sequence[Tracker] = (), interruption: Interruption | None = None) -> Outcome:
    """Trains as the configuration says, from the newest resume point in `config.out` if there is one.

    Args:
        also: trackers beside those of the configuration, e.g. one that prints.
        interruption: to stop by from another thread; SIGTERM and SIGINT do it anyway.
    Raises:
        InvalidRun, ParallelRefused: what the configuration asks cannot be done here.
        FolderTaken: another run is at work in `config.out`.
        CheckpointRefused, StateMismatch: the resume point is damaged or of another run.
        Diverged, OutOfMemory, RankLost, SaveFailed: see `bestiary.training.errors`.
    """
    with processes(config.loop.timeout_s) as here, ExitStack() as stack:
        config = pinned(config, here.control)
        owner = stack.enter_context(owned(config.out, Control(here.control)))
        torch.use_deterministic_algorithms(config.loop.deterministic)
        stack.callback(torch.use_deterministic_algorithms, False)
        stack.enter_context(named_failures(estimate(config).words(), config.loop.timeout_s))
        memory, others = PeakMemory(here.device), beside(config)
        if others is not None:
            stack.callback(others.close)
        trainer, saver, tokenizer = prepare(config, here, memory, others)
        stack.callback(saver.join)  # of a run that fails, too: it goes on from what is being written
        stack.callback(trainer.loader.close)
        trainer.interruption = interruption or trainer.interruption
        first = here.rank == 0
        check_tokenizer(config, tokenizer)
        step = saver.resume(trainer)
        if first:
            note(config, tokenizer)
        info = RunInfo(
            name=config.tracking.name or config.out.name,
            project=config.tracking.project,
            config=config.model_dump(mode="json"),
            step=step or 0,
            steps=trainer.steps,
        )
        tracker = trackers(config.tracking.to, config.out, info, first=first, also=also)
        stack.callback(tracker.close)
        trainer.log = tracker
        trainer.callbacks = (owner, *trainer.callbacks)
        trainer.fit()
    exported = config.out / EXPORT
    return Outcome(
        step=trainer.progress.step,
        steps=trainer.steps,
        stopped=trainer.stopped,
        resumed=step,
        loss=trainer.progress.losses[-1] if trainer.progress.losses else None,
        evaluation=None if trainer.progress.best == float("inf") else trainer.progress.best,
        export=exported if config.checkpoint.export and not trainer.interrupted else None,
    )


def prepare(
    config: RunConfig, here: Processes, memory: PeakMemory | None = None, roles: Beside | None = None
) -> tuple[Trainer, Checkpoints, BaseHFModelTokenizer]:
    """Everything that a run needs, made and checked, and nothing trained yet.

    Args:
        roles: processes beside this one, where the run has any; they start with the first step.
    """
    check_folder(config)
    mesh = mesh_of(config.parallel, here)
    data = data_parallel(mesh)
    seed_all(config.loop.seed, 0, 0)  # fresh adapters and heads are the same in every process
    model = load_model(config, here, mesh)
    tokenizer = load_tokenizer(config, model)
    elsewhere = None if roles is None else roles.teacher
    recipe, others = build(config, lambda src: load_other(config, src, here, mesh), elsewhere)
    context = Context.of(mesh)
    if context is not None:
        check_sliced(context.size, model, *others)
        recipe = InContext(recipe, context)
    wanted = wanted_of(config)
    plan = config.data.plan(tokenizer, wanted)
    check_data(config.data, recipe, data.size, answered=config.rollouts is not None)
    control = Control(here.control, copies=here.size // data.size)
    meter = Throughput(
        [StepFlops.of(model), *(StepFlops.of(other, backward=False) for other in others)],
        device_peak(here.device, FLOAT_TYPES[config.precision.compute] if config.precision.compute else model.dtype),
        devices=here.size,
        sums=control.sums,
        memory=memory,
    )
    make = meter.watching(recipe.batch)
    packs = PackLoader(
        plan,
        rank=data.rank,
        world_size=data.size,
        workers=config.loop.workers,
        make=make if config.rollouts is None else _itself,
        group=data.group,
    )
    loader = (
        packs if config.rollouts is None else answering(config.rollouts, packs, model, tokenizer, data, make, roles)
    )
    optimiser = Optimisers(model, config.optim, config.lr)
    steps = config.loop.steps or count_steps(plan, config.loop.workers, here)
    place = data.rank if context is None else data.rank * context.size + context.rank
    saver = Checkpoints(
        config.out / CHECKPOINTS,
        config.checkpoint,
        bound=_bound(config, model, tokenizer.fingerprint, steps, mesh),
        group=here.saving,
        export=_exporter(config, tokenizer) if config.checkpoint.export else None,
        seed=config.loop.seed,
        place=place,
        commits=commits_in(config, model),
        contents=contents_in(config, here.control),
    )
    seed_all(config.loop.seed, 0, place)
    held_out, evaluation = config.evaluation_data(), config.loop.evaluation
    if held_out is not None:
        check_data(held_out, recipe, 1, place="loop.evaluation")  # never on rollouts: it compares steps
    trainer = Trainer(
        model=model,
        recipe=recipe,
        loader=loader,
        optimiser=optimiser,
        steps=steps,
        per_step=plan.streams // data.size,
        loop=config.loop,
        optim=config.optim,
        lr=config.lr,
        control=control,
        data_rank=data.rank,
        data_parallel=data.size,
        clip=clip_grad_norm,
        meter=meter,
        saver=saver,
        held_out=()
        if held_out is None or evaluation is None
        else packs_of(held_out.plan(tokenizer, replace(wanted, answer=0)), evaluation.packs),
        callbacks=tuple(component(path, "loop.callbacks", InvalidRun)() for path in config.loop.callbacks),
    )
    return trainer, saver, tokenizer


# ---------------------------------------------------------------------- parts


def mesh_of(section: ParallelSection, here: Processes) -> DeviceMesh:
    """The processes as the section `parallel` arranges them; every process calls it at once."""
    return build_mesh(
        replicate=section.replicate,
        shard=section.shard,
        context=section.context,
        tensor=section.tensor,
        expert=section.expert,
        device_type=here.device.type,
    )


def load_model(config: CommonConfig, here: Processes, mesh: DeviceMesh) -> Decoder:
    """The model that trains: with its adapters, checkpointing and compilation, spread over the mesh if need be."""
    precision = config.precision

    def spread(model: Decoder) -> None:
        compute = FLOAT_TYPES[precision.compute] if precision.compute else model.dtype
        reduce = torch.promote_types(FLOAT_TYPES[precision.reduce], compute)  # sums are as wide as their terms
        parallelize(model, mesh, precision=Precision(None if compute is model.dtype else compute, reduce))

    if config.model.compile and here.device.type == "cpu" and cxx() is None:
        raise InvalidRun(
            "model.compile = true, and there is no C++ compiler, which torch.compile calls on a CPU.",
            remedy="apt-get install g++, or name one in CXX; or model.compile=false",
        )
    # FSDP2 keeps wide parameters and computes in narrow ones, on one process too.
    spreads = here.size > 1 or precision.compute is not None
    model = AutoDecoder.from_pretrained(
        config.model.src,
        revision=config.model.revision,
        dtype=precision.parameters,
        device=here.device,
        lora=config.adapters,
        mesh=spread if spreads else None,
        head="score" if config.recipe == "reward" else None,
    )
    model.model.checkpointing = config.model.recomputes
    if config.model.compile:
        model.decoder_config = model.model.decoder_config = model.decoder_config.with_(compile_blocks=True)
        for layer in model.model.layers:
            layer.compile()
    return model


def load_other(config: CommonConfig, src: str, here: Processes, mesh: DeviceMesh) -> Decoder:
    """A model that only computes: a reference or a teacher, spread as the one that trains."""
    src, revision = split_revision(src)
    return AutoDecoder.from_pretrained(
        src,
        revision=revision,
        dtype=config.precision.compute or config.precision.parameters,
        device=here.device,
        mesh=partial(parallelize, mesh=mesh) if here.size > 1 else None,
    )


def beside(config: RunConfig) -> Beside | None:
    """The processes on Ray that a run has beside its own, none of them started; None: it has none.

    Raises:
        InvalidRun: a student in several processes.   MissingLibrary: no ray or verl for them.
    """
    engines = 0 if config.rollouts is None else config.rollouts.engines
    for key, count in (("rollouts.engines", engines), ("placement.teacher", config.teachers)):
        if count and dist.get_world_size() > 1:
            raise InvalidRun(
                f"{key} = {count} for a student in {dist.get_world_size()} processes.",
                remedy=f"{key}=0: every process has its part of the work",
            )
    if not engines and not config.teachers:
        return None
    from bestiary.training.rl.beside import Beside

    return Beside(config)


def answering(
    section: RolloutSection,
    packs: PackLoader,
    model: Decoder,
    tokenizer: BaseHFModelTokenizer,
    data: DataParallel,
    make: Callable[[Pack], Any],
    roles: Beside | None,
) -> RolloutLoader:
    """Batches of the answers that the model itself samples to the prompts in packs."""
    sampling = Sampling(
        max_tokens=section.max_tokens,
        temperature=section.temperature,
        stop_ids=tuple(sorted(tokenizer.stop_ids)),
        seed=section.seed,
    )
    engine: RolloutEngine
    if section.engines and roles is not None:
        from bestiary.training.rl.student_engines import StudentEngines

        engine = StudentEngines(model, partial(roles.group, "rollout"))
    else:
        engine = EmbeddedEngine(model, rows=section.rows, agree=data.largest if data.size > 1 else None)
    return RolloutLoader(
        packs, engine, sampling, make=make, pad_id=tokenizer.pad_id, share=section.share, ranks=data.size
    )


def check_sliced(ranks: int, *models: Decoder) -> None:
    """Refuse models that cannot be computed in slices of rows by `ranks` processes.

    Raises:
        InvalidRun.
    """
    for model in models:
        if model.decoder_config.output_router_logits:
            raise InvalidRun(
                f"parallel.context = {ranks} with output_router_logits = true in the model's config: the router's loss "
                "is a product of means over whole rows.",
                remedy="output_router_logits = false in its config.json, or parallel.context = 1 and the processes to "
                "parallel.shard",
            )


def check_data(data: DataConfig, recipe: Recipe, ranks: int, *, answered: bool = False, place: str = "data") -> None:
    """Refuse sources that the recipe does not train on, and streams that `ranks` processes cannot share.

    Args:
        answered: by the policy, which needs prompts and has no use for texts without one.
        place: of the section in the run's file.
    Raises:
        InvalidRun.
    """
    kinds = recipe.kinds - {"text"} | {"prompt"} if answered else recipe.kinds
    for source in data.sources:
        if source.kind not in kinds:
            raise InvalidRun(
                f"{place}.sources: {source.name} is of kind {source.kind!r}, and {recipe.name} trains on others.",
                remedy=f"kind: one of {', '.join(sorted(kinds))}",
            )
    _check_streams(data, ranks)


def check_processes(config: RunConfig, processes: int) -> None:
    """Refuse a number of processes that mesh and data cannot be shared among, before any of them is there.

    Raises:
        InvalidRun, ParallelRefused.
    """
    replicate, shard, _, expert, _ = mesh_shape(processes, **config.parallel.model_dump())
    _check_streams(config.data, replicate * shard * expert)


def _check_streams(data: DataConfig, ranks: int) -> None:
    if data.streams % ranks:
        raise InvalidRun(
            f"data.streams = {data.streams} packs a step over {ranks} processes with different data.",
            remedy=f"data.streams a multiple of {ranks}; more of them are micro-batches",
        )


def count_steps(plan: Plan, workers: int, here: Processes) -> int:
    """Steps that `data.epochs` gives, by packing all of it once in the first process."""
    found = [0]
    if here.rank == 0:
        loader = PackLoader(plan, workers=workers, make=_nothing)
        try:
            found = [sum(1 for _ in loader) // plan.streams]
        finally:
            loader.close()
    dist.broadcast_object_list(found, src=0, group=here.control)
    if not found[0]:
        raise InvalidRun("the data does not fill one step.", remedy="fewer data.streams, or more data")
    return found[0]


def packs_of(plan: Plan, most: int) -> list[Pack]:
    """The first packs of a plan with one epoch."""
    loader = PackLoader(plan, workers=0, make=_itself)
    return [pack for _, pack in zip(range(most), loader, strict=False)]


def _nothing(pack: Pack) -> None:
    return None


def _itself(pack: Pack) -> Pack:
    return pack


# ---------------------------------------------------------------------- the run's folder


def check_folder(config: CommonConfig) -> None:
    """Refuse a folder that nothing can be written to, and one with a run in it where it is not to be resumed.

    Raises:
        InvalidRun.
    """
    whole = config.out.absolute()
    above = next(folder for folder in (whole, *whole.parents) if os.path.exists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "cannot be written to" if above.is_dir() else "is a file"
        raise InvalidRun(f"out = {config.out}: {above} {what}.", remedy="out=FOLDER, one that may be written to")
    steps = saved_steps(config.out / CHECKPOINTS)
    if steps and config.checkpoint.resume == "never":
        raise InvalidRun(
            f"{config.out} holds a run at step {steps[-1]} and checkpoint.resume = never.",
            remedy="another `out`, or checkpoint.resume=auto",
        )


def check_tokenizer(config: CommonConfig, tokenizer: BaseHFModelTokenizer) -> None:
    """Refuse to go on under another tokenizer, in the words of what changed in it.

    Raises:
        FingerprintChanged.
    """
    known = config.out / FINGERPRINT
    if known.exists() and saved_steps(config.out / CHECKPOINTS):
        tokenizer.fingerprint.require(Fingerprint.load(known), str(known))


def note(config: CommonConfig, tokenizer: BaseHFModelTokenizer) -> None:
    """Write what the run is into its folder, once it is known to be the run that the folder holds."""
    config.out.mkdir(parents=True, exist_ok=True)
    tokenizer.fingerprint.save(config.out / FINGERPRINT)
    (config.out / CONFIG).write_text(config.yaml(), encoding="utf-8")


def _bound(config: RunConfig, model: Decoder, fingerprint: Fingerprint, steps: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What a resume must agree in."""
    section = config.model_dump(mode="json", exclude={"rollouts": {"rows", "engines"}})  # which change no answer
    own = {"loss": section["loss"], "rollouts": section["rollouts"]}
    return bound_to(config, model, fingerprint, steps, mesh) | own


def bound_to(
    config: CommonConfig, model: Decoder, fingerprint: Fingerprint, steps: int, mesh: DeviceMesh
) -> dict[str, Any]:
    """What the resume of any run must agree in, as JSON values by name."""
    section = config.model_dump(mode="json")
    # States of eight bits are each process's own, in blocks of what it holds.
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if sizes[CONTEXT] == 1:
        del sizes[CONTEXT]  # as in checkpoints of before it was a dimension
    return {
        **({"mesh": sizes} if config.optim.name == "adamw8bit" else {}),
        "recipe": config.recipe,
        "model": repr(replace(model.decoder_config, compile_blocks=False, activation_checkpointing=False)),
        "tokenizer": fingerprint.model_dump(mode="json", exclude={"versions"}),
        "optim": {**section["optim"], "lr": config.lr},
        "steps": steps,
    }


def _exporter(config: RunConfig, tokenizer: BaseHFModelTokenizer) -> Callable[[Trainer], None]:
    """Writes the result once the last step is made."""

    def export(trainer: Trainer) -> None:
        if trainer.interrupted:
            return
        write_result(trainer.model, tokenizer, config.out / EXPORT, first=trainer.control.first, overwrite=True)
        trainer.control.wait()

    return export
