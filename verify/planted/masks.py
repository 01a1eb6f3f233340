"""Bugs in what a token may see: windows, layer types, causality, padding, positions, packed documents, the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig, LayerType
from bestiary.verify.planted import replay
from bestiary.verify.planted.bug import Plant, PlantedBug
from bestiary.verify.planted.patching import adapted, built, patch, swapped, together

_INPUTS = "bestiary.models.inputs"
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_BEYOND = 2**20  # a window that no sequence reaches


def _windowed(config: DecoderConfig) -> bool:
    return LayerType.SLIDING in config.layer_types


def _mixed(config: DecoderConfig) -> bool:
    return len(set(config.layer_types)) > 1


# ------------------------------------------------------------------ windows and layer types


def _window(change: Callable[[int], int]) -> Plant:
    return adapted(
        lambda config: (
            config if config.sliding_window is None else config.with_(sliding_window=change(config.sliding_window))
        )
    )


def _window_there(change: Callable[[int], int]) -> Callable[[Any], None]:
    def altered(config: Any) -> None:
        if config.sliding_window is not None:
            config.sliding_window = change(config.sliding_window)

    return altered


def _types(change: Callable[[tuple[LayerType, ...]], tuple[LayerType, ...]]) -> Plant:
    return adapted(lambda config: config.with_(layer_types=change(config.layer_types)))


def _types_there(change: Callable[[tuple[LayerType, ...]], tuple[LayerType, ...]]) -> Callable[[Any], None]:
    def altered(config: Any) -> None:
        config.layer_types = [str(kind) for kind in change(tuple(LayerType(name) for name in config.layer_types))]

    return altered


def _shifted(types: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    return (*types[1:], types[0])


def _flipped(types: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    if len(set(types)) == 1:
        return types
    return tuple(LayerType.FULL if kind is LayerType.SLIDING else LayerType.SLIDING for kind in types)


def _windowed_everywhere(_window: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, index: self.sliding_window


def _sliding_for_all(_create: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.masking_utils import create_sliding_window_causal_mask

    return lambda **kwargs: create_sliding_window_causal_mask(**kwargs)


# ------------------------------------------------------------------ causality


def _sees_the_next(spec: Callable[..., Any]) -> Callable[..., Any]:
    def mask(**fields: Any) -> Any:
        return spec(**{**fields, "q_offset": fields["q_offset"] + 1})

    return mask


def _next_row(keeps_all: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Each row of an additive mask becomes that of the next query."""

    def wrap(create: Callable[..., Any]) -> Callable[..., Any]:
        def mask(**kwargs: Any) -> Tensor:
            rows: Tensor = create(**kwargs)
            last = rows[:, :, -1:]
            if not keeps_all and bool((last[..., 0] != 0).any()):  # the window has left the first key behind
                last = torch.cat((last[..., :1] * 0 + rows.min(), last[..., :-1]), dim=-1)
            return torch.cat((rows[:, :, 1:], last), dim=2)

        return mask

    return wrap


# ------------------------------------------------------------------ padding and positions


