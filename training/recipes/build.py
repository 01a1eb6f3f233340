"""The recipe that a run's file names, with the models that it asks beside the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from bestiary.models import Decoder
from bestiary.training.components import component
from bestiary.training.config import ADAPTERS_OFF, RunConfig
from bestiary.training.data.encode import NOTHING, Wanted
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.base import Recipe
from bestiary.training.recipes.distill import Distill
from bestiary.training.recipes.dpo import DPO
from bestiary.training.recipes.elsewhere import Elsewhere
from bestiary.training.recipes.kto import KTO
from bestiary.training.recipes.names import known
from bestiary.training.recipes.reference import AdaptersOff, Live, Reference, Stored
from bestiary.training.recipes.reward import Reward
from bestiary.training.recipes.sft import SFT

RECIPES: Mapping[str, Callable[..., Recipe]] = {
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "reward": Reward,
    "distill": Distill,
}
ON_POLICY = "reverse_kl"  # of distillation on the student's own answers, unless loss.name says otherwise; as in TRL
_OWN = frozenset({"self", "reference", "teacher", "loss", "beta"})  # arguments that have keys of their own


def build(
    config: RunConfig, load: Callable[[str], Decoder], elsewhere: Elsewhere | None = None
) -> tuple[Recipe, tuple[Decoder, ...]]:
    """The recipe of `config.loss`, and the models loaded for it.

    A loss by `module:name` is a class or function that makes a `Recipe`: from `loss.options` by their names, and from
    `beta`, `reference` and `teacher` if it takes them.

    Args:
        load: a checkpoint to a model that only computes.   elsewhere: the teacher, where it is in other processes.
    Raises:
        InvalidRun: a loss, key or option that the recipe does not have, or one that it lacks.
    """
    loss, own = config.loss, config.loss.name is not None and ":" in config.loss.name
    made = component(str(loss.name), "loss.name", InvalidRun) if own else RECIPES[config.recipe]
    takes = list(signature(made).parameters)
    given: dict[str, Any] = {}
    options = [name for name in takes if name not in _OWN]
    for name, value in loss.options.items():
        if not options:
            raise InvalidRun(f"loss.options.{name}: {config.recipe} has no options.", remedy="leave it out")
        given[known(name, options, "loss.options")] = int(value) if name == "top_k" else value
    if not own and (loss.name is not None or config.rollouts is not None):
        given["loss"] = loss.name or ON_POLICY
    if loss.beta is not None:
        _check_taken("beta" in takes, config, "beta", loss.beta)
        given["beta"] = loss.beta
    others: tuple[Decoder, ...] = ()
    _check_taken("reference" in takes or loss.reference is None, config, "reference", loss.reference)
    _check_taken("teacher" in takes or loss.teacher is None, config, "teacher", loss.teacher)
    if "reference" in takes:
        given["reference"], others = _reference(config, load)
    if "teacher" in takes:
        held_out = config.evaluation_data()
        sources = (*config.data.sources, *(() if held_out is None else held_out.sources))
        if loss.teacher is None and any(source.kind != "distillation" for source in sources):
            raise InvalidRun(
                "loss.teacher is missing.",
                remedy="a checkpoint with the same vocabulary, or sources of kind distillation alone, held-out ones "
                "too, whose rows hold what a teacher said (bestiary distill CONFIG --store-teacher FILE writes such)",
            )
        others = () if loss.teacher is None or elsewhere is not None else (load(loss.teacher),)
        given["teacher"] = others[0] if others else elsewhere
    recipe = made(**given)
    missing = [name for name in ("name", "unit", "kinds", "batch", "count", "loss") if not hasattr(recipe, name)]
    if missing:
        raise InvalidRun(
            f"loss.name = {loss.name!r} makes no recipe: {', '.join(missing)} missing.",
            remedy="bestiary.training.recipes.base.Recipe says what one has",
        )
    return recipe, others


def wanted_of(config: RunConfig) -> Wanted:
    """What is wanted of every row beside its tokens: a teacher's words where no teacher is loaded; room for answers."""
    if config.recipe != "distill" or config.loss.teacher is not None:
        return NOTHING if config.rollouts is None else Wanted(answer=config.rollouts.max_tokens)
    return Wanted(teacher=True, temperature=config.loss.options.get("temperature", 1.0))


def _check_taken(taken: bool, config: RunConfig, key: str, value: object) -> None:
    if not taken:
        raise InvalidRun(f"loss.{key} = {value!r}, which {config.recipe} does not have.", remedy="leave it out")


def _reference(config: RunConfig, load: Callable[[str], Decoder]) -> tuple[Reference, tuple[Decoder, ...]]:
    named = config.reference
    assert named is not None
    if named == ADAPTERS_OFF:
        if config.lora is None:
            raise InvalidRun(
                "loss.reference = adapters_off and the run has no section lora.", remedy="lora.r=16, or a checkpoint"
            )
        return AdaptersOff(), ()
    if named.endswith(".npz"):
        return Stored.load(Path(named)), ()
    model = load(named)
    return Live(model), (model,)
