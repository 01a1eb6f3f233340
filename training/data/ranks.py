"""What the ranks of a data-parallel run tell each other: whether all are done, their states, packs that change hands.

Small and on the CPU: give these a gloo group of their own, so that they never queue behind gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bestiary.training.data.balance import Cost, assign
from bestiary.training.data.errors import StateMismatch
from bestiary.training.data.packing import Pack

State = dict[str, Any]


def all_done(done: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether every rank's streams are over; without a group, this one's."""
    if group is None:
        return done
    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def gather_state(state: State, group: dist.ProcessGroup | None) -> State:
    """The state of all ranks, on each of them; to be called by all, after the same step."""
    if group is None:
        return state
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, state, group=group)
    return merge_states(states)


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state from those of all ranks, e.g. read from their checkpoint files.

    Raises:
        StateMismatch: they are of different plans, or two of them hold one stream.
    """
    streams: dict[str, Any] = {}
    for state in states:
        if state["plan"] != states[0]["plan"]:
            raise StateMismatch("the ranks' states are of different plans.", remedy="take them from one checkpoint")
        twice = sorted(streams.keys() & state["streams"].keys())
        if twice:
            raise StateMismatch(f"two of the ranks' states hold stream {twice[0]}.", remedy="give each state once")
        streams |= state["streams"]
    return {**states[0], "streams": dict(sorted(streams.items(), key=lambda item: int(item[0])))}


def exchange(packs: Mapping[int, Pack], cost: Cost, group: dist.ProcessGroup | None) -> list[Pack]:
    """The packs this rank computes in a step, chosen so that all ranks have about equal work.

    Args:
        packs: by stream, those that this rank has produced.

    Returns:
        As many as came in, in the order of their streams. Without a group, those that came in.
    """
    if group is None:
        return [packs[stream] for stream in sorted(packs)]
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, {stream: cost(pack) for stream, pack in packs.items()}, group=group)
    owner = {stream: place for place, own in enumerate(told) for stream in own}
    streams = sorted(owner)
    taken = assign([told[owner[stream]][stream] for stream in streams], world)
    taker = {streams[index]: place for place, indices in enumerate(taken) for index in indices}
    sent, received, works = [], {}, []
    for stream in streams:
        source, target = owner[stream], taker[stream]
        if source == target or rank not in (source, target):
            continue
        peer = dist.get_global_rank(group, target if rank == source else source)
        if rank == source:
            sent.append(_flat(packs[stream]))
            works.append(dist.isend(sent[-1], peer, group=group, tag=stream))
        else:
            length = len(next(iter(packs.values())).input_ids)
            received[stream] = torch.empty(4 * length + 4, dtype=torch.int32)
            works.append(dist.irecv(received[stream], peer, group=group, tag=stream))
    for work in works:
        if work is not None:
            work.wait()
    return [
        packs[stream] if owner[stream] == rank else _unflat(received[stream])
        for stream in streams
        if taker[stream] == rank
    ]


def _flat(pack: Pack) -> torch.Tensor:
    """(4·T + 4,) int32: ids, labels, borders and the bits of values padded to their largest numbers, three counts."""
    length = len(pack.input_ids)
    flat = torch.zeros(4 * length + 4, dtype=torch.int32)
    flat[:length] = torch.from_numpy(pack.input_ids)
    flat[length : 2 * length] = torch.from_numpy(pack.labels)
    flat[2 * length : 2 * length + len(pack.borders)] = torch.from_numpy(pack.borders)
    if pack.values is not None:
        flat[3 * length + 1 : 3 * length + 1 + pack.documents] = torch.from_numpy(pack.values.view(np.int32))
    flat[-3], flat[-2], flat[-1] = pack.values is not None, len(pack.borders), pack.documents
    return flat


def _unflat(flat: torch.Tensor) -> Pack:
    row = flat.numpy()
    length, valued, borders, documents = (len(row) - 4) // 4, bool(row[-3]), int(row[-2]), int(row[-1])
    values = row[3 * length + 1 : 3 * length + 1 + documents].view(np.float32).copy() if valued else None
    return Pack(
        row[:length], row[length : 2 * length], row[2 * length : 2 * length + borders].copy(), documents, values
    )
