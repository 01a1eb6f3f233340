"""`verify`: one target, one typed verdict; `verify_several`: the same in several processes. The command calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from bestiary.bridges.hub import commit_of, resolve
from bestiary.bridges.storage import read_json
from bestiary.models.config import HeadKind
from bestiary.verify.checkpoint import run_checkpoint
from bestiary.verify.foreign import OPTION, load_factory
from bestiary.verify.gates import Gates
from bestiary.verify.hypotheses import explain
from bestiary.verify.placing import usable
from bestiary.verify.reference import ReferencePool
from bestiary.verify.run import BadUsage, run
from bestiary.verify.tiny import Raw
from bestiary.verify.verdict import Verdict
from bestiary.verify.workers import pool_of


def verify(
    target: str | Path,
    *,
    level: str | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    keep_going: bool = False,
    tighten: Sequence[str] = (),
    config: str | Path | None = None,
    isolate: bool = False,
    text: str | Path | None = None,
    tokens: str | Path | Sequence[int] | None = None,
    progress: Callable[[str], None] | None = None,
    pool: ReferencePool | None = None,
    work: str | Path | None = None,
    ours: str | None = None,
    device: str = "cpu",
    head: str = "lm",
    revision: str | None = None,
) -> Verdict:
    """Verifies a family on tiny configs, or a checkpoint folder on its own weights.

    The keywords are the options of `verify-bridge`; a verdict is returned whatever it says, errors of usage are raised.

    Args:
        target: `model_type` of a registered bridge, or a checkpoint folder or hub id.
        level: "V2", "V0..V2", "V0,V4"; None: all. Of a checkpoint V0, V1, V8, or several with commas.
        only: patterns of check ids, or `layerN`.
        seed: of weights and inputs.
        keep_going: run later levels after one failed.
        tighten: stricter gates, e.g. ("V2=1e-12",).
        config: a config.json to verify on in place of the tiny configs.
        isolate: run our forward also where transformers' modelling files cannot be imported.
        text: checkpoint: a text file to compare on, by the folder's own tokenizer.
        tokens: checkpoint: token ids to compare on, or a JSON file with a list of them.
        progress: called with a line before each level.
        work: checkpoint: folder for what a killed run leaves; None: in the user's cache folder.
        pool: references that earlier calls built, to share them.
        device: where both sides compute: "cpu", "cuda" or "cuda:N"; level K runs on the CPU.
        head: family: "score" verifies its reward model, against transformers' `…ForSequenceClassification`.
        ours: family: "package.module:factory" of another implementation; see `bestiary.verify.foreign`.
        revision: checkpoint: branch, tag or commit of a hub id; the verdict holds the commit.
    Raises:
        NoScoreClass: transformers has no reward model of this family.
        UnsupportedModelType, CheckpointNotFound, BadUsage, GateError, NoDevice, BadFactory: nothing can be verified so.
    """
    gates = Gates().tightened(tighten)
    foreign, place = None if ours is None else load_factory(ours), usable(device)
    if head not in list(HeadKind):
        raise BadUsage(f"--head {head}.", remedy=f"one of {', '.join(HeadKind)}")
    if is_checkpoint(str(target)):
        if head != HeadKind.LM:
            raise BadUsage(f"--head {head} with the checkpoint {target}.", remedy="name the family, e.g. qwen3")
        if foreign is not None:
            raise BadUsage(f"{OPTION} {ours} with the checkpoint {target}.", remedy="name the family, e.g. qwen3")
        folder = resolve(target, revision=revision)
        return run_checkpoint(
            target,
            seed=seed,
            gates=gates,
            token_ids=_token_ids(text, tokens, target, commit_of(folder)),
            revision=commit_of(folder) or revision,
            keep_going=keep_going,
            progress=progress,
            work=None if work is None else Path(work),
            levels=None if level is None else level.split(","),
            device=place,
        )
    if revision is not None:
        raise BadUsage(f"--revision {revision} with the family {target}.", remedy="a revision is a checkpoint's")
    return run(
        str(target),
        level,
        seed,
        only=[pattern for one in only for pattern in one.split(";")],
        gates=gates,
        keep_going=keep_going,
        isolate=isolate,
        cases=_cases(config),
        pool=pool,
        explain=explain if head == HeadKind.LM else None,  # the bugs that it replays are a language model's
        progress=progress,
        foreign=foreign,
        device=place,
        head=HeadKind(head),
    )


def verify_several(
    targets: Sequence[str],
    *,
    workers: int,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Verdict]:
    """`verify` of each target, in the order given.

    Args:
        workers: processes, each with its share of torch's threads; 1: this process, one after the other.
        options: of `verify`, the same for every target.
    Raises:
        BadUsage: fewer than one process.   Those of `verify`.
    """
    if workers < 1:
        raise BadUsage(f"--workers {workers}.", remedy="at least 1")
    count = min(workers, len(targets))
    if count <= 1:
        return [verify(target, progress=progress, **options) for target in targets]
    threads = max(1, torch.get_num_threads() // count)
    with pool_of(count, threads=threads) as pool:
        futures = [pool.submit(partial(verify, target, **options)) for target in targets]
        verdicts = []
        for future in futures:
            verdicts.append(future.result())
            if progress is not None:
                progress(f"{len(verdicts)}/{len(targets)} {verdicts[-1].family} {verdicts[-1].verdict}")
    return verdicts


def is_checkpoint(target: str) -> bool:
    """Whether a target is a folder or hub id rather than a model_type; a registered name wins over a folder."""
    if target in entry_points(group="bestiary.bridges").names:
        return False
    return "/" in target or "\\" in target or Path(target).is_dir()


def _cases(file: str | Path | None) -> dict[str, Raw] | None:
    """One case from a config.json, None without."""
    if file is None:
        return None
    if not Path(file).is_file():
        raise BadUsage(f"--config {file} is no file.", remedy="give a config.json")
    return {Path(file).stem: read_json(Path(file))}


def _token_ids(
    text: str | Path | None, tokens: str | Path | Sequence[int] | None, source: str | Path, revision: str | None
) -> Sequence[int] | None:
    """Token ids given, from a JSON file or from a text; None: the checkpoint run draws its own."""
    if isinstance(tokens, str | Path):
        try:
            ids = json.loads(Path(tokens).read_text(encoding="utf-8"))
        except ValueError:
            ids = None
        if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
            raise BadUsage(f"{tokens} is no JSON list of integers.", remedy="write [1, 2, 3, …]")
        return ids
    if tokens is not None:
        return tokens
    if text is None:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    return list(tokenizer(Path(text).read_text(encoding="utf-8"))["input_ids"])
