"""The C++ compiler of this machine, which torch.compile calls for code on the CPU."""

from __future__ import annotations

import os
import shlex
import shutil
import sys


def cxx() -> str | None:
    """Its path: the program in CXX, or g++ (clang++ on macOS), as torch looks for it; None: there is none."""
    words = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return shutil.which(words[0]) if words else None
