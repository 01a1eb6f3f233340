"""Weights from the trainer into a rollout engine, believed only after the engine was asked.

`sync` streams hub tensors (adapters folded in, the base untouched) and then checks, every time:

* Names: what the engine's checkpoint has, each once, in its shape; the engine reports parameters that it did not fill.
* Values: a checksum of every tensor that was sent against one of what the engine holds now, where it holds it in a
  layout that can be compared. Packed and fused layouts cannot be, and are named in `Synced.unread`.
* What it says: answers to a fixed prompt, whose log-probabilities under the trainer's model must be those the engine
  gave. This covers what checksums cannot see, and the temperature.

An engine in which any of this failed has no weights anybody could name, and refuses to generate until a sync succeeds.
`check_rollouts` makes the last comparison for the answers of a step, and says what is wrong by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from bestiary.kernels.errors import BestiaryError
from bestiary.models import Decoder
from bestiary.models.sharding import gathered
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.documents import frozen_pass
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.mismatch import Parity, parity
from bestiary.training.rl.rollout import Rollout, RolloutEngine, Sampling

Shapes = Mapping[str, tuple[int, ...]]
FULL, HALF = 1e-4, 5e-2  # mean |difference| of log-probabilities: both sides in float32 or more, or one in less
BLAMED, BLAMED_TOKENS = 4, 64  # answers, and tokens of each, whose logits are computed to say what is wrong
MEASURABLE = 4.0  # how many times the engine's own distance the policy must have moved for the two to be told apart


class SyncFailed(BestiaryError):
    """Weights that did not arrive whole; the engine refuses to generate until they do."""


class StaleWeights(BestiaryError):
    """An engine whose weights are not those of the policy, by its version or by what it says."""


class WrongTemperature(BestiaryError):
    """Answers sampled at another temperature than the one that is trained at."""


class Retokenised(BestiaryError):
    """Answers whose ids are not those that were sampled."""


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
        dtype: that it computes in.
        answered: None at first; `sync` keeps here what was said at the last one.
    """

    shapes: Shapes
    dtype: torch.dtype
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
            one seed, so that answers begin alike from sync to sync and can be compared with the last one's.
        tolerance: of the mean |difference| of log-probabilities; default 1e-4, or 5e-2 where a side computes in half.
    Raises:
        SyncFailed: a tensor that was dropped, sent twice, is unknown, has another shape or arrived with other values,
            or a stream that ended in an error.
        StaleWeights, WrongTemperature, Retokenised: see `check_rollouts`.
        InvalidRun: an engine that takes no weights, or is of another model.
    """
    asked = Sampling(max_tokens=8, temperature=0.8, n=2, seed=0) if sampling is None else sampling
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
    for name, checksum in sent.checksums.items():
        there = engine.held(name)
        if there is None:
            unread.append(name)
        elif checksum_of(there, engine.dtype) != checksum:
            raise SyncFailed(
                f"tensor {name} of version {version} did not arrive as it was sent.",
                remedy="sync again; if it happens again, start the engine anew",
            )
        else:
            read.append(name)
    said = engine.probe([words], asked)
    found, policy = _compared(decoder, [words], said, asked, None, tolerance, engine.dtype)
    now = Answered(
        prompt=tuple(map(int, words)),
        temperature=asked.temperature,
        ids=tuple(torch.from_numpy(one.ids.astype(np.int64)) for one in said),
        policy=tuple(policy),
        engine=tuple(_told(one) for one in said),
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


def _told(one: Rollout) -> Tensor:
    """The engine's log-probabilities, float64."""
    return torch.from_numpy(np.asarray(one.log_probs)).double()


def takes_weights(engine: RolloutEngine) -> TypeGuard[WeightReceiver]:
    """Whether it is a `WeightReceiver`; asks the class, since an engine without weights has no version to be read."""
    return all(hasattr(type(engine), name) for name in ("receive", "held", "probe", "accept"))


