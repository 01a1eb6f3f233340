"""What the ranks of a data-parallel run tell each other: whether all are done, their states, packs that change hands.

Small and on the CPU: give these a gloo group of their own, so that they never queue behind gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bestiary.training.data.balance import Cost, assign
from bestiary.training.data.errors import StateMismatch
from bestiary.training.data.packing import Pack
from bestiary.training.data.tokens import TeacherWords

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
    dist.all_gather_object(told, {stream: (cost(pack), _width(pack)) for stream, pack in packs.items()}, group=group)
    owner = {stream: place for place, own in enumerate(told) for stream in own}
    streams = sorted(owner)
    taken = assign([told[owner[stream]][stream][0] for stream in streams], world)
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
            received[stream] = torch.empty((4 + sum(told[source][stream][1])) * length + 6, dtype=torch.int32)
            works.append(dist.irecv(received[stream], peer, group=group, tag=stream))
    for work in works:
        if work is not None:
            work.wait()
    return [
        packs[stream] if owner[stream] == rank else _unflat(received[stream], told[owner[stream]][stream][1])
        for stream in streams
        if taker[stream] == rank
    ]


def _width(pack: Pack) -> tuple[int, int]:
    """How many int32 a token's row of teacher's words takes, and how many its log-probabilities."""
    if pack.teacher is None:
        return 0, 0
    words = pack.teacher.words.shape[1]
    return words, words * pack.teacher.log_probs.itemsize // 4


def _flat(pack: Pack) -> torch.Tensor:
    """int32: ids, labels, borders and the bits of values padded to their largest numbers, the teacher's words and the
    bits of their log-probabilities, stream and number, three counts.
    """
    length, (words, bits) = len(pack.input_ids), _width(pack)
    flat = torch.zeros((4 + words + bits) * length + 6, dtype=torch.int32)
    flat[:length] = torch.from_numpy(pack.input_ids)
    flat[length : 2 * length] = torch.from_numpy(pack.labels)
    flat[2 * length : 2 * length + len(pack.borders)] = torch.from_numpy(pack.borders)
    if pack.values is not None:
        flat[3 * length + 1 : 3 * length + 1 + pack.documents] = torch.from_numpy(pack.values.view(np.int32))
    if pack.teacher is not None:
        start = 4 * length + 1
        flat[start : start + words * length] = torch.from_numpy(pack.teacher.words).flatten()
        log_probs = np.ascontiguousarray(pack.teacher.log_probs).view(np.int32)
        flat[start + words * length : start + (words + bits) * length] = torch.from_numpy(log_probs).flatten()
    flat[-5], flat[-4] = pack.stream, pack.number
    flat[-3], flat[-2], flat[-1] = pack.values is not None, len(pack.borders), pack.documents
    return flat


def _unflat(flat: torch.Tensor, width: tuple[int, int]) -> Pack:
    row, (words, bits) = flat.numpy(), width
    length = (len(row) - 6) // (4 + words + bits)
    stream, number, valued, borders, documents = (int(value) for value in row[-5:])
    values = row[3 * length + 1 : 3 * length + 1 + documents].view(np.float32).copy() if valued else None
    teacher = None
    if words:
        start, middle, end = (4 * length + 1 + part * length for part in (0, words, words + bits))
        wide = bits > words
        log_probs: NDArray[np.floating[Any]] = row[middle:end].copy().view(np.float64 if wide else np.float32)
        teacher = TeacherWords(row[start:middle].reshape(length, words).copy(), log_probs.reshape(length, words))
    ids, labels = row[:length], row[length : 2 * length]
    return Pack(ids, labels, row[2 * length : 2 * length + borders].copy(), documents, values, teacher, stream, number)
