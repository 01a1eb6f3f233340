"""Small, correct generation with a KV cache: greedy and sampling, several stop ids, left-padded batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bestiary.kernels.deferred import in_eager
from bestiary.kernels.packed import packed_weights
from bestiary.kernels.precision import at_least_fp32
from bestiary.models.cache import Cache
from bestiary.models.config import DynamicScaling, HeadKind, LongRopeScaling
from bestiary.models.errors import InvalidInput

if TYPE_CHECKING:
    from bestiary.models.decoder import Decoder


_READ = frozenset(
    {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id"}
)
_WITHOUT_EFFECT = frozenset(  # how the result is computed or wrapped, not which tokens it has
    {"bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache"}
    | {"cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"}
    | {"return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits"}
    | {"prefill_chunk_size", "low_memory", "continuous_batching_config", "num_assistant_tokens_schedule"}
    | {"num_assistant_tokens", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"}
    | {"is_assistant", "max_matching_ngram_size", "length_penalty", "early_stopping"}
)
_NEUTRAL: Mapping[str, float] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "guidance_scale": 1.0,
}  # values beside None, False and 0 that change nothing

_KNOWN = frozenset({"bestiary", "torch"})  # packages whose modules leave weights alone
_LIKELY = 1024  # tokens among which the nucleus is looked for first
_BLOCK = 1024  # tokens whose mass is summed before a drawn token is looked up among them
_GOING = 0.75  # of the rows in the cache: at fewer that go on, those that ended leave it


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits (B, V); `top_k` 0 and `top_p` 1 filter nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.do_sample and not self.temperature > 0:
            raise InvalidInput(f"temperature = {self.temperature}.", remedy="above 0; do_sample=False for greedy")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InvalidInput(
                f"top_k = {self.top_k}, top_p = {self.top_p}.", remedy="top_k ≥ 0 (0: off), top_p in (0, 1] (1: off)"
            )

    def choose(
        self,
        logits: Tensor,
        generator: torch.Generator | None,
        drawn: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> Tensor:
        """(B, V) → (B,) token ids.

        Args:
            drawn: (B,) numbers in [0, 1) that choose, in place of the generator's.
            probabilities: of `unfiltered`, where they are known already.
        """
        if not self.do_sample:
            return logits.argmax(-1)
        # One uniform number a row, looked up in the cumulative distribution: `multinomial` draws one for each token of
        # the vocabulary, which takes longer than the forward pass.
        if drawn is None:
            drawn = torch.rand(len(logits), generator=generator, dtype=torch.float64, device=logits.device)
        if probabilities is None:
            probabilities = self.filtered(self._scaled(logits)).softmax(-1)
        return _looked_up(probabilities, drawn.double())

    def unfiltered(self, logits: Tensor) -> Tensor | None:
        """Probabilities (B, V) of all tokens, if they are those that choose; None: greedy, or there are filters."""
        if not self.do_sample or self.top_k or self.top_p < 1.0:
            return None
        return self._scaled(logits).softmax(-1)

    def log_probs(self, logits: Tensor, ids: Tensor, probabilities: Tensor | None = None) -> Tensor:
        """(B, V), (B,) → (B,): log softmax(logits / temperature) at `ids`, before any filter.

        Args:
            probabilities: of `unfiltered`, where they are known already; of what was drawn from them none is 0.
        """
        if probabilities is not None:
            return probabilities.gather(-1, ids[:, None]).log().squeeze(-1)
        return self._scaled(logits).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)

    def _scaled(self, logits: Tensor) -> Tensor:
        """What the softmax is of: greedy has no temperature."""
        return logits / self.temperature if self.do_sample and self.temperature != 1.0 else logits

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits with everything outside top-k, then outside the smallest set of mass ≥ top_p, at −inf."""
        if 0 < self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        if self.top_p < 1.0:
            probabilities = logits.softmax(-1)
            likely, order = probabilities.topk(min(_LIKELY, logits.shape[-1]))
            if likely.sum(-1).min() < self.top_p:  # a flat distribution: now all of it is sorted, which is 50 × slower
                likely, order = probabilities.sort(-1, descending=True)
            inside = likely.cumsum(-1) - likely < self.top_p
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, inside)
            logits = logits.masked_fill(~kept, -torch.inf)
        return logits


