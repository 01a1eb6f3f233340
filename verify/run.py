"""One run: a family, its levels, one verdict. Callable in-process, with mutations of either side."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bestiary.bridges import get_bridge
from bestiary.bridges.errors import UnsupportedConfig
from bestiary.kernels.errors import BestiaryError
from bestiary.models.config import HeadKind
from bestiary.verify.activity import audit, weaknesses
from bestiary.verify.checks import Check, Outcome, Replay, exit_codes, not_run, run_level, selected
from bestiary.verify.delegation import foreign_code, foreign_modules
from bestiary.verify.foreign import OPTION, Foreign
from bestiary.verify.gates import GATE_VERSION, OFFICIAL, Gates
from bestiary.verify.hashes import (
    altered_files,
    digest,
    own_hashes,
    patched_functions,
    reference_hash,
    reference_modules,
)
from bestiary.verify.lab import Lab
from bestiary.verify.levels import LevelSpec, registry
from bestiary.verify.localise import localise
from bestiary.verify.placing import CPU
from bestiary.verify.reference import ReferencePool, quiet
from bestiary.verify.scoring import score_configs
from bestiary.verify.side import MutateOurs, MutateTheirs, OurSide, TheirSide
from bestiary.verify.tiny import FROM_DEFAULTS, Raw, completed, tiny_configs
from bestiary.verify.verdict import (
    WORDS,
    Activity,
    Divergence,
    Exit,
    Hypothesis,
    Implementation,
    Level,
    Verdict,
    first_present,
    today,
)

AUDITED = frozenset({"V2", "V3", "V4", "V5", "V6", "V7"})
"""Levels whose meaning depends on active configs."""

Explain = Callable[["Evidence"], list[Hypothesis]]


class BadUsage(BestiaryError):
    """Arguments that name nothing: a level, a pattern, a file.

    Remedy: correct the option; `verify-bridge --help` has examples.
    """


@dataclass(frozen=True)
class Evidence:
    """What an explanation of a failure starts from: the bench, the first divergence, and where to look again.

    `divergence` is None where a plain forward of both sides agrees: a loss, a gradient, a cache or fp32 is wrong.
    """

    lab: Lab
    divergence: Divergence | None
    replay: Replay
    level: str


def parse_levels(text: str | None, head: HeadKind = HeadKind.LM) -> list[LevelSpec]:
    """The levels of "V2", "V0..V2" or "V0,V4" that a model under `head` has; all of them for None.

    Raises:
        BadUsage: an unknown level, or a range that runs backwards.
    """
    offered = registry(head)
    known = [spec.id for spec in offered]
    if text is None:
        return list(offered)
    wanted: list[str] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        last = last if dots else first
        if first not in known or last not in known or known.index(first) > known.index(last):
            raise BadUsage(
                f"--level {text} is no level or range.", remedy=f"e.g. V2, V0..V2; known: {', '.join(known)}"
            )
        wanted += known[known.index(first) : known.index(last) + 1]
    return [spec for spec in offered if spec.id in wanted]


def environment(device: torch.device = CPU) -> dict[str, str]:
    """Versions, threads and machine kind of this process, and where the models computed."""
    from importlib.metadata import version

    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "device": device.type if device == CPU else f"{device} ({torch.cuda.get_device_name(device)})",
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def run(
    family: str,
    levels: str | None = None,
    seed: int = 0,
    *,
    only: Sequence[str] = (),
    gates: Gates | None = None,
    keep_going: bool = False,
    isolate: bool = False,
    cases: dict[str, Raw] | None = None,
    mutate_ours: MutateOurs | None = None,
    mutate_reference: MutateTheirs | None = None,
    pool: ReferencePool | None = None,
    explain: Explain | None = None,
    progress: Callable[[str], None] | None = None,
    foreign: Foreign | None = None,
    device: torch.device = CPU,
    first_failure: bool = False,
    head: HeadKind = HeadKind.LM,
) -> Verdict:
    """Verifies one family on tiny configs.

    Args:
        family: a `model_type`, or an alias of one.
        levels: "V2", "V0..V2"; None: all.
        seed: of weights and inputs.
        only: patterns of check ids, or `layerN`.
        gates: thresholds; None: the official ones.
        keep_going: run later levels after one failed.
        isolate: run our forward also where transformers' modelling files cannot be imported.
        cases: config.json content by name, in place of the derived tiny configs.
        mutate_ours, mutate_reference: planted changes; see `bestiary.verify.side`. A mutated reference is not checked
            for tampering and is never taken from `pool`.
        pool: references built by earlier runs.
        explain: names causes of a divergence (planted-bug replay).
        progress: called with a line before each level.
        foreign: an implementation of somebody else's, verified in place of ours.
        first_failure: ask a level no further once a check has failed that can be looked at again: a self-test needs
            no more.
        device: where both sides compute; level K has implementations of its own for the CPU and runs there.
        head: SCORE: the family's reward model, against transformers' `…ForSequenceClassification`, on its levels.
    Returns:
        The verdict. Errors of usage (unknown family, level or pattern) are raised.
    Raises:
        UnsupportedModelType, BadUsage.   NoScoreClass: transformers has no reward model of this family.
    """
    start = time.perf_counter()
    specs = parse_levels(levels, head)
    for spec in specs:  # a module imported while a bug is planted would keep it, by the name it imports
        spec.load()
    if head is not HeadKind.LM and foreign is not None:
        raise BadUsage(f"{OPTION} {foreign.name} with --head {head}.", remedy="drop one of the two")
    shared = ReferencePool(device) if pool is None else pool
    if shared.device != device:
        told = f"a pool of references on {shared.device} for a run on {device}."
        raise BadUsage(told, remedy="a pool for each device")
    bridge = get_bridge(family)
    given = None if cases is None else {name: completed(bridge.reference, raw) for name, raw in cases.items()}
    if head is HeadKind.SCORE:
        given = score_configs(bridge, given)
    lab = Lab(
        family=family,
        reference=bridge.reference_for(head),
        cases=tiny_configs(bridge.reference) if given is None else given,
        head=head,
        ours=OurSide(bridge, foreign, device),
        theirs=TheirSide(),
        seed=seed,
        gates=gates or Gates(),
        pool=shared if mutate_reference is None else ReferencePool(device),
        isolate=isolate and mutate_ours is None and mutate_reference is None,
    )
    if mutate_ours is not None:
        mutate_ours(lab.ours)
        if lab.ours.reaches_out:  # a reference that meets it is nobody else's
            lab.pool = ReferencePool(device)
    if mutate_reference is not None:
        mutate_reference(lab.theirs)
    try:
        with lab.ours.patched(), lab.theirs.patched(), quiet(), _one_thread():
            return _verify(lab, specs, only, keep_going, first_failure, explain, progress or (lambda _: None), start)
    finally:
        lab.close()


class _one_thread:
    """Tiny tensors are slower on several threads, and sums must not depend on their number."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def _verify(
    lab: Lab,
    specs: Sequence[LevelSpec],
    only: Sequence[str],
    keep_going: bool,
    first_failure: bool,
    explain: Explain | None,
    progress: Callable[[str], None],
    start: float,
) -> Verdict:
    results: list[Level] = []
    codes: list[Exit] = []
    replay: tuple[str, Replay] | None = None
    refusal = _refusal(lab)
    stopped: str | None = None
    omitted: list[str] = []
    for spec in specs:
        progress(f"{lab.family} {spec.id} {spec.title}")
        checks = _asked(lab, spec, only, omitted)
        if not checks and (only or lab.ours.foreign is not None):
            continue
        if stopped is not None:
            results.append(not_run(spec.id, spec.title, checks, stopped))
            continue
        level, outcomes = run_level(
            spec.id,
            spec.title,
            checks,
            on_error=spec.on_error,
            refusals_are_answers=spec.refusals_are_answers,
            first_failure=first_failure,
        )
        results.append(level)
        codes += exit_codes(level)
        if replay is None:
            found = _first_replay(outcomes)
            replay = None if found is None else (spec.id, found)
        if level.status != "ok" and not keep_going:
            stopped = f"{spec.id} is not ok (--keep-going runs the rest)"
    if not results:
        raise BadUsage(f"--only {', '.join(only)} matches no check.", remedy="layerN, or a pattern such as base/*")
    activity, weak = _audit(lab, specs, checks_run=any(level.id in AUDITED for level in results))
    tampered = [] if lab.theirs.mutated else _tampering(lab)
    if weak:
        codes.append(Exit.INCONCLUSIVE)
    if tampered:
        codes.append(Exit.TAMPERING)
    code = first_present(codes)
    divergence, hypotheses = _explain(lab, replay, explain)
    hashes = own_hashes(lab.ours.current.config_from_hf.__module__, lab.config_json())
    return Verdict(
        family=lab.family,
        model_type=lab.ours.current.model_type,
        reference_class=lab.reference.partition(":")[2],
        head=lab.head.value,
        verdict=WORDS[code],
        exit_code=code,
        scope="full" if not only and not omitted and len(specs) == len(registry(lab.head)) else "partial",
        gate_version=GATE_VERSION,
        official=dict(lab.gates.table) == dict(OFFICIAL),
        env=environment(lab.device),
        hashes={**hashes, "transformers": reference_hash()},
        implementation=_implementation(lab, omitted),
        seed=lab.seed,
        made=today(),
        seconds=time.perf_counter() - start,
        levels=results,
        cases=dict(lab.cases),
        first_divergence=divergence,
        hypotheses=hypotheses,
        keys=lab.keys,
        config=lab.config,
        activity=activity,
        kernels=[lab.kernels[name] for name in sorted(lab.kernels)],
        profiles=lab.profiles,
        weak=weak,
        repro=_repro(lab, results, divergence),
        error="; ".join(filter(None, [refusal, *tampered[:2]])) or None,
    )


