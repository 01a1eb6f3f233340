"""From a run's file to a run of reinforcement learning: policy, engine, sampler, scorer, controller.

out/ holds what every run's does (see `bestiary.training.run`), and `rollouts/` with every round's experiences where
`rollouts.keep` asks for them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bestiary.bridges.fields import FLOAT_TYPES
from bestiary.training.checkpoint import CHECKPOINTS, Checkpoints, saved_steps, seed_all
from bestiary.training.commits import commits_in, pinned
from bestiary.training.components import component
from bestiary.training.config import ADAPTERS_OFF
from bestiary.training.contents import Contents, contents_in
from bestiary.training.control import Control, Interruption, named_failures
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import InvalidRun
from bestiary.training.estimate import estimate
from bestiary.training.export import load_tokenizer
from bestiary.training.flops import StepFlops
from bestiary.training.loop import Trainer
from bestiary.training.memory import PeakMemory
from bestiary.training.metrics import Throughput
from bestiary.training.optim import Optimisers
from bestiary.training.owner import owned
from bestiary.training.parallel import clip_grad_norm, data_parallel
from bestiary.training.peaks import device_peak
from bestiary.training.processes import Processes, processes
from bestiary.training.rl.config import GrpoConfig
from bestiary.training.rl.controller import Controller
from bestiary.training.rl.conversations import ToolEnvironments
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.environments import EnvironmentFactory
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.held_out import HeldOut
from bestiary.training.rl.isolated import START_S
from bestiary.training.rl.isolated_environments import IsolatedEnvironments
from bestiary.training.rl.policy import Account, LocalFrozen, LocalPolicy, Room
from bestiary.training.rl.prompts import Prompts, count_prompts
from bestiary.training.rl.roles import Frozen
from bestiary.training.rl.rollout import Constraint, RolloutEngine, Sampling
from bestiary.training.rl.rollout_check import computed_in
from bestiary.training.rl.rounds import Roles, Rounds
from bestiary.training.rl.scorers import scorer_of
from bestiary.training.rl.shared_prompts import shares
from bestiary.training.rl.tools import Tools
from bestiary.training.run import (
    EXPORT,
    bound_to,
    check_folder,
    check_tokenizer,
    load_model,
    load_other,
    mesh_of,
    note,
)
from bestiary.training.tracking import RunInfo, Tracker, trackers

ROLLOUTS = "rollouts"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        round, rounds: made, and of the whole run.   version: optimiser steps made or skipped.
        stopped: why before its end, or None.   resumed: version that it went on from, or None.
        reward: of the last round.   export: folder of the result, or None.
    """

    round: int
    rounds: int
    version: int
    stopped: str | None
    resumed: int | None
    reward: float | None
    export: Path | None


def run(config: GrpoConfig, *, also: Sequence[Tracker] = (), interruption: Interruption | None = None) -> Outcome:
    """Trains as the configuration says, from the newest resume point in `config.out` if there is one.

    Args:
        also: trackers beside those of the configuration.   interruption: to stop by from another thread.
    Raises:
        InvalidRun: what the configuration asks cannot be done here.
        FolderTaken: another run is at work in `config.out`.
        CheckpointRefused, StateMismatch: the resume point is damaged or of another run.
        RewardFailed, EnvironmentFailed, StaleWeights, Diverged, SaveFailed, …: as roles and controller raise them.
    """
    _refuse_several()
    config = pinned(config)
    with ExitStack() as stack:
        stack.enter_context(named_failures(estimate(config).words(), config.loop.timeout_s))
        owner = stack.enter_context(owned(config.out))
        rounds = count_rounds(config)
        if config.placement is None:
            cast = stack.enter_context(in_one_process(config, rounds))
        else:
            from bestiary.training.rl.placed import on_ray

            cast = stack.enter_context(on_ray(config, rounds, config.placement))
        policy, tokenizer = cast.roles.policy, cast.tokenizer
        check_tokenizer(config, tokenizer)
        prompts = prompts_of(config, tokenizer, cast.context)
        note(config, tokenizer)
        steps = saved_steps(config.out / CHECKPOINTS)
        plan = rounds_of(config, tokenizer, rounds)
        info = RunInfo(
            name=config.tracking.name or config.out.name,
            project=config.tracking.project,
            config=config.model_dump(mode="json"),
            step=steps[-1] if steps else 0,
            steps=rounds * plan.steps,
        )
        tracker = trackers(config.tracking.to, config.out, info, also=also)
        stack.callback(tracker.close)
        controller = Controller(
            cast.roles,
            prompts,
            plan,
            held_out_of(config, tokenizer, cast.context, plan),
            log=tracker,
            callbacks=[owner, *(component(path, "loop.callbacks", InvalidRun)() for path in config.loop.callbacks)],
            interruption=interruption or Interruption(),
        )
        controller.fit()
        exported = None
        if config.checkpoint.export and not controller.interrupted:
            exported = config.out / EXPORT
            policy.export(exported)
    return Outcome(
        round=controller.round,
        rounds=rounds,
        version=policy.version,
        stopped=controller.stopped,
        resumed=controller.resumed,
        reward=controller.values.get("rl/reward"),
        export=exported,
    )


