"""The roles of a run on Ray, as `placement` says: what each process makes for itself from the run's file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from bestiary.bridges.fields import FLOAT_TYPES
from bestiary.bridges.hub import resolve
from bestiary.kernels.errors import BestiaryError
from bestiary.training.config import ADAPTERS_OFF
from bestiary.training.contents import Contents, checkpoints_of, contents_in, refuse_others
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import ClusterLost, Role, RoleLost
from bestiary.training.parallel import build_mesh
from bestiary.training.processes import processes
from bestiary.training.rl.cluster import enter, session
from bestiary.training.rl.config import GrpoConfig
from bestiary.training.rl.environments import EnvironmentFactory
from bestiary.training.rl.groups import Group, Pool, RoleWorker
from bestiary.training.rl.grpo import (
    Cast,
    environment_of,
    local_policy,
    refuse_small_context,
    sampler_of,
)
from bestiary.training.rl.placement import PlacementSection
from bestiary.training.rl.policy import LocalFrozen, LocalPolicy, Room
from bestiary.training.rl.remote import RemoteEnvironments, RemoteFrozen, RemotePolicy, RemoteScorer, SpreadSampler
from bestiary.training.rl.remote_engine import RolloutGroup
from bestiary.training.rl.roles import Frozen, Scorer
from bestiary.training.rl.rounds import Roles
from bestiary.training.rl.scorers import scorer_of
from bestiary.training.rl.standalone import StandaloneEngine
from bestiary.training.rl.weight_sync import WeightReceiver
from bestiary.training.rl.workers import EnvironmentWorker, FrozenWorker, PolicyWorker, RewardWorker, RolloutWorker
from bestiary.training.run import check_folder, load_other

LOGGER = logging.getLogger(__name__)
_MIB = 2**20


@contextmanager
def on_ray(config: GrpoConfig, rounds: int, placement: PlacementSection) -> Iterator[Cast]:
    """Everybody on Ray, started and ended here.

    Raises:
        InvalidRun: no room for so many processes, or what the processes raise.   MissingLibrary: ray or verl.
    """
    check_folder(config)
    with session(max(os.cpu_count() or 1, placement.cpus or placement.processes)), ExitStack() as stack:
        groups = started(config, rounds, placement, stack)
        yield cast(config, placement, groups, stack)


def started(config: GrpoConfig, rounds: int, placement: PlacementSection, stack: ExitStack) -> dict[Role, Group]:
    """Groups of the roles that the run has, none of them waited for.

    Args:
        stack: ends them.
    """
    # A process that is started again finds the run's own resume points, whatever the file says of those of another.
    section = config.checkpoint.model_copy(update={"resume": "auto"})
    plain = config.model_copy(update={"checkpoint": section}).model_dump(mode="json")
    found = contents_in(config)  # here for all of them, and for those that are started again
    judged = {key: found[key] for key in found if key.startswith("rewards.")}
    asked = {key: found[key] for key in found.keys() - judged.keys()}
    wanted: dict[Role, tuple[type[RoleWorker], Callable[..., Any], int, int]] = {
        "policy": (PolicyWorker, partial(policy_process, rounds=rounds, contents=found), placement.policy, 1),
        "rollout": (RolloutWorker, engine_process, placement.rollout, 4),
        "reward": (RewardWorker, partial(reward_process, contents=judged), placement.reward, 1),
    }
    if config.reference is not None:
        wanted["reference"] = (FrozenWorker, partial(reference_process, contents=asked), placement.reference, 1)
    if config.environment is not None:
        calls = config.environment.threads * placement.rollout
        count = placement.environment
        wanted["environment"] = (EnvironmentWorker, environment_process, count, -(-calls // max(1, count)) + 1)
    sharing = [role for role in wanted if role == "policy" or role in placement.together]
    shared = Pool(
        placement.places // placement.nodes, len(sharing), nodes=placement.nodes, timeout_s=placement.timeout_s
    )
    stack.callback(shared.close)
    groups: dict[Role, Group] = {}
    for role, (worker, make, size, threads) in wanted.items():
        if not size:
            continue
        pool = shared
        if role not in sharing:
            computes = role in ("rollout", "reference")
            pool = Pool(size, 1, nodes=None, gpu=None if computes else False, timeout_s=placement.timeout_s)
            stack.callback(pool.close)
        groups[role] = Group(
            role,
            worker,
            partial(make, plain, os.getcwd()),
            size=size,
            pool=pool,
            together=role == "policy",
            threads=threads,
            timeout_s=placement.timeout_s,
        )
        stack.callback(groups[role].close)
    return groups


def cast(config: GrpoConfig, placement: PlacementSection, groups: Mapping[Role, Group], stack: ExitStack) -> Cast:
    """The roles as the controller sees them, once all are there.

    Args:
        stack: closes what of them is in this process.
    """
    rows: int = groups["policy"].described[0].vocabulary
    tokenizer = tokenizer_of(config, rows)
    policy = RemotePolicy(groups["policy"])
    stack.enter_context(finishing(policy))
    engine = RolloutGroup(groups["rollout"], bucket_bytes=placement.bucket_mib * _MIB)
    context = min(config.data.pack_length, engine.context)
    refuse_small_context(config, context)
    environments = RemoteEnvironments(groups["environment"]) if "environment" in groups else None
    # One factory for all players: what it guards, it guards for all of them.
    factory: EnvironmentFactory | None = environments or environment_of(config)
    engines = [engine.alone(member) for member in range(placement.rollout)]
    players = [sampler_of(config, one, context, rows, factory) for one in engines]
    sampler = SpreadSampler(engine, players, environments)
    stack.callback(sampler.close)
    scorer: Scorer
    if "reward" in groups:
        scorer = RemoteScorer(groups["reward"])
    else:
        scorer = scorer_of(config, tokenizer, torch.device("cpu"), stack)
    reference: Frozen | None = RemoteFrozen(groups["reference"]) if "reference" in groups else None
    return Cast(Roles(policy, sampler, scorer, reference, shares=False), tokenizer, context)


@contextmanager
def finishing(policy: RemotePolicy) -> Iterator[None]:
    """A run that ends in an error goes on from the resume point that was being written: it is waited for.

    The error stays what it was. Of a policy that is lost there is nothing to wait for.
    """
    try:
        yield
    except BaseException as error:
        lost = isinstance(error, ClusterLost) or (isinstance(error, RoleLost) and error.role == "policy")
        if not lost:
            try:
                policy.finish()
            except BestiaryError as second:
                LOGGER.warning("no waiting for resume points after %s: %s", type(error).__name__, second.what)
        raise


def tokenizer_of(config: GrpoConfig, vocabulary: int) -> BaseHFModelTokenizer:
    """The run's, as `export.load_tokenizer` gives it beside a model of so many words."""
    rows = config.data.tokenizer.vocab_rows or vocabulary
    return config.data.tokenizer.model_copy(update={"vocab_rows": rows}).load()


