"""A real checkpoint: its keys, its round trip through our files, and the logits of the whole model in float32 (V8).

The two models are never in memory together: Hugging Face's logits are kept, the model goes, ours comes.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bestiary.bridges import Bridge, Plan, SafetensorsSource, get_bridge, read_config
from bestiary.bridges.errors import KeyMismatch
from bestiary.bridges.hub import resolve
from bestiary.bridges.storage import read_rows
from bestiary.models import Decoder, DecoderConfig
from bestiary.verify.checks import (
    Check,
    Outcome,
    exit_codes,
    failed,
    holds,
    judged,
    not_run,
    passed,
    run_level,
    unless_mismatched,
)
from bestiary.verify.gates import GATE_VERSION, OFFICIAL, Gates
from bestiary.verify.hashes import altered_files, own_hashes, patched_functions, reference_hash, reference_modules
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.measure import bit_equal
from bestiary.verify.profiles import position_errors, record
from bestiary.verify.reference import default_dtype, quiet, reference_class
from bestiary.verify.run import BadUsage, environment
from bestiary.verify.verdict import WORDS, Exit, Keys, Level, Profile, Verdict, first_present

MAX_LOGIT_BYTES = 2**30
BEYOND_WINDOW = 96
CHUNK = 64
OFFSET = 4096
OFFSET_LENGTH = 48
SCANNED_BYTES = 2**26


@dataclass
class Bench:
    """One checkpoint under test."""

    folder: Path
    raw: dict[str, Any]
    bridge: Bridge
    scratch: Path
    token_ids: Sequence[int]
    gates: Gates
    keys: Keys = field(default_factory=Keys)
    profiles: list[Profile] = field(default_factory=list)
    _plan: Plan | KeyMismatch | None = None
    _logits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def config(self) -> DecoderConfig:
        """The architecture our bridge reads."""
        return self.bridge.parse(self.raw, source=str(self.folder / "config.json")).decoder

    def plan(self) -> Plan:
        """Which stored tensor goes where; a mismatch of keys is raised at every call."""
        if isinstance(self._plan, KeyMismatch):
            raise self._plan
        if self._plan is None:
            parsed = self.bridge.parse(self.raw, source=str(self.folder / "config.json"))
            with SafetensorsSource(self.folder) as source:
                try:
                    self._plan = self.bridge.plan_import(
                        parsed.decoder, source.infos, quantization=parsed.quantization, read_from=str(self.folder)
                    )
                except KeyMismatch as error:
                    self.keys.missing += error.missing
                    self.keys.unexpected += error.extra
                    self.keys.shape_mismatch += error.mismatched
                    self._plan = error
                    raise
            self.keys.ignored_with_reason.update(self._plan.ignored)
        return self._plan

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every stored tensor."""
        with SafetensorsSource(self.folder) as source:
            return {name: info.shape for name, info in source.infos.items()}

    def exported(self) -> Path:
        """Our export of the checkpoint, written at first use."""
        target = self.scratch / "export"
        if not target.exists():
            self.bridge.save(self.bridge.load(self.folder), target)
            gc.collect()
        return target

    # ------------------------------------------------------------ logits

    def inputs(self, name: str) -> Inputs:
        """The text from position 0, or its beginning at a far position."""
        ids = torch.tensor([list(self.token_ids)])
        if name == "text":
            return Inputs(ids)
        ids = ids[:, :OFFSET_LENGTH]
        return Inputs(ids, position_ids=torch.arange(ids.shape[1])[None] + OFFSET)

    def logits(self, name: str) -> tuple[Tensor, Tensor]:
        """Ours and Hugging Face's float32 logits (T, V) of one input."""
        if not self._logits:
            names = ["text"] + ["offset"] * (self.config.max_position_embeddings > OFFSET + OFFSET_LENGTH)
            theirs = self._hugging_face(names)
            gc.collect()
            model: Decoder = self.bridge.load(self.folder, dtype=torch.float32)
            with torch.no_grad():
                for one in names:
                    ours = model(**self.inputs(one).kwargs())["logits"][0]
                    self._logits[one] = (ours, theirs[one])
                    errors = position_errors(ours, theirs[one], scale=_spread(theirs[one]))
                    record(self.profiles, "V8", one, self.gates["V8.max"].limit, positions=errors)
            del model
            gc.collect()
        return self._logits[name]

    def _hugging_face(self, names: Sequence[str]) -> dict[str, Tensor]:
        with quiet(), default_dtype(torch.float32), torch.no_grad():
            model = reference_class(self.bridge.reference).from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation="eager"
            )
            model.eval()
            return {name: model(**self.inputs(name).kwargs(), use_cache=False).logits[0] for name in names}


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
    first = bench.bridge.load(bench.folder)
    again = dict(bench.bridge.load(bench.exported()).named_parameters())
    wrong = [name for name, parameter in first.named_parameters() if not bit_equal(parameter, again[name])]
    return holds(not wrong, Exit.KEYS, f"{len(wrong)} parameters differ after export and import, first {wrong[:1]}")


