"""What level K runs: a small model with chosen implementations, forward and backward, on every kind of input.

Weights are those of the tiny configs' recipe, rounded to bfloat16 once, so that float64, float32 and bfloat16 compute
with the same numbers. Routers take the experts that the float64 reference took: a flipped expert is no rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_attention
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bestiary.kernels.dispatch import OPERATIONS, Log, force, record
from bestiary.kernels.divergence import TeacherHead, linear_divergence
from bestiary.kernels.selected import linear_selected_log_prob
from bestiary.models import Cache, Decoder, LoRAConfig
from bestiary.models.config import DecoderConfig
from bestiary.models.layers.moe import Router
from bestiary.verify.aligned import BATCH, LENGTH
from bestiary.verify.inputs import tokens
from bestiary.verify.planted.patching import swapped
from bestiary.verify.weights import perturb

TEMPERATURE = 0.7
LORA = LoRAConfig(r=8, alpha=12, targets=("*_proj",))
CHUNKS = (32, 1, 1, 30, 1, 32, 1, 32, 20)  # of cached decoding: several at once, step by step, past the window

REFERENCES: Mapping[str, str] = {name: operation.reference for name, operation in OPERATIONS.items()}


@dataclass(frozen=True)
class Answer:
    """Outputs at tokens (padding left out), gradients by parameter (None where there is none), and what ran."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    log: Log


@dataclass
class Routes:
    """The experts that every router chose in the run that sets the truth, by module name: (B, T, K)."""

    chosen: dict[str, Tensor] = field(default_factory=dict)
    span: slice = field(default_factory=lambda: slice(None))

    @contextmanager
    def followed(self, model: Decoder, batch: int) -> Iterator[None]:
        """Routers of `model` choose as before; at the first run what they choose is kept."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if isinstance(module, Router):
                    stack.enter_context(swapped(module, "forward", self._routing(name, module, batch)))
            yield

    def _routing(self, name: str, router: Router, batch: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        route = router.forward

        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if name not in self.chosen:
                logits, weights, indices = route(x)
                self.chosen[name] = indices.unflatten(0, (batch, -1))
                return logits, weights, indices
            indices = self.chosen[name][:, self.span].flatten(0, 1)
            with _Chosen(indices, router.num_experts):
                return route(x)

        return forward


class _Chosen(TorchFunctionMode):
    """Answers `topk` over all experts with the experts it is given."""

    def __init__(self, indices: Tensor, experts: int) -> None:
        super().__init__()
        self._indices, self._experts = indices, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and args[0].shape == (self._indices.shape[0], self._experts):
            make: Any = type(func(*args, **(kwargs or {})))
            return make((args[0].gather(-1, self._indices), self._indices))
        return func(*args, **(kwargs or {}))


@dataclass
class Bench:
    """One aligned config: its models in every dtype, and what the reference of each kind of input answers.

    Args:
        build: gives the float64 model of a config.
        config: the architecture.
        seed: of weights and inputs.
    """

    build: Callable[[DecoderConfig], Decoder]
    config: DecoderConfig
    seed: int
    _models: dict[tuple[torch.dtype, bool], Decoder] = field(default_factory=dict)
    _references: dict[tuple[str, torch.dtype], Answer] = field(default_factory=dict)
    _routes: dict[str, Routes] = field(default_factory=dict)

    def model(self, dtype: torch.dtype, *, lora: bool = False) -> Decoder:
        """The model in `dtype`, in eval mode, every weight a bfloat16 number."""
        if (dtype, lora) not in self._models:
            if dtype is torch.float64:
                config = self.config.with_(lora=LORA) if lora else self.config
                made = self.build(config)
                perturb(made, self.seed)
                with torch.no_grad():
                    for parameter in made.parameters():
                        parameter.copy_(parameter.to(torch.bfloat16))
            else:
                made = deepcopy(self.model(torch.float64, lora=lora)).to(dtype)
            self._models[dtype, lora] = made.eval()
        return self._models[dtype, lora]

    def ids(self, salt: int = 0) -> Tensor:
        """(B, T) token ids."""
        return tokens(self.config.vocab_size, BATCH, LENGTH, 1000 * self.seed + salt)

    def normal(self, *shape: int, salt: int) -> Tensor:
        """Standard normal numbers that are bfloat16 numbers, in float64."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(shape, generator=generator).to(torch.bfloat16).double()

    def truth(self, kind: str) -> Answer:
        """The reference in float64."""
        return self.reference(kind, torch.float64)

    def reference(self, kind: str, dtype: torch.dtype) -> Answer:
        """The answer with every operation in its reference implementation, computed once.

        Without a cache in float64: that is the truth for decoding too.
        """
        if (kind, dtype) not in self._references:
            if dtype is not torch.float64:
                self.truth(kind)
            self._references[kind, dtype] = self.run(kind, dtype, REFERENCES, cached=dtype is not torch.float64)
        return self._references[kind, dtype]

    def run(
        self, kind: str, dtype: torch.dtype, forced: Mapping[str, str], *, trains: bool = True, cached: bool = True
    ) -> Answer:
        """One answer.

        Args:
            kind: one of `KINDS`.
            forced: operation → implementation.
            trains: whether to run the backward pass, where the kind has one.
            cached: whether decoding uses the cache.
        """
        model, probe = self.model(dtype, lora=kind == "lora"), KINDS[kind]
        routes = self._routes.setdefault(kind, Routes())
        graded = trains and kind != "decode"
        # FlexAttention's CPU form is one operator: dynamo would trace for seconds what it then runs as it is.
        model.zero_grad(set_to_none=True)
        with (
            swapped(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
            force(**forced),
            record() as log,
            routes.followed(model, BATCH),
            torch.set_grad_enabled(graded),
        ):
            values, scalar, leaves = probe(self, model, Call(routes, cached))
            if graded:
                scalar.backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items()} if graded else {}
        model.zero_grad(set_to_none=True)
        return Answer({name: value.detach() for name, value in values.items()}, gradients, log)


