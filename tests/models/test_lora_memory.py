"""What a block keeps for its backward pass when its base is frozen and every linear layer has an adapter."""

import pytest
import torch
from torch import Tensor

from bestiary.models import Decoder, LoRAConfig
from bestiary.models.inputs import read_inputs
from bestiary.models.lora import sites

from .tiny import tiny, tokens

RANK, ROWS, LENGTH = 5, 2, 19
DENSE = ("qwen3", "gemma3")


def kept_bytes(model: Decoder) -> int:
    """Of the distinct memory that autograd keeps of block 1, the parameters and tables it shares left out."""
    inputs = read_inputs(tokens(ROWS, LENGTH), None, None, None, None, None)
    backbone, block = model.model, model.model.layers[1]
    table = backbone._rotary[block.rope](inputs.position_ids, model.dtype)
    mask = inputs.masks(model.decoder_config, None)[block.layer_type]
    x = torch.randn(ROWS, LENGTH, model.decoder_config.hidden_size, dtype=model.dtype, requires_grad=True)
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *table)}
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, table, mask)
    return sum(size for pointer, (_, size) in kept.items() if pointer not in shared)


@pytest.mark.parametrize("family", DENSE)
def test_adapters_keep_no_activation_but_their_own_low_rank_one(family: str) -> None:
    """The bytes of the block without adapters, (N, r) of each adapter, and the product that `down_proj` takes in.

    Without an adapter there the product is computed again in the backward pass.
    """
    plain = tiny(family).train()
    model = tiny(family, lora=LoRAConfig(r=RANK, alpha=9.0, targets=("*_proj",))).train()
    adapters = sum(site.name.startswith("model.layers.1.") for site in sites(model))
    assert adapters == 7
    product = ROWS * LENGTH * model.decoder_config.intermediate_size * 8
    assert kept_bytes(model) == kept_bytes(plain) + product + adapters * ROWS * LENGTH * RANK * 8


@pytest.mark.parametrize("family", DENSE)
def test_what_only_the_frozen_weights_would_need_is_not_kept(family: str) -> None:
    """With adapters on q alone the input of the MLP goes; its product is not kept anyway."""
    plain = tiny(family).train()
    model = tiny(family, lora=LoRAConfig(r=RANK, alpha=9.0, targets=("q_proj",))).train()
    config, tokens_ = model.decoder_config, ROWS * LENGTH
    assert kept_bytes(model) <= kept_bytes(plain) + tokens_ * RANK * 8 - tokens_ * config.hidden_size * 8
