"""Token embeddings."""

import torch
from torch import Tensor, nn

from bestiary.kernels.errors import TokenOutOfRange
from bestiary.kernels.lookup import lookup
from bestiary.models.config import DecoderConfig


class Embedding(nn.Embedding):
    """Rows of weight (V, H), times the config's `embedding_multiplier`.

    As in transformers' models, the lookup of `padding_idx` passes no gradient on; a tied head still trains that row.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        pad = config.padding_idx
        if pad is not None and pad < 0:  # counted from the end, as nn.Embedding counts it
            pad += config.vocab_size
        self.padding_idx = pad  # not an argument of nn.Embedding, which would zero the row
        self.multiplier = 1.0 if config.scales_inputs_embeds else config.embedding_multiplier
        self.multiplier_in_weight_dtype = config.embedding_multiplier_in_weight_dtype

    def forward(self, input: Tensor) -> Tensor:
        """(B, T) int64 → (B, T, H).

        Raises:
            TokenOutOfRange: on the CPU; on an accelerator and in a compiled graph the lookup itself asserts, without a
                synchronisation and without a break in the graph.
        """
        if input.device.type == "cpu" and not torch.compiler.is_compiling() and input.numel():
            self._check(input)
        embedded = self._rows(input)
        if self.multiplier == 1.0:
            return embedded
        multiplier = self.multiplier
        if self.multiplier_in_weight_dtype:  # Gemma: √H rounds before it multiplies (bf16: 25.298 becomes 25.25)
            multiplier = float(torch.tensor(multiplier, dtype=self.weight.dtype, device="cpu"))
        return embedded * multiplier

    def _rows(self, input: Tensor) -> Tensor:
        return lookup(input, self.weight, self.padding_idx)

    def _check(self, input_ids: Tensor) -> None:
        low, high = (int(bound) for bound in torch.aminmax(input_ids))
        if low < 0 or high >= self.num_embeddings:
            raise TokenOutOfRange(
                f"input_ids holds token id {low if low < 0 else high}, outside [0, {self.num_embeddings}).",
                remedy="check that the tokenizer belongs to the model, or call resize_token_embeddings",
            )
