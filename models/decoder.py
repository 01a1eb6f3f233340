"""The canonical decoder: embed → blocks → norm → head. Families are configurations of it."""

import hashlib
from collections.abc import Container, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bestiary.kernels.attention import MaskSpec, PieceMasks
from bestiary.kernels.balance import load_balancing_loss
from bestiary.kernels.divergence import Distillation
from bestiary.kernels.log_prob import LogProb
from bestiary.models.cache import Cache
from bestiary.models.config import DecoderConfig, HeadKind, LayerType
from bestiary.models.context import ContextSlice
from bestiary.models.errors import InvalidConfig, InvalidInput
from bestiary.models.generation import GenerationMixin
from bestiary.models.inputs import Inputs, read_inputs, shifted
from bestiary.models.layers.block import Block
from bestiary.models.layers.embedding import Embedding
from bestiary.models.layers.head import Head
from bestiary.models.layers.norm import RMSNorm
from bestiary.models.layers.rotary import RotaryTable
from bestiary.models.layers.score import ScoreHead, last_tokens
from bestiary.models.lora import ADAPTER_LEAVES, Adaptable, check_targets, reset_adapter, sites
from bestiary.models.output import DecoderOutput
from bestiary.models.protocol import TrainerProtocol
from bestiary.models.recomputation import Part, again
from bestiary.models.sharding import is_spread, put

RopeTables = dict[object, tuple[Tensor, Tensor]]
_BY_TOKEN = {"log_probs", "entropy", "divergence"}


class Backbone(nn.Module):
    """Embedding, blocks and the final norm: everything but the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.decoder_config = config
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm)
        kinds = {config.rope_of(index) for index in range(config.num_hidden_layers)} - {None}
        self._rotary = {rope: RotaryTable(rope) for rope in kinds if rope is not None}
        self.checkpointing = config.checkpointing

    def forward(self, inputs: Inputs, cache: Cache | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states (B, T, H) after the final norm, and the router logits of the routed layers."""
        x = self.embed_tokens(inputs.input_ids) if inputs.embeds is None else inputs.embeds
        if self.decoder_config.scales_inputs_embeds:
            x = x * self.decoder_config.embedding_multiplier
        row = {} if inputs.row_positions is None else {"row_positions": inputs.row_positions}
        tables: RopeTables = {rope: table(inputs.position_ids, x.dtype, **row) for rope, table in self._rotary.items()}
        masks = inputs.masks(self.decoder_config, cache)
        elsewhere = inputs.elsewhere(cache)
        router_logits = []
        recomputes = self.checkpointing if torch.is_grad_enabled() and cache is None else None
        for index, layer in enumerate(self.layers):
            arguments = (x, tables.get(layer.rope), masks[cast(LayerType, layer.layer_type)], elsewhere)
            if self.decoder_config.compile_blocks:
                _any_length(*arguments[:3])
            part = None if recomputes is None else recomputes.of(index)
            halves = () if part is None else (part,)
            x, logits = again(layer, *arguments) if part is Part.FULL else layer(*arguments, *halves)
            if logits is not None:
                router_logits.append(logits)
        return self.norm(x), tuple(router_logits)


def _any_length(x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: MaskSpec | PieceMasks) -> None:
    """Ask the compiler for one graph for every number of tokens and documents, from the first call on."""
    from torch._dynamo import maybe_mark_dynamic  # longer to import than all of torch

    for tensor in (x, *(rope or ())):
        maybe_mark_dynamic(tensor, 1)
    for piece in mask.masks if isinstance(mask, PieceMasks) else (mask,):
        if piece.ranges()[0] is not None:
            maybe_mark_dynamic(piece.ranges()[0], 0)