def _looked_up(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """(B, V) and (B,) in [0, 1) → (B,): the first token up to which more than that share of the mass lies.

    First among blocks of tokens, then inside one: a running sum over a large vocabulary takes as long as the head.
    Running sums are in float64, so that rare tokens keep their share.
    """
    vocab = probabilities.shape[-1]
    whole = vocab // _BLOCK * _BLOCK
    blocks = probabilities[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1) if whole else probabilities[:, :0]
    masses = torch.cat((blocks, probabilities[:, whole:].sum(-1, keepdim=True)), dim=-1).double()
    block, share = _place(masses, drawn)
    ids = block[:, None] * _BLOCK + torch.arange(min(_BLOCK, vocab), device=probabilities.device)
    inside = probabilities.gather(-1, ids.clamp(max=vocab - 1)).double().masked_fill(ids >= vocab, 0.0)
    return block * _BLOCK + _place(inside, share)[0]


def _place(masses: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) and (B,) in [0, 1) → where the running sum passes that share of its end, and the share of that mass."""
    reached = masses.cumsum(-1)
    wanted = share[:, None] * reached[:, -1:]
    place = torch.searchsorted(reached, wanted, right=True).clamp(max=masses.shape[-1] - 1)
    mass = masses.gather(-1, place)
    within = 1.0 - (reached.gather(-1, place) - wanted) / mass
    return place.squeeze(-1), within.clamp(0.0, 1.0 - 2.0**-53).squeeze(-1)


class GenerationMixin:
    """`generate` for `Decoder`."""

    def can_generate(self) -> bool:
        """True, for trainers that ask."""
        return True

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Arguments of the next forward call: only the tokens that the cache has not seen."""
        cache = kwargs.get("past_key_values")
        unseen = input_ids if cache is None else input_ids[:, len(cache) :]
        return {**kwargs, "input_ids": unseen}

    @torch.no_grad()
    @in_eager  # compiled blocks would be compiled again for every length of the cache
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | int | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
        prompt_of: Tensor | None = None,
        finished: Callable[[bool], bool] | None = None,
        allowed: Callable[[Tensor], Tensor] | None = None,
        return_log_probs: bool = False,
        allow_long: bool = False,
        use_cache: bool = True,
    ) -> Any:
        """Continue each row until a stop id or `max_new_tokens`.

        An argument wins over `generation_config` (a transformers GenerationConfig), which wins over: greedy, no filter,
        the stop ids of the checkpoint, 20 tokens.

        Args:
            input_ids: (B, T) int64, shorter prompts padded on the left.
            attention_mask: (B, T), 0 on that padding.
            stop_token_ids: generation of a row ends after one of them.
            pad_token_id: fills rows that ended; default the configured one, else a stop id.
            uniforms: (B, max_new_tokens) numbers in [0, 1) that choose the tokens in place of the generator's, so that
                a row's answer depends on its own numbers and not on its neighbours.
            prompt_of: (R,) int64, the row of `input_ids` that each answer continues; None: one answer to each. What is
                said of B below and in `uniforms` and `allowed` is then said of R; prompts are computed once.
            finished: of a model that lies in parts on several processes, each with prompts of its own: whether all of
                them are done, from whether this one is. All call it after every token and stop together.
            allowed: what was generated, (B, n) int64, to the ids that may follow in each row, (B, k) int64, −1 for no
                further one. Of a row that they are all −1 of nothing more is asked; at first each row has one.
            allow_long: permit positions at and past `max_position_embeddings`.
            use_cache: False recomputes everything for each token (a reference for tests).
        Returns:
            (B, T + new) int64; with `return_log_probs` also (B, new): log-probability of each token under
            softmax(logits / temperature), before filters, 0 after the end of a row. Greedy has no temperature. With
            `allowed` the softmax is over those ids, and a row ends where there are none.
        Raises:
            InvalidInput: a score head, right padding, an empty row, a length beyond the context without `allow_long`,
                uniforms of another shape, a prompt that is none, nothing allowed at the beginning of a row.
        Cost:
            Rows that ended are not computed further once they are a quarter of those that are.
            On CPUs the weights are packed for the length of the call where that pays (`kernels.packed`): a copy of at
            most 2 GiB. Not with hooks or modules of others, which could write weights behind torch's back (`.data`);
            other threads must not do so meanwhile.
        """
        given = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        model = cast("Decoder", self)
        if model.decoder_config.head is not HeadKind.LM:
            raise InvalidInput(
                "generate() on a model with a score head, which gives no next token.",
                remedy='load the language model: from_pretrained(src) of its checkpoint, head="lm"',
            )
        settings = _read_settings(generation_config)
        sampling = _sampling(given, settings)
        max_new_tokens = _new_tokens(max_new_tokens, settings, input_ids)
        stops = _stop_ids(model, stop_token_ids, settings)
        pad = _pad_id(model, pad_token_id, settings, stops)
        mask = _left_padding(input_ids, attention_mask)
        sequence_length = _checked_length(model, input_ids, mask, max_new_tokens, allow_long)
        device, use_cache = input_ids.device, use_cache and not _frequencies_change(model, sequence_length)
        if prompt_of is not None:
            _check_prompts(prompt_of, len(input_ids))
        sequence = input_ids if prompt_of is None else input_ids[prompt_of]
        prompt, rows = input_ids.shape[1], len(sequence)
        if uniforms is not None and uniforms.shape != (rows, max_new_tokens):
            raise InvalidInput(f"uniforms is {tuple(uniforms.shape)}.", remedy=f"pass ({rows}, {max_new_tokens})")

        stop_tensor = torch.tensor(stops, dtype=input_ids.dtype, device=device)
        running = torch.ones(rows, dtype=torch.bool, device=device)
        live = torch.arange(rows, device=device)  # rows that are computed
        cache = Cache(model.decoder_config) if use_cache else None
        log_probs: list[Tensor] = []
        words = None if allowed is None else _first_allowed(allowed, sequence)
        unseen = input_ids
        if cache is None and prompt_of is not None:
            unseen, mask = sequence, None if mask is None else mask[prompt_of]
        cheap = use_cache and _is_unobserved(model)
        with packed_weights(uses=max_new_tokens - 1 if cheap else 0, rows=rows):
            for place in range(max_new_tokens):
                positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -unseen.shape[1] :]
                output = model(
                    unseen, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
                )
                logits = output["logits"][:, -1]
                logits = logits.to(at_least_fp32(logits.dtype))  # a cumulative sum in bf16 would not reach top_p
                if place == 0 and cache is not None and prompt_of is not None:
                    logits, mask = logits[prompt_of], None if mask is None else mask[prompt_of]
                    cache.reorder(prompt_of)
                drawn = None if uniforms is None else uniforms[:, place]
                if drawn is None and sampling.do_sample:  # of rows that ended too: they change nothing for the others
                    drawn = torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
                if words is not None:
                    logits = logits.gather(-1, words.clamp(min=0)).masked_fill(words < 0, -torch.inf)
                going = running[live]
                whole = sampling.unfiltered(logits)
                taken = sampling.choose(logits, generator, None if drawn is None else drawn[live], whole)
                taken = torch.where(going, taken, 0)
                if return_log_probs:
                    told = torch.where(going, sampling.log_probs(logits, taken, whole), 0.0)
                    log_probs.append(told.new_zeros(rows).index_copy(0, live, told))
                named = taken if words is None else words.gather(-1, taken[:, None]).squeeze(-1)
                chosen = sequence.new_full((rows,), pad).index_copy(0, live, torch.where(going, named, pad))
                sequence = torch.cat((sequence, chosen[:, None]), dim=1)
                if mask is not None:
                    mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
                running = running & ~torch.isin(chosen, stop_tensor)
                if allowed is not None:
                    words = allowed(sequence[:, prompt:])
                    running = running & (words >= 0).any(-1)
                if stops or words is not None:
                    left = int(running.sum())
                    if left == 0 if finished is None else finished(left == 0):
                        break
                    if cache is not None and left <= _GOING * len(live):
                        # One that ended keeps other processes company.
                        kept = running[live].nonzero().squeeze(-1) if left else live.new_zeros(1)
                        cache.reorder(kept)
                        live, mask = live[kept], None if mask is None else mask[kept]
                if words is not None:
                    words = words[live]
                unseen = sequence if cache is None else chosen[live, None]
        return (sequence, torch.stack(log_probs, dim=1)) if return_log_probs else sequence


