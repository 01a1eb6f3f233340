"""What the log-prob core keeps, how much it holds at its peak, and which products it computes."""

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bestiary.kernels import vocab_tiles
from bestiary.kernels.cross_entropy import linear_cross_entropy
from bestiary.kernels.log_prob import linear_log_prob
from bestiary.kernels.vocab_tiles import COLUMNS, row_chunks, tiles_of

from .naive_head import case

TOKENS, VOCAB, HIDDEN = 96, 520, 12


class Watch(TorchDispatchMode):
    """Bytes of new memory alive at the peak, and multiplications in matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage(), new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage(), new=True)
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = (args[0], args[1]) if name == "aten::mm" else (args[1], args[2])
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return out

    def _see(self, storage: Any, *, new: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self._known:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def inputs(ignored: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, target, _ = case(TOKENS, VOCAB, ignored=ignored).leaves()
    return hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_(), target


def scalar(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target)


def per_token(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_log_prob(hidden, weight, target).log_prob.sum()


@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize("entropy", [False, True])
def test_per_token_mode_keeps_its_inputs_and_a_few_numbers_a_token(entropy: bool, ignored: float) -> None:
    """Nothing of the size of the vocabulary lives from the forward to the backward pass."""
    hidden, weight, target = inputs(ignored)
    given = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weight, target)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = linear_log_prob(hidden, weight, target, entropy=entropy)
    assert out.log_prob.requires_grad
    assert kept
    assert sum(kept.values()) <= 4 * TOKENS * 4


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_scalar_mode_keeps_its_inputs_and_its_gradients(ignored: float) -> None:
    """dX of the tokens that count and dW, and hands them out without a copy."""
    hidden, weight, target = inputs(ignored)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, target)
    given = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weight, target)}
    assert {tensor.untyped_storage().data_ptr() for tensor in saved} == given
    held = loss.grad_fn.held
    assert held.hidden.shape == (int((target != -100).sum()), HIDDEN)
    assert held.weight.shape == weight.shape
    assert held.bias is None
    of_weight = held.weight.data_ptr()
    del held
    loss.backward()
    assert weight.grad.data_ptr() == of_weight


@pytest.mark.parametrize(
    ("function", "factor"), [(scalar, (2, 4, 4, 6)), (per_token, (2, 6, 6, 8))], ids=["scalar", "per token"]
)
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_products_that_nobody_needs_are_not_computed(
    function: Callable[..., Tensor], factor: tuple[int, ...], ignored: float
) -> None:
    """A frozen head, frozen hidden states, both; ignored tokens: in FLOPs, 2·N·H·V for each product."""
    for (of_hidden, of_weight), times in zip(((0, 0), (1, 0), (0, 1), (1, 1)), factor, strict=True):
        hidden, weight, target = inputs(ignored)
        hidden.requires_grad_(bool(of_hidden))
        weight.requires_grad_(bool(of_weight))
        with Watch() as watch:
            loss = function(hidden, weight, target)
            if loss.requires_grad:
                loss.backward()
        counted = int((target != -100).sum())
        assert watch.flops == times * counted * HIDDEN * 576, "576 = 520 rounded up to a multiple of 64"
        assert (hidden.grad is not None, weight.grad is not None) == (bool(of_hidden), bool(of_weight))


LARGE = (512, 8256, 32)  # tokens, vocabulary = 129 · 64, hidden size
ROWS, COLUMNS_HERE = 64, 512
FEW = 20 * LARGE[0] + 8 * ROWS * (LARGE[2] + 17)  # numbers: columns of tokens, a chunk of hidden states, of each tile


def large(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, vocab, size = LARGE
    hidden, weight, target, _ = case(tokens, vocab, ignored=0.0, size=size)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tiles and 8 chunks."""
    monkeypatch.setattr(vocab_tiles, "COLUMNS", COLUMNS_HERE)
    monkeypatch.setattr(vocab_tiles, "ROWS", ROWS)
    monkeypatch.setattr(vocab_tiles, "HELD_BYTES", 1)
    monkeypatch.setattr(vocab_tiles, "HELD_ROWS", (ROWS, ROWS, ROWS))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("options", "tiles"), [({}, 1), ({"softcap": 2.0}, 2), ({"softcap": 2.0, "entropy": True}, 3)])
