"""Weights from the trainer into a rollout engine, believed only after the engine was asked.

`sync` streams hub tensors (adapters folded in, the base untouched) and then checks, every time:

* Names: what the engine's checkpoint has, each once, in its shape; the engine reports parameters that it did not fill.
* Values: a checksum of every tensor that was sent against one of what the engine holds now, where it holds it in a
  layout that can be compared. Packed and fused layouts cannot be, and are named in `Synced.unread`.
* What it says: answers to a fixed prompt, whose log-probabilities under the trainer's model must be those the engine
  gave. This covers what checksums cannot see, and the temperature.

An engine in which any of this failed has no weights anybody could name, and refuses to generate until a sync succeeds.
`rollout_check` makes the last comparison, for the answers of a step too, and says what is wrong by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.mismatch import Parity
from bestiary.training.rl.rollout import Rollout, RolloutEngine, Sampling
from bestiary.training.rl.rollout_check import FULL, StaleWeights, check_rollouts, compared, told

Shapes = Mapping[str, tuple[int, ...]]
MEASURABLE = 4.0  # how many times the engine's own distance the policy must have moved for the two to be told apart


class SyncFailed(BestiaryError):
    """Weights that did not arrive whole; the engine refuses to generate until they do.

    Remedy: sync again; the engine serves no answer of a half-written policy.
    """


@dataclass(frozen=True, slots=True)
class Answered:
    """What an engine and the policy said when a sync was accepted.

    Attributes:
        prompt, temperature: of the fixed answers.
        ids: of each answer.   policy, engine: its log-probabilities, float64, under either.
    """

    prompt: tuple[int, ...]
    temperature: float
    ids: tuple[Tensor, ...]
    policy: tuple[Tensor, ...]
    engine: tuple[Tensor, ...]


class WeightReceiver(RolloutEngine, Protocol):
    """A `RolloutEngine` with weights of its own.

    Attributes:
        shapes: hub names and shapes of what it must be sent.
        dtype: that it computes in.   context: positions of a prompt and its answer.
        answered: None at first; `sync` keeps here what was said at the last one.
    """

    shapes: Shapes
    dtype: torch.dtype
    context: int
    answered: Answered | None

    def receive(self, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Take every tensor; until `accept` the engine answers nobody but `probe`.

        Returns:
            Its own parameters, in its own words, that nothing was written to.
        Raises:
            SyncFailed: the engine could not make anything of a tensor.
        """
        ...

    def held(self, name: str) -> Tensor | None:
        """What the engine computes with under a hub name, or None where its layout does not tell."""
        ...

    def probe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """`generate` with what was received and not yet accepted."""
        ...

    def accept(self, version: int) -> None:
        """What was received is version `version`."""
        ...


@runtime_checkable
class Checksums(Protocol):
    """A `WeightReceiver` that adds up what it holds where it lies, so that no tensor travels back to be compared."""

    def checksums(self) -> Mapping[str, int]:
        """`checksum_of` of `held`, in the engine's dtype, of every name that it can read."""
        ...


@dataclass(frozen=True, slots=True)
class Synced:
    """A sync that succeeded.

    Attributes:
        version: that the engine has now.
        tensors, bytes: sent.
        read: names whose values were read back and compared.   unread: those in a layout that cannot be.
        unverified: all of `unread` where the answers say nothing of them either, since the policy moved too little
            from the last sync to tell new weights from old ones, or there was no sync; else nothing.
        parity: of the log-probabilities of answers to the fixed prompt.
    """

    version: int
    tensors: int
    bytes: int
    read: tuple[str, ...]
    unread: tuple[str, ...]
    unverified: tuple[str, ...]
    parity: Parity


def sync(
    decoder: Decoder,
    engine: RolloutEngine,
    version: int,
    *,
    prompt: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    tolerance: float | None = None,
) -> Synced:
    """Put the weights of `decoder` into `engine` and check that they are there.

    The embedded engine has the trainer's weights already: only its version and what it says are checked.

    Args:
        version: optimiser steps behind the weights.
        prompt: of the fixed answers; default some ids of the vocabulary.
        sampling: of them; default 2 answers of 8 tokens at a temperature other than 1, of
            one seed, so that answers begin alike from sync to sync and can be compared with the last one's; of 2 tokens
            from the embedded engine, in which nothing can have stayed behind.
        tolerance: of the mean |difference| of log-probabilities; default 1e-4, or 5e-2 where a side computes in half.
    Raises:
        SyncFailed: a tensor that was dropped, sent twice, is unknown, has another shape or arrived with other values,
            or a stream that ended in an error.
        StaleWeights, WrongTemperature, Retokenised: see `rollout_check.check_rollouts`.
        InvalidRun: an engine that takes no weights, or is of another model.
    """
    tokens = 2 if isinstance(engine, EmbeddedEngine) else 8
    asked = Sampling(max_tokens=tokens, temperature=0.8, n=2, seed=0) if sampling is None else sampling
    words = fixed_prompt(decoder.decoder_config.vocab_size) if prompt is None else prompt
    if isinstance(engine, EmbeddedEngine):
        if engine.model is not decoder:
            raise InvalidRun("the embedded engine has another model.", remedy="an engine on the model that trains")
        engine.version = version
        said = engine.generate([words], asked)
        return Synced(version, 0, 0, (), (), (), check_rollouts(decoder, [words], said, asked, tolerance=tolerance))
    if not takes_weights(engine):
        raise InvalidRun(f"{type(engine).__name__} takes no weights.", remedy="an engine with `receive` and `accept`")
    sent = _Sent(engine.shapes, engine.dtype)
    with torch.no_grad():
        unfilled = engine.receive(sent.stream(decoder.named_hf_tensors()))
    sent.check()
    if unfilled:
        raise SyncFailed(
            f"nothing was written to {unfilled[0]} of the engine ({len(unfilled)} such parameters).",
            remedy="an engine whose model is this one; see its log",
        )
    read, unread = [], []
    held = engine.checksums() if isinstance(engine, Checksums) else None
    for name, checksum in sent.checksums.items():
        there = _checksum(engine, name) if held is None else held.get(name)
        if there is None:
            unread.append(name)
        elif there != checksum:
            raise SyncFailed(
                f"tensor {name} of version {version} did not arrive as it was sent.",
                remedy="sync again; if it happens again, start the engine anew",
            )
        else:
            read.append(name)
    said = engine.probe([words], asked)
    found, policy = compared(decoder, [words], said, asked, None, tolerance, engine.dtype)
    now = Answered(
        prompt=tuple(map(int, words)),
        temperature=asked.temperature,
        ids=tuple(torch.from_numpy(one.ids.astype(np.int64)) for one in said),
        policy=tuple(policy),
        engine=tuple(told(one) for one in said),
    )
    unverified = () if told_apart(now, engine.answered) else tuple(unread)
    engine.accept(version)
    engine.answered = now
    return Synced(version, len(sent.checksums), sent.bytes, tuple(read), tuple(unread), unverified, found)


