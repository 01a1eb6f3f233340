"""What makes token ids: a tokenizer's files, template and behaviour, as JSON to store and to compare."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bestiary.training.data.errors import FingerprintChanged

# Where tokenizers have differed between versions, engines and entry paths.
PROBES = (
    "The quick brown fox, 12345.67 and 1,000,000!",
    "  two leading spaces, trailing  ",
    "e\u0301 cafe\u0301 \u1112\u1161\u11ab",
    "\N{FAMILY} \N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL} \N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}",
    "line\r\nline\n\n\nline\ttab",
    "def f(x):\n    return {'a': [x, -1e-3]}  # comment",
    "<think>\n\n</think>\n\n<tool_call>{}</tool_call>",
    "naïve Straße 東京 москва العربية नमस्ते",
    "\u2581under \u2581\u2581score \u00a0 \u3000 \u200b",
    "\x00\x01\x7f\ufeff\ufffd",
    "don't I'LL we've they're",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
LIBRARIES = ("transformers", "tokenizers", "jinja2")


class Fingerprint(BaseModel):
    """Stored in checkpoints, exports and resume states.

    Attributes:
        tokenizer: sha256 of tokenizer.json, or of the engine's own text where there is no file.
        template: sha256 of the chat template; None without one.
        arguments: the template's arguments, as JSON.
        probes: for each text of `PROBES`, the start of the sha256 of its ids.
        chat: sha256 of the ids of a small conversation; None without a template.
        vocabulary: number of tokens.   pad, bos, stops: ids.
        versions: of the libraries; a difference here alone changes nothing and is no error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer: str
    template: str | None
    arguments: str
    probes: tuple[str, ...]
    chat: str | None
    vocabulary: int
    pad: int
    bos: int | None
    stops: tuple[int, ...]
    versions: dict[str, str]

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, in words, from `other` (the stored one); versions are mentioned only beside something else."""
        found = []
        if self.tokenizer != other.tokenizer:
            found.append(f"tokenizer file: {other.tokenizer[:12]} became {self.tokenizer[:12]}")
        if self.template != other.template:
            found.append(f"chat template: {_short(other.template)} became {_short(self.template)}")
        if self.arguments != other.arguments:
            found.append(f"template arguments: {other.arguments} became {self.arguments}")
        for text, old, new in zip(PROBES, other.probes, self.probes, strict=False):
            if old != new:
                found.append(f"token ids of {text!r}")
        if len(other.probes) != len(self.probes):
            found.append(f"number of probe texts: {len(other.probes)} became {len(self.probes)}")
        if self.chat != other.chat:
            found.append("token ids of a small conversation")
        for field in ("vocabulary", "pad", "bos", "stops"):
            old, new = getattr(other, field), getattr(self, field)
            if old != new:
                found.append(f"{field}: {old} became {new}")
        if found and self.versions != other.versions:
            changed = (f"{name} {other.versions.get(name)} → {self.versions.get(name)}" for name in LIBRARIES)
            found.append("versions: " + ", ".join(changed))
        return found

    def require(self, stored: Fingerprint, source: str) -> None:
        """Nothing, if `stored` is the same.

        Raises:
            FingerprintChanged: lists what changed since.
        """
        if changed := self.differences(stored):
            raise FingerprintChanged(
                "the tokenizer is not the one these data were made with: " + "; ".join(changed) + ".",
                read_from=source,
                remedy="load the tokenizer, template and arguments of that run, or start anew with the new ones",
            )

    def save(self, file: Path) -> None:
        """Writes it as JSON."""
        file.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Fingerprint:
        """Reads what `save` wrote.

        Raises:
            FingerprintChanged: the file is not a fingerprint.
        """
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            raise FingerprintChanged(
                f"not a tokenizer fingerprint: {error.errors()[0]['loc']} {error.errors()[0]['msg']}.",
                read_from=str(file),
                remedy="use the file that came with the checkpoint",
            ) from error


def versions() -> dict[str, str]:
    """The libraries that turn text into ids."""
    return {name: version(name) for name in LIBRARIES}


def digest(data: bytes | str) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def digest_ids(ids: list[int] | list[str]) -> str:
    """sha256 of token ids, or of other digests."""
    return digest(json.dumps(ids))


def _short(value: str | None) -> str:
    return "none" if value is None else value[:12]