def _check_prompts(prompt_of: Tensor, prompts: int) -> None:
    if prompt_of.dim() != 1 or not len(prompt_of) or int(prompt_of.min()) < 0 or int(prompt_of.max()) >= prompts:
        raise InvalidInput(
            f"prompt_of is {tuple(prompt_of.shape)}, {prompt_of.tolist()[:8]}…, of {prompts} prompts.",
            remedy="(answers,), for each the row of input_ids that it continues",
        )


def _first_allowed(allowed: Callable[[Tensor], Tensor], input_ids: Tensor) -> Tensor:
    """(B, k), what may begin each row."""
    words = allowed(input_ids[:, :0])
    barred = (words < 0).all(-1)
    if barred.any():
        raise InvalidInput(
            f"row {int(barred.nonzero()[0])} of {len(input_ids)} has no id that may come first.",
            remedy="a constraint that allows one at least",
        )
    return words


def _sampling(given: dict[str, Any], settings: Mapping[str, Any]) -> Sampling:
    chosen = {name: value if value is not None else settings.get(name) for name, value in given.items()}
    return Sampling(**{name: value for name, value in chosen.items() if value is not None})


def _read_settings(generation_config: Any) -> dict[str, Any]:
    """Its fields, those that would change the result and are not implemented refused by name."""
    if generation_config is None:
        return {}
    if isinstance(generation_config, Mapping):
        raise InvalidInput(
            f"generation_config is a {type(generation_config).__name__}.",
            remedy="pass transformers.GenerationConfig(**fields), or the fields as arguments",
        )
    settings = dict(vars(generation_config))
    for name, value in settings.items():
        if name in _READ or name in _WITHOUT_EFFECT or value is None or value == _NEUTRAL.get(name, False):
            continue
        raise InvalidInput(
            f"generation_config.{name} = {value!r} is not implemented.",
            remedy=f"set {name} to None; greedy, temperature, top_k, top_p and stop ids are what there is",
        )
    return settings