def told_apart(now: Answered, then: Answered | None) -> bool:
    """Whether the engine's answers show that it has the weights of now and not those of the last sync.

    Compared are the tokens up to which answers are the same as then: their contexts are.

    Returns:
        False where that cannot be seen: no such tokens, or log-probabilities under the policy that moved in the mean by
        less than `MEASURABLE` times what the engine was off then, or by less than 1e-4.
    Raises:
        StaleWeights: the policy moved, and the engine is nearer to what it was.
    """
    if then is None or (now.prompt, now.temperature) != (then.prompt, then.temperature):
        return False
    same = [_common(one, other) for one, other in zip(now.ids, then.ids, strict=False)]

    def joined(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value[:count] for value, count in zip(values, same, strict=False)])

    if not sum(same):
        return False
    new, old, said = joined(now.policy), joined(then.policy), joined(now.engine)
    off = float((joined(then.engine) - old).abs().mean())
    moved = float((new - old).abs().mean())
    if moved <= max(MEASURABLE * off, FULL):
        return False
    to_new, to_old = float((said - new).abs().mean()), float((said - old).abs().mean())
    if to_new >= to_old:
        raise StaleWeights(
            f"the engine's log-probabilities are {to_new:.2g} from the policy's and {to_old:.2g} from those of the "
            f"last sync; between the two the policy moved by {moved:.2g}.",
            remedy="the engine kept its earlier weights: sync again; if it happens again, start the engine anew",
        )
    return True


def _common(one: Tensor, other: Tensor) -> int:
    """Length of the prefix that two answers share."""
    length = min(len(one), len(other))
    differing = (one[:length] != other[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def takes_weights(engine: RolloutEngine) -> TypeGuard[WeightReceiver]:
    """Whether it is a `WeightReceiver`; asks the class, since an engine without weights has no version to be read."""
    return all(hasattr(type(engine), name) for name in ("receive", "held", "probe", "accept"))


def fixed_prompt(vocab: int) -> list[int]:
    """12 ids spread over the vocabulary, the same for the same size."""
    return [1 + (place * 7919 + 5) % (vocab - 1) for place in range(12)]


def _checksum(engine: WeightReceiver, name: str) -> int | None:
    there = engine.held(name)
    return None if there is None else checksum_of(there, engine.dtype)


def checksum_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """CRC-32 of the values in `dtype`."""
    raw = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw.numpy().data)


class _Sent:
    """What went through a stream of tensors: names once each, in the shapes expected, with checksums."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.checksums: dict[str, int] = {}
        self.bytes = 0
        self.error: Exception | None = None

    def stream(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors; an error ends them, so that the engine is left in a state that can be loaded again."""
        try:
            for name, tensor in tensors:
                self._admit(name, tensor)
                yield name, tensor
        except Exception as error:  # noqa: BLE001 (told by `check`, after the engine has put itself in order)
            self.error = error

    def check(self) -> None:
        """Raises SyncFailed unless everything went through."""
        if isinstance(self.error, SyncFailed):
            raise self.error
        count = f"{len(self.checksums)} of {len(self.shapes)} tensors were sent"
        if self.error is not None:
            raise SyncFailed(
                f"the sync was interrupted by {type(self.error).__name__}: {self.error} ({count}).", remedy="sync again"
            ) from self.error
        missing = [name for name in self.shapes if name not in self.checksums]
        if missing:
            raise SyncFailed(
                f"tensor {missing[0]} was dropped: {count}.", remedy="every tensor of named_hf_tensors, each once"
            )

    def _admit(self, name: str, tensor: Tensor) -> None:
        if name not in self.shapes:
            raise SyncFailed(
                f"tensor {name} is not in the engine's checkpoint.",
                remedy="start the engine from an export of this model (save_pretrained, adapters merged)",
            )
        if name in self.checksums:
            raise SyncFailed(f"tensor {name} was sent twice.", remedy="every tensor of named_hf_tensors, each once")
        if tuple(tensor.shape) != self.shapes[name]:
            raise SyncFailed(
                f"tensor {name} has shape {tuple(tensor.shape)}, in the engine {self.shapes[name]}.",
                remedy="an engine of this very model: same widths, same vocabulary",
            )
        self.checksums[name] = checksum_of(tensor, self.dtype)
        self.bytes += tensor.numel() * tensor.element_size()
