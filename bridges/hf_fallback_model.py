"""`HFDecoder`: a transformers model behind the surface of `Decoder`, for architectures without a bridge."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bestiary.bridges import hf_fallback_adapters as adapters
from bestiary.bridges.errors import NoDecoderConfig, UnsupportedAdapter, UnsupportedLoad
from bestiary.bridges.hf_fallback_generation import generate
from bestiary.bridges.hf_fallback_head import HeadMap
from bestiary.bridges.hf_fallback_packing import documents_leak
from bestiary.bridges.hf_fallback_surface import HFSurface
from bestiary.bridges.writing import parse_size, staged
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.errors import TokenOutOfRange
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.precision import at_least_fp32
from bestiary.models.cache import Cache
from bestiary.models.errors import InvalidConfig, InvalidInput
from bestiary.models.inputs import Inputs, read_inputs, shifted
from bestiary.models.output import DecoderOutput

_IGNORE = -100


class HFDecoder(HFSurface, nn.Module):
    """A transformers causal language model with the forward contract, loss and trainer surface of `Decoder`.

    Made by `AutoDecoder.from_pretrained(src, backend="hf")`. The wrapped model is `hf`, its parameters are named
    `hf.<name in transformers>`. It has no `decoder_config`, and nothing of it is verified.

    Args:
        hf: the model.
        head: the map from its head's product to its logits, or why there is none (then logits are transformers' own).
        adapter: the `adapter_config.json` of adapters that are injected already.
    """

    def __init__(
        self, hf: Any, *, head: HeadMap | str, adapter: Mapping[str, Any] | None = None, name_or_path: str = ""
    ) -> None:
        super().__init__()
        self.hf = hf
        self.head_map = head
        self.adapter_json = None if adapter is None else dict(adapter)
        self.name_or_path = name_or_path
        self.notes: tuple[str, ...] = ()
        self._leaks: dict[Any, str | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "decoder_config":
            raise NoDecoderConfig(type(self.hf).__name__)
        return super().__getattr__(name)

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        temperature: float = 1.0,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        output_router_logits: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        cache: Any = None,
        **ignored: Any,
    ) -> DecoderOutput:
        """As `Decoder.forward`, with three differences; `past_key_values` is a transformers cache.

        Packed documents are refused where the wrapped model lets them see each other, a router's loss is refused, and
        where `head_map` is a reason the logits (B, T, V) are made even if only the loss is wanted.

        Raises:
            InvalidInput, TokenOutOfRange, LabelOutOfRange.
        """
        self._refuse(ignored, output_router_logits)
        past = past_key_values if past_key_values is not None else cache
        cached = use_cache or past is not None  # then position_ids mark no documents, as in a native model
        seen = cast(Cache, _Length(0 if past is None else past.get_seq_length())) if cached else None
        inputs = read_inputs(input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, seen)
        self._check_ids(input_ids)
        arguments: dict[str, Any] = {"use_cache": cached}
        arguments["input_ids" if inputs_embeds is None else "inputs_embeds"] = (
            input_ids if inputs_embeds is None else inputs_embeds
        )
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        self._add_positions(arguments, inputs, given=position_ids is not None)
        self._add_past(arguments, past)

        head = self.hf.get_output_embeddings()
        separate = isinstance(self.head_map, HeadMap) and type(head) is nn.Linear  # not one put in its place since
        result = (self.hf.base_model if separate else self.hf)(**arguments)
        targets = shift_labels if shift_labels is not None else shifted(labels, inputs.documents)
        output: dict[str, Any] = {}
        if arguments["use_cache"]:
            output["past_key_values"] = result.past_key_values
        if targets is not None:
            per_token = shift_labels is not None and num_items_in_batch is None
            score = self._score_hidden if separate else _score_logits
            loss, log_probs = score(result[0], targets, temperature, num_items_in_batch, per_token)
            output |= {"loss": loss, "log_probs": log_probs}
        if return_logits or (targets is None and return_logits is not False):
            kept: Any = slice(None)
            if not isinstance(logits_to_keep, int) or logits_to_keep:
                kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            rows = result[0][:, kept]
            output["logits"] = cast(HeadMap, self.head_map).logits(head(rows)) if separate else rows
        return DecoderOutput(output)

    def _score_hidden(
        self, hidden: Tensor, targets: Tensor, temperature: float, items: Tensor | int | None, per_token: bool
    ) -> tuple[Tensor, Tensor]:
        """Loss and log-probabilities through the log-prob core, without logits."""
        head = self.hf.get_output_embeddings()
        options = {**cast(HeadMap, self.head_map).core_options(head), "temperature": temperature}
        rows = (hidden.reshape(-1, hidden.shape[-1]), head.weight, targets.reshape(-1))
        if per_token:
            log_probs = linear_log_prob(*rows, **options).log_prob
            loss = -log_probs.sum() / (targets != _IGNORE).sum().clamp(min=1)
        else:
            loss, core = linear_cross_entropy(*rows, **options, num_items=items, return_log_prob=True)
            log_probs = core.log_prob
        return loss, log_probs.view_as(targets).clone()

    def _refuse(self, ignored: Mapping[str, Any], output_router_logits: bool | None) -> None:
        for name in ("output_attentions", "output_hidden_states"):
            if ignored.get(name):
                raise InvalidInput(f"forward({name}=True): no layer's insides are returned.", remedy="ask model.hf")
        unknown = sorted(set(ignored) - self.ignored_arguments)
        if unknown:
            raise InvalidInput(
                f"forward() has no argument {unknown[0]!r}.",
                remedy="drop it, or call the wrapped model itself: model.hf(...)",
            )
        configured = self.hf.config.get_text_config().to_dict().get("output_router_logits")
        if configured if output_router_logits is None else output_router_logits:
            raise InvalidInput(
                "output_router_logits = True: the fallback backend adds no router loss.",
                read_from="model.config" if output_router_logits is None else None,
                remedy="output_router_logits=False trains without it; model.hf(...) is transformers' own forward pass",
            )

    def _check_ids(self, input_ids: Tensor | None) -> None:
        """Only on the CPU, where looking costs no synchronisation."""
        if input_ids is None or input_ids.device.type != "cpu" or not input_ids.numel():
            return
        rows, low, high = self.hf.get_input_embeddings().weight.shape[0], int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise TokenOutOfRange(f"token id {wrong} with {rows} embeddings.", remedy="use the model's own tokenizer")

    def _add_past(self, arguments: dict[str, Any], past: Any) -> None:
        if arguments["use_cache"] and "past_key_values" not in self._accepted:
            raise InvalidInput(
                f"use_cache: {type(self.hf).__name__} keeps its past in another form than past_key_values.",
                remedy="generate() uses it; a training step needs none",
            )
        if past is not None:
            arguments["past_key_values"] = past

    # ------------------------------------------------------------------ packed documents

    def _add_positions(self, arguments: dict[str, Any], inputs: Inputs, *, given: bool) -> None:
        """`position_ids` for the wrapped model; refused where documents would see each other."""
        if inputs.documents is not None:
            starts = inputs.position_ids[:, 1:] != inputs.position_ids[:, :-1] + 1
            if not torch.equal(starts.expand(len(inputs.documents), -1), inputs.documents.diff(dim=-1) != 0):
                raise InvalidInput(
                    "position_ids and cu_seq_lens_q name different documents, and transformers reads position_ids.",
                    remedy="give cu_seq_lens_q alone, or position_ids that restart at its borders",
                )
            reason = self._leak()
            if reason is not None:
                raise InvalidInput(
                    f"packed documents: {type(self.hf).__name__} would let them see each other ({reason}).",
                    remedy="one document a row, padded with an attention_mask; model.fallback_report() says what is on",
                )
        elif not given:
            return
        elif "position_ids" not in self._accepted:
            plain = torch.arange(inputs.length, device=inputs.position_ids.device)
            if not bool((inputs.position_ids == plain).all()):
                raise InvalidInput(
                    f"position_ids: {type(self.hf).__name__} takes none.", remedy="leave them out, or count from 0"
                )
            return
        arguments["position_ids"] = inputs.position_ids

    def _leak(self) -> str | None:
        """Why packed documents would see each other, asked once for each attention implementation."""
        if "position_ids" not in self._accepted:
            return "it takes no position_ids"
        key = self.hf.config._attn_implementation
        if key not in self._leaks:
            with _evaluating(self.hf):
                vocab = self.hf.get_input_embeddings().weight.shape[0]
                self._leaks[key] = documents_leak(self._hidden_or_logits, vocab, self.device)
        return self._leaks[key]

    def _hidden_or_logits(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        module = self.hf.base_model if isinstance(self.head_map, HeadMap) else self.hf
        return cast(Tensor, module(input_ids=ids, position_ids=position_ids, use_cache=False)[0])

    @property
    def _accepted(self) -> frozenset[str]:
        """Arguments that the wrapped model names."""
        module = self.hf.base_model if isinstance(self.head_map, HeadMap) else self.hf
        return frozenset(inspect.signature(module.forward).parameters)

    # ------------------------------------------------------------------ what it is

    def fallback_report(self) -> str:
        """What runs, and which of our optimisations and proofs are off, one a line."""
        known = self._leaks.get(self.hf.config._attn_implementation, "")
        packing = {None: "kept apart by position_ids (tried)", "": "tried at the first packed batch"}.get(
            known, f"refused: {known}"
        )
        fast = isinstance(self.head_map, HeadMap)
        head = (
            f"on: the log-prob core, no (B, T, V) logits ({self.head_map})"
            if fast
            else f"off: logits are made in full, because {self.head_map}"
        )
        lines = {
            "model": f"transformers' {type(self.hf).__name__} (model_type {self.hf.config.model_type})",
            "loss": head,
            "verification": "off: verify-bridge has not compared anything here",
            "attention": f"transformers' {self.hf.config._attn_implementation}; off: our blocks and packed kernels",
            "packed documents": packing,
            "kernels": "off: our norms, RoPE, gated activations, routed experts, linear layers with LoRA",
            "vocabulary": "off: no padding to a multiple of 64, no sparse gradient of a tied embedding",
            "adapters": "PEFT's" if self.adapter_json is not None else "none (PEFT's, with lora=)",
            "router loss": "off: refused",
            "decoder_config": "absent",
            "FLOPs": "count_flops: counted by torch over one forward pass, not known from a config",
        }
        width = max(map(len, lines))
        return "\n".join([f"{name:<{width}}  {text}" for name, text in lines.items()] + list(self.notes))

    @torch.no_grad()
    def count_flops(self, batch: int, tokens: int) -> int:
        """FLOPs of one forward pass with logits, counted by torch while it runs (2 a multiply-add, products alone)."""
        ids = torch.zeros(batch, tokens, dtype=torch.long, device=self.device)
        implementation = self.hf.config._attn_implementation
        self.hf.set_attn_implementation("eager")  # torch has no formula for its CPU attention kernel
        try:
            with FlopCounterMode(display=False) as counter, _evaluating(self.hf):
                self.hf(input_ids=ids, use_cache=False)
        finally:
            self.hf.set_attn_implementation(implementation)
        return int(counter.get_total_flops())

    # ------------------------------------------------------------------ generation and travel

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Any:
        """Continue each row: see `bestiary.bridges.hf_fallback_generation.generate`."""
        return generate(self.hf, input_ids, attention_mask, generation_config, **options)

    def named_hf_tensors(self, *, merge_lora: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hub names and shapes; a tied head is left out. Without adapters and conversions views of the parameters."""
        from transformers.core_model_loading import revert_weight_conversion

        state: dict[str, Tensor] = {}
        owners: set[tuple[int, torch.Size]] = set()
        for name, tensor in adapters.plain_state(self.hf, merge=merge_lora).items():
            place = tensor.data_ptr(), tensor.shape
            if place in owners and tensor.numel():
                continue
            owners.add(place)
            state[name] = tensor.detach()
        yield from revert_weight_conversion(self.hf, state).items()

    def load_hf_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Refused: what transformers converts on its way in, it converts for whole checkpoints alone.

        Raises:
            UnsupportedLoad.
        """
        raise UnsupportedLoad(
            f"tensors by name into transformers' {type(self.hf).__name__}: the fallback backend only gives them out.",
            remedy='save_pretrained and AutoDecoder.from_pretrained(folder, backend="hf"), or a family with a bridge',
        )

    def save_pretrained(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        merge: bool = False,
        max_shard_size: int | str = "5GB",
        into: str | Path | None = None,
    ) -> Path:
        """Write a checkpoint that transformers loads; with LoRA on a PEFT folder, with `merge=True` the full model.

        Raises:
            FolderNotEmpty: the folder has content and `overwrite` is False.
            UnsupportedAdapter: something trains beside the adapters.   UnsupportedLoad: `into`.
        """
        if into is not None:
            raise UnsupportedLoad(f"into = {str(into)!r} with the fallback backend.", remedy="save a whole checkpoint")
        if self.adapter_json is not None and not merge:
            base = self.name_or_path or None
            return adapters.save_folder(self.hf, self.adapter_json, Path(path), base=base, overwrite=overwrite)
        size = parse_size(max_shard_size)
        with staged(Path(path), overwrite=overwrite) as folder:
            self.hf.save_pretrained(folder, state_dict=adapters.plain_state(self.hf, merge=True), max_shard_size=size)
        return Path(path)

    def load_adapter(self, src: str | Path, *, revision: str | None = None) -> None:
        """Put the values of a PEFT adapter into the adapters this model was built with.

        Raises:
            UnsupportedAdapter: the model has none, or of another rank or scaling.   KeyMismatch: adapters elsewhere.
        """
        if self.adapter_json is None:
            raise UnsupportedAdapter(
                "load_adapter() on a model without adapters.", remedy="from_pretrained(base, lora=FOLDER) builds them"
            )
        folder, json, _ = adapters.read_folder(src, revision)
        adapters.check_same_adapters(self.adapter_json, json, read_from=str(folder))
        adapters.fill(self.hf, folder)

    def merge_lora(self) -> None:
        """Fold every adapter into its weight and drop it; then all parameters train. One-way.

        Raises:
            InvalidConfig: there is no adapter.
        """
        if self.adapter_json is None:
            raise InvalidConfig("merge_lora() on a model without LoRA.", remedy="merge once, with lora=")
        adapters.fold(self.hf)
        self.adapter_json = None
        self.requires_grad_(True)


class _Length:
    """What `read_inputs` asks of a cache: how many tokens it holds."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens


def _score_logits(
    logits: Tensor, targets: Tensor, temperature: float, items: Tensor | int | None, per_token: bool
) -> tuple[Tensor, Tensor]:
    """Loss and log-probabilities from logits (B, T, V), in at least fp32."""
    counted = targets != _IGNORE
    scaled = logits.to(at_least_fp32(logits.dtype)) / temperature
    chosen = scaled.log_softmax(-1).gather(-1, targets.masked_fill(~counted, 0)[..., None]).squeeze(-1)
    log_probs = chosen.masked_fill(~counted, 0.0)
    loss = -log_probs.sum() / (counted.sum().clamp(min=1) if items is None else items)
    return loss, log_probs if per_token else log_probs.detach()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module as it was."""
    before: list[tuple[nn.Module, bool]] = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