def _new_tokens(given: int | None, settings: Mapping[str, Any], input_ids: Tensor) -> int:
    count = given if given is not None else settings.get("max_new_tokens")
    if count is None and settings.get("max_length") is not None:
        count = settings["max_length"] - input_ids.shape[-1]
    if count is None:
        return 20
    if count < 1:
        raise InvalidInput(
            f"{count} new tokens for a prompt of {input_ids.shape[-1]}.",
            remedy="max_new_tokens of at least 1, or a max_length above the prompt's",
        )
    return int(count)


def _configured(model: "Decoder", settings: Mapping[str, Any], name: str) -> Any:
    """The first that is set: the config given, the model's own, the checkpoint's generation config, its config."""
    own = model._generation_config  # made at first access: to have looked at it changes nothing
    stored = (model.hf_generation_config_json if own is None else vars(own), model.hf_config_json)
    values = [settings.get(name), *((source or {}).get(name) for source in stored)]
    return next((value for value in values if value is not None), None)


def _stop_ids(model: "Decoder", given: Sequence[int] | int | None, settings: Mapping[str, Any]) -> list[int]:
    found = given if given is not None else _configured(model, settings, "eos_token_id")
    return [found] if isinstance(found, int) else [int(token) for token in found or ()]


def _pad_id(model: "Decoder", given: int | None, settings: Mapping[str, Any], stops: Sequence[int]) -> int:
    configured = given if given is not None else _configured(model, settings, "pad_token_id")
    return int(configured) if configured is not None else (stops[0] if stops else 0)


def _left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise InvalidInput(
            f"input_ids has shape {tuple(input_ids.shape)}.", remedy="(batch, tokens), at least one token"
        )
    if attention_mask is None:
        return None
    mask = (attention_mask != 0).to(torch.int64)
    if (mask[:, 1:] < mask[:, :-1]).any() or (mask[:, -1] == 0).any():
        raise InvalidInput(
            "attention_mask has padding on the right, or a row without tokens.",
            remedy='pad prompts on the left (tokenizer.padding_side = "left")',
        )
    return mask


def _checked_length(model: "Decoder", input_ids: Tensor, mask: Tensor | None, new: int, allow_long: bool) -> int:
    """Tokens of the longest row, the new ones included."""
    longest = input_ids.shape[1] if mask is None else int(mask.sum(-1).max())
    limit = model.decoder_config.max_position_embeddings
    if longest + new > limit and not allow_long:
        raise InvalidInput(
            f"{longest} prompt tokens + max_new_tokens = {new} exceed max_position_embeddings = {limit}.",
            remedy="shorten the prompt or max_new_tokens, or pass allow_long=True",
        )
    return longest + new


def _is_unobserved(model: "Decoder") -> bool:
    """Whether nothing but our code and torch's runs during a forward pass: no hook, module or mode of others."""
    ours = all(
        type(module).__module__.partition(".")[0] in _KNOWN
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in model.modules()
    )
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return ours and not modes and not torch.nn.modules.module._has_any_global_hook()


def _frequencies_change(model: "Decoder", length: int) -> bool:
    """Whether a RoPE kind turns all keys by other angles once the sequence outgrows its first context."""
    scalings = (rope.scaling for rope in (model.decoder_config.rope, model.decoder_config.sliding_rope) if rope)
    return any(
        isinstance(scaling, DynamicScaling | LongRopeScaling) and length > scaling.original_max_position_embeddings
        for scaling in scalings
    )
