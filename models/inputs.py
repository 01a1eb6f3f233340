"""From the arguments of a forward call to positions, documents and masks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bestiary.kernels.attention import MaskSpec, PieceMasks
from bestiary.models.cache import Cache, KeyValues
from bestiary.models.config import DecoderConfig, LayerType
from bestiary.models.context import ContextSlice
from bestiary.models.errors import InvalidInput


@dataclass
class Inputs:
    """A checked batch. position_ids (B or 1, T); documents (B, T) or None; key_valid (B, past + T) or None.

    Under a `context` input_ids, embeds, position_ids and length are those of its slice, the others of the whole row;
    row_positions are those of the whole row, which a RoPE that looks at the longest one needs.
    """

    input_ids: Tensor | None
    embeds: Tensor | None
    position_ids: Tensor
    documents: Tensor | None
    key_valid: Tensor | None
    length: int
    context: ContextSlice | None = None
    row_positions: Tensor | None = None

    def sliced(self, context: ContextSlice) -> "Inputs":
        """The same batch, of whose rows a slice is computed.

        Raises:
            InvalidInput: the slice is of rows of another length.
        """
        if context.length != self.length:
            raise InvalidInput(
                f"context_slice is of {context.length} tokens, and the rows have {self.length}.",
                remedy="the whole rows, and a slice of their length",
            )
        cut = context.cut
        return replace(
            self,
            input_ids=None if self.input_ids is None else cut(self.input_ids),
            embeds=None if self.embeds is None else cut(self.embeds),
            position_ids=cut(self.position_ids),
            length=context.own,
            context=context,
            row_positions=self.position_ids,
        )

    def elsewhere(self, cache: Cache | None) -> KeyValues | None:
        """Where layers find the keys and values that they do not compute themselves."""
        return self.context if cache is None else cache

    def masks(self, config: DecoderConfig, cache: Cache | None) -> dict[LayerType, MaskSpec | PieceMasks]:
        """One mask a layer type, built once a forward pass.

        Raises:
            InvalidInput: a cache for a model that looks both ways.
        """
        if cache is not None and not config.attention.causal:
            raise InvalidInput(
                "past_key_values (or use_cache) with attention.causal = False: later tokens change what earlier ones "
                "computed, so their keys cannot be kept.",
                remedy="use_cache=False, and give the whole text at once",
            )
        masks: dict[LayerType, MaskSpec | PieceMasks] = {}
        plain = not config.attention.sinks and config.attention.logit_softcap is None
        for index, layer_type in enumerate(config.layer_types):
            if layer_type in masks:
                continue
            window = config.window(index)
            if self.context is not None:
                pieces = [self._piece(*piece, window, config.attention.causal) for piece in self.context.pieces]
                masks[layer_type] = PieceMasks(tuple(pieces))
                for piece in pieces:
                    piece.prepare(self.position_ids.device, plain=plain)
                continue
            past = 0 if cache is None else len(cache)
            first_key = 0 if cache is None else past - cache.kept(index)
            mask = MaskSpec(
                q_len=self.length,
                kv_len=past - first_key + self.length,
                q_offset=past,
                kv_offset=first_key,
                window=window,
                documents=self.documents,
                key_valid=None if self.key_valid is None else self.key_valid[:, first_key:],
                causal=config.attention.causal,
            )
            mask.prepare(self.position_ids.device, plain=plain)
            masks[layer_type] = mask
        return masks

    def _piece(self, start: int, end: int, window: int | None, causal: bool) -> MaskSpec:
        """What the tokens start..end of the row see of it: of the keys, those that one of them can see at all."""
        assert self.context is not None
        first, last = 0, end if causal else self.context.length
        if causal and window is not None:
            first = max(start - window + 1, 0)
        return MaskSpec(
            q_len=end - start,
            kv_len=last - first,
            q_offset=start,
            kv_offset=first,
            window=window,
            documents=None if self.documents is None else self.documents[:, first:last],
            key_valid=None if self.key_valid is None else self.key_valid[:, first:last],
            causal=causal,
        )


def read_inputs(
    input_ids: Tensor | None,
    embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    cache: Cache | None,
) -> Inputs:
    """Check a batch and derive what it left open.

    Raises:
        InvalidInput: names the argument, its shape and what is expected.
    """
    if (input_ids is None) == (embeds is None):
        raise InvalidInput("give exactly one of input_ids and inputs_embeds.", remedy="drop the other")
    given = input_ids if input_ids is not None else embeds
    if given is None or given.dim() != (2 if embeds is None else 3):
        raise InvalidInput(
            f"{'input_ids' if embeds is None else 'inputs_embeds'} has shape "
            f"{() if given is None else tuple(given.shape)}.",
            remedy="(batch, tokens) for input_ids, (batch, tokens, hidden_size) for inputs_embeds",
        )
    batch, length = given.shape[:2]
    past = 0 if cache is None else len(cache)
    key_valid = _key_valid(attention_mask, batch, past + length)
    documents = None
    if cu_seq_lens is not None:
        documents = _documents_of(cu_seq_lens, batch, length, attention_mask, cache)
        if position_ids is None:
            starts = cu_seq_lens.to(given.device)[documents]
            position_ids = torch.arange(length, device=given.device)[None] - starts
    elif position_ids is not None and attention_mask is None and cache is None:
        documents = _documents_by_restart(position_ids, batch)
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=given.device)[None]
    elif position_ids.shape not in {(batch, length), (1, length)}:
        raise InvalidInput(
            f"position_ids has shape {tuple(position_ids.shape)}.", remedy=f"({batch}, {length}) or (1, {length})"
        )
    return Inputs(input_ids, embeds, position_ids, documents, key_valid, length)


def shifted(labels: Tensor | None, documents: Tensor | None, ignore_index: int = -100) -> Tensor | None:
    """Targets (B, T): the label of the next token, ignored at the end of the row and of every document."""
    if labels is None:
        return None
    targets = torch.full_like(labels, ignore_index)
    targets[:, :-1] = labels[:, 1:]
    if documents is not None:
        border = documents[:, 1:] != documents[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(border, ignore_index)
    return targets


def _key_valid(attention_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, keys):
        raise InvalidInput(
            f"attention_mask has shape {tuple(attention_mask.shape)}.",
            remedy=f"({batch}, {keys}): batch × (cached + new) tokens, 1 for a token and 0 for padding",
        )
    valid = attention_mask != 0
    # Nothing is padded: the plain causal path. Only on the CPU, where looking costs no synchronisation.
    return None if may_look(valid) and bool(valid.all()) else valid


def may_look(tensor: Tensor) -> bool:
    """Whether Python may read data: it stops an accelerator, and breaks a graph that is being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _documents_by_restart(position_ids: Tensor, batch: int) -> Tensor | None:
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if may_look(starts) and not bool(starts.any()):
        return None
    documents = torch.nn.functional.pad(starts.cumsum(-1), (1, 0))
    return documents.expand(batch, -1)


def _documents_of(
    cu_seq_lens: Tensor, batch: int, length: int, attention_mask: Tensor | None, cache: Cache | None
) -> Tensor:
    if batch != 1 or cache is not None or attention_mask is not None:
        raise InvalidInput(
            f"cu_seq_lens_q with a batch of {batch} rows, "
            f"{'no' if cache is None else 'a'} cache and {'no' if attention_mask is None else 'an'} attention_mask.",
            remedy="one packed row, no cache, no attention_mask",
        )
    borders = cu_seq_lens.tolist() if may_look(cu_seq_lens) else None
    if borders is not None and (borders[0] != 0 or borders[-1] != length or borders != sorted(borders)):
        raise InvalidInput(
            f"cu_seq_lens_q = {borders} for {length} tokens.", remedy="rising borders from 0 to the row's length"
        )
    tokens = torch.arange(length, device=cu_seq_lens.device)
    return (torch.searchsorted(cu_seq_lens.to(tokens.dtype), tokens, right=True) - 1)[None]
