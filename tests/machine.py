"""For tests that need something of the machine which is not Python."""

from importlib.util import find_spec

import pytest

from bestiary.kernels.system import NUMA, cxx, has_library

NEEDS_COMPILER = pytest.mark.skipif(
    cxx() is None, reason="there is no C++ compiler (g++), which torch.compile calls on a CPU"
)
_VLLM = "vLLM is not installed (tools/requirements/vllm.txt)" if find_spec("vllm") is None else ""
_NUMA = "" if has_library(NUMA) else f"vLLM needs {NUMA} of the system (Debian: apt-get install libnuma1)"
NEEDS_VLLM = pytest.mark.skipif(bool(_VLLM or _NUMA), reason=_VLLM or _NUMA)


def require_vllm() -> None:
    """The same inside a fixture."""
    if _VLLM or _NUMA:
        pytest.skip(_VLLM or _NUMA)