# ---------------------------------------------------------------------- in the processes


@contextmanager
def policy_process(config: Mapping[str, Any], folder: str, *, rounds: int, contents: Contents) -> Iterator[LocalPolicy]:
    """One rank of the policy."""
    read = _read(config, folder)
    with processes(read.loop.timeout_s) as here:
        torch.use_deterministic_algorithms(read.loop.deterministic)
        policy, _ = local_policy(read, here, rounds, contents=contents)
        try:
            yield policy
        finally:
            policy.close()


@contextmanager
def reference_process(config: Mapping[str, Any], folder: str, *, contents: Contents) -> Iterator[LocalFrozen]:
    """The model before training, or the one that the file names.

    Raises:
        CheckpointRefused: another one than in `contents` lies there by now.
    """
    read = _read(config, folder)
    refuse_others(checkpoints_of(read), contents)
    with processes(read.loop.timeout_s) as here:
        named = read.reference
        src = read.model.named if named in (None, ADAPTERS_OFF) else str(named)
        model = load_other(read, src, here, build_mesh(device_type=here.device.type)).requires_grad_(False).eval()
        tokenizer = tokenizer_of(read, model.decoder_config.vocab_size)
        yield LocalFrozen(model, Room(read.data.pack_length, tokenizer.pad_id))


def engine_process(config: Mapping[str, Any], folder: str) -> WeightReceiver:
    """An engine on the checkpoint that the run began with; its weights are nobody's before the first sync."""
    read = _read(config, folder)
    section = read.rollouts
    src = resolve(read.model.src, revision=read.model.revision)
    name = section.dtype or read.precision.compute or read.precision.parameters
    dtype = None if name is None else FLOAT_TYPES[name]
    if section.engine == "embedded":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return StandaloneEngine(src, version=None, dtype=dtype, device=device, rows=section.rows)
    from bestiary.training.rl.vllm_engine import VllmEngine

    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    return VllmEngine(src, rows=section.rows, **given, **section.of_vllm)


@contextmanager
def reward_process(config: Mapping[str, Any], folder: str, *, contents: Contents) -> Iterator[Scorer]:
    """Whoever judges.

    Raises:
        CheckpointRefused: another reward model than in `contents` lies there by now.
    """
    read = _read(config, folder)
    refuse_others(checkpoints_of(read), contents)
    with ExitStack() as stack:
        tokenizer = read.data.tokenizer.load()
        yield scorer_of(read, tokenizer, torch.device("cpu"), stack)


def environment_process(config: Mapping[str, Any], folder: str) -> EnvironmentFactory:
    """What makes the worlds of episodes."""
    found = environment_of(_read(config, folder))
    assert found is not None
    return found


def _read(config: Mapping[str, Any], folder: str) -> GrpoConfig:
    """The run's file, in the folder that relative paths in it count from.

    Raises:
        InvalidRun: the folder is not on this node.
    """
    enter(folder)
    return GrpoConfig.model_validate(config)
