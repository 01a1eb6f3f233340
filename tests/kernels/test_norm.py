"""RMSNorm and LayerNorm, bit for bit against the classes of transformers."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bestiary.kernels.norm import rms_norm
from bestiary.verify.reference import promoted

STYLES: dict[type[nn.Module], dict[str, bool]] = {
    Qwen3RMSNorm: {},
    GptOssRMSNorm: {"scale_then_cast": True},
    Olmo2RMSNorm: {"scale_then_cast": True},
    Gemma3RMSNorm: {"scale_then_cast": True, "plus_one": True},
    Cohere2LayerNorm: {"scale_then_cast": True, "centred": True},
}
EPS = 1e-3


def setting(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 80, generator=generator, dtype=torch.float64)
    return (x * 3).to(dtype), torch.randn(80, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theirs", STYLES)
def test_bit_equal_with_transformers(theirs: type[nn.Module], dtype: torch.dtype) -> None:
    """In every dtype; float64 with transformers' requests for fp32 promoted."""
    x, weight = setting(dtype)
    reference = theirs(80, eps=EPS)
    reference.weight = nn.Parameter(weight)
    if dtype is torch.float64:
        with promoted():
            expected = reference(x)
    else:
        expected = reference(x)
    ours = rms_norm(x, weight, EPS, **STYLES[theirs])
    assert ours.dtype == dtype
    assert torch.equal(ours, expected)


def test_the_styles_differ_in_bf16() -> None:
    """Otherwise the test above could not tell them apart."""
    x, weight = setting(torch.bfloat16)
    results = [rms_norm(x, weight, EPS, scale_then_cast=late) for late in (False, True)]
    assert not torch.equal(*results)


@pytest.mark.parametrize("style", STYLES.values())
def test_gradcheck(style: dict[str, bool]) -> None:
    """Input and weight."""
    x, weight = (tensor.requires_grad_() for tensor in setting(torch.float64))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, **style), (x[:3], weight), fast_mode=True)


def test_large_values_do_not_overflow() -> None:
    """The square of 300 is beyond fp16; the mean runs in fp32."""
    x = torch.full((2, 80), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(80, dtype=torch.float16), EPS), torch.ones_like(x))


def test_the_dtype_of_the_input_comes_out_whatever_the_weight_has() -> None:
    """fp32 weights under a bf16 stream."""
    x, weight = setting(torch.bfloat16)
    for late in (False, True):
        assert rms_norm(x, weight.float(), EPS, scale_then_cast=late).dtype == torch.bfloat16
