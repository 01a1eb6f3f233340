"""For tests in which torch.compile makes C++."""

import pytest

from bestiary.kernels.compiler import cxx

NEEDS_COMPILER = pytest.mark.skipif(
    cxx() is None, reason="there is no C++ compiler (g++), which torch.compile calls on a CPU"
)
