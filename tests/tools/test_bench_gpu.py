"""The prepared GPU script: its dry run on the CPU, its targets, and what it does when time or a section fails."""

import functools
import json

import pytest
import torch

from bestiary.tools.bench import gpu, process
from bestiary.tools.bench.gpu_work import SECTIONS


@functools.cache
def answer(told):
    """What a section says to a job; each runs once for all tests."""
    return json.dumps({"rows": gpu._work(json.loads(told))})


@pytest.fixture
def in_process(monkeypatch):
    """Sections run here instead of in processes of their own; what they return still passes through JSON."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(process, "run_worker", lambda module, job, timeout=None: json.loads(answer(json.dumps(job))))
    yield
    torch.set_num_threads(threads)


EAGER = [name for name in SECTIONS if "compiled" not in name]


@pytest.mark.parametrize("section", [*EAGER, pytest.param("step ours, compiled blocks", marks=pytest.mark.slow)])
def test_dry_run(section, in_process, tmp_path, capsys):
    """Every section runs through on the CPU; an arm is timed, checked, or says why it cannot run."""
    assert gpu.main(["--dry", "--only", section, "--out", str(tmp_path)]) == 0
    payload = json.loads((tmp_path / "gpu.json").read_text())
    assert payload["dry"]
    assert payload["problems"] == {}
    assert payload["rows"]
    for row in payload["rows"]:
        assert {"ms", "error", "cannot"} & set(row), row
    assert "| " + payload["rows"][0]["section"] in (tmp_path / "gpu.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("bench gpu (dry run on the CPU")


def test_both_sides_of_the_step_have_the_same_weights():
    told = [json.dumps({"arm": name, "dry": True}) for name in ("step ours", "step transformers")]
    losses = [json.loads(answer(job))["rows"][0]["loss"] for job in told]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def row(**figures):
    return {"section": "log_prob", "case": "8192x2560x151936", "arm": "ours", **figures}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (row(ms=26.9, extra_mb=499.0), []),
        (row(ms=54.0, extra_mb=10.0), ["ms 54.0 > 27, by 100.0%"]),
        (row(ms=20.0, extra_mb=600.0), ["extra_mb 600.0 > 500, by 20.0%"]),
        (row(cannot="why"), ["ms was not measured (limit 27): why", "extra_mb was not measured (limit 500): why"]),
        ({**row(error=2e-5), "case": "core, torch.float32"}, ["error 2.0e-05 > 1e-05"]),
        ({**row(error=2e-5), "case": "core, torch.bfloat16"}, []),
    ],
)
def test_targets(given, words):
    found = gpu.misses([given], timed=True)
    assert len(found) == len(words)
    assert all(line.endswith(word) for line, word in zip(found, words, strict=True))


def test_a_dry_run_judges_no_times_but_errors():
    assert gpu.misses([row(ms=1e6, extra_mb=1e6)], timed=False) == []
    assert gpu.misses([{**row(error=1.0), "case": "core, torch.float32"}], timed=False)


def test_losses_that_differ_are_a_miss():
    rows = [{"section": "step", "case": "c", "arm": arm, "loss": loss} for arm, loss in (("a", 7.0), ("b", 7.1))]
    assert "the losses differ" in gpu.misses(rows, timed=False)[0]


def test_a_section_that_crashes_costs_itself_alone(monkeypatch, tmp_path, capsys):
    def run(module, job, timeout=None):
        if job["arm"] == "check":
            raise process.WorkerFailed("it crashed", remedy="look")
        return {"rows": [{"section": job["arm"], "case": "c", "arm": "ours", "ms": 1.0}]}

    monkeypatch.setattr(process, "run_worker", run)
    assert gpu.main(["--dry", "--out", str(tmp_path)]) == 1
    payload = json.loads((tmp_path / "gpu.json").read_text())
    assert list(payload["problems"]) == ["check"]
    assert len(payload["rows"]) == len(SECTIONS) - 1
    assert "it crashed" in (tmp_path / "gpu.md").read_text()


def test_what_the_time_does_not_allow_is_listed(monkeypatch, tmp_path, capsys):
    clock = iter(range(0, 100000, 3))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(process, "run_worker", lambda module, job, timeout=None: {"rows": []})
    assert gpu.main(["--dry", "--seconds", "30", "--out", str(tmp_path)]) == 1
    problems = json.loads((tmp_path / "gpu.json").read_text())["problems"]
    assert 0 < len(problems) < len(SECTIONS)
    assert set(problems.values()) == {"not run: no time left"}


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "_device", lambda: None)
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--out", str(tmp_path)])
    assert caught.value.code == 7
    assert "--dry" in capsys.readouterr().err
