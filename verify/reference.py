"""The Hugging Face side: models of the installed transformers, run in true float64.

`.double()` alone is no float64 reference: norms, softmax, RoPE and routers ask for float32 by name. `promoted()`
answers every such request with float64, while the model is built and while it runs, without touching the library's
code. Attention and experts run eagerly, the paths that are written down in the modelling files.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bestiary.verify.inputs import Inputs
from bestiary.verify.placing import CPU, moved, placed
from bestiary.verify.tracing import Trace, traced
from bestiary.verify.weights import Store, centred, perturb

T = TypeVar("T")


class _Promote(TorchFunctionMode):
    """Turns every request for float32 into one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        for item in args:
            if item is torch.float32:
                args = tuple(torch.float64 if item is torch.float32 else item for item in args)
                break
        if not kwargs:
            return func(*args)
        for item in kwargs.values():
            if item is torch.float32:
                kwargs = {key: torch.float64 if item is torch.float32 else item for key, item in kwargs.items()}
                break
        return func(*args, **kwargs)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype set to `dtype` for the length of the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def promoted() -> Iterator[None]:
    """Within the block every request for float32 gets float64."""
    with default_dtype(torch.float64), _Promote():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers' warnings and progress bars off: tiny configs break its rules of thumb on purpose."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if before == logging.CRITICAL and not bars:  # inside another block; to set it again empties logging's caches
        yield
        return
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def reference_class(reference: str) -> Any:
    """The class that a bridge's `reference` names, e.g. "transformers:Qwen3ForCausalLM"."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def hf_config(reference: str, raw: Mapping[str, Any]) -> Any:
    """A fresh config object of the reference class from config.json content."""
    cls = reference_class(reference).config_class
    with quiet():
        return cls.from_dict(json.loads(json.dumps(raw)))


def build(
    reference: str, raw: Mapping[str, Any], dtype: torch.dtype = torch.float64, *, initialised: bool = True
) -> nn.Module:
    """A model in eval mode with eager attention and experts; float64 is built under promotion.

    Args:
        initialised: False: without drawing weights, for a caller that sets every one. Parameters that a constructor
            fills itself (norms) are as it leaves them, the others are undefined.
    """
    from transformers.initialization import no_init_weights

    config = hf_config(reference, raw)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    cls = reference_class(reference)
    with quiet(), promoted() if dtype is torch.float64 else default_dtype(dtype):
        if initialised:
            model = cls(config)
        else:
            with no_init_weights():  # that skips the tie of the head as well
                model = cls(config)
            model.tie_weights()
    if dtype is not torch.float64:
        _keep_in_fp32(model)
    return cast(nn.Module, model.eval())


def is_kept_in_fp32(model_class: Any, name: str) -> bool:
    """Whether transformers holds the tensor `name` in float32 whatever the model's dtype."""
    patterns = model_class._keep_in_fp32_modules_strict or ()  # the others are for float16 alone
    return any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in patterns)


