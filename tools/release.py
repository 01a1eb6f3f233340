"""Builds the source distribution and the wheel, and tries the wheel where the repository is out of reach.

The wheel is built from the source distribution, installed into a new environment in a temporary folder, and there
`bestiary --version`, `bestiary models` and `verify-bridge qwen3` have to pass. Large dependencies are those of this
Python: the new environment looks them up in its site-packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.arguments import Parser, write_json
from bestiary.tools.port.state import checkout
from bestiary.tools.sbom import bill

EXAMPLE = """\
examples:
  python -m bestiary.tools.release
  python -m bestiary.tools.release --level V0..V2 --out out/dist --json -"""
TIMEOUT_S = 900


class ReleaseFailed(BestiaryError):
    """A distribution that is not built, or that does not work outside of the repository.

    Remedy: read the end of the output in the message, and run that command by hand.
    """

    exit_code = 1


def build(root: Path, out: Path) -> tuple[Path, Path]:
    """Source distribution and wheel of a checkout, the wheel from what the other one holds.

    Raises:
        ReleaseFailed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("bestiary-*.whl"), *out.glob("bestiary-*.tar.gz")):
        old.unlink()
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(root)], cwd=out)
    (source,), (wheel,) = out.glob("bestiary-*.tar.gz"), out.glob("bestiary-*.whl")
    return source, wheel


def environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel and, behind it, the packages of this Python; returns its folder of commands."""
    venv.create(folder, with_pip=False, symlinks=True)
    commands = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install", "--quiet"]
    _run([*pip, "--no-deps", "--no-index", str(wheel)], cwd=folder)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_run([str(commands / "python"), "-c", asked], cwd=folder).strip())
    theirs = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "packages-of-the-builder.pth").write_text("\n".join(theirs) + "\n", encoding="utf-8")
    return commands


def smoke(commands: Path, folder: Path, level: str | None) -> dict[str, Any]:
    """What the installed commands say, run in `folder`; seconds of each.

    Raises:
        ReleaseFailed: one fails, or the package that runs is not the installed one.
    """
    where = _run([str(commands / "python"), "-c", "import bestiary.models as m; print(m.__file__)"], cwd=folder)
    if not Path(where.strip()).is_relative_to(commands.parent):
        raise ReleaseFailed(f"bestiary.models is imported from {where.strip()}, not from {commands.parent}.")
    verdict = folder / "verdict.json"
    levels = [] if level is None else ["--level", level]
    seconds = {}
    for name, *arguments in (
        ["bestiary", "--version"],
        ["bestiary", "models", "--family", "qwen3"],
        ["verify-bridge", "qwen3", *levels, "--quiet", "--json", str(verdict)],
    ):
        start = time.monotonic()
        _run([str(commands / name), *arguments], cwd=folder)
        seconds[name if name not in seconds else f"{name} {arguments[0]}"] = time.monotonic() - start
    (found,) = json.loads(verdict.read_text(encoding="utf-8"))["verdicts"]
    return {"verdict": found["verdict"], "levels": [one["id"] for one in found["levels"]], "seconds": seconds}


def _run(command: Sequence[str], *, cwd: Path) -> str:
    """Output of a command that sees nothing of the repository but what its arguments name."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env | {"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseFailed(f"{' '.join(command)} took more than {TIMEOUT_S:g} s.") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise ReleaseFailed(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Builds, tries and describes; returns 0, or the exit code of the error."""
    parser = Parser("bestiary.tools.release", __doc__, EXAMPLE)
    parser.add_argument("--out", type=Path, default=Path("out/dist"), help="folder to write to (default out/dist)")
    parser.add_argument("--level", help="levels of verify-bridge qwen3; default: all")
    args = parser.parse_args(argv)
    try:
        out = args.out.absolute()
        files = build(checkout(), out)
        with tempfile.TemporaryDirectory(prefix="bestiary-release-") as scratch:
            commands = environment(Path(scratch) / "venv", files[1])
            told = smoke(commands, Path(scratch), args.level)
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    materials = out / "sbom.cdx.json"
    materials.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
    made = [(file, file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()) for file in (*files, materials)]
    sizes = {file.name: {"bytes": size, "sha256": digest} for file, size, digest in made}
    write_json(args.json, {"schema": "bestiary.release/1", "exit_code": 0, "files": sizes, **told})
    if args.json != "-":
        for file, size, digest in made:
            print(f"{size:>9,} bytes  {digest[:16]}  {args.out / file.name}")
        print(f"outside of the repository: verify-bridge qwen3 {told['verdict']}, levels {' '.join(told['levels'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
