"""Huge pages for large parameters: fewer page faults while they are filled."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE = 2 * 2**20


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask the kernel to back `tensor` by 2 MiB pages where it is on the CPU and large; a hint, never an error."""
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or nbytes < 2 * _HUGE or not sys.platform.startswith("linux"):
        return
    begin = -(-tensor.untyped_storage().data_ptr() // _HUGE) * _HUGE
    end = (tensor.untyped_storage().data_ptr() + nbytes) // _HUGE * _HUGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