def _refuse_several() -> None:
    """Each of them would ask a hub, start a cluster and write into the folder for itself.

    Raises:
        InvalidRun.
    """
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise InvalidRun(
            f"bestiary grpo in {size} processes: its controller is one.",
            remedy="start it without torchrun; placement.policy says how many ranks the policy has",
        )


@dataclass(frozen=True)
class Cast:
    """Who works in a run.

    Attributes:
        context: tokens of an episode.
    """

    roles: Roles
    tokenizer: BaseHFModelTokenizer
    context: int


@contextmanager
def in_one_process(config: GrpoConfig, rounds: int) -> Iterator[Cast]:
    """Everybody here."""
    with processes(config.loop.timeout_s) as here, ExitStack() as stack:
        torch.use_deterministic_algorithms(config.loop.deterministic)
        stack.callback(torch.use_deterministic_algorithms, False)
        policy, tokenizer = local_policy(config, here, rounds)
        stack.callback(policy.close)
        context = min(config.data.pack_length, policy.model.decoder_config.max_position_embeddings)
        refuse_small_context(config, context)
        reference = reference_of(config, policy, here)
        scorer = scorer_of(config, tokenizer, here.device, stack)
        rows = policy.model.decoder_config.vocab_size
        sampler = sampler_of(config, engine_of(config, policy, context), context, rows)
        stack.callback(sampler.close)
        yield Cast(Roles(policy, sampler, scorer, reference), tokenizer, context)


# ---------------------------------------------------------------------- the run as numbers


