"""metrics.jsonl and the trackers beside it."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from bestiary.training import tracking
from bestiary.training.tracking import METRICS, MetricsDamaged, RunInfo, TrackerMissing, read_metrics, trackers

RUN = RunInfo("first", config={"optim": {"lr": 1e-3}})


def write(folder: Path, steps: range, start: int = 0) -> None:
    tracker = trackers((), folder, RunInfo("first", step=start))
    for step in steps:
        tracker.log(step, {"loss": 1.0 / step})
    tracker.close()


def test_a_line_is_in_the_file_before_the_next_is_logged(tmp_path: Path) -> None:
    tracker = trackers((), tmp_path / "run", RUN)
    tracker.log(1, {"loss": 2.0})
    assert read_metrics(tmp_path / "run" / METRICS) == [{"step": 1, "loss": 2.0}]
    tracker.close()


@pytest.mark.slow
@given(data=st.data(), written=st.integers(1, 8))
def test_a_resumed_run_leaves_the_file_of_one_that_never_stopped(
    data: DataObject, written: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed in the middle of a line, too."""
    resumed, whole = tmp_path_factory.mktemp("resumed"), tmp_path_factory.mktemp("whole")
    step = data.draw(st.integers(0, written))
    write(whole, range(1, 10))
    write(resumed, range(1, written + 1))
    path = resumed / METRICS
    content = path.read_bytes()
    last = content[:-1].rfind(b"\n") + 1
    if step < written:
        path.write_bytes(content[: data.draw(st.integers(last + 1, len(content)))])
    write(resumed, range(step + 1, 10), start=step)
    assert path.read_bytes() == (whole / METRICS).read_bytes()


def test_a_run_that_begins_anew_keeps_no_figure_from_before_its_first_step(tmp_path: Path) -> None:
    for _ in range(2):
        tracker = trackers((), tmp_path, RUN)
        tracker.log(0, {"eval/loss": 3.0})
        tracker.close()
    assert read_metrics(tmp_path / METRICS) == [{"step": 0, "eval/loss": 3.0}]


def test_the_old_file_stays_whole_when_the_cut_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 5))
    before = (tmp_path / METRICS).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, range(3, 5), start=2)
    assert (tmp_path / METRICS).read_bytes() == before


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"loss": 2}\n{"step": 3}\n')
    with pytest.raises(MetricsDamaged, match="line 2"):
        trackers((), tmp_path, RUN)


def test_what_is_not_finite_stays_readable_json(tmp_path: Path) -> None:
    tracker = trackers((), tmp_path, RUN)
    tracker.log(1, {"loss": math.nan, "grad_norm": math.inf})
    tracker.close()
    line = (tmp_path / METRICS).read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None}


def test_one_process_writes(tmp_path: Path) -> None:
    tracker = trackers((), tmp_path / "run", RUN, first=False)
    tracker.log(1, {"loss": 2.0})
    tracker.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TrackerMissing) as caught:
        trackers([name], tmp_path / "run", RUN)
    assert f"bestiary[{name}]" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_misspelt_tracker_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(TrackerMissing, match="tensorboard"):
        trackers(["tensorbord"], tmp_path, RUN)


@pytest.mark.slow
def test_tensorboard_shows_every_figure_and_after_a_resume_those_of_the_last_attempt(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, offset in ((0, 0.0), (2, 10.0)):
        tracker = trackers(["tensorboard"], tmp_path, RunInfo("first", config=RUN.config, step=start))
        for step in range(start + 1, 5):
            tracker.log(step, {"loss": step + offset, "eval/loss": 0.5})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]
    assert len(events.Scalars("eval/loss")) == 4