def test_peak_memory_of_a_scalar_loss(options: dict[str, Any], tiles: int, dtype: torch.dtype) -> None:
    """R·V logits, one to three tiles of them, dX and dW in fp32, and for bf16 inputs one tile of the weight."""
    hidden, weight, target = large(dtype)
    tokens, vocab, size = LARGE
    with Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, target, **options)
    gradients = size * (tokens + vocab)
    weight_tile = COLUMNS_HERE * size if dtype == torch.bfloat16 else 0
    formula = ROWS * vocab + tiles * ROWS * COLUMNS_HERE + gradients + weight_tile
    assert 4 * formula < watch.peak < 4 * (formula + FEW)
    assert formula > 10 * FEW
    assert watch.alive < 4 * (gradients + 10 * tokens), "between forward and backward: the gradients"
    del loss


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [({}, 1, 1), ({"softcap": 2.0}, 1, 2), ({"entropy": True}, 2, 2), ({"softcap": 2.0, "entropy": True}, 2, 3)],
    ids=str,
)
def test_peak_memory_per_token(options: dict[str, Any], forward: int, backward: int) -> None:
    """So many tiles of logits, and in the backward pass dX and dW."""
    hidden, weight, target = large(torch.float32)
    tokens, vocab, size = LARGE
    tile = ROWS * COLUMNS_HERE
    with Watch() as watch:
        out = linear_log_prob(hidden, weight, target, **options)
        assert 4 * forward * tile < watch.peak < 4 * (forward * tile + FEW)
        loss = out.log_prob.sum() if out.entropy is None else (out.log_prob + out.entropy).sum()
        loss.backward()
    formula = backward * tile + size * (tokens + vocab)
    assert 4 * formula < watch.peak < 4 * (formula + FEW)


# ---------------------------------------------------------------------- sizes of chunks and tiles


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((2048, 640, 262144), 256),  # Gemma 3 270M: 256 MiB of logits
        ((1024, 2048, 151936), 512),
        ((8192, 2560, 151936), 512),
        ((8192, 2880, 201088), 512),
        ((1024, 640, 32768), 1024),
        ((8192, 64, 8192), 2048),
        ((300, 640, 262144), 150),  # two equal chunks rather than 256 and 44
        ((5, 640, 262144), 5),
    ],
)
def test_rows_of_a_chunk_that_is_held(shape: tuple[int, int, int], rows: int) -> None:
    """As documented, in fp32; half as many bytes' worth in float64."""
    chunks = row_chunks(*shape, torch.float32, held=1)
    assert chunks[0] == slice(0, rows)
    assert chunks[-1].stop == shape[0]
    assert all(a.stop == b.start for a, b in pairwise(chunks))
    wide = row_chunks(*shape, torch.float64, held=1)
    assert (wide[0].stop - wide[0].start) <= max(rows, 2)
    assert row_chunks(*shape, torch.float32, held=1) == chunks


def test_no_tokens_make_no_chunks() -> None:
    assert row_chunks(0, 8, 100, torch.float32) == row_chunks(0, 8, 100, torch.float32, held=1) == []
    assert row_chunks(513, 8, 100, torch.float32) == [slice(0, 257), slice(257, 513)]


@pytest.mark.parametrize("vocab", [0, 1, 63, 64, 65, COLUMNS, COLUMNS + 1, 3 * COLUMNS - 1, 262144])
def test_tiles_cover_the_vocabulary_in_multiples_of_64(vocab: int) -> None:
    """The last tile alone is ragged, and 64 wide."""
    tiles = tiles_of(vocab)
    assert [column for tile in tiles for column in range(vocab)[tile.columns]] == list(range(vocab))
    assert all(tile.width % 64 == 0 and tile.width <= COLUMNS for tile in tiles)
    assert all(tile.real == tile.width for tile in tiles[:-1])
    assert all(tile.width - tile.real < 64 for tile in tiles)
    assert [tile.index for tile in tiles] == list(range(len(tiles)))
