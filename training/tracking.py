"""Where a run's figures go: metrics.jsonl always, and the trackers that are asked for, behind one interface.

    metrics.jsonl   one JSON object a line: `step`, then the figures of that step. Of a training step: time (seconds of
                    training so far), loss, grad_norm, lr, tokens, useful_tokens, loss_tokens (of this step, all
                    processes), tokens_per_s, mfu, data_wait_s, mem_gib; of an evaluation: eval/…. null: not finite.
    tensorboard     event files in `tensorboard/` of the run's folder
    wandb           offline in `wandb/` of the run's folder, unless WANDB_MODE says otherwise; then `wandb sync`
    mlflow          files in `mlflow/` of the run's folder, unless MLFLOW_TRACKING_URI names a server
    trackio         trackio's own place (TRACKIO_DIR), which `trackio show` reads

One process writes. After a resume metrics.jsonl is cut back to the step that the run goes on from; TensorBoard hides
what lies behind it; the other trackers have no way to forget, and keep both.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TextIO
from uuid import uuid4

from bestiary.kernels.errors import BestiaryError

METRICS = "metrics.jsonl"
_IDS = "trackers.json"  # what a tracker calls this run, so that a resumed one goes on in it


class TrackerMissing(BestiaryError):
    """A tracker whose package is not installed, or whose name is unknown.

    Remedy: install the extra of that name, or take it out of `tracking.to`.
    """


class MetricsDamaged(BestiaryError):
    """A metrics.jsonl with a line that is no JSON object with a step.

    Remedy: remove the line that the message names, or start under another `out`.
    """


@dataclass(frozen=True)
class RunInfo:
    """What trackers are told of a run.

    Attributes:
        name, project: of it.
        config: plain JSON values.
        step: that it goes on from; 0: it is new.
        steps: of the whole run; 0: unknown.
    """

    name: str
    project: str = "bestiary"
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    steps: int = 0


class Tracker(Protocol):
    """Something that keeps figures."""

    def start(self, run: RunInfo) -> None:
        """Once, before the first figure."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step; steps do not fall."""

    def close(self) -> None:
        """Once, after the last one."""