def _keep_in_fp32(model: nn.Module) -> None:
    """What `from_pretrained` does: some tensors stay wide in a narrow model."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_kept_in_fp32(type(model), name):
            tensor.data = tensor.data.float()


class Reference:
    """One Hugging Face model with perturbed weights and the answers it gave, each computed once.

    Args:
        reference: "transformers:ClassName".
        raw: config.json content.
        seed: of the weights.
        dtype: float64 (promoted) or float32 (plain).
        mutate: planted change of the model, applied after the weights are set.
        store: weights shared with other references.
        device: where it computes; its answers come back to the CPU.

    Attributes:
        model: the module.   config: its config object.
    """

    def __init__(
        self,
        reference: str,
        raw: Mapping[str, Any],
        seed: int,
        *,
        dtype: torch.dtype = torch.float64,
        mutate: Callable[[nn.Module], None] | None = None,
        store: Store | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.dtype = dtype
        self.model = build(reference, raw, dtype, initialised=False)
        if not centred(self.model):
            self.model = build(reference, raw, dtype)
        self.config: Any = self.model.config
        perturb(self.model, seed, store if mutate is None else None)
        if mutate is not None:
            mutate(self.model)
        placed(self.model, device)
        self._memo: dict[tuple[str, str], Any] = {}
        self._bare = [
            module
            for module in self.model.modules()
            if not list(module.parameters(recurse=False)) and not list(module.children())
        ]

    def once(self, question: str, inputs: Inputs, answer: Callable[[], T]) -> T:
        """`answer()` at the first time that `question` is asked about `inputs`."""
        key = (question, inputs.key)
        if key not in self._memo:
            self._memo[key] = answer()
        answered: T = self._memo[key]
        return answered

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """The model, in the precision of this reference; what a forward leaves behind in it is undone.

        Dynamic and LongRoPE frequencies are kept between calls by Hugging Face and depend on earlier lengths, and a
        second LongRoPE call with nested parameters fails there.
        """
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in self._bare]
        try:
            with quiet():
                if self.dtype is torch.float64:
                    with promoted():
                        yield self.model
                else:
                    yield self.model
        finally:
            for module, attributes, buffers in before:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)

    def state(self) -> dict[str, Tensor]:
        """The state dict: parameters and persistent buffers under Hugging Face's module names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def call(self, inputs: Inputs, **extra: Any) -> dict[str, Any]:
        """One forward without gradients; tensors detached."""
        with self.running() as model, torch.no_grad():
            return dict(model(**inputs.kwargs(), **extra))

    def new_cache(self) -> dict[str, Any]:
        """An empty key/value cache as a keyword argument, under the name that this version's forward gives it."""
        from transformers import DynamicCache

        names = inspect.signature(type(self.model).forward).parameters
        return {"cache" if "cache" in names else "past_key_values": DynamicCache(config=self.config)}

    def output(self, inputs: Inputs) -> dict[str, Any]:
        """Forward output (logits, loss and aux_loss where there are labels), without a cache, computed once."""
        return self.once("output", inputs, lambda: self.call(inputs, use_cache=False, return_dict=True))

    def train_output(self, inputs: Inputs, seed: int) -> dict[str, Any]:
        """Forward output in train mode, torch's generator at `seed`, computed once."""

        def answer() -> dict[str, Any]:
            self.model.train()
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    return self.call(inputs, use_cache=False, return_dict=True)
            finally:
                self.model.eval()

        return self.once(f"train {seed}", inputs, answer)

    def logits(self, inputs: Inputs) -> Tensor:
        """Logits (B, T, V)."""
        logits: Tensor = self.output(inputs)["logits"]
        return logits

    def trace(self, inputs: Inputs) -> Trace:
        """Inputs and outputs of every module in one forward without labels."""
        plain = inputs.without_labels()

        def answer() -> Trace:
            with self.running() as model, torch.no_grad():
                return traced(model, lambda: model(**plain.kwargs(), use_cache=False))

        return self.once("trace", plain, answer)

    def gradients(
        self, inputs: Inputs, loss: Callable[[dict[str, Any]], Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
        """Output and the gradient of its loss for every parameter and for "inputs_embeds".

        The embeddings are computed inside the model and tapped at their output, so both paths of a tied matrix count.

        Args:
            loss: of the output, one for each model; None: the model's own, which needs labels.
        """

        def answer() -> tuple[dict[str, Any], dict[str, Tensor | None]]:
            taps: list[Tensor] = []
            embedding = cast(Any, self.model).get_input_embeddings()

            def tap(_module: nn.Module, _args: Any, output: Tensor) -> None:
                output.retain_grad()
                taps.append(output)

            handle = embedding.register_forward_hook(tap)
            try:
                with self.running() as model:
                    model.zero_grad(set_to_none=True)
                    output = dict(model(**inputs.kwargs(), use_cache=False))
                    (output["loss"] if loss is None else loss(output)).backward()
            finally:
                handle.remove()
            grads = {name: moved(parameter.grad, CPU) for name, parameter in self.model.named_parameters()}
            grads["inputs_embeds"] = moved(taps[0].grad, CPU)
            self.model.zero_grad(set_to_none=True)
            plain = {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
            return plain, grads

        return self.once("gradients", inputs, answer)


class ReferencePool:
    """References shared between levels and between runs (self-test plants many bugs in front of the same ones).

    Args:
        device: where they compute.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._built: dict[str, Reference] = {}
        self._remembered: dict[Hashable, Any] = {}
        self._weights: Store = {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` at first use of `key`: findings about references that later runs need again."""
        if key not in self._remembered:
            self._remembered[key] = make()
        made: T = self._remembered[key]
        return made

    def get(
        self,
        reference: str,
        raw: Mapping[str, Any],
        seed: int,
        *,
        dtype: torch.dtype = torch.float64,
        mutate: Callable[[nn.Module], None] | None = None,
    ) -> Reference:
        """The reference of this config and seed, built at first use."""
        key = json.dumps([reference, raw, seed, str(dtype)], sort_keys=True)
        if key not in self._built:
            self._built[key] = Reference(
                reference, raw, seed, dtype=dtype, mutate=mutate, store=self._weights, device=self.device
            )
        return self._built[key]
