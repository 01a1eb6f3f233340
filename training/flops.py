"""FLOPs of a training step, product by product, from a `DecoderConfig` alone.

What is counted, so that a number can be compared:

    matrix products     2 · rows · in · out forward, as much again for the gradient of the input where one has to flow
                        (dX), and of the weight where it trains (dW)
    attention           scores and values of *visible pairs*: query and key of one document, inside the window
    experts             the ones a token is routed to; the router; the shared expert
    head                positions that have a target
    adapters            their two products, beside the frozen one
    not counted         embedding (a lookup), norms, RoPE, activations, softmax, optimiser; padding of tokens and of
                        the vocabulary; what a kernel computes again inside itself

Activation checkpointing computes blocks, or parts of them, a second time. That is work of the hardware and not of the
model: it is in `hardware` (HFU) and not in `model` (MFU). The convention is that of PaLM (arXiv:2204.02311, appendix
B), but for pairs that no query sees, and weights without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bestiary.models import Decoder
from bestiary.models.config import DecoderConfig, MoE, NormPlacement
from bestiary.models.lora import ADAPTER_LEAVES, adapter
from bestiary.models.recomputation import Part

CONVENTION = "visible pairs, active experts, targets alone through the head; no embedding, no recomputation in MFU"
"""One line to print beside a figure."""

Unit = Literal["token", "pair", "target"]
Trainable = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the model and its FLOPs for one `unit`.

    Attributes:
        name: of the weight's module; of attention `model.layers.N.self_attn.attention`, of adapters `….lora_A`.
        unit: what the numbers are multiplied by: tokens, visible (query, key) pairs under `window`, or targets.
        forward, d_input, d_weight: FLOPs; of attention all that flows back is `d_input`.
        recompute: FLOPs that activation checkpointing repeats.
    """

    name: str
    unit: Unit
    forward: int
    d_input: int
    d_weight: int
    recompute: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class FlopRow:
    """FLOPs of one product in one step; see `Product`."""

    name: str
    forward: int
    d_input: int
    d_weight: int
    recompute: int

    @property
    def model(self) -> int:
        """Forward, dX and dW."""
        return self.forward + self.d_input + self.d_weight


@dataclass(frozen=True)
class FlopReport:
    """FLOPs of one step by product, in the order of the forward pass; sums of reports are reports of all their work."""

    rows: tuple[FlopRow, ...]
    convention: str = CONVENTION

    @property
    def forward(self) -> int:
        """Of the forward pass."""
        return sum(row.forward for row in self.rows)

    @property
    def d_input(self) -> int:
        """Of gradients of activations."""
        return sum(row.d_input for row in self.rows)

    @property
    def d_weight(self) -> int:
        """Of gradients of weights."""
        return sum(row.d_weight for row in self.rows)

    @property
    def model(self) -> int:
        """What MFU counts: forward, dX and dW."""
        return sum(row.model for row in self.rows)

    @property
    def hardware(self) -> int:
        """What HFU counts: that and what activation checkpointing computes again."""
        return self.model + sum(row.recompute for row in self.rows)

    def by_leaf(self) -> dict[str, int]:
        """`model` FLOPs summed over layers, by the last part of the name: q_proj, attention, lm_head, …"""
        sums: dict[str, int] = {}
        for row in self.rows:
            leaf = row.name.rsplit(".", 1)[-1]
            sums[leaf] = sums.get(leaf, 0) + row.model
        return sums

    def as_json(self) -> dict[str, Any]:
        """Totals, the convention and the rows as plain JSON values."""
        totals = {name: getattr(self, name) for name in ("forward", "d_input", "d_weight", "model", "hardware")}
        return {**totals, "convention": self.convention, "rows": [asdict(row) for row in self.rows]}

    def __add__(self, other: FlopReport) -> FlopReport:
        return FlopReport(self.rows + other.rows, self.convention)


@dataclass(frozen=True, slots=True)
class Totals:
    """FLOPs that MFU and HFU count."""

    model: int
    hardware: int