def trackers(
    names: Sequence[str], folder: Path, run: RunInfo, *, first: bool = True, also: Sequence[Tracker] = ()
) -> Tracker:
    """A started tracker that writes metrics.jsonl and passes on to all others.

    Args:
        names: of `TRACKERS`.
        folder: of the run; made if it is not there.
        first: whether this process is the one that writes; in the others nothing is written.
        also: further trackers, e.g. one that prints.
    Raises:
        TrackerMissing: names the extra to install, or the nearest known name.
        MetricsDamaged: the metrics.jsonl that the run goes on with.
    """
    if not first:
        return Tee(())
    made = [_known(name)(folder) for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    every = Tee((JsonLines(folder / METRICS), *made, *also))
    every.start(run)
    return every


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that was cut off while it was written is left out.

    Raises:
        MetricsDamaged: names the line.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("no object with an integer step")
        except ValueError as error:
            if _is_last(path, number):
                break
            raise MetricsDamaged(
                f"line {number} is no JSON object with a step: {line[:80].decode(errors='replace')!r}.",
                read_from=str(path),
                remedy="remove the line, or move the file away",
            ) from error
        rows.append(row)
    return rows


def _is_last(path: Path, number: int) -> bool:
    """Whether a line is the unfinished end of the file."""
    content = path.read_bytes()
    return not content.endswith(b"\n") and content.count(b"\n") == number - 1


class Tee:
    """Trackers, one after the other."""

    def __init__(self, parts: Iterable[Tracker]) -> None:
        self._parts = tuple(parts)

    def start(self, run: RunInfo) -> None:
        """All of them."""
        for part in self._parts:
            part.start(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """To all of them."""
        for part in self._parts:
            part.log(step, values)

    def close(self) -> None:
        """All of them, the last first."""
        for part in reversed(self._parts):
            part.close()


class JsonLines:
    """metrics.jsonl: every line is on its way to the disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, run: RunInfo) -> None:
        """Cut the file back to `run.step`: the new one replaces the old one in one move, or not at all.

        A run that begins anew keeps nothing, the figures before its first step neither.
        """
        if self._path.exists():
            kept = [row for row in read_metrics(self._path) if run.step and row["step"] <= run.step]
            _replace(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        if self._file is None:
            raise MetricsDamaged(f"{self._path} is not open.", remedy="start() before log()")
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Event files, one scalar a figure."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._make: Callable[..., Any] = SummaryWriter
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """What an earlier process wrote behind `run.step` is hidden."""
        purged = run.step + 1 if run.step else None
        self._writer = self._make(log_dir=str(self._folder), purge_step=purged, flush_secs=10)
        self._writer.add_text("config", "```json\n" + json.dumps(run.config, indent=2) + "\n```", run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Weights & Biases, offline unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._wandb: Any = wandb
        self._folder = folder
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Go on in the same run after a resume."""
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            id=_id_of(self._folder, "wandb", run, lambda: uuid4().hex[:12]),
            resume="allow",
            dir=str(self._folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All figures of a step at once."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """MLflow through its client, which leaves a run that the user has open alone."""

    def __init__(self, folder: Path) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise _missing("mlflow") from error
        self._client_class: Callable[..., Any] = MlflowClient
        self._metric: Callable[..., Any] = Metric
        self._folder = folder
        self._client: Any = None
        self._run = ""

    def start(self, run: RunInfo) -> None:
        """Go on in the same run after a resume."""
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # mlflow 3 asks to be told that files are wanted: its other local store needs a database engine.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (self._folder / "mlflow").resolve().as_uri()
        self._client = self._client_class(tracking_uri=uri)
        self._run = _id_of(self._folder, "mlflow", run, lambda: self._created(run))
        self._client.update_run(self._run, status="RUNNING")

    def _created(self, run: RunInfo) -> str:
        known = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if known is None else known.experiment_id
        made = self._client.create_run(experiment, run_name=run.name)
        for name, value in _flat(run.config):
            self._client.log_param(made.info.run_id, name, value)
        return str(made.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All figures of a step at once."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        if self._run:
            self._client.set_terminated(self._run)


class Trackio:
    """Hugging Face's trackio, local."""

    def __init__(self, folder: Path) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        self._trackio: Any = trackio
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Go on in the run of the same name after a resume."""
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=run.project,
                name=run.name,
                config=dict(run.config),
                resume="allow" if run.step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All figures of a step at once."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._trackio.finish()


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Name → what makes the tracker of a run's folder."""


def _known(name: str) -> Callable[[Path], Tracker]:
    if name not in TRACKERS:
        near = get_close_matches(name, TRACKERS, n=1)
        meant = f"{near[0]!r}? There are" if near else "one of"
        raise TrackerMissing(
            f"tracking.to names {name!r}, which is no tracker.", remedy=f"{meant} {', '.join(TRACKERS)}"
        )
    return TRACKERS[name]


def _missing(name: str) -> TrackerMissing:
    return TrackerMissing(
        f"tracking.to names {name!r}, and its package is not installed.",
        remedy=f"pip install 'bestiary[{name}]', or drop it: metrics.jsonl is written without it",
    )


def _id_of(folder: Path, tracker: str, run: RunInfo, new: Callable[[], str]) -> str:
    """What a tracker calls this run: as noted in the folder if the run goes on, otherwise new and noted."""
    path = folder / _IDS
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not run.step or tracker not in known:
        known[tracker] = new()
        _replace(path, json.dumps(known, indent=2) + "\n")
    return known[tracker]


def _replace(path: Path, content: str) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new one."""
    spare = path.with_name(f"{path.name}.new")
    with spare.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    spare.replace(path)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """A tree as dotted names and texts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
