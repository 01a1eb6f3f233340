"""`verify-bridge self-test`: does the verifier find what is wrong, and leave alone what is right?

Every planted bug that concerns a family must be killed by its level, and its cause named; every benign rewrite must
pass. A family whose untouched model does not pass proves nothing: then nothing it "kills" counts.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bestiary.bridges import Bridge, get_bridge
from bestiary.models.config import HeadKind
from bestiary.verify.benign import REWRITES, Benign
from bestiary.verify.gates import GATE_VERSION
from bestiary.verify.hypotheses import explain
from bestiary.verify.planted import PlantedBug, catalogue_with
from bestiary.verify.reference import ReferencePool
from bestiary.verify.run import BadUsage, parse_levels, run
from bestiary.verify.scoring import score_configs
from bestiary.verify.tiny import Raw, tiny_configs
from bestiary.verify.verdict import Exit, Finding, Verdict
from bestiary.verify.workers import pool_of

MIN_BUGS = 34
MIN_BENIGN = 10
MIN_SCORE_BUGS = 8
"""Of reward models, whose backbone the others are planted in."""
MIN_NAMED = 0.9
"""Share of kills whose cause the verdict must name."""

KILLING = frozenset({Exit.NUMERIC, Exit.KEYS, Exit.CONFIG, Exit.TAMPERING})
"""Exit codes that find a bug; a refusal or an inconclusive run does not."""

_CRASH = re.compile(r"(Attribute|Type|Name|Import|ModuleNotFound|UnboundLocal|Syntax|Assertion)\w*Error: ")
Progress = Callable[[str], None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Kill(_Strict):
    """One bug planted in one family: whether its level found it, by which check, and which causes the verdict names.

    Attributes:
        asked: other levels that ran on it for the whole kill matrix, on the tiny config of the kill.
        seen_by: those of them that found it too.
    """

    bug: str
    level: str
    cause: str
    killed: bool
    named: bool
    verdict: str
    check: str = ""
    detail: str = ""
    causes: list[str] = Field(default_factory=list)
    asked: list[str] = Field(default_factory=list)
    seen_by: list[str] = Field(default_factory=list)
    seconds: float


class Pass(_Strict):
    """One benign rewrite of one family: whether every level passed, else what raised the false alarm."""

    rewrite: str
    levels: str
    passed: bool
    verdict: str
    check: str = ""
    detail: str = ""
    seconds: float


class FamilyResult(_Strict):
    """The self-test of one family.

    Attributes:
        clean: the verdict of the untouched model over all levels.
        unkept: bugs that the bridge's kill list promises and that do not concern the family.
    """

    family: str
    clean: str
    unkept: list[str]
    kills: list[Kill]
    passes: list[Pass]
    seconds: float

    @property
    def survivors(self) -> list[Kill]:
        """Bugs that no check found."""
        return [kill for kill in self.kills if not kill.killed]

    @property
    def alarms(self) -> list[Pass]:
        """Rewrites that did not pass."""
        return [run for run in self.passes if not run.passed]


class SelfTest(_Strict):
    """What `--json` writes."""

    schema_: Literal["bestiary.self_test/1"] = Field(default="bestiary.self_test/1", alias="schema")
    exit_code: Exit
    seed: int
    gate_version: int
    seconds: float
    families: list[FamilyResult]
    problems: list[str]

    def to_json(self, *, indent: int | None = 1) -> str:
        """The result as JSON text; one line with `indent` None."""
        return self.model_dump_json(by_alias=True, indent=indent)

    def text(self) -> str:
        """One line a family, then what went wrong, then the sums."""
        levels = sorted({kill.level for family in self.families for kill in family.kills})
        widths = [f"{level:>7}" for level in levels]
        lines = [f"{'self-test':<14}" + "".join(widths) + f"{'killed':>10}{'named':>10}{'alarms':>9}{'seconds':>9}"]
        for family in self.families:
            found = Counter(kill.level for kill in family.kills if kill.killed)
            planted = Counter(kill.level for kill in family.kills)
            cells = "".join(f"{f'{found[level]}/{planted[level]}':>7}" for level in levels)
            killed, named = sum(found.values()), sum(kill.named for kill in family.kills)
            lines.append(
                f"{family.family:<14}{cells}{f'{killed}/{len(family.kills)}':>10}{f'{named}/{killed}':>10}"
                f"{f'{len(family.alarms)}/{len(family.passes)}':>9}{family.seconds:>9.0f}"
            )
        lines += [f"  {problem}" for problem in self.problems[:20]]
        kills = [kill for family in self.families for kill in family.kills]
        killed = sum(kill.killed for kill in kills)
        applicable = ", ".join(f"{family.family} {len(family.kills)}" for family in self.families)
        alarms = sum(len(family.alarms) for family in self.families)
        runs = sum(len(family.passes) for family in self.families)
        named = sum(kill.named for kill in kills)
        lines += [
            f"killed {killed}/{len(kills)}, applicable {applicable}, false alarms {alarms}/{runs}",
            f"{len({kill.bug for kill in kills})} bugs, {len(_rewrites(self.families))} benign rewrites, "
            f"causes named {named}/{killed}, gate {self.gate_version}, seed {self.seed}, {self.seconds:.0f} s",
            f"exit {int(self.exit_code)}",
        ]
        return "\n".join(lines)


def _rewrites(families: Sequence[FamilyResult]) -> set[str]:
    return {run.rewrite for family in families for run in family.passes}


# ------------------------------------------------------------------ one family


def plant(
    family: str, bug: PlantedBug, *, seed: int = 0, pool: ReferencePool | None = None, matrix: str | None = None
) -> Kill:
    """Runs the level of a planted bug: on the first tiny config it concerns, and on all of them if it survives there.

    A kill by fewer configs or checks is a kill by all: the rest could only add findings.

    Args:
        matrix: further levels, as `--level` takes them, to ask whether they see the bug too; None: its own alone.
    """
    start = time.perf_counter()
    shared = pool or ReferencePool()
    verdict, error = _planted(family, bug, _first_case(family, bug), bug.quick, seed, shared)
    if not _killing(verdict):
        verdict, error = _planted(family, bug, None, (), seed, shared)
    findings = _killing(verdict)
    found = [f"{finding.check}: {finding.detail}" for finding in findings]
    causes = [] if verdict is None else [hypothesis.mutation_id for hypothesis in verdict.hypotheses]
    by_check = any(part in text for part in bug.checks for text in found)
    first = findings[0] if findings else None
    others = [] if matrix is None else [spec.id for spec in parse_levels(matrix, bug.head) if spec.id != bug.level]
    return Kill(
        bug=bug.id,
        level=bug.level,
        cause=bug.cause,
        killed=bool(findings),
        named=bool(findings) and (by_check or bug.id in causes),
        verdict=error if verdict is None else verdict.verdict,
        check="" if first is None else first.check,
        detail="" if first is None else first.detail[:200],
        causes=causes,
        asked=others,
        seen_by=_seen_by(family, bug, others, seed, shared) if others else [],
        seconds=time.perf_counter() - start,
    )


def _seen_by(family: str, bug: PlantedBug, levels: Sequence[str], seed: int, pool: ReferencePool) -> list[str]:
    """Those of `levels` with a check that finds the bug, each run whatever the others say."""
    cases = _first_case(family, bug)
    seen = []
    for level in levels:
        try:
            verdict = run(
                family, level, seed, cases=cases, mutate_ours=bug.ours, pool=pool, first_failure=True, head=bug.head
            )
        except (AttributeError, ImportError, TypeError, KeyError):
            continue  # cannot be planted, which the kill reports
        if _killing(verdict):
            seen.append(level)
    return seen


def _first_case(family: str, bug: PlantedBug) -> dict[str, Raw] | None:
    """The first tiny config that has what the bug breaks; all of them for the config sweep, which has its own."""
    bridge = get_bridge(family)
    if bug.level == "V3":
        return None
    cases = _configs(bridge, bug.head)
    return next(({name: raw} for name, raw in cases.items() if bug.applies(bridge.parse(raw).decoder)), None)


def _configs(bridge: Bridge, head: HeadKind) -> dict[str, Raw]:
    return tiny_configs(bridge.reference) if head is HeadKind.LM else score_configs(bridge)


def _planted(
    family: str, bug: PlantedBug, cases: dict[str, Raw] | None, only: Sequence[str], seed: int, pool: ReferencePool
) -> tuple[Verdict | None, str]:
    """The verdict on a family with the bug; None and why, where it cannot be planted or no check has that name."""
    try:
        verdict = run(
            family,
            bug.level,
            seed,
            only=only,
            cases=cases,
            mutate_ours=bug.ours,
            pool=pool,
            explain=explain if bug.head is HeadKind.LM else None,
            head=bug.head,
            first_failure=bug.reference is not None and not bug.checks,  # then a replay names the cause
        )
    except BadUsage as error:
        return None, f"no such check: {error.what}"
    except (AttributeError, ImportError, TypeError, KeyError) as error:
        return None, f"cannot be planted: {type(error).__name__}: {error}"
    return verdict, ""


def _killing(verdict: Verdict | None) -> list[Finding]:
    """Failed checks that found the bug. A crash of Python is no finding: it may be the plant itself that is broken."""
    if verdict is None or verdict.exit_code not in KILLING:
        return []
    failed = [item for level in verdict.levels for item in level.findings if item.status == "failed"]
    if verdict.exit_code == Exit.TAMPERING and verdict.error is not None:
        guard = Finding(check="tampering", status="failed", exit_code=Exit.TAMPERING, detail=verdict.error)
        failed.insert(0, guard)
    return [item for item in failed if not _CRASH.match(item.detail)]


def rewrite(family: str, benign: Benign, *, seed: int = 0, pool: ReferencePool | None = None) -> Pass:
    """Runs the levels of a benign rewrite; anything but a pass is a false alarm."""
    start = time.perf_counter()
    verdict = run(family, benign.levels, seed, mutate_ours=benign.ours, pool=pool, keep_going=True)
    findings = [item for level in verdict.levels for item in level.findings]
    return Pass(
        rewrite=benign.id,
        levels=benign.levels,
        passed=verdict.exit_code == Exit.PASS,
        verdict=verdict.verdict,
        check=findings[0].check if findings else "",
        detail=findings[0].detail[:200] if findings else "",
        seconds=time.perf_counter() - start,
    )


def examine(
    family: str,
    bugs: Sequence[PlantedBug],
    rewrites: Sequence[Benign] | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    matrix: str | None = None,
    head: HeadKind = HeadKind.LM,
) -> FamilyResult:
    """Runs a family untouched, then with each bug and each rewrite (None: all of `REWRITES`) that concerns it.

    Args:
        head: of the models; `bugs` are of the same, and rewrites there are of language models alone.
        matrix: as for `plant`.
    """
    start, say, pool = time.perf_counter(), progress or (lambda _: None), ReferencePool()
    bridge = get_bridge(family)
    say(f"{family} untouched")
    clean = run(family, None, seed, pool=pool, head=head)
    configs = [bridge.parse(raw).decoder for raw in _configs(bridge, head).values()]
    if head is not HeadKind.LM:
        rewrites = ()
    kills, passes = [], []
    for bug in bugs:
        if bug.concerns(bridge, configs):
            say(f"{family} {bug.id}")
            kills.append(plant(family, bug, seed=seed, pool=pool, matrix=matrix))
    for benign in REWRITES if rewrites is None else rewrites:
        if any(benign.applies(config) for config in configs):
            say(f"{family} {benign.id}")
            passes.append(rewrite(family, benign, seed=seed, pool=pool))
    promised = {bug.id for bug in bugs if any(fnmatchcase(bug.id, glob) for glob in bridge.kill_list)}
    return FamilyResult(
        family=family,
        clean=clean.verdict,
        unkept=sorted(promised - {kill.bug for kill in kills}),
        kills=kills,
        passes=passes,
        seconds=time.perf_counter() - start,
    )


# ------------------------------------------------------------------ all of them


def _work(family: str, catalogues: Sequence[str], seed: int, matrix: str | None, head: HeadKind) -> FamilyResult:
    return examine(family, catalogue_with(catalogues, head), seed=seed, matrix=matrix, head=head)


def judge(families: Sequence[FamilyResult], *, seed: int, seconds: float, head: HeadKind = HeadKind.LM) -> SelfTest:
    """The result over families: anything that is missing is a problem, and a problem is never exit 0."""
    wrong = [f"{f.family}: the untouched model does not pass ({f.clean})" for f in families if f.clean != "pass"]
    wrong += [
        f"{f.family}: {id} is on the kill list and concerns nothing the family has" for f in families for id in f.unkept
    ]
    wrong += [f"{f.family}: {k.bug} survives {k.level} ({k.verdict}): {k.cause}" for f in families for k in f.survivors]
    wrong += [f"{f.family}: false alarm on {p.rewrite}: {p.check} {p.detail}" for f in families for p in f.alarms]
    weak = []
    bugs = {kill.bug for family in families for kill in family.kills}
    least, benign = (MIN_BUGS, MIN_BENIGN) if head is HeadKind.LM else (MIN_SCORE_BUGS, 0)
    if len(bugs) < least:
        weak.append(f"{len(bugs)} bugs were planted, at least {least} needed")
    if len(_rewrites(families)) < benign:
        weak.append(f"{len(_rewrites(families))} benign rewrites were run, at least {benign} needed")
    killed = [kill for family in families for kill in family.kills if kill.killed]
    named = sum(kill.named for kill in killed)
    if named < MIN_NAMED * len(killed):
        unnamed = ", ".join(dict.fromkeys(kill.bug for kill in killed if not kill.named))
        weak.append(f"the cause of {named} of {len(killed)} kills is named, {MIN_NAMED:.0%} needed; not of {unnamed}")
    code = Exit.NUMERIC if wrong else Exit.INCONCLUSIVE if weak or not families else Exit.PASS
    return SelfTest(
        exit_code=code,
        seed=seed,
        gate_version=GATE_VERSION,
        seconds=seconds,
        families=list(families),
        problems=[*wrong, *weak],
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def self_test(
    families: Sequence[str],
    *,
    catalogues: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
    workers: int | None = None,
    matrix: str | None = None,
    head: HeadKind = HeadKind.LM,
) -> SelfTest:
    """Plants the catalogue, and that of further modules, in each family.

    Args:
        families: model types.
        catalogues: modules with more `BUGS`.
        seed: of weights and inputs.
        progress: called with a line now and then.
        workers: processes; None: one a core, at most one a family.
        matrix: levels, as `--level` takes them, that are asked about every bug beside its own; None: none.
        head: SCORE: the bugs of reward models, in those.
    Raises:
        BadUsage: `matrix` names no level.
        BadCatalogue: a module that cannot be used.   UnsupportedModelType: an unknown family.
        NoScoreClass: transformers has no reward model of a family.
    """
    start = time.perf_counter()
    bugs = catalogue_with(catalogues, head)
    parse_levels(matrix, head)
    for family in families:
        get_bridge(family).reference_for(head)
    count = min(len(families), cores()) if workers is None else workers
    results: list[FamilyResult] = []
    if count <= 1:
        results = [examine(family, bugs, seed=seed, progress=progress, matrix=matrix, head=head) for family in families]
    else:
        with pool_of(count) as pool:
            futures = [pool.submit(_work, family, catalogues, seed, matrix, head) for family in families]
            for future in futures:
                results.append(future.result())
                if progress is not None:
                    progress(f"self-test {len(results)}/{len(families)} families")
    return judge(results, seed=seed, seconds=time.perf_counter() - start, head=head)
