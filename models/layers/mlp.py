"""The dense gated MLP."""

from torch import Tensor, nn

from bestiary.kernels.activation import gated
from bestiary.models.config import DecoderConfig
from bestiary.models.layers.linear import Linear
from bestiary.models.lora import adapter


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)).

    Args:
        name: module name in the decoder, which LoRA targets are matched against.
        intermediate_size: width; None: the config's.
    """

    def __init__(self, config: DecoderConfig, name: str, intermediate_size: int | None = None) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.activation = config.activation
        self.gate_proj = Linear(hidden, width, bias, adapter(config, f"{name}.gate_proj"))
        self.up_proj = Linear(hidden, width, bias, adapter(config, f"{name}.up_proj"))
        self.down_proj = Linear(width, hidden, bias, adapter(config, f"{name}.down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))
