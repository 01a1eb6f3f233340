"""The bench of one run: a family, its tiny configs, both sides built at most once, and what has been computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bestiary.bridges import TensorInfo
from bestiary.models import Decoder, DecoderConfig
from bestiary.models.config import HeadKind
from bestiary.verify.foreign import ALWAYS
from bestiary.verify.gates import Gates
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.reference import Reference, ReferencePool, hf_config, reference_class
from bestiary.verify.side import OurSide, TheirSide
from bestiary.verify.tiny import LENGTH, Raw
from bestiary.verify.tracing import Trace, unfused
from bestiary.verify.verdict import FieldFinding, KernelPath, Keys, Profile

T = TypeVar("T")

BATCH = 3
PAD_AT = 11  # where the probe holds the pad token


@dataclass
class Lab:
    """Everything that the levels of one run share.

    Attributes:
        family: name of the run.   reference: "transformers:ClassName".
        cases: config.json content by tiny config name.
        ours, theirs: the two sides, mutations registered.
        seed: of weights and inputs.
        gates: thresholds of this run.
        pool: built references; shared between runs where nothing of Hugging Face is mutated.
        isolate: whether our forward also runs in a process without transformers' modelling files.
        head: what stands on the final norm, on both sides.
        keys, config, profiles: what V0, V3 and comparisons of logits found, for the verdict.
        kernels: what K found of every optimised implementation, by "operation=implementation".
        varied: configs beside `cases` in which a check failed, by check id, so that they can be looked at again.
    """

    family: str
    reference: str
    cases: Mapping[str, Raw]
    ours: OurSide
    theirs: TheirSide
    seed: int
    gates: Gates
    pool: ReferencePool
    isolate: bool = False
    head: HeadKind = HeadKind.LM
    keys: Keys = field(default_factory=Keys)
    config: list[FieldFinding] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    kernels: dict[str, KernelPath] = field(default_factory=dict)
    varied: dict[str, Raw] = field(default_factory=dict)
    _memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """`make()` at first use; an exception is raised again at every later use."""
        if key not in self._memo:
            try:
                self._memo[key] = (make(), None)
            except Exception as error:
                self._memo[key] = (None, error)
                raise
        value, raised = self._memo[key]
        if raised is not None:
            raise raised
        made: T = value
        return made

    def folder(self, *parts: str) -> Path:
        """A path for files of this run; its parent exists, everything goes when the lab closes."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="verify-bridge-")
        path = Path(self._folder.name, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def close(self) -> None:
        """Removes the run's files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def device(self) -> torch.device:
        """Where both sides compute."""
        return self.ours.device

    @property
    def main_case(self) -> str:
        """The first tiny config, on which levels run that need one only."""
        return next(iter(self.cases))

    # ---------------------------------------------------------------- the two sides

    @property
    def hf_class(self) -> Any:
        """The reference class."""
        return reference_class(self.reference)

    def reference_of(self, raw: Raw, *, seed: int | None = None, dtype: torch.dtype = torch.float64) -> Reference:
        """Hugging Face's model of a config with perturbed weights."""
        return self.pool.get(
            self.reference,
            self.theirs.changed(raw),
            self.seed if seed is None else seed,
            dtype=dtype,
            mutate=self.theirs.finish if self.theirs.mutated else None,
        )

    def raw(self, case: str) -> Raw:
        """config.json content of a tiny config, or of one in which a check failed."""
        return self.cases[case] if case in self.cases else self.varied[case]

    def hf(self, case: str) -> Reference:
        """The float64 reference of a tiny config."""
        return self.reference_of(self.raw(case))

    def trace(self, case: str, inputs: Inputs) -> Trace:
        """What passed through Hugging Face's modules, each part of a fused one as the module of ours that it is."""
        parts = self.ours.current.fused_modules(self.decoder_config(case))
        return unfused(self.hf(case).trace(inputs), parts)

    def state(self, raw: Raw, *, seed: int | None = None) -> dict[str, Tensor]:
        """Weights of a config, as Hugging Face holds them."""
        return self.reference_of(raw, seed=seed).state()

    def model(self, case: str) -> Decoder:
        """Our float64 model of a tiny config with the reference's weights, in eval mode."""
        return self.once(("model", case), lambda: self.ours.build(self.raw(case), self.hf(case).state(), torch.float64))

    def decoder_config(self, case: str) -> DecoderConfig:
        """The architecture our bridge reads."""
        return self.once(("config", case), lambda: self.ours.decoder_config(self.raw(case)))

    def arguments(self) -> frozenset[str]:
        """Arguments that an implementation of somebody else's takes; where it cannot be built, all that it must."""
        foreign = self.ours.foreign
        if foreign is None:
            return frozenset()
        try:
            return self.once(("arguments",), lambda: foreign.accepts(self.decoder_config(self.main_case)))
        except Exception:  # noqa: BLE001 - every check meets it again and reports it
            return ALWAYS

    def infos(self, case: str) -> dict[str, TensorInfo]:
        """Names, shapes and dtypes of the reference's state dict."""
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.hf(case).state().items()}

    # ---------------------------------------------------------------- inputs

    def inputs(self, raw: Raw, *, batch: int = BATCH, length: int = LENGTH, salt: int = 0) -> Inputs:
        """Random tokens for a config."""
        return Inputs(tokens(raw["vocab_size"], batch, length, 1000 * self.seed + salt))

    def probe(self, case: str) -> Inputs:
        """The main input of a tiny config: three rows beyond four windows, with labels.

        The pad token, where the config has one, stands inside the text: its row of the embedding trains otherwise.
        """

        def draw() -> Inputs:
            inputs = self.inputs(self.cases[case])
            pad = hf_config(self.reference, self.cases[case]).pad_token_id
            if pad is not None:
                inputs.input_ids[:, PAD_AT] = pad
            return inputs.with_labels()

        return self.once(("probe", case), draw)

    # ---------------------------------------------------------------- structure

    def layer_types(self, case: str) -> list[str]:
        """Hugging Face's layer types, or one name for all."""
        config = self.hf(case).config.to_dict()
        return list(config.get("layer_types") or ["all"] * config["num_hidden_layers"])

    def dense_layers(self, case: str) -> set[int]:
        """Layers of the reference without experts, in a model that has some."""
        names = self.hf(case).state()
        routed = {int(name.split(".")[2]) for name in names if ".mlp.experts." in name}
        return set(range(len(self.layer_types(case)))) - routed if routed else set()

    def config_json(self) -> str:
        """All tiny configs as canonical JSON, for the verdict's hash."""
        return json.dumps(dict(self.cases), sort_keys=True)


def count_layers(lab: Lab, case: str) -> int:
    """Layers of a tiny config."""
    layers: int = lab.cases[case]["num_hidden_layers"]
    return layers
