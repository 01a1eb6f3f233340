"""New weights into a vLLM that runs in this process, by its own `reload_weights`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def reload(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a vLLM worker in this process; its prefix cache is the caller's.

    Layers keep packed copies of the weights, which a plain `load_weights` does not renew (on a CPU it raises). vLLM
    0.32 packs experts for the CPU when it sets up their kernel and only then (`UnquantizedFusedMoEMethod`): a second
    load would leave them unpacked, and the engine would answer with other probabilities. Without a kernel it sets up
    a new one.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if worker.device.type == "cpu":
        for module in worker.model_runner.get_model().modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
    worker.model_runner.reload_weights(weights_iterator=tensors)
