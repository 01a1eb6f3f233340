"""Processes that verify beside this one, where torch and transformers are imported once for all of them."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context

import torch

PRELOADED = ["bestiary.verify.api", "bestiary.verify.levels.k_kernels", "transformers.modeling_utils"]


def pool_of(count: int, *, threads: int | None = None) -> ProcessPoolExecutor:
    """A pool of `count` processes, forked from one that has imported the verifier, or spawned where none can be.

    This process itself is never forked: it may have threads, or a device.

    Args:
        threads: of torch in each; None: as torch chooses.
    """
    forked = "forkserver" in get_all_start_methods()
    context = get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload(PRELOADED)
    if threads is None:
        return ProcessPoolExecutor(count, mp_context=context)
    return ProcessPoolExecutor(count, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))