# ------------------------------------------------------------------------------------------------ kinds of input


@dataclass(frozen=True)
class Call:
    """How a probe is to run: where routers look up their choice, and whether decoding uses a cache."""

    routes: Routes
    cached: bool


Probed = tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]
"""Values to compare, the scalar whose gradients are compared, and the tensors they are taken for."""


def _trained(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _labelled(model: Decoder, ids: Tensor, **extra: Any) -> Probed:
    labels = ids.clone()
    labels[:, 5::7] = -100
    mask = extra.get("attention_mask")
    if mask is not None:  # what stands behind padding is not predicted: queries of padding have no meaning
        labels[:, 0] = -100
        labels[:, 1:][(mask[:, 1:] == 0) | (mask[:, :-1] == 0)] = -100
    output = model(ids, labels=labels, return_logits=True, **extra)
    logits = output["logits"] if mask is None else output["logits"][mask == 1]
    return (
        {"logits": logits, "log_probs": output["log_probs"], "loss": output["loss"]},
        output["loss"],
        _trained(model),
    )


def _loss(bench: Bench, model: Decoder, call: Call) -> Probed:
    """Plain rows; the loss takes the gradients in its forward pass."""
    return _labelled(model, bench.ids())


def _per_token(bench: Bench, model: Decoder, call: Call) -> Probed:
    """Log-probabilities of given targets at a temperature, weighted as by advantages."""
    targets = bench.ids(salt=1)
    targets[:, ::6] = -100
    log_probs = model(bench.ids(), shift_labels=targets, temperature=TEMPERATURE)["log_probs"]
    weights = bench.normal(BATCH, LENGTH, salt=2).to(log_probs.dtype)
    return {"log_probs": log_probs}, (weights * log_probs).mean(), _trained(model)


def _packed(bench: Bench, model: Decoder, call: Call) -> Probed:
    """Documents told apart by positions that restart, in another order in every row."""
    counts = [LENGTH // 2 + 21, 1, LENGTH // 2 - 22]
    orders = [counts if row % 2 == 0 else counts[::-1] for row in range(BATCH)]
    positions = torch.stack([torch.cat([torch.arange(count) for count in order]) for order in orders])
    return _labelled(model, bench.ids(salt=3), position_ids=positions)


def _padded(bench: Bench, model: Decoder, call: Call) -> Probed:
    """One row padded on the left, the others on the right."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, :9] = 0
    for row in range(1, BATCH):
        mask[row, LENGTH - 30 * row :] = 0
    return _labelled(model, bench.ids(salt=4), attention_mask=mask)


def _decode(bench: Bench, model: Decoder, call: Call) -> Probed:
    """Logits of a text fed through a cache in chunks; the truth is one forward over all of it."""
    ids = bench.ids(salt=5)
    if not call.cached:
        logits = model(ids)["logits"]
        return {"logits": logits}, logits.sum(), {}
    cache, found, start = Cache(model.decoder_config), [], 0
    try:
        for count in CHUNKS:
            call.routes.span = slice(start, start + count)
            found.append(model(ids[:, call.routes.span], past_key_values=cache, use_cache=True)["logits"])
            start += count
    finally:
        call.routes.span = slice(None)
    logits = torch.cat(found, dim=1)
    return {"logits": logits}, logits.sum(), {}


def _distilled(bench: Bench, model: Decoder, call: Call) -> Probed:
    """The head against a teacher: its full vocabulary, and the words that it lists."""
    dtype, graded = model.model.norm.weight.dtype, torch.is_grad_enabled()
    count, vocabulary, size = BATCH * LENGTH, bench.config.vocab_size, bench.config.hidden_size
    hidden, other = (bench.normal(count, size, salt=salt).to(dtype) for salt in (6, 7))
    weight, head = (bench.normal(vocabulary, size, salt=salt).div(8).to(dtype) for salt in (8, 9))
    hidden, weight = hidden.requires_grad_(graded), weight.requires_grad_(graded)
    teacher = TeacherHead(other, head)
    options: dict[str, Any] = {"softcap": bench.config.final_logit_softcap, "temperature": TEMPERATURE}
    first = bench.ids(salt=10).flatten()
    words = torch.stack((first, (first + 1) % vocabulary), dim=1)
    named = linear_selected_log_prob(hidden, weight, words, **options)
    values = {
        "forward_kl": linear_divergence(hidden, weight, teacher, kind="forward_kl", **options),
        "jsd": linear_divergence(hidden, weight, teacher, kind="jsd", reduction="none", **options),
        "log_prob": named.log_prob,
        "log_rest": named.log_rest,
    }
    scalar = torch.stack([value.mean() for value in values.values()]).sum()
    return values, scalar, {"hidden": hidden, "weight": weight}


KINDS: Mapping[str, Callable[[Bench, Decoder, Call], Probed]] = {
    "loss": _loss,
    "per token": _per_token,
    "packed": _packed,
    "padded": _padded,
    "decode": _decode,
    "lora": _loss,
    "distilled": _distilled,
}
