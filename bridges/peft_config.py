"""`adapter_config.json`: PEFT's LoraConfig, read field by field and written in full.

Nothing is read with a default nobody sees: what we do not implement and is switched on is refused by its name.
Source: peft 0.19.1 and 0.21.2, `tuners/lora/config.py`; matching of patterns as in `utils/other.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bestiary.bridges.errors import CorruptCheckpoint, UnsupportedConfig

LAYOUT_VERSION = "0.19.1"  # the oldest peft that reads what we write; before 0.19 experts lay the other way round

_REMEDY = "merge the adapter with PEFT (merge_and_unload, save_pretrained) and load the full checkpoint"
SEQ_CLS = "SEQ_CLS"
_HEADS = ("classifier", "score")  # what PEFT saves whole with that task, whichever there is
_ANY = None
_OFF: tuple[Any, ...] = (None, False, (), [], {})
_START = "start values; the stored ones replace them"
_VARIANTS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)

# Every other field of LoraConfig: the values it may have, and what it is.
_FIELDS: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    "task_type": ((None, "CAUSAL_LM", SEQ_CLS), "another task has another head"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal"),
        "this start may leave the base weight changed, and the adapter belongs to the changed one",
    ),
    "bias": (("none",), "biases of the base were trained beside the adapters"),
    "trainable_token_indices": (_OFF, "rows of the embedding were trained beside the adapters"),
    "fan_in_fan_out": (_OFF, "no layer here stores its weight transposed"),
    "ensure_weight_tying": (_OFF, "it adapts the embedding and the head"),
    "layer_replication": (_OFF, "it changes the number of layers"),
    "megatron_config": (_OFF, "it is for another implementation of the model"),
    "loftq_config": (_OFF, "it quantises the base"),
    **dict.fromkeys(("auto_mapping", "inference_mode", "runtime_config"), (_ANY, "of no forward pass")),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), (_ANY, "a detail of something that is off")),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), (_ANY, _START)),
    **dict.fromkeys(_VARIANTS, (_OFF, "a variant whose forward pass or weights are not plain LoRA")),
}


@dataclass(frozen=True)
class PeftConfig:
    """What an `adapter_config.json` says about the computation.

    Attributes:
        rank_pattern, alpha_pattern: regular expression over Hugging Face's names to the value that holds there.
        target_parameters: endings of the names of parameters (not modules) that carry an adapter.
        target_modules: what modules carry one: endings of names, or one regular expression; None for a shorthand.
        exclude_modules: what modules carry none, written in the same two ways.
        layers: indices that `target_modules` is restricted to; None for all.
        layers_pattern: regular expressions of the name before the index; () for any.
        base: name or path of the model it was trained on, or None.   revision: of a base on the hub; None: its newest.
        scores: whether a score head was trained beside the adapters, and is in the folder.
        version: of the peft that wrote it, (major, minor); () where it is not stated, as before 0.18.
        source: the file.
    """

    r: int
    alpha: float
    dropout: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...]
    target_modules: tuple[str, ...] | str | None
    exclude_modules: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    version: tuple[int, ...]
    base: str | None
    revision: str | None
    source: str
    scores: bool = False

    def rank(self, name: str) -> int:
        """The rank of the module or parameter `name`; the first pattern that matches its whole end counts."""
        return next((rank for pattern, rank in self.rank_pattern.items() if _matches(pattern, name)), self.r)

    def alpha_of(self, name: str) -> float:
        """The alpha of the module or parameter `name`."""
        return next((alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, name)), self.alpha)

    def targets_parameter(self, name: str) -> bool:
        """Whether the parameter `name` is among `target_parameters`: by its whole name, or by its end after a dot."""
        return _ends_in(name, self.target_parameters)

    def targets_module(self, name: str) -> bool:
        """Whether the module `name` is among `target_modules`; False where only PEFT could tell."""
        if self.barrier(name) is not None:
            return False
        return self.target_modules is not None and _names(self.target_modules, name)

    def barrier(self, name: str) -> str | None:
        """The field, with its value, that keeps an adapter off the module `name`; None where nothing does."""
        if self.exclude_modules and _names(self.exclude_modules, name):
            return f"exclude_modules = {self.exclude_modules!r}"
        if self.layers is not None and self._layer(name) not in self.layers:
            pattern = f" with layers_pattern = {list(self.layers_pattern)!r}" if self.layers_pattern else ""
            return f"layers_to_transform = {list(self.layers)!r}{pattern}"
        return None

    def _layer(self, name: str) -> int | None:
        """The index of the layer that `name` lies in, as PEFT finds it: the first number, or that after a pattern."""
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_pattern] or [r".*?\.[^.]*"]
        found = (re.match(rf"{pattern}\.(?P<index>\d+)\.", name) for pattern in patterns)
        return next((int(match["index"]) for match in found if match is not None), None)


def parse_peft_config(json: Mapping[str, Any], *, source: str) -> PeftConfig:
    """Read an `adapter_config.json`.

    Raises:
        UnsupportedConfig: a method other than LoRA, or a field that changes the computation in a way we do not follow.
        CorruptCheckpoint: a field of the wrong type.
    """
    method = json.get("peft_type")
    if method != "LORA":
        raise UnsupportedConfig("peft_type", method, "is not LORA.", read_from=source, remedy=_REMEDY)
    reader = _Reader(json, source)
    config = PeftConfig(
        r=reader.take("r", int, 8),
        alpha=reader.take("lora_alpha", float, 8.0),
        dropout=reader.take("lora_dropout", float, 0.0),
        rslora=reader.take("use_rslora", bool, False),
        rank_pattern=reader.patterns("rank_pattern", int),
        alpha_pattern=reader.patterns("alpha_pattern", float),
        target_parameters=tuple(reader.take("target_parameters", list, [])),
        target_modules=reader.target_modules(),
        exclude_modules=reader.module_names("exclude_modules"),
        layers=reader.layers(),
        layers_pattern=reader.layers_pattern(),
        version=reader.version(),
        base=reader.take("base_model_name_or_path", str, "") or None,
        revision=reader.take("revision", str, "") or None,
        source=source,
        scores=reader.scores(),
    )
    for name, value in json.items():
        if name in reader.taken:
            continue
        allowed, why = _FIELDS.get(name, (_OFF, "nobody here knows it"))
        if allowed is not _ANY and not any(value == one and type(value) is type(one) for one in allowed):
            raise UnsupportedConfig(name, value, f"is not implemented: {why}.", read_from=source, remedy=_REMEDY)
    return config


def peft_json(
    *,
    base: str | None,
    revision: str | None = None,
    r: int,
    alpha: float,
    dropout: float,
    rslora: bool,
    target_modules: Iterable[str],
    target_parameters: Iterable[str],
    rank_pattern: Mapping[str, int],
    alpha_pattern: Mapping[str, float],
    scores: bool = False,
) -> dict[str, Any]:
    """The `adapter_config.json` of a plain LoRA adapter, for PEFT 0.19.1 and later.

    The keys of both patterns are names of modules or parameters, or their endings. With `scores` the folder holds a
    score head, whole.
    """
    return {
        "peft_type": "LORA",
        "peft_version": LAYOUT_VERSION,
        "task_type": SEQ_CLS if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": r,
        "lora_alpha": _number(alpha),
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "use_dora": False,
        "lora_bias": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": ["score"] if scores else None,
        "target_modules": sorted(target_modules),  # [] and not null, which would mean PEFT's default for the family
        "target_parameters": sorted(target_parameters) or None,
        "rank_pattern": {re.escape(name): rank for name, rank in rank_pattern.items()},
        "alpha_pattern": {re.escape(name): _number(value) for name, value in alpha_pattern.items()},
    }


def shortest_endings(wanted: Iterable[str], everything: Iterable[str], *, parts: int = 1) -> list[str]:
    """The shortest endings (after a dot) that together mean exactly the names in `wanted` among `everything`.

    `q_proj` if every `….q_proj` is wanted, whole names where only some are. An ending has at least `parts` parts.
    """
    chosen = set(wanted)
    others = set(everything) - chosen
    taboo = {ending for name in others for ending in _endings(name, parts)}
    return sorted({next((e for e in _endings(name, parts) if e not in taboo), name) for name in chosen})


def _endings(name: str, parts: int) -> Iterable[str]:
    split = name.split(".")
    return (".".join(split[start:]) for start in range(len(split) - parts, -1, -1))


def _ends_in(name: str, endings: Iterable[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _names(modules: tuple[str, ...] | str, name: str) -> bool:
    return re.fullmatch(modules, name) is not None if isinstance(modules, str) else _ends_in(name, modules)


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


class _Reader:
    """Typed access to the fields of one JSON object; null means the default, as in PEFT."""

    def __init__(self, json: Mapping[str, Any], source: str) -> None:
        self.json, self.source, self.taken = json, source, {"peft_type"}

    def take(self, name: str, kind: type[Any], default: Any) -> Any:
        self.taken.add(name)
        value = self.json.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind or (kind is int and value < 1):
            raise self._corrupt(name, value, kind.__name__ if kind is not int else "positive int")
        return value

    def target_modules(self) -> tuple[str, ...] | str | None:
        if self.json.get("target_modules") in (None, "all-linear"):
            self.taken.add("target_modules")
            return None
        return self.module_names("target_modules")

    def scores(self) -> bool:
        """Whether `modules_to_save` names the score head; other whole modules are refused."""
        value = self.json.get("modules_to_save")
        self.taken.add("modules_to_save")
        names: list[Any] = value if isinstance(value, list) else []
        if (value not in _OFF and not names) or not all(name in _HEADS for name in names):
            why = "is not implemented: whole modules of the base were trained beside the adapters."
            raise UnsupportedConfig("modules_to_save", value, why, read_from=self.source, remedy=_REMEDY)
        if self.json.get("task_type") == SEQ_CLS and "score" not in names:
            why = "without its head among modules_to_save: nobody knows the scores it was trained for."
            raise UnsupportedConfig("task_type", SEQ_CLS, why, read_from=self.source, remedy=_REMEDY)
        return "score" in names

    def module_names(self, name: str) -> tuple[str, ...] | str:
        """Endings of names, or one regular expression; () for null."""
        if isinstance(self.json.get(name), str):
            found: str = self.take(name, str, "")
            self._compiled(name, found)
            return found
        return self._strings(name)

    def layers(self) -> tuple[int, ...] | None:
        value = self.json.get("layers_to_transform")
        self.taken.add("layers_to_transform")
        indices = [value] if type(value) is int else value
        if indices is None or indices == []:
            return None
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise self._corrupt("layers_to_transform", value, "layer index or list of them")
        return tuple(indices)

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.json.get("layers_pattern")
        self.taken.add("layers_pattern")
        one = (value,) if isinstance(value, str) and value else ()
        patterns = one if isinstance(value, str) else self._strings("layers_pattern")
        for pattern in patterns:
            self._compiled("layers_pattern", pattern)
        return patterns

    def _strings(self, name: str) -> tuple[str, ...]:
        found = self.take(name, list, [])
        if not all(isinstance(one, str) for one in found):
            raise self._corrupt(name, found, "list of names")
        return tuple(found)

    def version(self) -> tuple[int, ...]:
        found = re.match(r"(\d+)\.(\d+)", self.take("peft_version", str, ""))
        return () if found is None else (int(found[1]), int(found[2]))

    def patterns(self, name: str, kind: type[Any]) -> dict[str, Any]:
        found = self.take(name, dict, {})
        for pattern, value in found.items():
            self._compiled(name, pattern)
            number = type(value) is int or type(value) is kind
            if not number or (kind is int and value < 1):
                raise self._corrupt(name, {pattern: value}, "positive int" if kind is int else "number")
        return dict(found)

    def _compiled(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._corrupt(name, pattern, f"regular expression ({error})") from error

    def _corrupt(self, name: str, value: Any, expected: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{name} = {value!r} is no {expected}.", read_from=self.source, remedy="correct adapter_config.json"
        )
