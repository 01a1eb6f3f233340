"""RMSNorm (or LayerNorm without a bias) in the style that the config names."""

import torch
from torch import Tensor, nn

from bestiary.kernels.norm import rms_norm
from bestiary.models.config import Norm, NormCast


class RMSNorm(nn.Module):
    """Normalises the last dimension; weight (size,), starting at 1, or at 0 where the model scales by 1 + weight."""

    def __init__(self, size: int, config: Norm) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size))
        self.reset()

    def reset(self) -> None:
        """Weight of the identity scale."""
        nn.init.constant_(self.weight, 0.0 if self.config.plus_one else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) → (..., size)."""
        style = self.config
        return rms_norm(
            x,
            self.weight,
            style.eps,
            plus_one=style.plus_one,
            scale_then_cast=style.cast is NormCast.SCALE_THEN_CAST,
            centred=style.subtract_mean,
        )

    def extra_repr(self) -> str:
        """Size and style, for `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.config.eps}, plus_one={self.config.plus_one}"
