"""What of this machine lies outside of Python: the C++ compiler, shared libraries."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import sys

NUMA = "libnuma.so.1"  # that vLLM's build for CPUs is linked to


def cxx() -> str | None:
    """Path of the compiler that torch.compile calls for code on the CPU; None: there is none.

    The program in CXX, or g++ (clang++ on macOS), as torch looks for it.
    """
    words = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return shutil.which(words[0]) if words else None


def has_library(name: str) -> bool:
    """Whether the system finds a shared library of that name."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
