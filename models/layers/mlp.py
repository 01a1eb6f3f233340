"""The dense MLP."""

from torch import Tensor, nn

from bestiary.kernels.activation import activated, gated
from bestiary.kernels.gated_linear import gated_linear
from bestiary.models.config import DecoderConfig
from bestiary.models.layers.linear import Linear, is_bare
from bestiary.models.lora import adapter


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), without a gate down(act(up(x))).

    Args:
        name: module name in the decoder, which LoRA targets are matched against.
        intermediate_size: width; None: the config's.
    """

    def __init__(self, config: DecoderConfig, name: str, intermediate_size: int | None = None) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.activation, self.gated = config.activation, config.mlp_gated
        if config.mlp_gated:
            self.gate_proj = Linear(hidden, width, bias, adapter(config, f"{name}.gate_proj"))
        self.up_proj = Linear(hidden, width, bias, adapter(config, f"{name}.up_proj"))
        self.down_proj = Linear(width, hidden, bias, adapter(config, f"{name}.down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) → (B, T, H)."""
        up, down = self.up_proj(x), self.down_proj
        if not self.gated:
            return down(activated(up, self.activation))
        gate = self.gate_proj(x)
        if is_bare(down):
            return gated_linear(gate, up, down.weight, down.bias, self.activation)
        return down(gated(gate, up, self.activation))
