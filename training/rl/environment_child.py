"""Environments in a process of their own, one after the other: what `isolated_environments` asks, answered there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bestiary.training.rl.environments import Environment, Heard, Said
from bestiary.training.rl.prompt import Prompt


def playing(factory: Callable[..., Environment]) -> Callable[[Any], Any]:
    """What makes an environment, as what a process calls: `{"do": "reset" | "step" | "cut_off" | "close", …}`."""
    played: list[Environment] = []

    def play(asked: Any) -> Any:
        match asked["do"]:
            case "reset":
                played.append(factory(**asked["options"]))
                prompt = Prompt(prompt_id=asked["name"], ids=tuple(asked["ids"]), row=asked["row"])
                return [int(word) for word in played[0].reset(prompt, seed=asked["seed"])]
            case "step":
                said = Said(ids=tuple(asked["ids"]), finish=asked["finish"], turn=asked["turn"])
                return _plain(played[0].step(said))
            case "cut_off":
                return _numbers(played[0].cut_off())
            case "close":
                while played:
                    played.pop().close()
                return None
        raise ValueError(f"asked to {asked['do']!r}")

    return play


def _plain(heard: Heard) -> dict[str, Any]:
    found = asdict(heard)
    return found | {"ids": [int(word) for word in heard.ids], "rewards": _numbers(heard.rewards)}


def _numbers(rewards: Any) -> dict[str, float | None]:
    return {name: None if value is None else float(value) for name, value in rewards.items()}
