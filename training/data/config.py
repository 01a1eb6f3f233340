"""The `data` section of a run's file: tokenizer, sources, packing; checked, and made into the objects it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bestiary.training.components import component
from bestiary.training.data.encode import NOTHING, RowEncoder, Wanted
from bestiary.training.data.errors import InvalidPlan
from bestiary.training.data.fingerprint import digest_ids
from bestiary.training.data.masks import TrainOn
from bestiary.training.data.packing import Overflow
from bestiary.training.data.plan import Plan
from bestiary.training.data.rows import Shape
from bestiary.training.data.samples import Kind
from bestiary.training.data.source import Source
from bestiary.training.data.template import TemplateArguments
from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.sections import Section, read_mapping, validated


class TokenizerConfig(Section):
    """Which tokenizer and template.

    Attributes:
        src: a folder or a hub id.   revision: of the hub.
        chat_template: a file that replaces the tokenizer's own.   arguments: of the template, fixed.
        pad_token: chosen instead of the one found.   vocab_rows: of the model's embedding.
    """

    src: str
    revision: str | None = None
    chat_template: Path | None = None
    arguments: TemplateArguments = Field(default_factory=TemplateArguments)
    pad_token: str | None = None
    vocab_rows: int | None = None

    def load(self) -> BaseHFModelTokenizer:
        """The tokenizer. Errors as `BaseHFModelTokenizer`; OSError where a file is missing."""
        template = None if self.chat_template is None else self.chat_template.read_text(encoding="utf-8")
        return BaseHFModelTokenizer.from_pretrained(
            self.src,
            revision=self.revision,
            chat_template=template,
            arguments=self.arguments,
            pad_token=self.pad_token,
            vocab_rows=self.vocab_rows,
        )


class SourceConfig(Section):
    """One source; `kind`, `shape`, `columns` and what is trained as `RowEncoder` has them, the rest as `Source`.

    Attributes:
        rows: module:name of a function of yours that takes a row as the file has it and returns the one that is read.
    """

    name: Annotated[str, Field(min_length=1)]
    files: str | tuple[str, ...]
    kind: Kind
    shape: Shape = "plain"
    rows: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)
    train_on: TrainOn = Field(default_factory=TrainOn)
    as_chat: bool = False
    reasoning: Literal["keep", "drop"] = "keep"
    neutralise: bool = True
    weight: Annotated[float, Field(ge=0)] = 1.0
    on_corrupt: Literal["raise", "skip"] = "raise"

    def encoder(self, tokenizer: BaseHFModelTokenizer, wanted: Wanted = NOTHING) -> RowEncoder:
        """What makes tokens of its rows."""
        return RowEncoder(
            tokenizer=tokenizer,
            kind=self.kind,
            shape=self.shape,
            rows=None if self.rows is None else component(self.rows, f"sources: {self.name}: rows", InvalidPlan),
            columns=self.columns,
            train_on=self.train_on,
            as_chat=self.as_chat,
            reasoning=self.reasoning,
            neutralise=self.neutralise,
            wanted=wanted,
        )

    def source(self, tokenizer: BaseHFModelTokenizer, wanted: Wanted = NOTHING) -> Source:
        """The source itself."""
        return Source(
            name=self.name,
            files=self.files,
            encode=self.encoder(tokenizer, wanted),
            weight=self.weight,
            on_corrupt=self.on_corrupt,
        )


class DataConfig(Section):
    """Everything that decides what enters the loss."""

    tokenizer: TokenizerConfig
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    pack_length: Annotated[int, Field(ge=8)] = 4096
    look_ahead: Annotated[int, Field(ge=1)] = 100
    overflow: Overflow = "error"
    mix_by: Literal["document", "token"] = "document"
    streams: Annotated[int, Field(ge=1)] = 1
    epochs: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources are named {', '.join(names)}: each needs a name of its own")
        pairs = {source.kind == "preference" for source in self.sources}
        if len(pairs) > 1:
            raise ValueError("preference pairs cannot be mixed with other kinds")
        return self

    def encoding(self, tokenizer: BaseHFModelTokenizer) -> str:
        """The tokenizer's part of what tokens depend on, as JSON; each source's encoder describes the rest."""
        mark = tokenizer.fingerprint.model_dump(mode="json", exclude={"versions"})
        return json.dumps({**mark, "probes": digest_ids(mark["probes"])[:16]}, sort_keys=True)

    def plan(self, tokenizer: BaseHFModelTokenizer, wanted: Wanted = NOTHING) -> Plan:
        """What a loader takes.

        Args:
            wanted: by the recipe, of every row.
        """
        return Plan(
            sources=tuple(source.source(tokenizer, wanted) for source in self.sources),
            pack_length=self.pack_length,
            pad_id=tokenizer.pad_id,
            tokenizer=self.encoding(tokenizer),
            seed=self.seed,
            streams=self.streams,
            look_ahead=self.look_ahead,
            overflow=self.overflow,
            parts=2 if self.sources[0].kind == "preference" else 1,
            mix_by=self.mix_by,
            epochs=self.epochs,
        )


def load_data_config(file: Path) -> DataConfig:
    """The `data` section of a YAML or JSON file; other sections are for other commands. Paths count from its folder.

    Raises:
        InvalidPlan: no such section, or a key or value that is wrong; an unknown key with the nearest known one.
    """
    whole = read_mapping(file, InvalidPlan)
    if not isinstance(whole.get("data"), Mapping):
        raise InvalidPlan("there is no section data.", read_from=str(file), remedy="data: {tokenizer: …, sources: […]}")
    found = validated(DataConfig, whole["data"], place="data", read_from=str(file), error=InvalidPlan)
    return placed_in(found, file.parent)


def placed_in(config: DataConfig, folder: Path) -> DataConfig:
    """The same with relative local paths made to count from the folder of its file."""

    def placed(path: str) -> str:
        return path if "://" in path or Path(path).is_absolute() else str(folder / path)

    sources = tuple(
        source.model_copy(
            update={
                "files": placed(source.files) if isinstance(source.files, str) else tuple(map(placed, source.files))
            }
        )
        for source in config.sources
    )
    given = config.tokenizer
    update: dict[str, Any] = {}
    if (folder / given.src).is_dir():
        update["src"] = str(folder / given.src)
    if given.chat_template is not None and not given.chat_template.is_absolute():
        update["chat_template"] = folder / given.chat_template
    return config.model_copy(update={"sources": sources, "tokenizer": given.model_copy(update=update)})