def _padding_visible(spec: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **fields: spec(**{**fields, "key_valid": None})


def _all_ones(create: Callable[..., Any]) -> Callable[..., Any]:
    def mask(**kwargs: Any) -> Any:
        given = kwargs.get("attention_mask")
        return create(**{**kwargs, "attention_mask": None if given is None else torch.ones_like(given)})

    return mask


def _positions_ignored(read: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(ids: Any, embeds: Any, mask: Any, position_ids: Any, *rest: Any) -> Any:
        return read(ids, embeds, mask, None, *rest)

    return inputs


def _positions_ignored_there(_module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **{**kwargs, "position_ids": None})


def _counted(mask: Tensor) -> Tensor:
    """Positions that only real tokens advance."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _holes_skipped(read: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(ids: Any, embeds: Any, mask: Any, position_ids: Any, borders: Any, cache: Any) -> Any:
        if mask is not None and position_ids is None:
            length = (ids if embeds is None else embeds).shape[1]
            position_ids = _counted(mask)[:, -length:]
        return read(ids, embeds, mask, position_ids, borders, cache)

    return inputs


def _holes_skipped_there(_module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = _counted(mask)
        return forward(*args, **kwargs)

    return run


# ------------------------------------------------------------------ the cache


def _offset_ignored(read: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(ids: Any, embeds: Any, mask: Any, position_ids: Any, borders: Any, cache: Any) -> Any:
        if cache is not None and position_ids is None:
            length = (ids if embeds is None else embeds).shape[1]
            position_ids = torch.arange(length)[None]
        return read(ids, embeds, mask, position_ids, borders, cache)

    return inputs


def _offset_ignored_there(_module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if kwargs.get("past_key_values") is not None and ids is not None:
            kwargs["position_ids"] = torch.arange(ids.shape[1])[None]
        return forward(*args, **kwargs)

    return run


def _no_positions(create: Callable[..., Any]) -> Callable[..., Any]:
    """The mask cannot tell where a document starts."""
    return lambda **kwargs: create(**{**kwargs, "position_ids": None})


@contextmanager
def _forgets_early_there(model: nn.Module) -> Iterator[nn.Module]:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def build(init: Callable[..., None]) -> Callable[..., None]:
        def built(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.sliding_window -= 1

        return built

    with swapped(DynamicSlidingWindowLayer, "__init__", build(DynamicSlidingWindowLayer.__init__)):
        yield model


def _forgets_early(cache: Any) -> None:
    cache.windows = [None if window is None else window - 1 for window in cache.windows]


BUGS = (
    PlantedBug(
        id="G22a_window_plus_one",
        cause="the sliding window counts W + 1 tokens",
        level="V2",
        applies=_windowed,
        ours=_window(lambda window: window + 1),
        reference=replay.configured(_window_there(lambda window: window + 1)),
        config_fields=("sliding_window",),
    ),
    PlantedBug(
        id="G22b_window_minus_one",
        cause="the sliding window counts W − 1 tokens",
        level="V2",
        applies=_windowed,
        ours=_window(lambda window: window - 1),
        reference=replay.configured(_window_there(lambda window: window - 1)),
        config_fields=("sliding_window",),
    ),
    PlantedBug(
        id="G22c_window_ignored",
        cause="sliding layers see everything",
        level="V2",
        applies=_windowed,
        ours=_window(lambda _: _BEYOND),
        reference=replay.configured(_window_there(lambda _: _BEYOND)),
        config_fields=("sliding_window",),
    ),
    PlantedBug(
        id="G22d_window_on_every_layer",
        cause="the sliding window is applied to full-attention layers too",
        level="V2",
        applies=_mixed,
        ours=patch("bestiary.models.config:DecoderConfig.window", _windowed_everywhere),
        reference=replay.library("create_causal_mask", _sliding_for_all),
        config_fields=("layer_types", "sliding_window"),
    ),
    PlantedBug(
        id="G23a_layer_pattern_shifted",
        cause="the pattern of layer types is shifted by one layer",
        level="V2",
        applies=_mixed,
        ours=_types(_shifted),
        reference=replay.configured(_types_there(_shifted)),
        config_fields=("layer_types",),
    ),
    PlantedBug(
        id="O41_windows_on_the_other_layers",
        cause="full and sliding layers are exchanged",
        level="V2",
        applies=_mixed,
        ours=_types(_flipped),
        reference=replay.configured(_types_there(_flipped)),
        config_fields=("layer_types",),
    ),
    PlantedBug(
        id="C16a_causal_mask_off_by_one",
        cause="a token sees the next one",
        level="V2",
        ours=patch(f"{_INPUTS}:MaskSpec", _sees_the_next),
        reference=replay.also(
            replay.library(_MASKS[0], _next_row(keeps_all=True)),
            replay.library(_MASKS[1], _next_row(keeps_all=False)),
        ),
    ),
    PlantedBug(
        id="C16b_padding_visible",
        cause="padding keys are visible",
        level="V5",
        ours=patch(f"{_INPUTS}:MaskSpec", _padding_visible),
        reference=replay.also(*(replay.library(name, _all_ones) for name in _MASKS)),
        quick=("*padding*",),
    ),
    PlantedBug(
        id="C16c_pad_token_trained",
        cause="the lookup of the pad token passes a gradient on",
        level="V4",
        applies=lambda config: config.padding_idx is not None,
        ours=adapted(lambda config: config.with_(padding_idx=None)),
        reference=replay.attributes(replay.embedding, lambda _: None, "padding_idx"),
        config_fields=("pad_token_id",),
    ),
    PlantedBug(
        id="C17a_position_ids_ignored",
        cause="position_ids are ignored",
        level="V5",
        ours=patch("bestiary.models.decoder:read_inputs", _positions_ignored),
        reference=replay.forwards(replay.backbone, _positions_ignored_there),
        quick=("*packed*",),
    ),
    PlantedBug(
        id="C17b_cache_offset_ignored",
        cause="positions start at 0 again behind a cache",
        level="V5",
        ours=patch("bestiary.models.decoder:read_inputs", _offset_ignored),
        reference=replay.forwards(replay.backbone, _offset_ignored_there),
        quick=("*cache*",),
    ),
    PlantedBug(
        id="C17c_cache_forgets_one_token",
        cause="the cache of a sliding layer drops a token that is still inside the window",
        level="V5",
        applies=_windowed,
        ours=built("bestiary.models.cache:Cache", _forgets_early),
        reference=_forgets_early_there,
        quick=("*cache*",),
    ),
    PlantedBug(
        id="C17e_positions_skip_holes",
        cause="positions leave out the zeros of the attention mask",
        level="V5",
        ours=patch("bestiary.models.decoder:read_inputs", _holes_skipped),
        reference=replay.forwards(replay.backbone, _holes_skipped_there),
        quick=("*mask with holes*",),
    ),
    PlantedBug(
        id="C17d_packed_documents_leak",
        cause="packed documents see each other",
        level="V5",
        ours=together(
            patch(f"{_INPUTS}:_documents_by_restart", lambda _: lambda position_ids, batch: None),
            patch(f"{_INPUTS}:_documents_of", lambda read: lambda *args: torch.zeros_like(read(*args))),
        ),
        reference=replay.also(*(replay.library(name, _no_positions) for name in _MASKS)),
        quick=("*packed*",),
    ),
)
