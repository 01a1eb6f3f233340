"""Component surgery: swap modules by name, resize the vocabulary."""

import re
from collections.abc import Callable
from fnmatch import translate

import torch
from torch import Tensor, nn

from bestiary.models.decoder import Decoder, seed_of
from bestiary.models.errors import InvalidInput, NoSuchModule
from bestiary.models.layers.embedding import Embedding
from bestiary.models.layers.head import Head


def replace_modules(model: nn.Module, pattern: str, factory: Callable[[str, nn.Module], nn.Module]) -> list[str]:
    """Swap every module whose name matches `pattern`.

    Args:
        pattern: glob over `named_modules` names, e.g. "model.layers.*.mlp"; `*` also crosses dots.
        factory: (name, old module) → new module; it takes the old one's inputs and returns its outputs.
    Returns:
        The names that were replaced. A module inside a replaced one is not visited.
    Raises:
        NoSuchModule: nothing matches.
    """
    wanted = re.compile(translate(pattern))
    names = [name for name, _ in model.named_modules() if name and wanted.match(name)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    if not outermost:
        raise NoSuchModule(
            f"no module matches {pattern!r}.",
            remedy="names are those of model.named_modules(), e.g. model.layers.0.self_attn",
        )
    for name in outermost:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        new = factory(name, model.get_submodule(name))
        if leaf.isdigit() and isinstance(owner, nn.ModuleList):
            owner[int(leaf)] = new
        else:
            setattr(owner, leaf, new)
    return outermost


def resize_token_embeddings(model: Decoder, size: int, *, seed: int = 0) -> nn.Module:
    """Give the model `size` tokens: old rows bit-equal, new rows drawn as `init_weights` would.

    Updates `decoder_config` and, where it exists already, the transformers config.

    Returns:
        The embedding module.
    Raises:
        InvalidInput: size below 1, or embedding or head are no longer the model's own.
    """
    if size < 1:
        raise InvalidInput(f"new vocabulary size {size}.", remedy="at least 1")
    config = model.decoder_config.with_(vocab_size=size)
    embedding, head = model.model.embed_tokens, model.get_output_embeddings()
    if not isinstance(embedding, Embedding) or not isinstance(head, Head | None):
        raise InvalidInput(
            f"embed_tokens is a {type(embedding).__name__} and lm_head a {type(head).__name__}: one was replaced.",
            remedy="resize first and replace then",
        )
    embedding.weight = _resized("embed_tokens", embedding.weight, size, config.initializer_range, seed)
    embedding.num_embeddings = size
    if embedding.padding_idx is not None and embedding.padding_idx >= size:
        embedding.padding_idx = None
    if head is not None:
        if not config.tie_word_embeddings:
            head.weight = _resized("lm_head", head.weight, size, config.initializer_range, seed)
        head.out_features = size
    model.decoder_config = model.model.decoder_config = config
    model.tie_weights()
    if model._config is not None:
        model._config.vocab_size = size
    return embedding


def _resized(name: str, weight: Tensor, size: int, spread: float, seed: int) -> nn.Parameter:
    kept = min(size, weight.shape[0])
    resized = torch.empty(size, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        resized[:kept] = weight[:kept]
        # Named by where the rows stand: growing twice gives no two tokens the same row.
        generator = torch.Generator(weight.device).manual_seed(seed_of(f"{name}[{kept}:]", seed))
        resized[kept:].normal_(0.0, spread, generator=generator)
    return nn.Parameter(resized, requires_grad=weight.requires_grad)
