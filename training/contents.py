"""What the checkpoints hold that a run computes beside the one it trains: read when it begins and each time it goes on.

A path says where reference, teacher and reward models lie, not what lies there. What `bridges.contents` tells of each
stands in every resume point, and a run does not go on beside another one. The base of adapters, and whatever else of
the model is frozen, is told by checksums of all its bits (`checkpoint.frozen_checksums`), the tokenizer by its
fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from bestiary.bridges.contents import contents
from bestiary.bridges.hub import split_revision
from bestiary.training.config import ADAPTERS_OFF, CommonConfig, RunConfig
from bestiary.training.control import decided
from bestiary.training.errors import CheckpointRefused
from bestiary.training.rl.config import GrpoConfig

Contents = Mapping[str, Mapping[str, str]]  # key of the run's file → file → what there is to it
NOTHING: Contents = {}


def contents_in(config: CommonConfig, group: dist.ProcessGroup | None = None) -> Contents:
    """Of every checkpoint, or file of stored sums, that a run reads beside the one it trains, by the key that names it.

    Args:
        group: of all processes, which call it at once; the first one reads, so that another checkpoint at that path on
            another node goes unseen. None: this process alone.
    Raises:
        CheckpointNotFound, …: as `bridges.contents`.
    """
    return decided(lambda: {key: contents(*split_revision(src)) for key, src in checkpoints_of(config).items()}, group)


def check_contents(then: Contents, now: Contents, *, read_from: str) -> None:
    """Nothing, if what both know is the same.

    Args:
        read_from: where `then` was written down.
    Raises:
        CheckpointRefused: names key and file.
    """
    for key in sorted(then.keys() & now.keys()):
        old, new = then[key], now[key]
        other = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        if other:
            name, more = other[0], f", and {len(other) - 1} more of its files differ" if len(other) > 1 else ""
            raise CheckpointRefused(
                f"{key}: the checkpoint at that place is not the one that the run began with: {name} was "
                f"{old.get(name, 'not there')} and is {new.get(name, 'not there')}{more}.",
                read_from=read_from,
                remedy=f"put back what {key} was; or another `out` for a run with this one",
            )


def refuse_others(src: Mapping[str, str], then: Contents) -> None:
    """Refuse, in a process that may have been started once more, other checkpoints than the run began with.

    Args:
        src: of the run's checkpoints by key; those that `then` does not know are not looked at.
    Raises:
        CheckpointRefused: names key and file.
    """
    now = {key: contents(*split_revision(name)) for key, name in src.items() if key in then}
    check_contents(then, now, read_from="what was there as the run began")


def checkpoints_of(config: CommonConfig) -> dict[str, str]:
    """Key → checkpoint or file of those that a run reads beside the model, or of the model once more."""
    found: dict[str, str | None] = {}
    if isinstance(config, RunConfig):
        found = {"model.src" if config.loss.reference is None else "loss.reference": config.reference}
        found["loss.teacher"] = config.loss.teacher
    elif isinstance(config, GrpoConfig):
        reference = config.reference
        if reference == ADAPTERS_OFF and config.placement is not None:
            reference = config.model.named  # which a process of its own reads
        found = {"model.src" if reference == config.model.named else "algorithm.reference": reference}
        found |= {f"rewards.{one.name}.model": one.model for one in config.rewards.functions}
    return {key: src for key, src in found.items() if src is not None and src != ADAPTERS_OFF}