def _asked(lab: Lab, spec: LevelSpec, only: Sequence[str], omitted: list[str]) -> list[Check]:
    """The checks of a level, without those that an implementation of somebody else's has nothing for: `omitted`."""
    if lab.ours.foreign is None:
        return selected(spec.plan(lab), only)
    if spec.own:
        omitted.append(f"{spec.id}: judges {spec.own}")
        return []
    accepted = lab.arguments()
    checks = selected(spec.plan(lab), only)
    lacking = {check.id: sorted(set(check.needs) - accepted) for check in checks}
    omitted += [f"{spec.id} {id}: needs {', '.join(names)}" for id, names in lacking.items() if names]
    return [check for check in checks if not lacking[check.id]]


def _implementation(lab: Lab, omitted: list[str]) -> Implementation | None:
    foreign = lab.ours.foreign
    if foreign is None:
        return None
    source = "" if foreign.file is None else digest([foreign.file])
    return Implementation(factory=foreign.name, source_hash=source, omitted=omitted)


def _refusal(lab: Lab) -> str | None:
    """Why our bridge refuses the family's tiny configs, if it does."""
    for case, raw in lab.cases.items():
        try:
            lab.ours.decoder_config(raw)
        except UnsupportedConfig as error:
            return f"the bridge refuses the config {case!r}: {error.what}"
        except BestiaryError:
            continue  # a planted or real bug of the adapter: the levels find it
    return None


