"""`Bridge`: one family between the Hub and bestiary, as data and two functions; everything else is derived here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bestiary.bridges import export, loading, peft_import
from bestiary.bridges.fields import HFFields
from bestiary.bridges.pieces import Shape
from bestiary.bridges.plan import PLAIN, Naming, Plan, plan_export, plan_import
from bestiary.bridges.rules import Hub, Ignore, IgnoreLayers, Rows, Rule, RuleSet, rename
from bestiary.bridges.score import SCORE_WEIGHT, read_head, score_class
from bestiary.bridges.storage import TensorInfo
from bestiary.models.config import DecoderConfig, HeadKind
from bestiary.models.errors import InvalidConfig

if TYPE_CHECKING:
    from bestiary.models.decoder import Decoder


# What a contradiction inside a DecoderConfig is called in HF's files, where the names differ: by family the first that
# the file holds, else the last.
_HF_NAMES = {
    "router.top_k": ("num_experts_per_tok",),
    "num_heads": ("num_attention_heads",),
    "attention.dropout": ("attention_dropout",),
    "moe.input_jitter": ("router_jitter_noise",),
    "residual_dropout": ("resid_pdrop", "residual_dropout"),
    "rope.rotary_dim": ("qk_rope_head_dim", "head_dim"),
}


@dataclass(frozen=True)
class CheckpointConfig:
    """What a `config.json` says.

    Attributes:
        decoder: the architecture.
        dtype: of the weights; None where it is not stated.
        quantization: `quantization_config.quant_method`, or None.
        kept: the other fields (token ids and bookkeeping), which an export carries on.
        inert: name and reason of each field that changes nothing we compute.
    """

    decoder: DecoderConfig
    dtype: torch.dtype | None
    quantization: str | None
    kept: Mapping[str, Any]
    inert: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Bridge:
    """One family.

    Attributes:
        model_type: HF's `model_type` that exports carry.
        reference: the class we equal, as "transformers:Qwen3ForCausalLM".
        decoder: our class.
        config_from_hf, config_to_hf: the architecture from the fields of a config.json, and back in v5 spelling.
        rules: which hub tensors each parameter is made of.
        module_map: our module pattern to the reference's, where they differ.
        kill_list: ids of planted bugs (`bestiary.verify.planted`), as globs; each match breaks something that the
            family has, so its self-test must run and kill it.
        namings: the prefixes under which checkpoints hold the model; the first one is written.
    Raises:
        InvalidRules: the rules are not one to one.
    """

    model_type: str
    reference: str
    decoder: type[Decoder]
    config_from_hf: Callable[[HFFields], DecoderConfig]
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    rules: tuple[Rule | Ignore | IgnoreLayers, ...]
    module_map: Mapping[str, str] = field(default_factory=dict)
    kill_list: tuple[str, ...] = ()
    namings: tuple[Naming, ...] = (PLAIN,)

    def __post_init__(self) -> None:
        if not self.rules or not self.rule_set.by_native:
            raise ValueError("a bridge without rules")

    @cached_property
    def rule_set(self) -> RuleSet:
        """The rules, expanded and checked, and the one of a score head, which all families share."""
        return RuleSet((*self.rules, rename(SCORE_WEIGHT)))

    @property
    def architecture(self) -> str:
        """Name of the reference class: what `architectures` holds."""
        return self.reference.rpartition(":")[2]

    def reference_for(self, head: HeadKind) -> str:
        """The class we equal under a head, as `reference` names the one with the language-model head.

        Raises:
            UnsupportedLoad: transformers has no class of this family for scores.
        """
        return self.reference if head is HeadKind.LM else f"transformers:{score_class(self)}"

    def parse(self, json: Mapping[str, Any], *, source: str = "config.json") -> CheckpointConfig:
        """Read a `config.json`.

        Raises:
            UnsupportedConfig: names the field, its value and the remedy.
            UnsupportedLoad: a reward model of a family that has none in transformers.
        """
        hf = HFFields(json, source=source, reference=f"transformers' {self.architecture}")
        try:
            decoder = self.config_from_hf(hf)
        except InvalidConfig as error:
            native = error.what.split()[0]
            names = _HF_NAMES.get(native, (native,))
            name = next((name for name in names if name in hf), names[-1])
            remedy = "correct the config" if error.remedy is None else error.remedy
            raise hf.unsupported(name, f"builds no model: {error.what}", remedy=remedy) from error
        decoder = read_head(self, decoder, hf)
        pad, vocab = decoder.padding_idx, decoder.vocab_size
        if pad is not None and not -vocab <= pad < vocab:
            raise hf.unsupported(
                "pad_token_id", f"is outside the vocabulary of {vocab}.", remedy="a token id, or null", value=pad
            )
        dtype = hf.dtype()
        quantization = hf.quantization(("mxfp4",) if self.rule_set.packed else ())
        hf.done()
        return CheckpointConfig(decoder, dtype, quantization, hf.kept(), hf.inert_everywhere())

    def parameters(self, config: DecoderConfig) -> dict[str, Shape]:
        """Name and shape of each parameter of the model `config` describes; nothing is allocated."""
        return {name: tuple(p.shape) for name, p in self.decoder(config, device="meta").named_parameters()}

    def plan_import(
        self,
        config: DecoderConfig,
        hub: Mapping[str, TensorInfo],
        *,
        quantization: str | None = None,
        read_from: str | None = None,
        parameters: Mapping[str, Shape] | None = None,
        new_head: bool = False,
    ) -> Plan:
        """Which tensor of `hub` goes where; see `bestiary.bridges.plan.plan_import`.

        Args:
            parameters: name and shape of each parameter, where the model is there already; None: those of `config`.
            new_head: the checkpoint is a language model's, the model scores.
        """
        return plan_import(
            self.rule_set,
            self.parameters(config) if parameters is None else parameters,
            hub,
            namings=self.namings,
            tied=config.ties_head,
            new_head=new_head,
            quantization=quantization,
            read_from=read_from,
        )

    def plan_export(self, config: DecoderConfig) -> Plan:
        """Which tensors an export writes, and from what; see `bestiary.bridges.plan.plan_export`."""
        return plan_export(self.rule_set, self.parameters(config))

    def fused_modules(self, config: DecoderConfig) -> dict[str, tuple[str, int, int]]:
        """Modules whose weight is some rows of a fused tensor: module of that tensor on the hub, first row, end."""
        parameters, found = self.parameters(config), {}
        for name, shape in parameters.items():
            rule, captures = self.rule_set.rule(name)
            if rule is not None and isinstance(rule.written, Rows):
                (piece,) = rule.written.sized(parameters, captures).pieces(shape, captures)
                rows = piece.source[0]
                found[name.rpartition(".")[0]] = piece.hub.name.rpartition(".")[0], rows.start, rows.stop
        return found

    def naming_of_modules(self, json: Mapping[str, Any] | None) -> Naming:
        """How transformers' own model of a checkpoint with the config.json `json` (None: of none) names its modules."""
        stated = json or {}
        return next((naming for naming in self.namings if naming.inside is not None and naming.inside in stated), PLAIN)

    def lies_as_in_hf(self, parameter: str) -> bool:
        """Whether transformers' modules hold `parameter` in our layout: what adapts the one fits the other."""
        rule, _ = self.rule_set.rule(parameter)
        return rule is not None and any(isinstance(e, Hub) and not e.packed for e in rule.layouts.values())

    # What the model classes reach through the entry point; each is documented where it is implemented.

    def load(self, src: str | Path, **options: Any) -> Decoder:
        """`from_pretrained` of this family: see `bestiary.bridges.loading.load_checkpoint`."""
        return loading.load_checkpoint(self, src, **options)

    def save(self, model: Decoder, path: str | Path, **options: Any) -> Path:
        """`save_pretrained`: see `bestiary.bridges.export.save_decoder`."""
        return export.save_decoder(self, model, path, **options)

    def load_adapter(self, model: Decoder, src: str | Path, **options: Any) -> None:
        """Values of a PEFT adapter for a model that has adapters: see `bestiary.bridges.peft_import.load_adapter`."""
        peft_import.load_adapter(self, model, src, **options)

    def named_hf_tensors(self, model: Decoder, *, merge_lora: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hub names and tensors: see `bestiary.bridges.export.named_hf_tensors`."""
        return export.named_hf_tensors(self, model, merge_lora=merge_lora)

    def fill_named(self, model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """What `named_hf_tensors` gave, into another such model: see `bestiary.bridges.loading.fill_named`."""
        return loading.fill_named(self, model, tensors)

    def hf_config(self, model: Decoder) -> Any:
        """The transformers config of `model`: see `bestiary.bridges.export.hf_config`."""
        return export.hf_config(self, model)

    def hf_generation_config(self, model: Decoder) -> Any:
        """The transformers generation config of `model`: see `bestiary.bridges.export.hf_generation_config`."""
        return export.hf_generation_config(model)
