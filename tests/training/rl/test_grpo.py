"""`bestiary grpo` as a user runs it: checkpoint, tokenizer, prompts, a reward; stopped, resumed, exported."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from bestiary.models import AutoDecoder, Qwen3
from bestiary.tools import cli
from bestiary.training import owner
from bestiary.training.checkpoint import saved_steps
from bestiary.training.control import Interruption
from bestiary.training.errors import CheckpointRefused, EnvironmentFailed, FolderTaken, InvalidRun
from bestiary.training.processes import processes
from bestiary.training.rl import vllm_engine
from bestiary.training.rl.config import RewardSection, load_grpo_config
from bestiary.training.rl.grpo import engine_of, environment_of, local_policy, run
from bestiary.training.rl.records import load_experiences
from bestiary.training.rl.scorers import judge_of

from ...models.tiny import tiny_config
from ..data.conftest import folder

VOCABULARY = 49152
REWARDS = """
from bestiary.training.rl.environments import Heard

def even(answers):
    assert all(one.row["sum"] == 2 * one.row["place"] and one.text is not None for one in answers)
    return [sum(word % 2 == 0 for word in one.ids) / len(one.ids) for one in answers]

class World:
    def __init__(self, turns):
        self.turns = turns

    def reset(self, prompt, *, seed):
        self.place = prompt.row["place"]
        return prompt.ids

    def step(self, said):
        if self.place % 3 == 0:
            raise OSError("the world ended")
        return Heard(ids=(5, 6), done=said.turn + 1 == self.turns, rewards={"paid": said.ids[0] % 7 / 10})

    def close(self):
        pass

def shout(text: str) -> str:
    return text.upper()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny Qwen3 with SmolLM's vocabulary, prompts, a reward's module and a run's file."""
    place = tmp_path_factory.mktemp("grpo")
    config = tiny_config("qwen3", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24)
    config = config.with_(attention=replace(config.attention, scale=config.attention.head_dim**-0.5))
    torch.manual_seed(0)
    Qwen3(config, dtype=torch.float32).save_pretrained(place / "model")
    rows = [{"prompt": f"{n} + {n}?", "place": n, "sum": 2 * n} for n in range(10)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "evenness.py").write_text(REWARDS)
    content = {
        "model": {"src": "model"},
        "data": {
            "tokenizer": {"src": str(folder("smollm"))},
            "sources": [{"name": "sums", "files": "sums.jsonl", "kind": "prompt"}],
            "pack_length": 96,
            "epochs": 1,
        },
        "rewards": {"functions": [{"name": "even", "function": "evenness:even"}]},
        "rollouts": {"max_tokens": 6, "n": 3, "seed": 1},
        "optim": {"lr": 1e-2, "warmup": 0},
        "algorithm": {"options": {"kl_coef": 0.01}},
        "loop": {"prompts": 4, "updates": 2},
        "checkpoint": {"every": 1},
    }
    (place / "run.json").write_text(json.dumps(content))
    sys.path.append(str(place))
    yield place
    sys.path.remove(str(place))


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Stops:
    """Asks for an end in the round that begins after a step."""

    def __init__(self, interruption, step):
        self.interruption, self.step = interruption, step

    def start(self, run):
        pass

    def log(self, step, values):
        if step == self.step:
            self.interruption.by = "SIGTERM"

    def close(self):
        pass


