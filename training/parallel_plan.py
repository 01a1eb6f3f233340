"""What each module of a family becomes under tensor and expert parallelism: data, derived from canonical names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from bestiary.models.config import DecoderConfig, QKNormSpan
from bestiary.models.decoder import Decoder
from bestiary.models.layers.head import Head
from bestiary.models.lora import matches
from bestiary.training.errors import ParallelRefused


class Style(StrEnum):
    """How a module runs on the ranks of one tensor group. Between blocks activations are the same on all of them.

    Each has the whole gradient of what lies outside a region. Inside one (attention, an MLP) a rank works on its heads
    or columns alone, and what it finds for a replicated parameter is one share of the gradient, summed over the group.
    """

    WHOLE = "whole"  # replicated, outside of regions: norms of the residual stream, routers
    INSIDE = "inside"  # replicated, inside a region: norms of single heads, the low-rank halves of a latent
    REGION = "region"  # an MLP: where its input enters, one all-reduce in the backward pass
    HEADS = "heads"  # attention: a region whose heads, sinks too, are split
    COLUMN = "column"  # weight, bias and lora_B split over outputs, lora_A replicated
    ROW = "row"  # weight and lora_A split over inputs, lora_B and bias replicated; one all-reduce in the forward pass
    GATHERED_NORM = "gathered_norm"  # a norm over all heads together: gathered, normed, cut again
    EXPERTS = "experts"  # whole experts on dim 0, over the tensor group and the expert group together
    VOCABULARY = "vocabulary"  # rows of embedding and head


Entry = tuple[str, Style]


@dataclass(frozen=True)
class ParallelPlan:
    """Styles by module name; the first pattern that means a module counts, and one with parameters needs one.

    Attributes:
        styles: (pattern, style); patterns as those of LoRA targets: a glob over the whole name or its end after a dot.
    """

    styles: tuple[Entry, ...]

    def style(self, name: str) -> Style | None:
        """Of the module `name`; None: no pattern means it."""
        return next((style for pattern, style in self.styles if matches(name, pattern)), None)

    def first(self, *entries: Entry) -> ParallelPlan:
        """With entries that come before the others."""
        return replace(self, styles=(*entries, *self.styles))


def default_plan(config: DecoderConfig) -> ParallelPlan:
    """The plan that every canonical decoder has, from the fields of its config."""
    return ParallelPlan(tuple(_styles(config)))


def plan_of(model: Decoder) -> ParallelPlan:
    """The default plan, behind what the model's family declares of its own.

    Raises:
        ParallelRefused: it declares a style that there is none of.
    """
    entries = []
    for pattern, style in model.parallel_styles:
        if style not in set(Style):
            raise ParallelRefused(
                f"{type(model).__name__}.parallel_styles gives {pattern!r} the style {style!r}.",
                remedy=f"one of {', '.join(Style)}",
            )
        entries.append((pattern, Style(style)))
    if not isinstance(model.head, Head):  # one that scores documents, or was put in its place
        entries += [("score", Style.WHOLE), ("lm_head", Style.WHOLE)]
    return default_plan(model.decoder_config).first(*entries)


def _styles(config: DecoderConfig) -> Iterator[Entry]:
    heads = config.attention
    yield "self_attn", Style.HEADS
    yield "self_attn.o_proj", Style.ROW
    if heads.mla is not None:
        split = ("q_proj", "q_b_proj", "kv_b_proj")
        yield from ((f"self_attn.{leaf}", Style.COLUMN) for leaf in split)
        yield "self_attn.*", Style.INSIDE
    else:
        yield from ((f"self_attn.{leaf}", Style.COLUMN) for leaf in ("q_proj", "k_proj", "v_proj"))
        full = heads.qk_norm is not None and heads.qk_norm.span is QKNormSpan.FULL
        yield "self_attn.?_norm", Style.GATHERED_NORM if full else Style.INSIDE
    yield "mlp.experts", Style.EXPERTS
    yield "mlp.gate", Style.WHOLE
    yield "mlp.shared_expert", Style.REGION
    yield "mlp.shared_expert_gate", Style.WHOLE
    for index in range(config.num_hidden_layers):
        if config.moe is None or not config.is_moe_layer(index):
            yield f"model.layers.{index}.mlp", Style.REGION
    for mlp in ("mlp", "mlp.shared_expert"):
        yield from ((f"{mlp}.{leaf}", Style.COLUMN) for leaf in ("gate_proj", "up_proj"))
        yield f"{mlp}.down_proj", Style.ROW
    yield "*layernorm", Style.WHOLE
    yield "model.norm", Style.WHOLE
    yield "model.embed_tokens", Style.VOCABULARY
    yield "lm_head", Style.VOCABULARY