class Decoder(TrainerProtocol, GenerationMixin, nn.Module):
    """A decoder-only language model described by a `DecoderConfig`.

    Args:
        config: the whole architecture, LoRA included.
        dtype, device: of the parameters; under `torch.device("meta")` nothing is allocated.

    With LoRA in the config the base is frozen and only adapters train, and a score head.
    """

    sizes: ClassVar[dict[str, DecoderConfig]] = {}
    parallel_styles: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern over module names, style): where the family is spread otherwise than `training.parallel_plan` says."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.decoder_config = config
        default = torch.get_default_dtype()
        torch.set_default_dtype(default if dtype is None else dtype)
        try:
            with torch.device(torch.get_default_device() if device is None else device), _no_reset():
                self.model = Backbone(config)
                if config.head is HeadKind.LM:
                    self.lm_head = Head(config)
                else:
                    self.score = ScoreHead(config)
        finally:
            torch.set_default_dtype(default)
        self.tie_weights()
        self.register_load_state_dict_post_hook(_tie_again)
        self._freeze_base()
        if config.compile_blocks:
            for layer in self.model.layers:
                layer.compile()
        if not self.model.norm.weight.is_meta:
            self.init_weights(seed=torch.initial_seed() % 2**31)

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
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        output_router_logits: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        cache: Cache | None = None,
        distillation: Distillation | None = None,
        return_teacher: bool = False,
        return_entropy: bool = False,
        allowed: Tensor | None = None,
        context_slice: ContextSlice | None = None,
        **ignored: Any,
    ) -> DecoderOutput:
        """Logits of a batch, or with labels its loss and log-probabilities; with a score head, its scores.

        Args:
            input_ids: (B, T) int64, or `inputs_embeds` (B, T, H), what the embedding module gives: scaled already, but
                for families that scale what they are given (`scales_inputs_embeds`).
            attention_mask: (B, past + T), 1 for tokens and 0 for padding.
            position_ids: (B or 1, T) int64; None: counted from the cache's length on, padding included, as transformers
                does. Without mask and cache, a document starts where they do not rise by one.
            labels: (B, T), the tokens themselves, −100 ignored; shifted here, never across a document border.
            shift_labels: (B, T), the target at each position, already shifted; wins over `labels`.
            num_items_in_batch: divisor of the summed loss; None: the number of targets.
            temperature: divides the logits inside `log_probs` and the loss.
            past_key_values: `Cache` of earlier tokens (alias `cache`); `use_cache` makes a new one.
            logits_to_keep: last n positions that get logits, or their indices; 0: all.
            return_logits: with labels, whether to compute logits as well; default no.
            cu_seq_lens_q: (documents + 1,) borders of packed documents in a batch of one row.
            return_entropy: with targets the output holds `entropy`, with a graph where log_probs have one.
            allowed: (B, T, k) int64, the words among which each target was chosen, −1 for no further one: log_probs,
                entropy and loss are those of the distribution over them.
            distillation: a teacher with B · T rows; loss and gradients are then those of the divergence from it, at the
                positions with a target.
            return_teacher: the output holds `teacher`, which another model's `distillation` takes. Its weight is this
                model's own: FSDP2 must not free it after this pass.
            context_slice: the tokens of each row that are computed here; all other arguments are those of whole rows, a
                teacher alone has a row for each token of the slice. log_probs, entropy and divergence have 0 for other
                tokens, logits are of the slice, loss is its share: the shares of all slices add up to the row's.
        Returns:
            `DecoderOutput`; log_probs[b, t] = log p(target at t), 0 where ignored; loss = −Σ / num_items, plus the
            router's load-balancing loss where `output_router_logits` asks for it. With `labels` or `num_items_in_batch`
            gradients flow through the loss alone, a quarter cheaper; with `shift_labels` alone through log_probs too.
            With a score head: scores (documents, num_labels) of the last token of each row, under an `attention_mask`
            of its last one that is no padding, of each document where they are packed (padding counts as one where
            `cu_seq_lens_q` counts it); `last_tokens` in layers/score.py says where transformers differs.
            With `distillation` loss = Σ divergence / num_items, and without num_items (B, T) `divergence` too.
        Raises:
            InvalidInput, TokenOutOfRange, LabelOutOfRange.
        """
        self._refuse_unknown(ignored)
        if self.decoder_config.head is HeadKind.SCORE:
            self._refuse_targets(
                labels=labels,
                shift_labels=shift_labels,
                logits_to_keep=logits_to_keep,
                distillation=distillation is not None,
                return_teacher=return_teacher,
                return_entropy=return_entropy,
                allowed=allowed is not None,
                context_slice=context_slice is not None,
            )
        past = past_key_values if past_key_values is not None else cache
        if past is None and use_cache:
            past = Cache(self.decoder_config)
        balances = self.decoder_config.output_router_logits if output_router_logits is None else output_router_logits
        inputs = read_inputs(input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens_q, past)
        targets = shift_labels if shift_labels is not None else shifted(labels, inputs.documents)
        items = num_items_in_batch
        if context_slice is not None:
            _refuse_in_slices(past_key_values=past, logits_to_keep=logits_to_keep, output_router_logits=balances)
            inputs = inputs.sliced(context_slice)
            if targets is not None:  # counted in the whole row
                items = (targets != -100).sum().clamp(min=1) if items is None else items
                targets = context_slice.cut(targets)
            allowed = None if allowed is None else context_slice.cut(allowed)
        hidden, router_logits = self.model(inputs, past)
        if past is not None:
            past.advance(inputs.length)

        output: dict[str, Any] = {"past_key_values": past}
        if self.decoder_config.head is HeadKind.SCORE:
            output["scores"] = self.score(hidden, last_tokens(inputs, hidden.shape[0], cu_seq_lens_q))
            output["logits"], return_logits = output["scores"], False
        if allowed is not None and (targets is None or return_teacher or distillation is not None):
            raise InvalidInput(
                "forward(allowed=…) without targets, or with distillation: nothing is chosen among those words.",
                remedy="pass labels or shift_labels with it, and no teacher",
            )
        if return_teacher or distillation is not None:
            summed = num_items_in_batch is not None
            self._distil(output, hidden, targets, temperature, items, distillation, return_teacher, summed=summed)
        elif targets is not None:
            alone = shift_labels is not None and num_items_in_batch is None
            columns: dict[str, Any] = {"entropy": True} if return_entropy else {}
            if allowed is not None:
                columns["allowed"] = allowed
            loss, core = self._scored(hidden, targets, temperature, items, columns, per_token=alone)
            output["log_probs"] = core.log_prob.view_as(targets).clone()  # FSDP2 hooks outputs, and not on views
            if core.entropy is not None:
                output["entropy"] = core.entropy.view_as(targets).clone()
            output["loss"] = loss
        if context_slice is not None:
            output |= {name: context_slice.placed(output[name]) for name in _BY_TOKEN & output.keys()}
        if return_logits or (targets is None and return_logits is not False and not return_teacher):
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
            )
            output["logits"] = self.lm_head(hidden if isinstance(kept, int) else hidden[:, kept])
        if balances and router_logits:
            counted = None if attention_mask is None else attention_mask[:, -inputs.length :].reshape(-1)
            self.add_router_loss(output, router_logits, counted)
        if not self._keep_hidden:
            return DecoderOutput(output)
        return DecoderOutput(output, hidden_states=hidden)

    def _scored(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        num_items: Tensor | int | None,
        columns: Mapping[str, Any],
        *,
        per_token: bool,
    ) -> tuple[Tensor, LogProb]:
        """The loss and the log-probabilities, which have a graph of their own if `per_token`."""
        if isinstance(self.lm_head, Head) and not per_token and "allowed" not in columns:
            scored = self.lm_head(hidden, targets, temperature=temperature, loss=True, num_items=num_items, **columns)
            return cast(tuple[Tensor, LogProb], scored)
        core = cast(LogProb, self.lm_head(hidden, targets, temperature=temperature, **columns))
        # A batch without targets has loss 0, not 0 / 0: it still takes part in the backward pass.
        items = (targets != -100).sum().clamp(min=1) if num_items is None else num_items
        return -core.log_prob.sum() / items, core

    def _distil(
        self,
        output: dict[str, Any],
        hidden: Tensor,
        targets: Tensor | None,
        temperature: float,
        num_items: Tensor | int | None,
        distillation: Distillation | None,
        as_teacher: bool,
        *,
        summed: bool,
    ) -> None:
        if not isinstance(self.lm_head, Head):
            raise InvalidInput(
                f"distillation with a head of class {type(self.lm_head).__name__}, which has no vocabulary.",
                remedy="teacher and student are language models with their own heads",
            )
        if as_teacher:
            output["teacher"] = self.lm_head(hidden, as_teacher=True)
        if distillation is None:
            return
        if targets is None:
            raise InvalidInput("distillation without targets.", remedy="labels or shift_labels say where it counts")
        items = (targets != -100).sum().clamp(min=1) if num_items is None else num_items
        found = self.lm_head(
            hidden,
            targets,
            temperature=temperature,
            loss=summed,
            num_items=items if summed else None,
            distillation=distillation,
        )
        if summed:
            output["loss"] = found
        else:
            output["divergence"] = cast(Tensor, found).view_as(targets).clone()  # as log_probs above
            output["loss"] = output["divergence"].sum() / items

    _keep_hidden = False

    def add_router_loss(
        self, output: dict[str, Any], router_logits: tuple[Tensor, ...], token_mask: Tensor | None
    ) -> None:
        """Put `router_logits` and `aux_loss` into an output, and weighed into its `loss` if it has one.

        Args:
            token_mask: (B · T,), 0 for tokens that do not count; None: all count.
        Raises:
            InvalidConfig: a model without experts.
        """
        moe = self.decoder_config.moe
        if moe is None:
            raise InvalidConfig("output_router_logits on a model without experts.", remedy="drop it")
        output["router_logits"] = router_logits
        output["aux_loss"] = load_balancing_loss(router_logits, moe.router.top_k, token_mask)
        if "loss" in output:
            output["loss"] = output["loss"] + self.decoder_config.router_aux_loss_coef * output["aux_loss"]

    # ------------------------------------------------------------------ parameters

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Make head and embedding one Parameter where the config ties them (arguments of trainers are ignored)."""
        if self.decoder_config.ties_head and isinstance(self.lm_head, Head):  # not a head put in its place
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    def init_weights(self, seed: int = 0, *, only: Container[str] | None = None) -> None:
        """Normal(0, initializer_range) for matrices and sinks, identity norms, zero biases, neutral adapters.

        Args:
            only: names of the parameters to draw; None: all.

        Each parameter draws from a generator of its own, seeded by `seed` and its name, so a model built on meta, in
        parts or in another order gets the same values. Of a parameter that lies in parts on several processes each
        draws all and keeps its own, one parameter after the other.
        """
        norms = {f"{n}.weight" for n, module in self.named_modules() if isinstance(module, RMSNorm)}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if only is not None and name not in only:
                    continue
                generator = torch.Generator(parameter.device).manual_seed(seed_of(name, seed))
                spread = is_spread((parameter,))
                drawn = (
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                    if spread
                    else parameter
                )
                if name in norms:
                    drawn.fill_(0.0 if self.decoder_config.norm.plus_one else 1.0)
                elif name.endswith("bias"):
                    drawn.zero_()
                elif name.endswith(ADAPTER_LEAVES):
                    reset_adapter(name, drawn, generator)
                else:
                    drawn.normal_(0.0, self.decoder_config.initializer_range, generator=generator)
                if spread:
                    put(parameter, drawn)

    def _freeze_base(self) -> None:
        lora = self.decoder_config.lora
        if lora is None:
            return
        check_targets(lora, (site.name for site in sites(self)))
        trained = (*ADAPTER_LEAVES, "score.weight")  # a score head is as new as the adapters
        base = {name: p for name, p in self.named_parameters() if not name.endswith(trained)}
        self._frozen = frozenset(name for name, parameter in base.items() if parameter.requires_grad)
        for parameter in base.values():
            parameter.requires_grad_(False)

    _frozen: frozenset[str] = frozenset()  # what LoRA froze and `merge_lora` frees again

    def merge_lora(self) -> None:
        """Fold every adapter into its weight and drop it: then the model is one built without LoRA, all trainable.

        One-way: the base is not recoverable. To read merged tensors and keep the adapters, use `named_hf_tensors`.

        Raises:
            InvalidConfig: there is no adapter (a second merge included).
        """
        if self.decoder_config.lora is None:
            raise InvalidConfig("merge_lora() on a model without LoRA.", remedy="merge once, with `lora` in the config")
        if is_spread(self.parameters()):
            raise InvalidConfig(
                "merge_lora() on a model that is spread over processes.",
                remedy="save_pretrained(path, merge=True) writes the merged model, named_hf_tensors() its tensors",
            )
        for site in sites(self):
            if site.adapter is not None:
                with torch.no_grad():
                    site.weight.copy_(site.merged())
        for module in self.modules():
            if isinstance(module, Adaptable):
                module.drop_adapters()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name in self._frozen)
        self._frozen = frozenset()
        self.decoder_config = self.model.decoder_config = self.decoder_config.with_(lora=None)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        head = state_dict.get(f"{prefix}lm_head.weight")
        embedding = state_dict.get(f"{prefix}model.embed_tokens.weight")
        if self.decoder_config.tie_word_embeddings and head is not None and embedding is not None:
            if head is not embedding and not torch.equal(head, embedding):
                errors: list[str] = arguments[-1]
                errors.append(
                    "lm_head.weight differs from model.embed_tokens.weight and tie_word_embeddings = True: "
                    "drop one of them, or build the model with tie_word_embeddings=False."
                )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        super()._apply(fn, recurse)
        self.tie_weights()  # to_empty and device moves build one Parameter a module
        return self

    def _refuse_targets(self, **given: Any) -> None:
        for name, value in given.items():
            if isinstance(value, Tensor) or value:
                raise InvalidInput(
                    f"forward({name}=…) on a model with a score head, which scores documents and no tokens.",
                    remedy="drop it, and take a loss of the scores: output.scores, (documents, num_labels)",
                )

    def _refuse_unknown(self, ignored: Mapping[str, Any]) -> None:
        for name in ("output_attentions", "output_hidden_states"):
            if ignored.get(name):
                raise InvalidInput(
                    f"forward({name}=True): no layer's insides are returned.",
                    remedy="put a forward hook on the module you want to see, e.g. model.model.layers[3].self_attn",
                )
        unknown = sorted(set(ignored) - self.ignored_arguments)
        if unknown:
            raise InvalidInput(
                f"forward() has no argument {unknown[0]!r}.",
                remedy="drop it; a column of the data set that the model does not read belongs in remove_columns",
            )


def _refuse_in_slices(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            raise InvalidInput(
                f"forward({name}=…) with a context_slice of every row: it takes whole rows.",
                remedy="drop it, or compute whole rows",
            )


def seed_of(name: str, seed: int) -> int:
    """A seed whose low 32 bits mix both: torch's CPU generator reads no others."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _tie_again(decoder: nn.Module, incompatible_keys: object) -> None:
    """After `load_state_dict(assign=True)` the embedding holds another Parameter."""
    cast(Decoder, decoder).tie_weights()


class _no_reset(torch.overrides.TorchFunctionMode):
    """Skip torch's own random initialisation while modules are built: every value is written by `init_weights`."""

    _skipped = frozenset({"kaiming_uniform_", "uniform_", "normal_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._skipped:
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))
