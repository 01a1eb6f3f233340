"""A real checkpoint: its keys, its round trip through our files, and its layers and logits in float32 (V8)."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from bestiary.bridges import SafetensorsSource, get_bridge, read_config
from bestiary.bridges.hub import commit_of, resolve
from bestiary.bridges.storage import read_rows
from bestiary.bridges.streaming import stored_parameters
from bestiary.models import DecoderConfig
from bestiary.models.config import HeadKind
from bestiary.verify.checkpoint_bench import Bench
from bestiary.verify.checks import (
    Check,
    Outcome,
    exit_codes,
    failed,
    holds,
    not_run,
    passed,
    run_level,
    unless_mismatched,
)
from bestiary.verify.gates import GATE_VERSION, OFFICIAL, Gates
from bestiary.verify.hashes import altered_files, own_hashes, patched_functions, reference_hash, reference_modules
from bestiary.verify.inputs import tokens
from bestiary.verify.levels import v8_checkpoint
from bestiary.verify.measure import bit_equal
from bestiary.verify.placing import CPU
from bestiary.verify.reference import quiet, reference_class
from bestiary.verify.run import BadUsage, environment
from bestiary.verify.streamed_models import StreamedReference
from bestiary.verify.verdict import WORDS, Exit, Level, Verdict, first_present, today

MAX_LOGIT_BYTES = 2**30
BEYOND_WINDOW = 96
SHORTEST = 64
SCANNED_BYTES = 2**26


# ------------------------------------------------------------------------------------------------ V0


def _read_once(bench: Bench, key: str, shape: tuple[int, ...]) -> Outcome:
    plan = bench.plan()
    if key in plan.ignored or (plan.duplicate_head is not None and key == plan.duplicate_head[0]):
        return passed()
    readers = [transfer for transfer in plan.transfers if key in transfer.hub.stored]
    if len(readers) != 1:
        return failed(Exit.KEYS, f"{key} is read by {len(readers)} transfers")
    carried = sum(piece.numel for _, piece in readers[0].pieces)
    return holds(carried == prod(readers[0].hub.shape), Exit.KEYS, f"{carried} of {prod(shape)} elements are read")


def _written_once(bench: Bench) -> Outcome:
    written = dict.fromkeys(bench.bridge.parameters(bench.config), 0)
    shapes = bench.bridge.parameters(bench.config)
    for transfer in bench.plan().transfers:
        for name, piece in transfer.pieces:
            written[name] += piece.numel
    wrong = [name for name, count in written.items() if count != prod(shapes[name])]
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} parameters are not written once, first {wrong[:1]}")


def _tie(bench: Bench) -> Outcome:
    with torch.device("meta"), quiet():
        theirs = reference_class(bench.bridge.reference)(_hf_config(bench))
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    ours = bench.bridge.decoder(bench.config, device="meta")
    mine = ours.lm_head.weight is ours.model.embed_tokens.weight
    counts = [sum(p.numel() for p in model.parameters()) for model in (theirs, ours)]
    return holds(
        tied == mine and counts[0] == counts[1],
        Exit.KEYS,
        f"tied: Hugging Face {tied}, ours {mine}; distinct parameters {counts[0]} and {counts[1]}",
    )


def _not_finite(source: SafetensorsSource, name: str) -> int:
    """How many elements of a stored tensor are NaN or infinite, read a block of rows at a time."""
    info = source.infos[name]
    if not info.dtype.is_floating_point or not prod(info.shape):
        return 0
    rows = max(1, SCANNED_BYTES * info.num_rows // (4 * prod(info.shape)))
    starts = range(0, info.num_rows, rows)
    blocks = (read_rows(source, name, start, min(start + rows, info.num_rows)) for start in starts)
    return sum(int((~torch.isfinite(block.float())).sum()) for block in blocks)


def _finite_weights(bench: Bench) -> Outcome:
    """A weight that is not finite would make every logit of both sides so, and compare nothing."""
    with SafetensorsSource(bench.folder) as source:
        counts = {name: _not_finite(source, name) for name in source.infos}
    broken = [name for name, count in counts.items() if count]
    return holds(
        not broken,
        Exit.NUMERIC,
        f"{len(broken)} stored tensors are not finite, first "
        + "".join(f"{name} ({counts[name]} NaN or infinite values)" for name in broken[:1]),
    )


def _hf_config(bench: Bench) -> Any:
    with quiet():
        config = reference_class(bench.bridge.reference).config_class.from_pretrained(bench.folder)
    config._attn_implementation = "eager"
    return config


def _plan_v0(bench: Bench) -> list[Check]:
    checks = [Check(key, partial(_read_once, bench, key, shape)) for key, shape in bench.stored().items()]
    return [
        *checks,
        Check("written once", partial(_written_once, bench)),
        Check("tie", partial(_tie, bench)),
        Check("finite weights", partial(_finite_weights, bench)),
    ]


# ------------------------------------------------------------------------------------------------ V1


def _same_tensor(bench: Bench, key: str) -> Outcome:
    """A stored tensor in our export: the same bits under the plain name; MXFP4 and a tied head stored twice apart."""
    plan = bench.plan()
    name = plan.naming.ruled(key)
    with SafetensorsSource(bench.folder) as theirs, SafetensorsSource(bench.exported()) as ours:
        if key in plan.ignored:
            return holds(name is None or name not in ours.infos, Exit.KEYS, f"{key} is ignored and exported")
        if plan.duplicate_head is not None and key == plan.duplicate_head[0]:
            return holds(name not in ours.infos, Exit.KEYS, f"the tied head {key} is written twice")
        if any(transfer.hub.packed and key in transfer.hub.stored for transfer in plan.transfers):
            return holds(name not in ours.infos, Exit.KEYS, f"{key} is written as MXFP4")
        if name is None or name not in ours.infos:
            return failed(Exit.KEYS, f"{key} is missing in our export")
        rows = theirs.infos[key].num_rows
        same = bit_equal(read_rows(ours, name, 0, ours.infos[name].num_rows), read_rows(theirs, key, 0, rows))
    return holds(same, Exit.KEYS, f"{key} differs in our export")


def _imported_again(bench: Bench) -> Outcome:
    with (
        stored_parameters(bench.bridge, bench.folder) as (_, first),
        stored_parameters(bench.bridge, bench.exported()) as (_, again),
    ):
        wrong = [name for name in first if name not in again or not bit_equal(first[name], again[name])]
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} parameters differ after export and import, first {wrong[:1]}")


def _hugging_face_loads(bench: Bench) -> Outcome:
    """By its own loader, one layer at a time; a parameter that it leaves out is an error there."""
    theirs = StreamedReference(bench.bridge.reference, bench.exported())
    with theirs.outside():
        pass
    for index in range(len(theirs.layers)):
        with theirs.layer(index):
            pass
    wrong = {kind: sorted(map(str, found)) for kind, found in theirs.reported.items() if found}
    return holds(not wrong, Exit.KEYS, f"transformers reports for our export: {wrong}")


def _architecture(bench: Bench) -> Outcome:
    exported = bench.bridge.parse(read_config(bench.exported()), source="our export").decoder
    return holds(exported == bench.config, Exit.KEYS, "our export's config.json is another architecture")


def _plan_v1(bench: Bench) -> list[Check]:
    checks = [Check(key, partial(_same_tensor, bench, key)) for key in bench.stored()]
    return [
        *checks,
        Check("imported again", partial(_imported_again, bench)),
        Check("transformers loads", partial(_hugging_face_loads, bench)),
        Check("architecture", partial(_architecture, bench)),
    ]


IMPORTS: dict[str, tuple[str, Callable[[Bench], object]]] = {
    "V0": ("import plan", Bench.plan),
    "V1": ("import", Bench.exported),
}
"""What all checks of a level need; a mismatch there is the level's only check."""

