"""Which source the next document comes from: by weight of documents or tokens, on a schedule, no hidden state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.randomness import Draws


@dataclass(frozen=True, slots=True)
class Stage:
    """Weights that hold from a draw on.

    Attributes:
        start: in documents drawn by all streams together.
        weights: by source name; a name left out has weight 0.
        ramp: whether they move linearly to the next stage's, instead of holding until then.
    """

    start: int
    weights: Mapping[str, float]
    ramp: bool = False


def check_schedule(stages: Sequence[Stage], names: Collection[str]) -> None:
    """Refuse a schedule that does not start at 0, does not rise, or names an unknown source.

    Raises:
        InvalidPlan.
    """
    starts = [stage.start for stage in stages]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise InvalidPlan(f"schedule: stages start at {starts}.", remedy="the first at 0, each later than the last")
    for stage in stages:
        unknown = sorted(set(stage.weights) - set(names))
        if unknown:
            raise InvalidPlan(
                f"schedule: stage {stage.start} weighs {unknown[0]!r}.",
                remedy=f"sources are {', '.join(sorted(names))}",
            )
        if not all(weight >= 0 for weight in stage.weights.values()) or not any(stage.weights.values()):
            raise InvalidPlan(
                f"schedule: stage {stage.start} has weights {dict(stage.weights)}.", remedy="some above 0"
            )
    if stages[-1].ramp:
        raise InvalidPlan("schedule: the last stage has ramp = True.", remedy="it has no next stage to move to")


class Mixer:
    """The choices of one canonical stream.

    By document, draw k picks a source with the number that belongs to (seed, stream, k). By token, every source owns a
    credit: a document gives each its share of the tokens and takes them from its own source, and the largest credit is
    next. So the token shares are right to within a document at all times, whatever the lengths.

    Args:
        stages: checked ones.   by: what the weights count.   stream, streams: whose choices.

    Attributes:
        credit: in tokens, by source name (by token only).
    """

    def __init__(
        self, stages: Sequence[Stage], by: Literal["document", "token"], *, seed: int, stream: int, streams: int
    ) -> None:
        self._stages, self._by, self._streams = stages, by, streams
        self._draws = Draws(seed, "mixture", stream)
        self.credit: dict[str, float] = {}

    def shares(self, draw: int, active: Collection[str]) -> dict[str, float]:
        """Shares of the sources that still have rows, in the order of their names; empty where all weigh 0."""
        at = draw * self._streams
        index = max(place for place, stage in enumerate(self._stages) if stage.start <= at)
        stage = self._stages[index]
        weights = {name: float(stage.weights.get(name, 0.0)) for name in sorted(active)}
        if stage.ramp:
            following = self._stages[index + 1]
            moved = (at - stage.start) / (following.start - stage.start)
            weights = {
                name: weight + moved * (following.weights.get(name, 0.0) - weight) for name, weight in weights.items()
            }
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight > 0}

    def choose(self, draw: int, active: Collection[str]) -> str | None:
        """The source of a draw; None where no source is left."""
        shares = self.shares(draw, active)
        if not shares:
            return None
        if self._by == "token":
            largest = max(self.credit.get(name, 0.0) for name in shares)
            shares = {name: share for name, share in shares.items() if self.credit.get(name, 0.0) == largest}
        number, total = self._draws[draw], sum(shares.values())
        for name, share in shares.items():
            number -= share / total
            if number < 0:
                return name
        return name

    def charge(self, draw: int, active: Collection[str], chosen: str, tokens: int) -> None:
        """Book the length of what a draw brought."""
        if self._by == "document":
            return
        for name, share in self.shares(draw, active).items():
            self.credit[name] = self.credit.get(name, 0.0) + share * tokens
        self.credit[chosen] -= tokens