class StepFlops:
    """Products of a model that trains in some way, ready to be multiplied by what a step holds.

    Args:
        config: of the model, LoRA included.
        trainable: whether the parameter of a name trains, e.g. `names.__contains__`; a tied head goes by the name of
            the embedding. None: all of them, or with LoRA the adapters alone.
        backward: False for a model that is only asked: a reference, a teacher, an evaluation.
        labels: outputs of a score head (`score`) in the place of the vocabulary; its targets are sequences.

    Attributes:
        products: in the order of the forward pass.
        scores_documents: whether the head sees one position of each document: there are `labels`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        trainable: Trainable | None = None,
        backward: bool = True,
        labels: int | None = None,
    ) -> None:
        if not backward:
            trainable = _nothing
        elif trainable is None:
            trainable = trained_by_default(config)
        self.config, self.scores_documents = config, labels is not None
        self.products = tuple(_Walk(config, trainable).model(labels))
        self._sums: dict[tuple[Unit, int | None], Totals] = {}
        for product in self.products:
            key = (product.unit, product.window)
            model = product.forward + product.d_input + product.d_weight
            before = self._sums.get(key, Totals(0, 0))
            self._sums[key] = Totals(before.model + model, before.hardware + model + product.recompute)

    @classmethod
    def of(cls, model: Decoder, *, backward: bool = True) -> StepFlops:
        """Of a model as it stands: what of it trains, and whether it is under activation checkpointing.

        Args:
            backward: False for a model that is only asked.
        """
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        config = model.decoder_config.with_(activation_checkpointing=model.model.checkpointing or False)
        return cls(config, trainable=trains.__contains__, backward=backward)

    def report(self, lengths: Sequence[int], targets: int) -> FlopReport:
        """FLOPs by product.

        Args:
            lengths: tokens of each document; padding is none.
            targets: positions with a label (of a score head: sequences).
        """
        count = self._counts(lengths, targets)
        rows = []
        for product in self.products:
            units = count[product.unit, product.window]
            parts = (product.forward, product.d_input, product.d_weight, product.recompute)
            rows.append(FlopRow(product.name, *(part * units for part in parts)))
        return FlopReport(tuple(rows))

    def totals(self, lengths: Sequence[int], targets: int) -> Totals:
        """The sums of `report`, at the cost of one pass over the lengths."""
        count = self._counts(lengths, targets)
        model = sum(total.model * count[key] for key, total in self._sums.items())
        return Totals(model, sum(total.hardware * count[key] for key, total in self._sums.items()))

    def _counts(self, lengths: Sequence[int], targets: int) -> Mapping[tuple[Unit, int | None], int]:
        causal = self.config.attention.causal
        fixed: Mapping[Unit, int] = {"token": sum(lengths), "target": targets}
        return {
            (unit, window): sum(visible_pairs(n, window, causal=causal) for n in lengths)
            if unit == "pair"
            else fixed[unit]
            for unit, window in self._sums
        }


def step_flops(
    config: DecoderConfig,
    *,
    lengths: Sequence[int],
    loss_tokens: int,
    trainable: Trainable | None = None,
    backward: bool = True,
    labels: int | None = None,
) -> FlopReport:
    """FLOPs of one step by product; arguments as for `StepFlops`, lengths of documents and number of targets."""
    flops = StepFlops(config, trainable=trainable, backward=backward, labels=labels)
    return flops.report(lengths, loss_tokens)


def visible_pairs(length: int, window: int | None = None, *, causal: bool = True) -> int:
    """(query, key) pairs of a document of `length` tokens: itself and all before it, at most `window` tokens.

    Not `causal`: those behind it too, with a window of W the W − 1 to either side, as `kernels.attention` masks.
    """
    reach = length if window is None else min(length, window)
    back = reach * (reach + 1) // 2 + (length - reach) * reach
    return back if causal else 2 * back - length


def trained_by_default(config: DecoderConfig) -> Trainable:
    """All parameters, or with LoRA the adapters alone."""
    return _everything if config.lora is None else _adapters


def _nothing(name: str) -> bool:
    return False


def _everything(name: str) -> bool:
    return True


def _adapters(name: str) -> bool:
    return name.endswith(ADAPTER_LEAVES)


class _Walk:
    """The forward pass with flags in the place of tensors: whether a gradient has to flow to each of them."""

    def __init__(self, config: DecoderConfig, trainable: Trainable) -> None:
        self.config, self.trains = config, trainable
        self.found: list[Product] = []

    def model(self, labels: int | None) -> list[Product]:
        live = self.trains("model.embed_tokens.weight")
        for index in range(self.config.num_hidden_layers):
            start = len(self.found)
            attended, live = self._block(index, live)
            found = self.found[start:]
            self.found[start:] = [self._repeated(product, index, attended, live) for product in found]
        live |= self.trains("model.norm.weight")
        tied = self.config.tie_word_embeddings and labels is None
        name, columns = ("lm_head", self.config.vocab_size) if labels is None else ("score", labels)
        weight = "model.embed_tokens.weight" if tied else f"{name}.weight"
        self._add(name, "target", self.config.hidden_size * columns, live, self.trains(weight))
        return self.found

    def _repeated(self, product: Product, index: int, attended: bool, live: bool) -> Product:
        """With what is computed again of it, where something flows back to the half or the block that would be."""
        checkpointing = self.config.checkpointing
        part = None if checkpointing is None else checkpointing.of(index)
        of_attention = ".self_attn." in product.name
        again = {
            None: False,
            Part.FULL: live,
            Part.SELECTIVE: product.unit != "pair" and (attended if of_attention else live),
            Part.ATTENTION: of_attention and attended,
            Part.MLP: not of_attention and live,
        }[part]
        return replace(product, recompute=product.forward) if again else product

    def _block(self, index: int, live: bool) -> tuple[bool, bool]:
        """Whether a gradient flows to what attention leaves behind, and to what the block does."""
        name, placement = f"model.layers.{index}", self.config.norm.placement
        sandwich = placement is NormPlacement.SANDWICH
        parallel = placement is NormPlacement.PARALLEL
        taken = live
        if placement is not NormPlacement.POST:
            taken |= self.trains(f"{name}.input_layernorm.weight")
        attended = self._attention(f"{name}.self_attn", index, taken)
        if sandwich or placement is NormPlacement.POST:
            attended |= self.trains(f"{name}.post_attention_layernorm.weight")
        live = middle = live or attended
        fed = taken if parallel else live
        if placement is NormPlacement.PRE:
            fed |= self.trains(f"{name}.post_attention_layernorm.weight")
        elif sandwich:
            fed |= self.trains(f"{name}.pre_feedforward_layernorm.weight")
        moe = self.config.moe
        if moe is not None and self.config.is_moe_layer(index):
            out = self._experts(f"{name}.mlp", moe, fed)
        else:
            out = self._mlp(f"{name}.mlp", self.config.intermediate_size, fed)
        if sandwich or placement is NormPlacement.POST:
            out |= self.trains(f"{name}.post_feedforward_layernorm.weight")
        return middle, live or out

    def _attention(self, name: str, index: int, x: bool) -> bool:
        heads, hidden = self.config.attention, self.config.hidden_size
        q, k, v = self._heads(name, x) if heads.mla is None else self._latent_heads(name, x)
        scores = q or k or (heads.sinks and self.trains(f"{name}.sinks"))
        score, value = 2 * heads.num_heads * heads.head_dim, 2 * heads.num_heads * heads.v_head_dim
        back = score * (q + k) + value * (scores + v)
        window = self.config.window(index)
        self.found.append(Product(f"{name}.attention", "pair", score + value, back, 0, window=window))
        out = heads.num_heads * heads.v_head_dim
        return self._linear(f"{name}.o_proj", out, hidden, scores or v, bias=heads.out_bias)

    def _heads(self, name: str, x: bool) -> tuple[bool, bool, bool]:
        heads, hidden = self.config.attention, self.config.hidden_size
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q = self._linear(f"{name}.q_proj", hidden, q_size, x, bias=heads.qkv_bias)
        k = self._linear(f"{name}.k_proj", hidden, kv_size, x, bias=heads.qkv_bias)
        v = self._linear(f"{name}.v_proj", hidden, kv_size, x, bias=heads.qkv_bias)
        if heads.qk_norm is not None:
            q, k = q or self.trains(f"{name}.q_norm.weight"), k or self.trains(f"{name}.k_norm.weight")
        return q, k, v

    def _latent_heads(self, name: str, x: bool) -> tuple[bool, bool, bool]:
        heads, hidden, mla = self.config.attention, self.config.hidden_size, self.config.attention.mla
        assert mla is not None
        q_size = heads.num_heads * heads.head_dim
        if mla.q_lora_rank is None:
            q = self._linear(f"{name}.q_proj", hidden, q_size, x)
        else:
            latent = self._linear(f"{name}.q_a_proj", hidden, mla.q_lora_rank, x, bias=heads.qkv_bias)
            latent |= self.trains(f"{name}.q_a_layernorm.weight")
            q = self._linear(f"{name}.q_b_proj", mla.q_lora_rank, q_size, latent)
        size = mla.kv_lora_rank + mla.qk_rope_head_dim
        narrow = self._linear(f"{name}.kv_a_proj_with_mqa", hidden, size, x, bias=heads.qkv_bias)
        latent = narrow or self.trains(f"{name}.kv_a_layernorm.weight")
        size = heads.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        wide = self._linear(f"{name}.kv_b_proj", mla.kv_lora_rank, size, latent)
        return q, wide or narrow, wide

    def _mlp(self, name: str, width: int, x: bool) -> bool:
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        inner = self.config.mlp_gated and self._linear(f"{name}.gate_proj", hidden, width, x, bias=bias)
        inner |= self._linear(f"{name}.up_proj", hidden, width, x, bias=bias)
        return self._linear(f"{name}.down_proj", width, hidden, inner, bias=bias)

    def _experts(self, name: str, moe: MoE, x: bool) -> bool:
        hidden, width, chosen = self.config.hidden_size, moe.intermediate_size, moe.router.top_k
        out = self._linear(f"{name}.gate", hidden, moe.num_experts, x, bias=moe.router.bias)
        inner = self._linear(f"{name}.experts.gate_up_proj", hidden, 2 * width, x, bias=moe.bias, experts=chosen)
        out |= self._linear(f"{name}.experts.down_proj", width, hidden, inner, bias=moe.bias, experts=chosen)
        if moe.shared is not None:
            out |= self._mlp(f"{name}.shared_expert", moe.shared.intermediate_size, x)
            if moe.shared.gated:
                out |= self._linear(f"{name}.shared_expert_gate", hidden, 1, x)
        return out

    def _linear(self, name: str, inputs: int, outputs: int, x: bool, *, bias: bool = False, experts: int = 0) -> bool:
        """x Wᵀ + b and its adapter, for a token or for its experts; whether a gradient flows to the result."""
        rows, dot, weight = (experts, "_", name) if experts else (1, ".", f"{name}.weight")
        trains = self.trains(weight)
        self._add(name, "token", rows * inputs * outputs, x, trains)
        live = x or trains or (bias and self.trains(f"{name}_bias" if experts else f"{name}.bias"))
        lora = adapter(self.config, name)
        if lora is None:
            return live
        down, up = (f"{name}{dot}{leaf}" for leaf in ADAPTER_LEAVES)
        self._add(down, "token", rows * inputs * lora.r, x, self.trains(down))
        low = x or self.trains(down)
        self._add(up, "token", rows * lora.r * outputs, low, self.trains(up))
        return live or low or self.trains(up)

    def _add(self, name: str, unit: Unit, multiply_adds: int, x: bool, trains: bool) -> None:
        flops = 2 * multiply_adds
        self.found.append(Product(name, unit, flops, flops * x, flops * trains))