def _hugging_face_loads(bench: Bench) -> Outcome:
    with quiet():
        _, info = reference_class(bench.bridge.reference).from_pretrained(
            bench.exported(), dtype="auto", output_loading_info=True
        )
    wrong = [kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs") if info.get(kind)]
    return holds(not wrong, Exit.KEYS, f"transformers reports {wrong} for our export")


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


# ------------------------------------------------------------------------------------------------ V8


def _finite(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    ok = ours.shape == theirs.shape and bool(torch.isfinite(ours).all())
    return holds(
        ok, Exit.NUMERIC, f"our logits are {tuple(ours.shape)}, Hugging Face's {tuple(theirs.shape)}, or not finite"
    )


def _spread(logits: Tensor) -> float:
    """Standard deviation of logits (T, V), from some positions."""
    return float(logits[:: max(1, len(logits) // 16)].double().std())


def _max(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True))
    return judged(worst / _spread(theirs), bench.gates["V8.max"])


def _kl(bench: Bench, name: str) -> Outcome:
    ours, theirs = bench.logits(name)
    total = 0.0
    for a, b in zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True):
        p, q = b.double().log_softmax(-1), a.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return judged(total / len(theirs), bench.gates["V8.kl"])


def _top1(bench: Bench, name: str) -> Outcome:
    """Agreement of the most likely token where the reference's margin exceeds the noise that the gate allows."""
    ours, theirs = bench.logits(name)
    best = theirs.topk(2, dim=-1)
    noise = bench.gates["V8.max"].limit * float(theirs[:CHUNK].double().std())
    clear = best.values[:, 0] - best.values[:, 1] > noise
    if not bool(clear.any()):
        return failed(Exit.INCONCLUSIVE, "no position has a margin above the noise")
    agree = (ours.argmax(-1) == best.indices[:, 0])[clear]
    return judged(float(agree.double().mean()), bench.gates["V8.top1"])


def _long_enough(bench: Bench) -> Outcome:
    window = bench.config.sliding_window
    count = len(bench.token_ids)
    enough = window is None or count > window
    return (
        Outcome("passed")
        if enough
        else Outcome("inconclusive", Exit.INCONCLUSIVE, f"{count} tokens do not pass the window of {window}")
    )


def _plan_v8(bench: Bench) -> list[Check]:
    names = ["text"] + ["offset"] * (bench.config.max_position_embeddings > OFFSET + OFFSET_LENGTH)
    checks = [Check("longer than the window", partial(_long_enough, bench))]
    for name in names:
        checks += [
            Check(f"{name}/finite", partial(_finite, bench, name)),
            Check(f"{name}/max", partial(_max, bench, name)),
            Check(f"{name}/kl", partial(_kl, bench, name)),
            Check(f"{name}/top1", partial(_top1, bench, name)),
        ]
    return checks


IMPORTS: dict[str, tuple[str, Callable[[Bench], object]]] = {
    "V0": ("import plan", Bench.plan),
    "V1": ("import", Bench.exported),
}
"""What all checks of a level need; a mismatch there is the level's only check."""

LEVELS: tuple[tuple[str, str, Callable[[Bench], list[Check]], Exit], ...] = (
    ("V0", "keys", _plan_v0, Exit.KEYS),
    ("V1", "round trip", _plan_v1, Exit.KEYS),
    ("V8", "checkpoint", _plan_v8, Exit.NUMERIC),
)


def choose_tokens(config: DecoderConfig, token_ids: Sequence[int] | None, seed: int) -> list[int]:
    """The given tokens, cut to what logits may take, or random ones that pass the window.

    Raises:
        BadUsage: no tokens, or one outside the vocabulary.
    """
    most = max(CHUNK, MAX_LOGIT_BYTES // (4 * config.vocab_size))
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
) -> Verdict:
    """Verifies a checkpoint folder or hub id: V0 and V1 on its files, V8 on the float32 logits of the whole model.

    Args:
        token_ids: one sequence to compare on, best real text longer than the sliding window; None: random ids.
        keep_going: run later levels after one failed.
        progress: called with a line before each level.
    Raises:
        CheckpointNotFound, UnsupportedModelType, OfflineError, BadUsage.
    """
    start = time.perf_counter()
    folder = resolve(source)
    raw = read_config(folder)
    bridge = get_bridge(str(raw.get("model_type")), read_from=str(folder))
    config = bridge.parse(raw, source=str(folder / "config.json")).decoder
    with tempfile.TemporaryDirectory(prefix="verify-bridge-") as scratch, quiet():
        bench = Bench(
            folder,
            raw,
            bridge,
            Path(scratch),
            choose_tokens(config, token_ids, seed),
            gates or Gates(),
        )
        results, codes = _levels(bench, keep_going, progress or (lambda _: None))
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
        scope="full",
        gate_version=GATE_VERSION,
        official=dict(bench.gates.table) == dict(OFFICIAL),
        env=environment(),
        hashes={
            **own_hashes(bridge.config_from_hf.__module__, json.dumps(raw, sort_keys=True)),
            "transformers": reference_hash(),
        },
        seed=seed,
        seconds=time.perf_counter() - start,
        levels=results,
        cases={"checkpoint": raw},
        keys=bench.keys,
        profiles=bench.profiles,
        repro=f"verify-bridge {source} --seed {seed}",
        error="; ".join(tampered[:2]) or None,
    )


def _levels(bench: Bench, keep_going: bool, progress: Callable[[str], None]) -> tuple[list[Level], list[Exit]]:
    results: list[Level] = []
    codes: list[Exit] = []
    stopped: str | None = None
    for level, title, plan, on_error in LEVELS:
        progress(f"{bench.folder.name} {level} {title}")
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
