"""`bestiary port check`: is this port finished, and is it honest? Everything again, in processes started afresh."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bestiary.kernels.errors import BestiaryError
from bestiary.tools.port.guard import Cheating, file_findings
from bestiary.tools.port.judge import ANSWER, REQUEST
from bestiary.tools.port.state import ACCEPTANCE, CARD, KILLS, Port, python
from bestiary.verify.gates import GATE_VERSION
from bestiary.verify.hashes import digest
from bestiary.verify.levels import REGISTRY
from bestiary.verify.model_card import card
from bestiary.verify.reading import read_report
from bestiary.verify.self_test import FamilyResult, SelfTest, judge
from bestiary.verify.verdict import Exit, Report, Verdict

JUDGE = "bestiary.tools.port.judge"
TIMEOUT = 3600
LAST_LINES = 3


class PortFailed(BestiaryError):
    """A port whose code ends the process that judges it.

    Remedy: see where it stops: `verify-bridge MODEL_TYPE`.
    """

    exit_code = 2


class KillListWrong(BestiaryError):
    """A kill list that is not the list of planted bugs that concern the family; the remedy holds the right one.

    Remedy: copy the list that the message holds into the bridge.
    """

    exit_code = 5


class _Process:
    """One judge at work, in a folder of its own."""

    def __init__(self, port: Port, mode: str, seed: int) -> None:
        self.mode = mode
        self.scratch = tempfile.TemporaryDirectory(prefix=f"port-{mode}-")
        self.folder = Path(self.scratch.name)
        own = [] if port.root is None else [port.module, f"bestiary.models.{port.model_type}"]
        request = {"model_type": port.model_type, "seed": seed, "own": own}
        (self.folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        self.errors = (self.folder / "stderr").open("w+", encoding="utf-8")
        command = [*python(), "-m", JUDGE, mode, str(self.folder)]
        self.process = subprocess.Popen(
            command, env=port.environment(), cwd=port.folder, stdout=self.errors, stderr=self.errors
        )

    def answer(self) -> dict[str, Any]:
        """What the judge found.

        Raises:
            PortFailed: it ended without an answer.   Cheating: it names what was replaced or hard-coded.
        """
        try:
            code = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise PortFailed(
                f"the process that runs {self.mode} of the port gave no answer in {TIMEOUT} s.",
                remedy="see where it hangs: verify-bridge MODEL_TYPE",
            ) from None
        file = self.folder / ANSWER
        if code or not file.is_file():
            self.errors.seek(0)
            last = [line for line in self.errors.read().splitlines() if line.strip()][-LAST_LINES:]
            raise PortFailed(
                f"the process that runs {self.mode} of the port ended with status {code}: {' | '.join(last)}",
                remedy="make the loop pass first: verify-bridge MODEL_TYPE",
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["cheats"]:
            raise Cheating(found["cheats"])
        return found

    def close(self) -> None:
        """Ends the process and removes its folder."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        self.scratch.cleanup()


def check(port: Port, *, say: Callable[[str], None]) -> tuple[Report, SelfTest | None]:
    """Judges a port and writes its acceptance verdict, kill matrix and model card.

    Args:
        say: called with a line before each step.
    Returns:
        The verdict on fresh configs with a fresh seed, and the self-test of the family where that passed. The port is
        accepted if both exit codes are 0.
    Raises:
        Cheating: exit code 6.   PortFailed, KillListWrong.
    """
    say("files: bestiary, transformers, the port's sources")
    for name in (ACCEPTANCE, KILLS, CARD):
        (port.folder / name).unlink(missing_ok=True)
    found = file_findings(port)
    if found:
        raise Cheating(found)
    seed = 1 + secrets.randbelow(10**6)
    say(f"levels on new tiny configs with seed {seed}; planted bugs beside them")
    running = [_Process(port, mode, seed) for mode in ("verify", "kills")]
    try:
        levels, kills = running
        levels.answer()
        result = read_report(levels.folder / "verdict.json")
        verdict = _expected(result, port, seed)
        verdict.hashes["port"] = digest(port.sources)
        _write(port, result, None)
        if verdict.exit_code != Exit.PASS:
            return result, None
        listed = kills.answer()
        if listed["unlisted"] or listed["unkept"]:
            raise _wrong_list(port, listed)
        family = FamilyResult.model_validate_json((kills.folder / "kills.json").read_text(encoding="utf-8"))
    finally:
        for one in running:
            one.close()
    found = file_findings(port)
    if found:
        raise Cheating(found)
    self_test = judge([family], seed=0, seconds=family.seconds)
    _write(port, result, self_test)
    return result, self_test


def _expected(result: Report, port: Port, seed: int) -> Verdict:
    """The one verdict of a report, if it is the verdict that was asked for."""
    (verdict,) = result.verdicts
    wanted = [spec.id for spec in REGISTRY]
    skipped = sum(level.skipped for level in verdict.levels if level.status != "not run")
    rules = {
        "the verdict is of another family": verdict.family == port.model_type,
        "the verdict is of another seed": verdict.seed == seed,
        "the verdict has other gates": verdict.gate_version == GATE_VERSION and verdict.official,
        "the verdict is of a partial run": verdict.scope == "full",
        f"the levels are not {', '.join(wanted)}": [level.id for level in verdict.levels] == wanted,
        "checks were skipped": verdict.exit_code != Exit.PASS or not skipped,
        "the reference is another class": port.reference.endswith(f":{verdict.reference_class}"),
    }
    broken = [text for text, holds in rules.items() if not holds]
    if broken:
        raise Cheating(broken)
    return verdict


def _wrong_list(port: Port, listed: dict[str, Any]) -> KillListWrong:
    text = ", ".join(f'"{glob}"' for glob in listed["proposal"])
    return KillListWrong(
        f"KILL_LIST of {port.module} names {len(listed['unkept'])} planted bugs that concern nothing the family has "
        f"and leaves out {len(listed['unlisted'])} that do.",
        remedy=f"KILL_LIST = ({text})",
    )


def _write(port: Port, result: Report, self_test: SelfTest | None) -> None:
    (port.folder / ACCEPTANCE).write_text(result.to_json(indent=None) + "\n", encoding="utf-8")
    (port.folder / CARD).write_text(card(result, self_test), encoding="utf-8")
    if self_test is not None:
        (port.folder / KILLS).write_text(self_test.to_json(indent=None) + "\n", encoding="utf-8")