LEVELS: tuple[tuple[str, str, Callable[[Bench], list[Check]], Exit], ...] = (
    ("V0", "keys", _plan_v0, Exit.KEYS),
    ("V1", "round trip", _plan_v1, Exit.KEYS),
    ("V8", "checkpoint", v8_checkpoint.plan, Exit.NUMERIC),
)


def choose_tokens(config: DecoderConfig, token_ids: Sequence[int] | None, seed: int) -> list[int]:
    """The given tokens, cut to what logits may take, or random ones that pass the window.

    Raises:
        BadUsage: no tokens, or one outside the vocabulary.
    """
    most = max(SHORTEST, MAX_LOGIT_BYTES // (4 * config.vocab_size))
    if token_ids is None:
        length = min(most, (config.sliding_window or 256) + BEYOND_WINDOW)
        return list(tokens(config.vocab_size, 1, length, seed)[0].tolist())
    chosen = list(token_ids)[:most]
    if not chosen or min(chosen) < 0 or max(chosen) >= config.vocab_size:
        raise BadUsage(
            f"{len(chosen)} token ids, not all in [0, {config.vocab_size}).",
            remedy="use the checkpoint's own tokenizer",
        )
    return chosen


def run_checkpoint(
    source: Path | str,
    *,
    seed: int = 0,
    gates: Gates | None = None,
    token_ids: Sequence[int] | None = None,
    keep_going: bool = False,
    progress: Callable[[str], None] | None = None,
    work: Path | None = None,
    levels: Collection[str] | None = None,
    device: torch.device = CPU,
    revision: str | None = None,
) -> Verdict:
    """Verifies a checkpoint folder or hub id: V0 and V1 on its files, V8 on its layers and logits in float32.

    V1 holds a parameter or two in memory, or a layer of Hugging Face's; V8 a layer of one side at a time. A run that
    was killed in V8 goes on at the layer it had reached, as long as checkpoint, tokens and both implementations are
    the same.

    Args:
        token_ids: one sequence to compare on, best real text longer than the sliding window; None: random ids.
        keep_going: run later levels after one failed.
        progress: called with a line before each level and each layer.
        work: folder for what a killed run leaves; None: `bestiary/verify` in the user's cache folder.
        levels: some of V0, V1, V8; None: all.
        revision: branch, tag or commit of a hub id; the verdict holds the commit that was read.
    Raises:
        CheckpointNotFound, UnsupportedModelType, OfflineError, BadUsage.
    """
    start = time.perf_counter()
    known = [level for level, *_ in LEVELS]
    chosen = known if levels is None else [level for level in known if level in levels]
    if not chosen or not set(chosen).issuperset(levels or ()):
        raise BadUsage(f"a checkpoint has no level {', '.join(levels or ())}.", remedy=f"choose of {', '.join(known)}")
    folder = resolve(source, revision=revision)
    commit = None if Path(source).is_dir() else commit_of(folder)
    raw = read_config(folder)
    bridge = get_bridge(str(raw.get("model_type")), read_from=str(folder))
    config = bridge.parse(raw, source=str(folder / "config.json")).decoder
    if config.head is not HeadKind.LM:
        raise BadUsage(
            f"{source} is a reward model; V8 streams language models alone.",
            remedy=f"verify its family: verify-bridge {config.model_type} --head {config.head}",
        )
    with tempfile.TemporaryDirectory(prefix="verify-bridge-") as scratch, quiet():
        bench = Bench(
            folder,
            raw,
            bridge,
            Path(scratch),
            choose_tokens(config, token_ids, seed),
            gates or Gates(),
            work=work,
            device=device,
        )
        results, codes = _levels(bench, chosen, keep_going, progress or (lambda _: None))
    reference = reference_class(bridge.reference)
    tampered = [f"{path} differs from the wheel's RECORD" for path in altered_files()]
    tampered += [f"{name} was replaced in memory" for name in patched_functions(reference_modules(reference))]
    code = first_present([*codes, *([Exit.TAMPERING] if tampered else [])])
    return Verdict(
        family=str(source),
        model_type=bridge.model_type,
        reference_class=bridge.architecture,
        verdict=WORDS[code],
        exit_code=code,
        scope="full" if chosen == known else "partial",
        gate_version=GATE_VERSION,
        official=dict(bench.gates.table) == dict(OFFICIAL),
        env=environment(device),
        hashes={
            **own_hashes(bridge.config_from_hf.__module__, json.dumps(raw, sort_keys=True)),
            "transformers": reference_hash(),
        },
        seed=seed,
        made=today(),
        revision=commit,
        seconds=time.perf_counter() - start,
        levels=results,
        cases={"checkpoint": raw},
        keys=bench.keys,
        profiles=bench.profiles,
        repro=f"verify-bridge {source}{f' --revision {commit}' if commit else ''} --seed {seed}",
        error="; ".join(tampered[:2]) or None,
    )


def _line(progress: Callable[[str], None], before: str, text: str) -> None:
    progress(f"{before} {text}")


def _levels(
    bench: Bench, chosen: Collection[str], keep_going: bool, progress: Callable[[str], None]
) -> tuple[list[Level], list[Exit]]:
    results: list[Level] = []
    codes: list[Exit] = []
    stopped: str | None = None
    for level, title, plan, on_error in (one for one in LEVELS if one[0] in chosen):
        progress(f"{bench.folder.name} {level} {title}")
        bench.progress = partial(_line, progress, f"{bench.folder.name} {level}")
        if stopped is not None:
            results.append(not_run(level, title, plan(bench), stopped))
            continue
        name, imported = IMPORTS.get(level, ("", Bench.stored))
        checks = unless_mismatched(name, partial(imported, bench), partial(plan, bench))
        result, _ = run_level(level, title, checks, on_error=on_error, refusals_are_answers=False)
        results.append(result)
        codes += exit_codes(result)
        if result.status != "ok" and not keep_going:
            stopped = f"{level} is not ok (keep_going runs the rest)"
    return results, codes