def fixed_prompt(vocab: int) -> list[int]:
    """12 ids spread over the vocabulary, the same for the same size."""
    return [1 + (place * 7919 + 5) % (vocab - 1) for place in range(12)]


def checksum_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """CRC-32 of the values in `dtype`."""
    raw = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw.numpy().data)


def check_rollouts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    *,
    version: int | None = None,
    tolerance: float | None = None,
    engine_dtype: torch.dtype | None = None,
) -> Parity:
    """Whether answers have the log-probabilities that `decoder` gives them, which is what training takes for granted.

    What is wrong is told by elimination: the version; a temperature at which everything agrees; answers that agree up
    to a token and not from there on, or some that agree whole beside others, which weights cannot explain; and else the
    weights.

    Args:
        prompts: of the call; `Rollout.prompt` is a place in it.
        sampling: of the call; log-probabilities are compared at its temperature.
        version: that the answers must have; None: whichever.
        tolerance: of the mean |difference|; default 1e-4, or 5e-2 where a side computes in half.
        engine_dtype: that the engine computes in; None: as the decoder.
    Raises:
        StaleWeights: another version, or log-probabilities of other weights; names the worst token.
        WrongTemperature: names both.
        Retokenised: names the answer and its first token that was not sampled.
    """
    return _compared(decoder, prompts, rollouts, sampling, version, tolerance, engine_dtype)[0]


def _compared(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    version: int | None,
    tolerance: float | None,
    engine_dtype: torch.dtype | None,
) -> tuple[Parity, list[Tensor]]:
    """See `check_rollouts`; also the policy's log-probabilities, (tokens,) float64 of each answer."""
    for place, one in enumerate(rollouts):
        if version is not None and one.version != version:
            raise StaleWeights(
                f"answer {place} is of version {one.version}; the policy is at {version}.",
                remedy="sync the engine after the step, before it generates",
            )
        if len(one.ids) != len(one.log_probs):
            raise Retokenised(
                f"answer {place} has {len(one.ids)} tokens and {len(one.log_probs)} log-probabilities.", remedy=_RETOKEN
            )
    policy, computed = _log_probs(decoder, prompts, rollouts, sampling.temperature)
    half = any(torch.finfo(dtype).bits < 32 for dtype in (computed, engine_dtype) if dtype is not None)
    bound = (HALF if half else FULL) if tolerance is None else tolerance
    there = [_told(one) for one in rollouts]
    given = torch.cat(there) if there else torch.zeros(0, dtype=torch.float64)
    found = parity(torch.cat(policy) if policy else given, given, torch.ones(len(given), dtype=torch.bool))
    mean = found.absolute / max(1, found.tokens)
    if mean <= bound:
        return found, policy
    apart = [(mine - theirs).abs() for mine, theirs in zip(policy, there, strict=True)]
    worst = sorted(range(len(apart)), key=lambda place: -float(apart[place].mean()))[:BLAMED]
    few = [rollouts[place] for place in worst]
    said = torch.cat([there[place][:BLAMED_TOKENS] for place in worst])
    _blame_temperature(_logits(decoder, prompts, few), few, said, sampling.temperature, bound)
    _blame_tokens(apart, bound)
    answer = max(range(len(apart)), key=lambda place: float(apart[place].max()))
    token = int(apart[answer].argmax())
    engine, ours = float(there[answer][token]), float(policy[answer][token])
    raise StaleWeights(
        f"log-probabilities of the engine and the policy differ by {mean:.2g} in the mean (at most {bound:g}); worst "
        f"is token {token} of answer {answer}, id {int(rollouts[answer].ids[token])}: {engine:.5f} from the engine, "
        f"{ours:.5f} from the policy.",
        remedy="the engine has other weights than the policy: sync it; float32 on both sides compares best",
    )


_RETOKEN = "train on the ids that the engine gave: no decoding and encoding between"


