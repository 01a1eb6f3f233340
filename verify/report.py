"""The verdict as text: at most 40 lines a family, worst news first, ending in the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from bestiary.verify.verdict import WORDS, Exit, Level, Report, Verdict, Word, Worst

MAX_LINES = 40
MAX_FAILURES = 8
WIDTH = 200
MEANING: dict[Word, str] = {
    "pass": "Every planned check passed.",
    "numeric": "Numbers differ from Hugging Face's beyond a gate.",
    "keys": "Keys, shapes or the round trip of a checkpoint differ.",
    "config": "A config field moves Hugging Face and not ours.",
    "refused": "Refused by name as unsupported.",
    "inconclusive": "The checks that ran could not have told a wrong model from a right one.",
    "tampering": "The reference or the verifier is not what was installed, or ours delegates to the reference.",
    "usage": "Nothing was verified.",
}
_SHOWN = {"ok": "ok", "fail": "FAIL", "refused": "REFUSED", "inconclusive": "INCONCL", "not run": "not run"}


def _cut(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def figure_text(worst: Worst) -> str:
    """A level's worst figure, "1.2e-15"."""
    return "not finite" if worst.figure is None else f"{worst.figure:.1e}"


def totals(verdict: Verdict) -> tuple[int, int]:
    """Checks passed and planned over all levels."""
    return sum(level.passed for level in verdict.levels), sum(level.planned for level in verdict.levels)


def report_word(report: Report) -> Word:
    """The finding over all verdicts: the word of its exit code."""
    return WORDS[report.exit_code]


def _level(level: Level) -> str:
    counts = f"{level.passed}/{level.planned}"
    line = f"  {level.id:<2} {level.title:<11} {_SHOWN[level.status]:<8} {counts:>9}  {level.seconds:6.1f} s"
    if level.worst is not None:
        line += f"   worst {figure_text(level.worst)} at {_cut(level.worst.check, 40)} (gate {level.worst.gate:g})"
    extra = [f"{level.refused} refused"] if level.refused else []
    extra += [f"{level.skipped} skipped"] if level.skipped else []
    return line + (f"   {', '.join(extra)}" if extra else "")


def _whole(text: str) -> list[str]:
    """A text of several lines (which keys do not match, and what to do) without a cut, folded at `WIDTH`."""
    return [
        line
        for part in text.splitlines()
        for line in wrap(part, WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
    ]


def _failures(verdict: Verdict, room: int) -> Iterator[str]:
    """At most `MAX_FAILURES` findings; one of several lines in full where it fits into `room` lines, once."""
    found = [(level.id, item) for level in verdict.levels for item in level.findings if item.status != "refused"]
    told: set[str] = set()
    shown = 0
    for level, item in found[: min(MAX_FAILURES, max(1, room))]:
        head = f"  {level} {item.status:<12} {_cut(item.check, 44)}: "
        block = [head + _cut(item.detail, 100)]
        if "\n" in item.detail and item.detail not in told:
            block = [head, *_whole(item.detail)]
        if shown and len(block) > room:
            break
        told.add(item.detail)
        room -= len(block)
        shown += 1
        yield from (line.rstrip() for line in block)
    if len(found) > shown:
        yield f"  … and {len(found) - shown} more (--json FILE lists them)"


def _refusals(verdict: Verdict) -> Iterator[str]:
    names = [item.field for item in verdict.config if item.ours == "refused"]
    refused = sorted(dict.fromkeys(names))
    if refused:
        yield f"  refused by name   {_cut(', '.join(refused), 180)}"


def _elsewhere(verdict: Verdict) -> Iterator[str]:
    """Implementations for another device: named, so that nobody takes them for compared."""
    names = [f"{path.operation}={path.implementation}" for path in verdict.kernels if path.status == "another device"]
    if names:
        yield f"  not for this device {_cut(', '.join(names), 170)}"


def _divergence(verdict: Verdict) -> Iterator[str]:
    first = verdict.first_divergence
    if first is None:
        return
    details = [first.case, *first.pattern, "inputs equal" if first.inputs_equal else "inputs differ already"]
    if first.layer_type:
        details.insert(1, first.layer_type)
    yield f"  first divergence  {first.module} {first.tensor}   {_cut('; '.join(details), 140)}"
    if verdict.hypotheses:
        best = verdict.hypotheses[0]
        yield f"  likely cause      {_cut(best.hint, 90)} (reproduces our output to {best.reproduces_to:.0e})"
        for other in verdict.hypotheses[1:3]:
            yield f"  or                {_cut(other.hint, 90)} ({other.reproduces_to:.0e})"


def whose_text(verdict: Verdict) -> str | None:
    """A sentence on whose implementation was verified, where it is not bestiary's."""
    other = verdict.implementation
    if other is None:
        return None
    return (
        f"Verified is {other.factory}, not bestiary's own model; {len(other.omitted)} levels and checks were not asked."
    )


def _whose(verdict: Verdict) -> list[str]:
    """Whose implementation was verified, where it is not ours, and of how much it was not asked."""
    other = verdict.implementation
    if other is None:
        return []
    return [f"  ours is           {other.factory}   not asked: {_cut('; '.join(other.omitted) or 'nothing', 120)}"]


def _named(verdict: Verdict) -> str:
    return verdict.family if verdict.head == "lm" else f"{verdict.family} --head {verdict.head}"


def family_lines(verdict: Verdict) -> list[str]:
    """The text of one verdict, at most `MAX_LINES` lines."""
    scope = "" if verdict.scope == "full" else "   partial run"
    head = (
        f"{_named(verdict)}  transformers {verdict.env.get('transformers', '?')} {verdict.reference_class}"
        f"   seed {verdict.seed}   gate {verdict.gate_version}{'' if verdict.official else ' tightened'}{scope}"
    )
    lines = [head, *_whose(verdict), *(_level(level) for level in verdict.levels)]
    if verdict.error:
        lines.append(f"  error             {_cut(verdict.error, 160)}")
    lines += [f"  weak test         {_cut(reason, 120)}" for reason in verdict.weak[:4]]
    tail = [*_divergence(verdict), *_refusals(verdict), *_elsewhere(verdict)]
    if verdict.repro and verdict.exit_code != Exit.PASS:
        tail.append(f"  again             {verdict.repro}")
    tail.append(f"exit {int(verdict.exit_code)}  {verdict.verdict}  {verdict.seconds:.1f} s")
    room = MAX_LINES - len(lines) - len(tail) - 1
    return [*lines, *_failures(verdict, room), *tail]


def summary_line(verdict: Verdict) -> str:
    """One line for a run over several families."""
    passed, planned = totals(verdict)
    exact = [level.worst for level in verdict.levels if level.id in ("V2", "V3", "V4", "V5") and level.worst]
    figures = [worst.figure for worst in exact if worst.figure is not None]
    worst = f"   fp64 worst {max(figures):.1e}" if figures else ""
    refused = sum(level.refused for level in verdict.levels)
    return (
        f"{_named(verdict):<14} {verdict.verdict:<12} {passed}/{planned}{f', {refused} refused' if refused else ''}"
        f"   {verdict.seconds:.1f} s{worst}"
    )


def text(report: Report) -> str:
    """One family in full; several as one line each, then the failing ones in full."""
    if len(report.verdicts) == 1:
        return "\n".join(family_lines(report.verdicts[0]))
    lines = []
    for verdict in report.verdicts:
        lines.append(summary_line(verdict))
    for verdict in report.verdicts:
        if verdict.exit_code != Exit.PASS:
            lines += ["", *family_lines(verdict)]
    return "\n".join([*lines, f"exit {int(report.exit_code)}"])
