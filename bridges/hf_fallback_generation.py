"""`generate` of a wrapped model: transformers' own loop and caches under our arguments and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels.precision import at_least_fp32
from bestiary.models.errors import InvalidInput
from bestiary.models.generation import Sampling

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@torch.no_grad()
def generate(
    model: Any,
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
    return_log_probs: bool = False,
    allow_long: bool = False,
    use_cache: bool = True,
) -> Any:
    """As `Decoder.generate`: greedy unless an argument or the `generation_config` given asks for more.

    A `generation_config` may use whatever transformers implements. `generator` seeds transformers' draws: the same
    state gives the same tokens, other ones than a native model's.

    Returns:
        (B, T + new) int64; with `return_log_probs` also (B, new), as `Decoder.generate`.
    Raises:
        InvalidInput: right padding, a length beyond the context without `allow_long`, log-probabilities of a search.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig() if generation_config is None else deepcopy(generation_config)
    given = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, value in given.items():
        if value is not None:
            setattr(settings, name, value)
    chosen = {name: value for name in given if (value := vars(settings).get(name)) is not None}
    sampling = Sampling(**chosen)
    if not sampling.do_sample:  # transformers warns of settings that a greedy choice does not read
        settings.temperature = settings.top_k = settings.top_p = None
    if sampling.do_sample and sampling.top_k == 0:
        settings.top_k = 0  # None would be transformers' default of 50
    if settings.max_length is not None and max_new_tokens is None and settings.max_new_tokens is None:
        max_new_tokens = settings.max_length - input_ids.shape[-1]
    settings.max_new_tokens = _count(max_new_tokens, settings.max_new_tokens, input_ids)
    settings.max_length = None
    _set_token_ids(model, settings, stop_token_ids, pad_token_id)
    settings.use_cache, settings.return_dict_in_generate, settings.output_logits = use_cache, True, return_log_probs
    mask = _mask(input_ids, attention_mask)
    _check_length(model, mask, settings.max_new_tokens, allow_long)

    # transformers fills what is None from the checkpoint's generation_config, sampling and penalties too.
    stored, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(enabled=generator is not None):
            if generator is not None:
                seed = torch.randint(2**62, (), generator=generator, device=generator.device)
                torch.manual_seed(int(seed))
            result = model.generate(input_ids, attention_mask=mask, generation_config=settings)
    finally:
        model.generation_config = stored
    if not return_log_probs:
        return result.sequences
    if "logits" not in result or len(result.sequences) != len(input_ids):
        raise InvalidInput(
            "return_log_probs with a search or several sequences a row.", remedy="greedy, or sampling of one sequence"
        )
    return result.sequences, _log_probs(result, input_ids.shape[1], sampling, _stops(settings))


def _log_probs(result: Any, prompt: int, sampling: Sampling, stops: list[int]) -> Tensor:
    """(B, new): of each token under softmax(logits / temperature), 0 after the end of a row."""
    tokens = result.sequences[:, prompt:]
    logits = torch.stack(result.logits, dim=1)
    logits = logits.to(at_least_fp32(logits.dtype))
    scored = (logits / sampling.temperature if sampling.do_sample else logits).log_softmax(-1)
    found = scored.gather(-1, tokens[..., None]).squeeze(-1)
    ended = torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype, device=tokens.device)).cumsum(-1)
    over = torch.nn.functional.pad(ended, (1, 0))[:, :-1] > 0
    return found.masked_fill(over, 0.0)


def _count(given: int | None, configured: int | None, input_ids: Tensor) -> int:
    count = next((value for value in (given, configured) if value is not None), 20)
    if count < 1:
        raise InvalidInput(
            f"{count} new tokens for a prompt of {input_ids.shape[-1]}.",
            remedy="max_new_tokens of at least 1, or a max_length above the prompt's",
        )
    return count


def _set_token_ids(
    model: Any, settings: Any, stop_token_ids: Sequence[int] | int | None, pad_token_id: int | None
) -> None:
    """Stop and padding ids: the argument, the config given, the model's generation config, its config."""
    sources = (vars(settings), vars(model.generation_config), model.config.get_text_config().to_dict())
    for name in _TOKEN_IDS:
        setattr(settings, name, next((v for source in sources if (v := source.get(name)) is not None), None))
    if stop_token_ids is not None:
        settings.eos_token_id = stop_token_ids if isinstance(stop_token_ids, int) else list(stop_token_ids)
    settings.eos_token_id = _stops(settings) or None
    if pad_token_id is not None:
        settings.pad_token_id = pad_token_id
    if settings.pad_token_id is None:
        settings.pad_token_id = (_stops(settings) or [0])[0]


def _stops(settings: Any) -> list[int]:
    ids = settings.eos_token_id
    return [ids] if isinstance(ids, int) else [int(token) for token in ids or ()]


def _mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, T) of 0 and 1; all ones without a mask, which transformers would else guess from padding ids."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise InvalidInput(
            f"input_ids has shape {tuple(input_ids.shape)}.", remedy="(batch, tokens), at least one token"
        )
    if attention_mask is None:
        return torch.ones_like(input_ids)
    mask = (attention_mask != 0).to(torch.int64)
    if (mask[:, 1:] < mask[:, :-1]).any() or (mask[:, -1] == 0).any():
        raise InvalidInput(
            "attention_mask has padding on the right, or a row without tokens.",
            remedy='pad prompts on the left (tokenizer.padding_side = "left")',
        )
    return mask


def _check_length(model: Any, mask: Tensor, new: int, allow_long: bool) -> None:
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    longest = int(mask.sum(-1).max())
    if isinstance(limit, int) and longest + new > limit and not allow_long:
        raise InvalidInput(
            f"{longest} prompt tokens + max_new_tokens = {new} exceed max_position_embeddings = {limit}.",
            remedy="shorten the prompt or max_new_tokens, or pass allow_long=True",
        )