def count_rounds(config: GrpoConfig) -> int:
    """Rounds of the run: as many as are asked for, or as all prompts of `data.epochs` make; the last may be smaller."""
    if config.loop.steps is not None:
        return config.loop.steps
    prompts = count_prompts(
        config.data.plan(config.data.tokenizer.load()), config.data.pack_length - config.rollouts.max_tokens
    )
    if not prompts:
        raise InvalidRun("the data has no prompts.", remedy="more data, or a larger data.pack_length")
    return -(-prompts // config.loop.prompts)


def rounds_of(config: GrpoConfig, tokenizer: BaseHFModelTokenizer, rounds: int) -> Rounds:
    """What the controller does."""
    section, loop = config.rollouts, config.loop
    return Rounds(
        rounds=rounds,
        prompts=loop.prompts,
        sampling=Sampling(
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            stop_ids=tuple(sorted({*tokenizer.stop_ids, *section.stop_ids})),
            n=section.n,
            seed=section.seed,
            constraint=constraint_of(config),
        ),
        algorithm=config.objective(),
        weights=config.weights,
        overlong=config.overlong,
        updates=loop.updates,
        passes=loop.passes,
        staleness=loop.staleness,
        save_every=config.checkpoint.every,
        keep=config.out / ROLLOUTS if section.keep else None,
        restarts=loop.restarts,
        refill=config.algorithm.refill,
    )


def constraint_of(config: GrpoConfig) -> Constraint | None:
    """What `rollouts.constraint` names, made."""
    path = config.rollouts.constraint
    made: Constraint | None = None if path is None else component(path, "rollouts.constraint", InvalidRun)()
    return made


def prompts_of(config: GrpoConfig, tokenizer: BaseHFModelTokenizer, context: int) -> Prompts:
    """Prompts of the data, those that leave room for an answer."""
    return Prompts(config.data.plan(tokenizer), context - config.rollouts.max_tokens)


def held_out_of(config: GrpoConfig, tokenizer: BaseHFModelTokenizer, context: int, plan: Rounds) -> HeldOut | None:
    """The held-out prompts of the run, read here and now.

    Raises:
        InvalidRun: there are none that leave room for an answer.
    """
    section, data = config.loop.evaluation, config.evaluation_data()
    if section is None or data is None:
        return None
    prompts = Prompts(data.plan(tokenizer), context - config.rollouts.max_tokens).next(section.prompts)
    if not prompts:
        raise InvalidRun("loop.evaluation.sources have no prompts.", remedy="more of them, or no loop.evaluation")
    return HeldOut(
        prompts,
        plan.sampling,
        every=section.every,
        n=section.n,
        weights=plan.weights,
        at_start=section.at_start,
        patience=section.patience,
    )


def refuse_small_context(config: GrpoConfig, context: int) -> None:
    """Nothing, if an episode has room for a prompt beside an answer.

    Args:
        context: what a pack holds, and what the model has positions for.
    Raises:
        InvalidRun.
    """
    if context <= config.rollouts.max_tokens:
        raise InvalidRun(
            f"rollouts.max_tokens = {config.rollouts.max_tokens} and the model has {context} positions.",
            remedy="fewer max_tokens: a prompt needs room too",
        )


# ---------------------------------------------------------------------- roles


def local_policy(
    config: GrpoConfig,
    here: Processes,
    rounds: int,
    memory: PeakMemory | None = None,
    contents: Contents | None = None,
) -> tuple[LocalPolicy, BaseHFModelTokenizer]:
    """The policy, or this process's part of it, and its tokenizer; every process of a policy calls it at once.

    Args:
        rounds: of the run, which its schedule and its resume points depend on.
        contents: of the checkpoints beside it, where they were read already.
    """
    check_folder(config)
    memory = memory or PeakMemory(here.device)
    loop, recipe = config.loop, config.gradient
    mesh = mesh_of(config.parallel, here)
    data = data_parallel(mesh)
    seed_all(loop.seed, 0, 0)  # fresh adapters are the same in every process
    model = load_model(config, here, mesh)
    tokenizer = load_tokenizer(config, model)
    _check_own_tokenizer(config, tokenizer)
    control = Control(here.control, copies=here.size // data.size)
    compute = config.precision.compute
    meter = Throughput(
        [StepFlops.of(model)],
        device_peak(here.device, FLOAT_TYPES[compute] if compute else model.dtype),
        devices=here.size,
        sums=control.sums,
        memory=memory,
    )
    steps = rounds * loop.updates * loop.passes
    section = config.model_dump(mode="json")
    sampled = {name: value for name, value in section["rollouts"].items() if name not in ("rows", "keep", "options")}
    own = {"algorithm": section["algorithm"], "rollouts": sampled, "weights": config.weights}
    told = {name: section["loop"][name] for name in ("prompts", "updates", "passes")}
    trainer = Trainer(
        model=model,
        recipe=recipe,
        loader=Account(),
        optimiser=Optimisers(model, config.optim, config.lr),
        steps=steps,
        per_step=0,
        loop=loop.loop,
        optim=config.optim,
        lr=config.lr,
        control=control,
        data_rank=data.rank,
        data_parallel=data.size,
        clip=clip_grad_norm,
        meter=meter,
    )
    saver = Checkpoints(
        config.out / CHECKPOINTS,
        config.checkpoint,
        bound=bound_to(config, model, tokenizer.fingerprint, steps, mesh) | own | {"loop": told},
        group=here.saving,
        seed=loop.seed,
        place=data.rank,
        commits=commits_in(config, model),
        contents=contents_in(config, here.control) if contents is None else contents,
    )
    seed_all(loop.seed, 0, data.rank)
    policy = LocalPolicy(
        trainer,
        Room(
            config.data.pack_length,
            tokenizer.pad_id,
            data.largest if data.size > 1 else None,
            shares=loop.share_prompts and here.size == 1 and shares(model),
        ),
        saver=saver,
        make=meter.watching(recipe.batch),
        tokenizer=tokenizer,
        rows=config.rollouts.rows,
        tolerance=config.rollouts.tolerance,
        engine_dtype=None if config.rollouts.dtype is None else FLOAT_TYPES[config.rollouts.dtype],
        constraint=constraint_of(config),
    )
    return policy, tokenizer


def _check_own_tokenizer(config: GrpoConfig, tokenizer: BaseHFModelTokenizer) -> None:
    """Refuse prompts in another tokenizer's ids than the policy's checkpoint brings, where it brings one.

    Raises:
        InvalidRun.
    """
    src = Path(config.model.src)
    if not (src / "tokenizer.json").is_file() or src == Path(config.data.tokenizer.src):
        return
    own = BaseHFModelTokenizer.from_pretrained(src).fingerprint
    if (own.probes, own.vocabulary) != (tokenizer.fingerprint.probes, tokenizer.fingerprint.vocabulary):
        raise InvalidRun(
            f"data.tokenizer.src = {config.data.tokenizer.src} and {src} has another tokenizer: the ids of prompts and "
            "stop tokens would mean other words to the policy.",
            remedy="data.tokenizer.src = the checkpoint; one that was trained on new tokens is exported with them",
        )


def reference_of(config: GrpoConfig, policy: LocalPolicy, here: Processes) -> Frozen | None:
    """Whom the algorithm measures the policy against, in this process."""
    named = config.reference
    if named is None:
        return None
    if named == ADAPTERS_OFF:
        return LocalFrozen(policy.model, policy.room, without_adapters=True)
    mesh = mesh_of(config.parallel, here)
    return LocalFrozen(load_other(config, named, here, mesh).requires_grad_(False).eval(), policy.room)


def engine_of(config: GrpoConfig, policy: LocalPolicy, context: int) -> RolloutEngine:
    """The engine in this process; vLLM begins with the policy's weights as they are."""
    section = config.rollouts
    if section.engine == "embedded":
        return EmbeddedEngine(policy.model, rows=section.rows)
    from bestiary.training.rl.vllm_engine import VllmEngine

    dtype = computed_in(policy.model) if section.dtype is None else FLOAT_TYPES[section.dtype]
    config.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".engine-", dir=config.out) as folder:
        weights = Path(folder) / "weights"
        policy.model.save_pretrained(weights, merge=True)
        return VllmEngine(
            weights,
            version=policy.version,
            dtype=dtype,
            context=context,
            rows=section.rows,
            **section.of_vllm,
        )


def sampler_of(
    config: GrpoConfig,
    engine: RolloutEngine,
    context: int,
    vocabulary: int,
    environment: EnvironmentFactory | None = None,
) -> Episodes:
    """Episodes with an engine in the environment of the file.

    Args:
        context, vocabulary: of the policy, see `Episodes`.
        environment: where it is elsewhere; None: made here.
    """
    section = config.environment
    if section is None:
        return Episodes(engine, context=context, vocabulary=vocabulary)
    return Episodes(
        engine,
        context=context,
        vocabulary=vocabulary,
        environment=environment or environment_of(config),
        threads=section.threads,
        # Of those apart a step, what follows it and a start end by themselves.
        timeout_s=3 * section.timeout_s + START_S if section.apart else section.timeout_s,
        at_once=section.at_once,
        max_turns=section.max_turns,
        max_errors=section.max_errors,
        window=section.window,
    )


def environment_of(config: GrpoConfig) -> EnvironmentFactory | None:
    """What makes the world of one episode; None: there is none."""
    section = config.environment
    if section is None:
        return None
    if section.tools is not None:
        given = section.tools
        tools = Tools(given.functions, timeout_s=given.timeout_s, processes=given.processes, fresh=given.fresh)
        return ToolEnvironments(config.data.tokenizer.load(), tools, calls=given.calls)
    assert section.name is not None
    if section.apart:
        return IsolatedEnvironments(section.name, section.options, timeout_s=section.timeout_s)
    return partial(component(section.name, "environment.name", InvalidRun), **section.options)
