"""Ways to plant a bug in a Hugging Face model, each undone at the end of its block.

Modules are found by what they hold, not by class, so that a model nobody has seen yet can be replayed too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.verify.planted.bug import ReferencePlant
from bestiary.verify.planted.patching import swapped
from bestiary.verify.reference import default_dtype, promoted, quiet

_EMBEDDING = "model.embed_tokens.weight"
Finder = Callable[[nn.Module], list[Any]]


def holding(*names: str) -> Finder:
    """Finds the modules that have all of the attributes `names`."""
    return lambda model: [module for module in model.modules() if all(hasattr(module, name) for name in names)]


def layers(model: nn.Module) -> list[Any]:
    """The decoder layers."""
    return list(model.get_submodule("model.layers").children())


def ending(*leaves: str) -> Finder:
    """Finds the modules whose name ends in one of `leaves`."""
    return lambda model: [module for name, module in model.named_modules() if name.rpartition(".")[2] in leaves]


attentions = holding("o_proj", "head_dim", "scaling")
dense_mlps = holding("gate_proj", "up_proj", "down_proj", "act_fn")
fused_mlps = holding("gate_up_proj", "down_proj", "activation_fn")
experts = holding("gate_up_proj", "down_proj", "num_experts")
routers = holding("top_k", "num_experts", "weight")
rotaries = ending("rotary_emb")
qk_norms = ending("q_norm", "k_norm", "query_layernorm", "key_layernorm")  # of each layer first that of the queries


def backbone(model: nn.Module) -> list[Any]:
    """The model without its head."""
    return [model.get_submodule("model")]


def final_norm(model: nn.Module) -> list[Any]:
    """The norm before the head."""
    return [model.get_submodule("model.norm")]


def head(model: nn.Module) -> list[Any]:
    """The output projection."""
    return [model.get_submodule("lm_head")]


def embedding(model: nn.Module) -> list[Any]:
    """The token embedding."""
    return [model.get_submodule("model.embed_tokens")]


def norms(model: nn.Module) -> list[Any]:
    """Every norm."""
    return [module for module in model.modules() if type(module).__name__.endswith("Norm")]


class Misfit(ValueError):
    """A bug planted in a model that has no such place, or where the place already is what the bug would make of it."""


@contextmanager
def _all(model: nn.Module, contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[nn.Module]:
    if not contexts:
        raise Misfit("nothing to change")
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield model


def forwards(find: Finder, wrap: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> ReferencePlant:
    """Each module found computes `wrap(module, its forward)`."""
    return lambda model: _all(model, [swapped(m, "forward", wrap(m, m.forward)) for m in find(model)])


def exchanged(pairs: Callable[[nn.Module], list[tuple[Any, Any]]]) -> ReferencePlant:
    """The modules of each pair compute each other's function."""

    def plant(model: nn.Module) -> AbstractContextManager[nn.Module]:
        both = [(a, b, a.forward, b.forward) for a, b in pairs(model)]
        return _all(
            model,
            [swapped(a, "forward", of_b) for a, _, _, of_b in both]
            + [swapped(b, "forward", of_a) for _, b, of_a, _ in both],
        )

    return plant


def attributes(find: Finder, value: Callable[[Any], Any], *names: str) -> ReferencePlant:
    """Those of the attributes `names` that a module found has are `value(module)`."""

    def plant(model: nn.Module) -> AbstractContextManager[nn.Module]:
        new = [(m, name, value(m)) for m in find(model) for name in names if hasattr(m, name)]
        return _all(model, [swapped(m, name, one) for m, name, one in new if getattr(m, name) != one])

    return plant


def library(name: str, wrap: Callable[[Any], Any]) -> ReferencePlant:
    """The function `name` of the modelling file is `wrap(function)`."""

    def plant(model: nn.Module) -> AbstractContextManager[nn.Module]:
        module = sys.modules[type(model).__module__]
        return _all(model, [swapped(module, name, wrap(vars(module)[name]))] if name in vars(module) else [])

    return plant


def tensors(find: Finder, change: Callable[[Tensor], Tensor], *names: str) -> ReferencePlant:
    """Parameters `names` of the modules found hold `change(values)`."""

    @contextmanager
    def plant(model: nn.Module) -> Iterator[nn.Module]:
        found = [getattr(m, name) for m in find(model) for name in names if getattr(m, name, None) is not None]
        before = [tensor.detach().clone() for tensor in found]
        after = [change(values) for values in before]
        if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
            raise Misfit("nothing to change")
        with torch.no_grad():
            for tensor, values in zip(found, after, strict=True):
                tensor.copy_(values)
        try:
            yield model
        finally:
            with torch.no_grad():
                for tensor, values in zip(found, before, strict=True):
                    tensor.copy_(values)

    return plant


def configured(change: Callable[[Any], None]) -> ReferencePlant:
    """A sibling with the same weights, built from a config that `change` has altered in place."""

    @contextmanager
    def plant(model: nn.Module) -> Iterator[nn.Module]:
        from transformers.initialization import no_init_weights

        config = _altered(model.config, change)
        state = model.state_dict()
        with _building_as(model), no_init_weights():
            sibling: nn.Module = type(model)(config)
        sibling.load_state_dict(state, assign=True)
        if config.tie_word_embeddings:
            sibling.get_submodule("lm_head").register_parameter("weight", sibling.get_parameter(_EMBEDDING))
        yield sibling.eval()

    return plant


def _altered(config: Any, change: Callable[[Any], None]) -> Any:
    """A copy of `config` that `change` has altered."""
    altered = copy.deepcopy(config)
    change(altered)
    if altered.to_dict() == config.to_dict():
        raise Misfit("nothing to change")
    return altered


def turned(change: Callable[[Any], None]) -> ReferencePlant:
    """Rotary modules rebuilt from a config that `change` has altered in place; the rest stays."""

    @contextmanager
    def plant(model: nn.Module) -> Iterator[nn.Module]:
        config = _altered(model.config, change)
        owner: Any = model.get_submodule("model")
        before = owner.rotary_emb
        with _building_as(model):
            owner.rotary_emb = type(before)(config)
        try:
            yield model
        finally:
            owner.rotary_emb = before

    return plant


@contextmanager
def _building_as(model: nn.Module) -> Iterator[None]:
    """New modules get the precision of `model`."""
    dtype = next(model.parameters()).dtype
    with quiet(), promoted() if dtype is torch.float64 else default_dtype(dtype):
        yield


def also(*plants: ReferencePlant) -> ReferencePlant:
    """Those of several plants that fit, one of them at least; only the first may yield a sibling."""

    @contextmanager
    def plant(model: nn.Module) -> Iterator[nn.Module]:
        fitting = 0
        with ExitStack() as stack:
            for one in plants:
                with suppress(Misfit):
                    model = stack.enter_context(one(model))
                    fitting += 1
            if not fitting:
                raise Misfit("nothing to change")
            yield model

    return plant
