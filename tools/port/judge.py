"""The part of `bestiary port check` that loads the port: a process of its own, started afresh.

`python -m bestiary.tools.port.judge verify|kills FOLDER`, FOLDER/request.json saying what; the answer is written beside
it. Before the port is loaded every module of the verifier is, and what was replaced afterwards is cheating.
"""

from __future__ import annotations

import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from bestiary.bridges import Bridge, get_bridge
from bestiary.tools.port.fresh import fresh_configs
from bestiary.tools.port.snapshot import replaced, take
from bestiary.verify.benign import REWRITES
from bestiary.verify.hypotheses import explain
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.planted import CATALOGUE
from bestiary.verify.reference import Reference, ReferencePool, quiet
from bestiary.verify.run import run
from bestiary.verify.self_test import FamilyResult, plant, rewrite
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import Raw, tiny_configs
from bestiary.verify.verdict import Exit, Verdict, report

REQUEST, ANSWER = "request.json", "answer.json"
SHORT = 20
OFFICIAL_SEED = 0
"""Seed of the inner loop; a port that passes with it alone has learnt its answers."""


def constant_output(bridge: Bridge, raw: Raw, seed: int) -> list[str]:
    """Whether our logits ignore the weights, or the tokens: then they are no computation.

    A model that cannot be built or run says nothing here; the levels say why.
    """

    def answer(weights: int, text: int) -> torch.Tensor:
        state = Reference(bridge.reference, raw, weights).state()
        model = OurSide(bridge).build(raw, state, torch.float64)
        inputs = Inputs(tokens(raw["vocab_size"], 1, SHORT, text))
        with torch.no_grad():
            logits: torch.Tensor = model(**inputs.kwargs(), return_logits=True)["logits"]
        return logits

    try:
        with quiet():
            first, reweighted, retold = answer(seed, seed), answer(seed + 1, seed), answer(seed, seed + 1)
    except Exception:  # noqa: BLE001 - unfinished code may raise anything, and the levels report it
        return []
    found = []
    if torch.equal(first, reweighted):
        found.append("our logits are the same with all weights changed: the output is hard-coded")
    if torch.equal(first, retold):
        found.append("our logits are the same for other tokens: the output is hard-coded")
    return found


def learnt_by_heart(model_type: str, verdict: Verdict, seed: int) -> list[str]:
    """Whether V2 passes on the verifier's own configs with the loop's seed and fails there with another one."""
    if next((level.status for level in verdict.levels if level.id == "V2"), "ok") != "fail":
        return []
    codes = [run(model_type, "V2", one).exit_code for one in (OFFICIAL_SEED, seed)]
    if codes[0] != Exit.PASS or codes[1] == Exit.PASS:
        return []
    return [f"V2 passes with seed {OFFICIAL_SEED} and fails on the same configs with seed {seed}: answers by heart"]


def _verify(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    seen = take(frozenset(request["own"]))
    model_type, seed = request["model_type"], request["seed"]
    bridge = get_bridge(model_type)
    cheats = replaced(seen)
    if not cheats:
        cases = fresh_configs(bridge.reference, seed)
        cheats = constant_output(bridge, next(iter(cases.values())), seed)
    if cheats:
        return {"cheats": cheats}
    verdict = run(model_type, None, seed, isolate=True, cases=cases, explain=explain)
    (folder / "verdict.json").write_text(report([verdict]).to_json(), encoding="utf-8")
    return {"cheats": [*replaced(seen), *learnt_by_heart(model_type, verdict, seed)]}


def _kills(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The self-test of the family without its first step, the untouched model, which the other process verifies."""
    start, family = time.perf_counter(), request["model_type"]
    bridge, pool = get_bridge(family), ReferencePool()
    configs = [bridge.parse(raw).decoder for raw in tiny_configs(bridge.reference).values()]
    concerned = [bug for bug in CATALOGUE if bug.concerns(bridge, configs)]
    promised = {bug.id for bug in CATALOGUE if any(fnmatchcase(bug.id, glob) for glob in bridge.kill_list)}
    ids = {bug.id for bug in concerned}
    answer = {"cheats": [], "unlisted": sorted(ids - promised), "proposal": proposal(ids)}
    if promised != ids:
        return answer | {"unkept": sorted(promised - ids)}
    result = FamilyResult(
        family=family,
        clean="pass",
        unkept=[],
        kills=[plant(family, bug, pool=pool) for bug in concerned],
        passes=[
            rewrite(family, benign, pool=pool) for benign in REWRITES if any(benign.applies(one) for one in configs)
        ],
        seconds=time.perf_counter() - start,
    )
    (folder / "kills.json").write_text(result.model_dump_json(indent=1), encoding="utf-8")
    return answer | {"unkept": []}


def proposal(wanted: set[str]) -> list[str]:
    """The shortest globs that match these ids of the catalogue and no others: a kill list."""
    others = {bug.id for bug in CATALOGUE} - wanted
    found: list[str] = []
    for one in sorted(wanted):
        if not any(fnmatchcase(one, glob) for glob in found):
            cuts = (f"{one[:length]}*" for length in range(1, len(one)))
            found.append(next((glob for glob in cuts if not any(fnmatchcase(x, glob) for x in others)), one))
    return found


def main(mode: str, folder: Path) -> None:
    """Answers the request in `folder`."""
    torch.set_num_threads(1)
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    answer = {"verify": _verify, "kills": _kills}[mode](request, folder)
    (folder / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