def test_a_second_run_in_a_folder_is_refused_before_anything_is_made(place, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "GRACE_S", 0.1)
    with owner.owned(tmp_path), pytest.raises(FolderTaken, match="in the hands of process"):
        run(load_grpo_config(place / "run.json", [f"out={tmp_path}"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(place, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told = tmp_path / "told.json"
    assert cli.main(["grpo", str(place / "run.json"), f"out={whole}", "rollouts.keep=true", "--json", str(told)]) == 0
    said = capsys.readouterr().out
    assert "reward " in said
    assert f"round 3 of 3 · {whole}" in said
    assert json.loads(told.read_text())["version"] == 6

    rows = metrics(whole)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["rl/prompts"] for row in rows] == [4, 4, 2]
    for name in ("rl/reward", "rl/reward/even", "rl/kl", "rl/entropy", "rl/mismatch_max", "rl/staleness_max"):
        assert all(name in row for row in rows), name
    assert all(row["rl/mismatch_mean"] < 1e-4 and row["rl/reward/errors"] == 0 for row in rows)
    kept = load_experiences(whole / "rollouts" / "round-00000002.safetensors")
    assert len(kept) == 6
    assert {one.trajectory.version for one in kept} == {4}

    interruption = Interruption()
    config = load_grpo_config(place / "run.json", [f"out={parts}"])
    stopped = run(config, also=[Stops(interruption, 2)], interruption=interruption)
    assert (stopped.stopped, stopped.round, stopped.export) == ("SIGTERM", 1, None)
    assert saved_steps(parts / "checkpoints") == [2]
    resumed = run(config)
    assert (resumed.resumed, resumed.round, resumed.version, resumed.stopped) == (2, 3, 6, None)
    ours, theirs = (
        AutoDecoder.from_pretrained(out / "export", dtype=torch.float32).state_dict() for out in (whole, parts)
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    timed = ("_s", "time", "mfu", "hfu", "gib")
    again = [{name: value for name, value in row.items() if not name.endswith(timed)} for row in metrics(parts)]
    assert again == [{name: value for name, value in row.items() if not name.endswith(timed)} for row in rows]

    assert cli.main(["export", str(parts / "checkpoints" / "step-00000006"), str(tmp_path / "at-6")]) == 0
    exported = AutoDecoder.from_pretrained(tmp_path / "at-6", dtype=torch.float32).state_dict()
    assert all(torch.equal(ours[name], value) for name, value in exported.items())

    with pytest.raises(CheckpointRefused, match="algorithm was"):
        run(load_grpo_config(place / "run.json", [f"out={parts}", "algorithm.name=dapo"]))


@pytest.mark.slow
def test_episodes_that_their_world_ended_are_not_trained_and_too_many_end_the_run(place, tmp_path):
    given = [
        f"out={tmp_path}", "environment.name=evenness:World", "environment.options={turns: 2}", "loop.steps=2",
        "loop.prompts=4", "loop.updates=1", "rollouts.n=2", "rollouts.keep=true", "rewards.functions=[{name: paid}]",
        "checkpoint.export=false", "algorithm.options={}",
    ]  # fmt: skip
    with pytest.raises(EnvironmentFailed, match="OSError: the world ended"):
        run(load_grpo_config(place / "run.json", [*given, "environment.max_errors=0"]))
    outcome = run(load_grpo_config(place / "run.json", [*given, "environment.max_errors=0.2"]))
    assert (outcome.round, outcome.stopped) == (2, None)
    kept = [
        one
        for number in range(2)
        for one in load_experiences(tmp_path / "rollouts" / f"round-{number:08d}.safetensors")
    ]
    assert len(kept) == 16
    assert all(row["rl/turns"] <= 2 and row["rl/environment_s"] > 0 for row in metrics(tmp_path))
    ended = [one for one in kept if one.trajectory.extra["row"]["place"] % 3 == 0]
    assert 0 < len(ended) < 16
    assert sum(row["rl/environment_errors"] for row in metrics(tmp_path)) == len(ended)
    for one in kept:
        assert one.trained == (one not in ended)
        assert one.trajectory.rewards.get("paid") is None if one in ended else one.trajectory.extra["turns"] == 2


@pytest.mark.slow
def test_held_out_prompts_have_a_file_of_their_own(place, tmp_path):
    rows = [{"prompt": f"{n} + {n}?", "place": n, "sum": 2 * n} for n in range(50, 55)]
    (place / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"sources": [{"name": "sums", "files": "held_out.jsonl", "kind": "prompt"}], "prompts": 3, "every": 5}
    config = load_grpo_config(
        place / "run.json", [f"out={tmp_path}", "loop.steps=1", f"loop.evaluation={json.dumps(given)}"]
    )
    run(config)
    held = [row for row in metrics(tmp_path) if "eval/reward" in row]
    assert [row["step"] for row in held] == [0, 2]
    assert all(0 <= row["eval/reward"] <= 1 and row["eval/unscored"] == 0 for row in held)
    given["sources"][0]["kind"] = "events"
    with pytest.raises(InvalidRun, match=r"loop\.evaluation\.sources: sums is of kind events"):
        load_grpo_config(place / "run.json", [f"out={tmp_path}", f"loop.evaluation={json.dumps(given)}"])


def test_tools_of_a_run_are_named_in_its_file(place):
    config = load_grpo_config(place / "run.json", ["out=x", "environment.tools={functions: [evenness:shout]}"])
    conversation = environment_of(config)()
    assert [tool["function"]["name"] for tool in conversation.tools] == ["shout"]
    with pytest.raises(InvalidRun, match=r"environment.*name, of an environment, or tools"):
        load_grpo_config(place / "run.json", ["out=x", "environment={threads: 2}"])


@pytest.mark.parametrize("more", [[], ["placement={}"]])
def test_several_processes_are_refused_before_each_of_them_asks_a_hub(place, tmp_path, monkeypatch, more):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("bestiary.training.rl.grpo.pinned", None)
    with pytest.raises(InvalidRun, match=r"bestiary grpo in 2 processes: its controller is one\."):
        run(load_grpo_config(place / "run.json", [f"out={tmp_path / 'out'}", *more]))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_prompts_in_another_tokenizers_ids_are_refused(place, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(place / "model", other)
    tokenizer = json.loads((folder("smollm") / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["The"], vocabulary["ĠThe"] = vocabulary["ĠThe"], vocabulary["The"]
    shutil.copy(folder("smollm") / "tokenizer_config.json", other)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidRun, match=r"data\.tokenizer\.src = .* has another tokenizer"):
        run(load_grpo_config(place / "run.json", [f"out={tmp_path / 'out'}", f"model.src={other}"]))


def test_the_token_of_an_endpoint_is_an_environment_variables(place, monkeypatch):
    section = RewardSection(name="liked", endpoint="http://127.0.0.1:9/", token="LIKED_TOKEN")
    monkeypatch.setenv("LIKED_TOKEN", "secret")
    assert judge_of(section).headers["Authorization"] == "Bearer secret"
    monkeypatch.delenv("LIKED_TOKEN")
    with pytest.raises(InvalidRun, match=r"(?s)liked has token = LIKED_TOKEN.*export LIKED_TOKEN"):
        judge_of(section)


@pytest.mark.parametrize("lora", [False, True])
def test_vllm_begins_with_the_whole_policy_adapters_or_not(place, tmp_path, monkeypatch, lora):
    adapted = ["lora.r=2"] if lora else []
    config = load_grpo_config(place / "run.json", [f"out={tmp_path}", "rollouts.engine=vllm", *adapted])
    started = []

    def engine(folder, **given):
        assert not (folder / "adapter_config.json").exists()
        started.append((AutoDecoder.from_pretrained(folder).state_dict(), given))

    monkeypatch.setattr(vllm_engine, "VllmEngine", engine)
    with processes(60.0) as here:
        policy, _ = local_policy(config, here, 1)
        engine_of(config, policy, 96)
    weights, given = started[0]
    start = AutoDecoder.from_pretrained(place / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in start.items())
    assert (given["version"], given["dtype"], given["context"]) == (0, torch.float32, 96)
    assert given["hf_overrides"] == {"head_dtype": "float32"}
    assert not [*tmp_path.glob(".engine-*")]


def test_a_dry_run_tells_the_configuration_and_the_memory(place, tmp_path, capsys):
    assert cli.main(["grpo", str(place / "run.json"), f"out={tmp_path / 'dry'}", "--dry-run", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["rollouts"]["n"] == 3
    assert found["estimate"]["bytes"]["beside"] > 0
    assert not (tmp_path / "dry").exists()
