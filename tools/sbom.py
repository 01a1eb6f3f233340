"""A bill of materials of an installed bestiary, as CycloneDX 1.6 JSON: packages, their versions and licences.

Read from the metadata of the installed packages, so it says what is here and not what might be. Every requirement that
is installed counts, those of extras too; what is not installed is named in `metadata.properties`.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = "bestiary"
_CLASSIFIER = "License :: OSI Approved :: "


def collect(root: str = ROOT) -> tuple[dict[str, Distribution], list[str]]:
    """Installed distributions that `root` needs, directly or not, by canonical name; requirements that are missing."""
    found: dict[str, Distribution] = {}
    missing = set[str]()
    waiting = [(canonicalize_name(root), "", True)]
    seen = set[tuple[str, str]]()  # with its extra: one that comes later brings requirements of its own
    while waiting:
        name, extra, direct = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            held = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            missing.add(name)
            continue
        for text in held.requires or ():
            required = _requirement(text, extra, every=direct)
            if required is None:
                continue
            waiting += [(canonicalize_name(required.name), one, False) for one in ("", *required.extras)]
    return dict(sorted(found.items())), sorted(missing)


def _requirement(text: str, extra: str, *, every: bool) -> Requirement | None:
    """A requirement that holds here; of the root those of its extras too (`every`)."""
    try:
        required = Requirement(text)
    except InvalidRequirement:
        return None
    marker = required.marker
    if marker is None or marker.evaluate({"extra": extra}) or (every and "extra" in str(marker)):
        return required
    return None


def _field(held: Distribution, name: str) -> str:
    return (held.metadata.get_all(name) or [""])[0]


def licence(held: Distribution) -> str:
    """What a distribution's metadata says: an SPDX expression, a name, or "unknown"."""
    said = _field(held, "License-Expression")
    classified = [
        line.rpartition(" :: ")[2] for line in held.metadata.get_all("Classifier") or () if _CLASSIFIER in line
    ]
    named = _field(held, "License").strip()
    short = named if named and "\n" not in named and len(named) <= 60 else ""  # some put the whole text there
    return said or short or " and ".join(classified) or "unknown"


def bill(root: str = ROOT) -> dict[str, Any]:
    """The document. The same packages give the same document, its serial number included."""
    found, missing = collect(root)
    components = [_component(name, held) for name, held in found.items() if name != root]
    main = {**_component(root, found[root]), "type": "application"}
    identity = json.dumps([main, *components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, identity)}",
        "version": 1,
        "metadata": {
            "component": main,
            "properties": [{"name": "bestiary:not-installed", "value": name} for name in missing],
        },
        "components": components,
        "dependencies": [
            {"ref": _purl(name, held), "dependsOn": _children(held, found, every=name == root)}
            for name, held in found.items()
        ],
    }


def _component(name: str, held: Distribution) -> dict[str, Any]:
    said = licence(held)
    known = {"expression": said} if _field(held, "License-Expression") else {"license": {"name": said}}
    return {
        "type": "library",
        "bom-ref": _purl(name, held),
        "name": name,
        "version": held.version,
        "licenses": [known],
        "purl": _purl(name, held),
    }


def _purl(name: str, held: Distribution) -> str:
    return f"pkg:pypi/{name}@{held.version}"


def _children(held: Distribution, found: dict[str, Distribution], *, every: bool) -> list[str]:
    required = [_requirement(text, "", every=every) for text in held.requires or ()]
    names = {canonicalize_name(one.name) for one in required if one is not None}
    return [_purl(name, found[name]) for name in sorted(names & found.keys()) if found[name] is not held]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the document; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bestiary.tools.sbom",
        description=__doc__,
        epilog="example:\n  python -m bestiary.tools.sbom --out out/sbom.cdx.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="file to write; default: stdout")
    args = parser.parse_args(argv)
    text = json.dumps(bill(), indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