def _blame_temperature(
    logits: Sequence[Tensor], rollouts: Sequence[Rollout], given: Tensor, temperature: float, bound: float
) -> None:
    """Raises WrongTemperature where another temperature explains the log-probabilities: all but a quarter at least.

    Some temperature brings other weights a little nearer too.
    """

    def distance(other: float) -> float:
        return float((torch.cat(_at(logits, rollouts, other)) - given).abs().mean())

    # A grid, then ever finer ones about its best: the distance is steep about the right one, and flat far away.
    centre, width = 1.0, 8.0
    for _ in range(8):
        tried = [centre * width ** (step / 8) for step in range(-8, 9)]
        centre, width = min(tried, key=distance), width ** (1 / 4)
    if abs(centre / temperature - 1.0) > 1e-3 and distance(centre) <= min(bound, distance(temperature) / 4):
        raise WrongTemperature(
            f"answers were sampled at temperature {centre:.3g} and are trained at {temperature:g}.",
            remedy="one temperature on both sides: Sampling.temperature",
        )


def _blame_tokens(apart: Sequence[Tensor], bound: float) -> None:
    """Raises Retokenised where every answer agrees whole or breaks off sharply, as other weights would not make it."""
    sharp, broken, agreeing = min(100 * bound, 1.0), [], 0
    for place, found in enumerate(apart):
        beyond = (found > bound).nonzero()
        first = int(beyond[0]) if len(beyond) else len(found)
        agreeing += first
        if len(beyond):
            broken.append((place, first))
    if broken and 2 * agreeing >= len(apart) and all(float(apart[place][first]) > sharp for place, first in broken):
        place, first = broken[0]
        raise Retokenised(
            f"answer {place} agrees with what was sampled up to token {first}, not from there: its ids were changed.",
            remedy=_RETOKEN,
        )


def _log_probs(
    decoder: Decoder, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], temperature: float
) -> tuple[list[Tensor], torch.dtype]:
    """Of each answer, (tokens,) float64, and the dtype that they were computed in."""
    found: list[Tensor] = []
    with frozen_pass(decoder), gathered(decoder):
        for one in rollouts:
            ids = _ids(decoder, prompts, one)
            targets = ids.roll(-1, 1)
            targets[:, -1] = targets[:, : -len(one) - 1] = -100
            values = decoder(ids, shift_labels=targets, temperature=temperature).log_probs
            found.append(values[0, -len(one) - 1 : -1].double().cpu())
    return found, computed_in(decoder)


def computed_in(decoder: Decoder) -> torch.dtype:
    """The dtype of its forward pass: what FSDP2 casts parameters to, and else theirs."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            cast = module._get_fsdp_state()._mp_policy.param_dtype
            if cast is not None:
                return cast
    return next(decoder.parameters()).dtype


def _ids(decoder: Decoder, prompts: Sequence[Sequence[int]], one: Rollout) -> Tensor:
    """(1, T): a prompt and its answer."""
    words = [*map(int, prompts[one.prompt]), *one.ids.tolist()]
    return torch.tensor([words], device=next(decoder.parameters()).device)


def _logits(decoder: Decoder, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Of the first tokens of each answer, (at most `BLAMED_TOKENS`, vocabulary) float64."""
    found: list[Tensor] = []
    with frozen_pass(decoder), gathered(decoder):
        for one in rollouts:
            first, ids = len(prompts[one.prompt]), _ids(decoder, prompts, one)
            read = ids[:, : first + BLAMED_TOKENS]
            kept = decoder(read, logits_to_keep=read.shape[1] - first + 1).logits[0]
            found.append(kept[: min(len(one), BLAMED_TOKENS)].double().cpu())
    return found


def _at(logits: Sequence[Tensor], rollouts: Sequence[Rollout], temperature: float) -> list[Tensor]:
    """Log-probabilities of the tokens that there are logits of, (tokens,) float64 of each answer."""
    return [
        (of / temperature)
        .log_softmax(-1)
        .gather(-1, torch.from_numpy(one.ids[: len(of)].astype(np.int64))[:, None])[:, 0]
        for of, one in zip(logits, rollouts, strict=True)
    ]


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
