"""Items as short sequences of codes: tokens of their own in a vocabulary, and how their rows begin.

An item is one code a level (TIGER, arXiv 2305.05065; OneRec and PLUM put such tokens into the vocabulary of an LLM).
The tokens are contiguous, level by level, matched as they stand in text, and no special tokens: decoding shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken
from torch import Tensor

from bestiary.training.data.errors import SampleRefused, TokenizerRefused
from bestiary.training.data.samples import Events
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.data.tokens import IGNORED, Tokens

Codes = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class SemanticIds:
    """A block of token ids: code c of level l is the token `first_id + l · codebook_size + c`.

    Attributes:
        levels: codes an item has.   codebook_size: codes a level has.   first_id: of the block.
        begin_id: a token in front of each item; None without.
    """

    levels: int
    codebook_size: int
    first_id: int = 0
    begin_id: int | None = None

    @property
    def count(self) -> int:
        """Tokens of the block, the one in front of items left out."""
        return self.levels * self.codebook_size

    def ids_of(self, codes: Codes | Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """Token ids of codes: (…, levels) → (…, levels) int32.

        Raises:
            SampleRefused: another number of levels, or a code outside the codebook.
        """
        found = np.asarray(codes)
        if found.ndim == 0 or found.shape[-1] != self.levels:
            raise SampleRefused(f"codes have the shape {found.shape}, expected (…, {self.levels}).")
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < self.codebook_size:
            raise SampleRefused(
                f"codes run from {found.min()} to {found.max()}, the codebook has {self.codebook_size}."
            )
        return (found + np.arange(self.levels) * self.codebook_size + self.first_id).astype(np.int32)

    def codes_of(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """Codes of token ids: the inverse of `ids_of`.

        Raises:
            SampleRefused: an id that is none of that level's.
        """
        codes = np.asarray(ids) - self.first_id - np.arange(self.levels) * self.codebook_size
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook_size:
            raise SampleRefused("token ids that are no semantic ids of their level.")
        return codes.astype(np.int32)

    def tokens_of(self, codes: Codes | Sequence[Sequence[int]], *, trained_from: int = 1) -> Tokens:
        """A history of items (events, levels) as tokens; the codes of items from `trained_from` on are trained.

        Raises:
            SampleRefused: as `ids_of`.
        """
        ids = self.ids_of(codes)
        labels = ids.copy()
        labels[:trained_from] = IGNORED
        if self.begin_id is not None:
            ids = np.pad(ids, ((0, 0), (1, 0)), constant_values=self.begin_id)
            labels = np.pad(labels, ((0, 0), (1, 0)), constant_values=IGNORED)
        return Tokens(ids.reshape(-1), labels.reshape(-1))

    def encode(self, events: Events, *, trained_from: int = 1) -> Tokens:
        """A record of events with codes. Errors as `ids_of`, and for events with raw items."""
        if events.codes is None:
            raise SampleRefused("the events are raw items.", remedy="EventEncoder takes those")
        return self.tokens_of(events.codes, trained_from=trained_from)


def add_semantic_ids(
    tokenizer: BaseHFModelTokenizer, *, levels: int, codebook_size: int, prefix: str = "sid", begin: bool = False
) -> SemanticIds:
    """Adds `levels` × `codebook_size` tokens `<|prefix_level_code|>` behind the vocabulary.

    Args:
        begin: also `<|prefix_begin|>`, in front of the block.

    Raises:
        TokenizerRefused: a token that exists, ids that are not contiguous, or a token that does not encode to its id.
    """
    names = [f"<|{prefix}_{level}_{code}|>" for level in range(levels) for code in range(codebook_size)]
    wanted = [f"<|{prefix}_begin|>", *names] if begin else names
    engine = tokenizer.hf.backend_tokenizer
    if taken := next((name for name in wanted if engine.token_to_id(name) is not None), None):
        raise TokenizerRefused(f"{taken!r} is a token already.", remedy="choose another prefix")
    tokenizer.hf.add_tokens([AddedToken(name, normalized=False, special=False) for name in wanted])
    tokenizer.forget_fingerprint()
    ids = [tokenizer.id_of(name) for name in wanted]
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise TokenizerRefused(f"the tokenizer gave ids from {min(ids)} to {max(ids)} for {len(ids)} tokens.")
    encoded = engine.encode_batch(wanted, add_special_tokens=False)
    for name, index, found in zip(wanted, ids, encoded, strict=True):
        if found.ids != [index] or tokenizer.decode([index]).strip() != name:
            raise TokenizerRefused(f"{name!r} encodes to {found.ids}, expected [{index}].")
    first = ids[1] if begin else ids[0]
    return SemanticIds(levels=levels, codebook_size=codebook_size, first_id=first, begin_id=ids[0] if begin else None)


def mean_rows(old: Tensor, count: int, *, noise: float = 0.1, seed: int = 0) -> Tensor:
    """Rows around the mean of the old ones: mean + `noise` · their standard deviation · N(0, 1).

    Args:
        old: (V, H).

    Returns:
        (count, H) in old's dtype.
    """
    wide = old.detach().to(torch.float64)
    drawn = torch.randn((count, old.shape[1]), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (wide.mean(0) + noise * wide.std(0) * drawn.to(old.device)).to(old.dtype)


def described_rows(old: Tensor, tokenizer: BaseHFModelTokenizer, descriptions: Sequence[str]) -> Tensor:
    """For each new token the mean of the rows of the tokens of a description.

    Raises:
        SampleRefused: an empty description.
    """
    rows = []
    for number, ids in enumerate(tokenizer.encode_texts(descriptions, bos=False)):
        if not len(ids):
            raise SampleRefused(f"description {number} is empty.")
        rows.append(old.detach()[torch.from_numpy(ids).long().to(old.device)].to(torch.float64).mean(0))
    return torch.stack(rows).to(old.dtype)


def codebook_rows(old: Tensor, codebooks: Tensor, *, seed: int = 0) -> Tensor:
    """Rows that keep the geometry of codebooks: a random projection with orthonormal columns, as wide as the old rows.

    Args:
        old: (V, H).   codebooks: (levels, codebook_size, D), D at most H.

    Returns:
        (levels · codebook_size, H): distances are those of the codebook times one factor a level, around old's mean.

    Raises:
        TokenizerRefused: codebooks wider than the rows.
    """
    levels, _, depth = codebooks.shape
    width = old.shape[1]
    if depth > width:
        raise TokenizerRefused(f"codebook vectors have {depth} dimensions, rows {width}.", remedy="reduce them first")
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn((width, depth), dtype=torch.float64, generator=generator))
    wide = old.detach().to("cpu", torch.float64)
    spread = (wide - wide.mean(0)).norm(dim=1).mean()
    made = []
    for level in range(levels):
        vectors = codebooks[level].to("cpu", torch.float64)
        vectors = vectors - vectors.mean(0)
        made.append(wide.mean(0) + vectors @ basis.T * (spread / vectors.norm(dim=1).mean().clamp_min(1e-30)))
    return torch.cat(made).to(old.device, old.dtype)


def put_rows(weight: Tensor, rows: Tensor, first_id: int) -> None:
    """Copies rows into an embedding that was resized before.

    Raises:
        TokenizerRefused: they do not fit.
    """
    if weight.shape[0] < first_id + len(rows) or weight.shape[1] != rows.shape[1]:
        raise TokenizerRefused(
            f"rows {tuple(rows.shape)} from id {first_id} do not fit an embedding {tuple(weight.shape)}.",
            remedy="model.resize_token_embeddings first",
        )
    with torch.no_grad():
        weight[first_id : first_id + len(rows)].copy_(rows)


def train_only_rows(weight: Tensor, first_id: int, count: int) -> torch.utils.hooks.RemovableHandle:
    """Zeroes the gradient of every other row; use no weight decay on it, which acts without a gradient."""

    def keep(gradient: Tensor) -> Tensor:
        kept = torch.zeros_like(gradient)
        kept[first_id : first_id + count] = gradient[first_id : first_id + count]
        return kept

    return weight.register_hook(keep)


def residual_codes(
    vectors: NDArray[np.floating], *, levels: int, codebook_size: int, rounds: int = 20, seed: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Codes by residual k-means: each level quantises what the levels before left over.

    Args:
        vectors: (items, D).

    Returns:
        codes (items, levels), codebooks (levels, codebook_size, D).
    """
    random = np.random.default_rng(seed)
    rest = np.asarray(vectors, np.float64).copy()
    codes = np.zeros((len(rest), levels), np.int32)
    codebooks = np.zeros((levels, codebook_size, rest.shape[1]))
    for level in range(levels):
        start = random.choice(len(rest), codebook_size, replace=len(rest) < codebook_size)
        centres = rest[start].copy()
        for _ in range(rounds):
            nearest = _nearest(rest, centres)
            for code in range(codebook_size):
                members = rest[nearest == code]
                # A code that nobody uses moves to the vector that is worst served.
                centres[code] = (
                    members.mean(0) if len(members) else rest[((rest - centres[nearest]) ** 2).sum(1).argmax()]
                )
        codes[:, level] = _nearest(rest, centres)
        codebooks[level] = centres
        rest -= centres[codes[:, level]]
    return codes, codebooks


def _nearest(vectors: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.asarray(((centres**2).sum(1) - 2 * vectors @ centres.T).argmin(1))


def distinct(codes: Codes, codebook_size: int, *, policy: Literal["count", "refuse"] = "count") -> NDArray[np.int32]:
    """Codes with one more level that tells items with equal codes apart (TIGER's last digit).

    Args:
        policy: `count` adds the level; `refuse` raises where two items are equal and adds none.

    Raises:
        SampleRefused: equal codes under `refuse`, or more of them than a level can tell apart.
    """
    seen: dict[tuple[int, ...], int] = {}
    digits = np.zeros(len(codes), np.int32)
    for row, code in enumerate(map(tuple, codes.tolist())):
        digits[row] = seen.get(code, 0)
        seen[code] = int(digits[row]) + 1
    most = int(digits.max(initial=0))
    if policy == "refuse":
        if most:
            raise SampleRefused(f"{int((digits > 0).sum())} items have the codes of another.", remedy="policy='count'")
        return np.asarray(codes, np.int32)
    if most >= codebook_size:
        raise SampleRefused(f"{most + 1} items have the same codes, a level tells {codebook_size} apart.")
    return np.concatenate([np.asarray(codes, np.int32), digits[:, None]], axis=1)