def _first_replay(outcomes: Sequence[Outcome]) -> Replay | None:
    return next((o.replay for o in outcomes if o.status == "failed" and o.replay is not None), None)


def _audit(lab: Lab, specs: Sequence[LevelSpec], *, checks_run: bool) -> tuple[dict[str, Activity], list[str]]:
    """The activity of every tiny config, where a level that depends on it ran.

    That of a reward model's backbone is what a run without a score head finds: the tiny configs are the same.
    """
    if lab.head is not HeadKind.LM or not checks_run or not any(spec.id in AUDITED for spec in specs):
        return {}, []
    audits = lab.pool.remember(
        ("audit", lab.config_json(), lab.seed, lab.theirs.mutated),
        lambda: {case: audit(lab.hf(case), lab.probe(case)) for case in lab.cases},
    )
    return audits, weaknesses(audits, FROM_DEFAULTS)


def _tampering(lab: Lab) -> list[str]:
    """What differs from the installed transformers, on disk or in memory."""
    altered = [f"{path} differs from the wheel's RECORD" for path in altered_files()]
    patched = [f"{name} was replaced in memory" for name in patched_functions(reference_modules(lab.hf_class))]
    return altered + patched + (_borrowed(lab) if lab.ours.foreign is not None else [])


def _borrowed(lab: Lab) -> list[str]:
    """What of transformers an implementation of somebody else's is built of or runs, whatever level was asked for."""
    assert lab.ours.foreign is not None
    case = lab.main_case
    try:
        model = lab.ours.foreign(lab.decoder_config(case), dtype=torch.float64)
        built = foreign_modules(model)
        with torch.no_grad():
            ran = [] if built else foreign_code(lambda: model(**lab.probe(case).kwargs()))
    except Exception:  # noqa: BLE001 - a model that cannot be built or run computes nothing; the findings say why
        return []
    return [f"ours is built of {name}" for name in built] + [f"ours runs {name} of transformers" for name in ran]


def _explain(
    lab: Lab, replay: tuple[str, Replay] | None, explain: Explain | None
) -> tuple[Divergence | None, list[Hypothesis]]:
    if replay is None:
        return None, []
    level, where = replay
    try:
        model = lab.model(where.case)
    except Exception:  # noqa: BLE001 - a model that cannot be built has no first divergence; the findings say why
        return None, []
    divergence = None
    if where.question is None:
        divergence = localise(
            model,
            lab.trace(where.case, where.inputs),
            lab.ours.current.module_map,
            where.inputs,
            case=where.case,
            layer_types=lab.layer_types(where.case),
            dense_layers=lab.dense_layers(where.case),
        )
    return divergence, [] if explain is None else explain(Evidence(lab, divergence, where, level))


def _repro(lab: Lab, levels: Sequence[Level], divergence: Divergence | None) -> str | None:
    """One command that shows the first failure again."""
    for level in levels:
        failing = next((item for item in level.findings if item.status == "failed"), None)
        if failing is None:
            continue
        only = failing.check
        if divergence is not None and level.id == "V2" and divergence.layer is not None:
            only = f"layer{divergence.layer}"
        quoted = only if re.fullmatch(r"[\w./*-]+", only) else f"'{only}'"
        whose = "" if lab.ours.foreign is None else f" {OPTION} {lab.ours.foreign.name}"
        whose += "" if lab.head is HeadKind.LM else f" --head {lab.head}"
        return f"verify-bridge {lab.family}{whose} --level {level.id} --only {quoted} --seed {lab.seed}"
    return None
