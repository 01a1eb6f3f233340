"""The families and what accepted them: `ports/MODEL_TYPE/` holds verdict, planted bugs and card of each.

A record is stale once the family's bridge or model file changes. `make verify` runs stale families in full, the others
through V0–V2; the README's table is made from the records. Shared code moves under every record at once: `make
verify-all` and `make self-test` ask every family again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bestiary.bridges import Bridge, registered_bridges
from bestiary.kernels.errors import BestiaryError
from bestiary.tools.marked import between
from bestiary.tools.port.state import ACCEPTANCE, CARD, GROUP, KILLS, checkout
from bestiary.verify.api import verify_several
from bestiary.verify.gates import GATE_VERSION
from bestiary.verify.hashes import digest
from bestiary.verify.model_card import card
from bestiary.verify.reading import read_report, read_self_test
from bestiary.verify.report import figure_text, text, totals
from bestiary.verify.self_test import FamilyResult, cores, judge
from bestiary.verify.verdict import Exit, Report, Verdict, report

FOLDER = "ports"
SHORT = "V0..V2"
START, END = "<!-- families: written by `make readme` -->", "<!-- end of families -->"
_HEADS = (
    "model type",
    "class",
    "compared with",
    "checks passed",
    "worst in float64",
    "planted bugs killed",
    "false alarms",
)


class NotAccepted(BestiaryError):
    """A verdict or self-test that is no acceptance: it failed, it is partial, or a family lacks one of the two.

    Remedy: make the family pass: `verify-bridge NAME` and `verify-bridge self-test NAME`.
    """

    exit_code = 5


@dataclass(frozen=True)
class Record:
    """What accepted a family: its verdict and what became of the bugs planted in it."""

    verdict: Verdict
    kills: FamilyResult

    def why_stale(self, bridge: Bridge) -> str | None:
        """Why the record does not speak of the family as it is; None: it does."""
        verdict = self.verdict
        if verdict.exit_code != Exit.PASS or verdict.scope != "full" or not verdict.official:
            return f"the verdict is {verdict.verdict}, {verdict.scope}"
        if self.kills.survivors or self.kills.alarms or self.kills.clean != "pass":
            return "the self-test did not pass"
        if verdict.gate_version != GATE_VERSION:
            return f"gates of version {verdict.gate_version}, now {GATE_VERSION}"
        if verdict.hashes.get("port") != digest(sources(bridge)):
            return "its bridge or model file changed"
        return None


def sources(bridge: Bridge) -> list[Path]:
    """The two files that a family consists of: its bridge and its class."""
    (point,) = entry_points(group=GROUP, name=bridge.model_type)
    found = [find_spec(point.module), find_spec(bridge.decoder.__module__)]
    return [Path(str(spec.origin)) for spec in found if spec is not None]


def records(root: Path) -> dict[str, Record]:
    """The records in a checkout, by model_type.

    Raises:
        CorruptVerdict: a file that is no verdict or self-test.
    """
    found = {}
    for file in sorted((root / FOLDER).glob(f"*/{ACCEPTANCE}")):
        (verdict,) = read_report(file).verdicts
        (kills,) = read_self_test(file.with_name(KILLS)).families
        found[verdict.model_type] = Record(verdict, kills)
    return found


def stale(root: Path) -> dict[str, str]:
    """Model types whose record is missing or does not speak of the family as it is, and why."""
    known, found = records(root), {}
    for name, bridge in registered_bridges().items():
        why = known[name].why_stale(bridge) if name in known else "it has no record"
        if why is not None:
            found[name] = why
    return found


def accept(root: Path, verdicts: Report, families: Sequence[FamilyResult], *, seed: int) -> list[str]:
    """Writes the records of a report's families; returns their names.

    Raises:
        NotAccepted: a verdict that does not pass in full, or a family without a self-test that passes.
    """
    bridges, kills = registered_bridges(), {family.family: family for family in families}
    accepted = []
    for verdict in verdicts.verdicts:
        name = verdict.model_type
        if name not in kills:
            raise NotAccepted(f"{name} has no self-test.", remedy=f"verify-bridge self-test {name} --json FILE")
        bridge = bridges[name]
        verdict.hashes["port"] = digest(sources(bridge))
        why = Record(verdict, kills[name]).why_stale(bridge)
        if why is not None:
            raise NotAccepted(f"{name}: {why}.", remedy=f"make it pass: verify-bridge {name}")
        accepted.append((name, report([verdict]), judge([kills[name]], seed=seed, seconds=kills[name].seconds)))
    for name, one, self_test in accepted:
        folder = root / FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (
            (ACCEPTANCE, one.to_json(indent=None)),
            (KILLS, self_test.to_json(indent=None)),
            (CARD, card(one, self_test).rstrip("\n")),
        ):
            (folder / file).write_text(content + "\n", encoding="utf-8")
    return [name for name, _, _ in accepted]


# ------------------------------------------------------------------------------------------------ the README's table


def table(known: dict[str, Record]) -> Iterator[str]:
    """Markdown lines: one row a family, then the sums."""
    classes = {name: bridge.decoder.__name__ for name, bridge in registered_bridges().items()}
    yield f"| {' | '.join(_HEADS)} |"
    yield f"|{'---|' * len(_HEADS)}"
    for name, record in known.items():
        verdict, kills = record.verdict, record.kills
        passed, planned = totals(verdict)
        exact = [level.worst for level in verdict.levels if level.worst and level.worst.gate <= 1e-9]
        worst = max(exact, key=lambda one: one.figure if one.figure is not None else float("inf"), default=None)
        row = (
            f"[`{name}`]({FOLDER}/{name}/{CARD})",
            f"`{classes[name]}`",
            f"`{verdict.reference_class}`",
            f"{passed}/{planned}",
            figure_text(worst) if worst else "exact",
            f"{len(kills.kills) - len(kills.survivors)}/{len(kills.kills)}",
            f"{len(kills.alarms)}/{len(kills.passes)}",
        )
        yield f"| {' | '.join(row)} |"
    counts = [totals(record.verdict) for record in known.values()]
    passed, planned = (sum(count[i] for count in counts) for i in (0, 1))
    bugs = sum(len(record.kills.kills) for record in known.values())
    seconds = sum(level.seconds for record in known.values() for level in record.verdict.levels)
    versions = sorted({record.verdict.env.get("transformers", "?") for record in known.values()})
    yield ""
    yield (
        f"{len(known)} families, {passed} of {planned} checks in {seconds / 60:.0f} minutes of one process, "
        f"{bugs} planted bugs, against transformers {', '.join(versions)}. The name leads to the verdict's card."
    )


def with_table(readme: str, known: dict[str, Record]) -> str:
    """The README's text with the table of families between its two marks.

    Raises:
        NotAccepted: the marks are gone.
    """
    return between(readme, START, END, table(known), error=NotAccepted)


def summary(known: dict[str, Record]) -> str:
    """`bestiary.tools.catalogue.VERDICTS`: what an installed package says of its families, without the records."""
    families = {}
    for name, record in known.items():
        verdict, kills = record.verdict, record.kills
        passed, planned = totals(verdict)
        families[name] = {
            "date": verdict.made,
            "transformers": verdict.env.get("transformers"),
            "torch": verdict.env.get("torch"),
            "gate_version": verdict.gate_version,
            "passed": passed,
            "planned": planned,
            "bugs_killed": len(kills.kills) - len(kills.survivors),
            "bugs_planted": len(kills.kills),
        }
    return json.dumps({"schema": "bestiary.accepted/1", "families": families}, indent=1) + "\n"


# ------------------------------------------------------------------------------------------------ commands


def _verify() -> int:
    """Stale families at every level, the others at `SHORT`."""
    changed = stale(checkout())
    known = list(registered_bridges())
    for name, why in changed.items():
        print(f"{name}: {why}; every level")
    options: dict[str, Any] = {"workers": cores(), "isolate": True}
    verdicts = verify_several([name for name in known if name in changed], **options) if changed else []
    rest = [name for name in known if name not in changed]
    verdicts += verify_several(rest, level=SHORT, **options) if rest else []
    result = report(verdicts)
    print(text(result))
    return int(result.exit_code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bestiary.tools.families",
        description=__doc__.partition("\n\n")[2],
        epilog="example:\n  python -m bestiary.tools.families accept out/verdict.json out/self-test.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("stale", help="families whose record is missing or old, and why")
    commands.add_parser("verify", help=f"these in full, the others through {SHORT}")
    taking = commands.add_parser("accept", help="write records from a verdict and a self-test")
    taking.add_argument("verdict", help="of `verify-bridge FAMILY… --json`")
    taking.add_argument("self_test", help="of `verify-bridge self-test FAMILY… --json`")
    args = parser.parse_args(argv)
    try:
        if args.command == "verify":
            return _verify()
        root = checkout()
        if args.command == "stale":
            found = stale(root)
            print("\n".join(f"{name}: {why}" for name, why in found.items()) or "every record is current")
            return int(Exit.INCONCLUSIVE if found else Exit.PASS)
        result = read_self_test(args.self_test)
        names = accept(root, read_report(args.verdict), result.families, seed=result.seed)
        print(f"accepted: {', '.join(names)}")
    except BestiaryError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
