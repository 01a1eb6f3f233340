"""Which commits of the hub a run is made of: looked up when it begins, written down, and the same when it goes on.

A branch may move while a run is stopped. So each hub id in a run's file gets the commit that it means as the run
begins: `model.revision`, `data.tokenizer.revision`, and `owner/name@commit` where one word names a model (reference,
teacher, reward models). They stand in `out/config.yaml` and in every resume point. In a folder with resume points a
file without a revision means the commit that was written down; one whose revision is another commit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from bestiary.bridges.hub import (
    at_revision,
    commit_of,
    is_commit,
    is_hub_id,
    resolve,
    resolve_tokenizer,
    split_revision,
)
from bestiary.models import Decoder
from bestiary.training.checkpoint import CHECKPOINTS, saved_steps
from bestiary.training.config import CommonConfig
from bestiary.training.control import decided
from bestiary.training.errors import CheckpointRefused, InvalidRun
from bestiary.training.export import CONFIG
from bestiary.training.sections import read_mapping

_TOKENIZER = "data.tokenizer"
_SECTIONS = ("model", _TOKENIZER)  # with the keys src and revision
_WORDS = ("loss.reference", "loss.teacher", "algorithm.reference")
C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True)
class _Place:
    """Where a run's file names a model: its key, the mapping that holds it, and the key of its revision, if any."""

    key: str
    owner: dict[str, Any]
    src: str
    revision: str | None = None

    def read(self) -> tuple[str, str | None]:
        name = str(self.owner[self.src])
        return split_revision(name) if self.revision is None else (name, self.owner.get(self.revision))

    def on_hub(self) -> bool:
        """Whether it names a hub id; of tokenizers it may be one word."""
        return is_hub_id(self.read()[0], one_word=self.key == _TOKENIZER)

    def commit(self) -> str | None:
        """The commit that it means now."""
        src, revision = self.read()
        if self.key == _TOKENIZER:
            return commit_of(resolve_tokenizer(src, revision=revision)) or revision
        return _commit(src, revision)

    def write(self, src: str, revision: str | None) -> None:
        if self.revision is None:
            self.owner[self.src] = at_revision(src, revision)
        else:
            self.owner[self.revision] = revision


def pinned(config: C, group: dist.ProcessGroup | None = None) -> C:
    """The same with a commit for every hub id.

    Args:
        group: of all processes, which call it at once; the first one looks. None: this process alone.
    Raises:
        CheckpointRefused: a revision that is another commit than the one that the run in `config.out` began with.
        CheckpointNotFound, OfflineError: of a hub id.
    """
    return decided(lambda: _pinned(config), group)


def pinned_name(name: str) -> str:
    """The same for the name of one model."""
    src, revision = split_revision(name)
    return at_revision(src, _commit(src, revision)) if is_hub_id(src) else name


def commits_in(config: CommonConfig, model: Decoder | None = None) -> dict[str, str]:
    """`owner/name@commit` by the key that names it, of every hub id that has a commit.

    Args:
        model: that was read; as `base` it may be another one than the file names, which an adapter names in turn.
    """
    named = {place.key: place.read() for place in _places(config.model_dump(mode="json")) if place.on_hub()}
    if model is not None and is_hub_id(model.name_or_path):
        named["base"] = (model.name_or_path, model.revision)
    return {key: f"{src}@{at}" for key, (src, at) in named.items() if is_commit(at)}


def _pinned(config: C) -> C:
    plain = config.model_dump(mode="json")
    file = config.out / CONFIG
    goes_on = bool(saved_steps(config.out / CHECKPOINTS)) and file.is_file()
    known = {place.key: place.read() for place in _places(read_mapping(file, InvalidRun))} if goes_on else {}
    for place in _places(plain):
        src, asked = place.read()
        then_src, then = known.get(place.key, (None, None))
        if not place.on_hub():
            continue
        if then_src == src and asked in (None, then):
            place.write(src, then)  # None in a run of before commits were written down, which goes on as it began
            continue
        commit = place.commit()
        if then_src == src and is_commit(then) and commit != then:
            named = src if asked is None else f"{src}@{asked}"
            raise CheckpointRefused(
                f"{place.key}: {named} is commit {commit}, and the run began with {then}.",
                read_from=str(file),
                remedy=f"{then} as the revision, or none, which means it; or another `out`",
            )
        place.write(src, commit)
    return type(config).model_validate(plain)


def _commit(src: str, revision: str | None) -> str | None:
    """The commit that a revision of a hub id means now."""
    return commit_of(resolve(src, revision=revision, weights=False)) or revision


def _places(plain: Mapping[str, Any]) -> Iterator[_Place]:
    """Everywhere that a run's file, as plain values, names a model."""
    for key in _SECTIONS:
        owner = _below(plain, key.split("."))
        if owner.get("src") is not None:
            yield _Place(key, owner, "src", "revision")
    for key in _WORDS:
        section, _, name = key.partition(".")
        owner = _below(plain, [section])
        if owner.get(name) is not None:
            yield _Place(key, owner, name)
    for judge in _below(plain, ["rewards"]).get("functions", ()):
        if judge.get("model") is not None:
            yield _Place(f"rewards.{judge.get('name')}.model", judge, "model")


def _below(plain: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """The section at a path, {} where it is not there."""
    here: Any = plain
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return here if isinstance(here, dict) else {}
