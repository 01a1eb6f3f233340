"""Rewards: functions in processes of their own, endpoints, reward models, and all that goes wrong with them."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bestiary.models import Qwen3
from bestiary.models.config import HeadKind
from bestiary.training.errors import InvalidRun, RewardFailed
from bestiary.training.rl import judges
from bestiary.training.rl.isolated import CallHung, CallRaised, Isolated, Limits
from bestiary.training.rl.judges import EndpointJudge, FunctionJudge
from bestiary.training.rl.records import Trajectory
from bestiary.training.rl.reward_model import RewardModel
from bestiary.training.rl.rewards import Chained, Rewards, answer_of
from bestiary.training.rl.verdicts import Failure

from ...models.tiny import tiny, tiny_config
from ..data.conftest import load

FUNCTIONS = """
import os, time

def length(answers):
    print("to standard output")
    return [len(one.text) + one.row["more"] for one in answers]

async def cut(answers):
    return (one.finish == "length" for one in answers)

def faulty(answers):
    for one in answers:
        match one.row["way"]:
            case "raise":
                raise ZeroDivisionError("no such number")
            case "hang":
                time.sleep(60)
            case "exit":
                os._exit(3)
    found = [{"nan": float("nan"), "none": None, "text": "1.0"}.get(one.row["way"], 1.0) for one in answers]
    return [value for value, one in zip(found, answers) if one.row["way"] != "short"]

def child_process(seconds):
    if os.fork() == 0:
        time.sleep(60)
    return time.sleep(seconds)

def memory(count):
    return len(bytearray(count))

def where(_value):
    return [os.getcwd(), sorted(os.environ)]
"""
WAYS = {
    "raise": ("errors", r"ZeroDivisionError: no such number \(reward_functions\.py:15\)"),
    "exit": ("errors", "exit code 3"),
    "text": ("errors", "text in place of a number"),
    "short": ("errors", "0 rewards for 1 answers"),
    "hang": ("timeouts", "more than 1 s"),
    "nan": ("nan", "returned nan"),
    "none": ("none", "returned None"),
}


class Letters:
    """Token n is the nth letter, 0 ends an answer."""

    stop_ids = frozenset({0})

    def decode(self, ids):
        return "".join(chr(ord("a") + index) for index in ids)


def trajectory(name="p", ids=(1, 2, 3, 0), prompt=2, finish="stop", **extra):
    sampled = np.arange(len(ids)) >= prompt
    return Trajectory(
        prompt_id=name,
        group_id=name,
        sample=0,
        ids=np.array(ids, np.int32),
        sampled=sampled,
        rollout_log_probs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        temperature=1.0,
        version=0,
        finish=finish,
        extra=extra,
    )


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The name of a module that only the processes of functions import."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "reward_functions.py").write_text(FUNCTIONS)
    sys.path.append(str(folder))
    yield "reward_functions"
    sys.path.remove(str(folder))
    assert "reward_functions" not in sys.modules


@pytest.fixture(scope="module")
def faulty(functions):
    judge = FunctionJudge(f"{functions}:faulty", timeout_s=1.0)
    yield judge
    judge.close()


def test_functions_see_texts_rows_and_how_an_answer_ended(functions):
    made = {
        "length": FunctionJudge(f"{functions}:length", rows=2, processes=2),
        "cut": FunctionJudge(f"{functions}:cut"),
    }
    rewards = Rewards(made, tokenizer=Letters())
    given = [
        trajectory("a", row={"more": 10}),
        trajectory("empty", ids=(1, 2, 0), row={"more": 20}),
        trajectory("cut", ids=(1, 2, 3, 4, 5), finish="length", row={"more": 0.5}),
        trajectory("lost", failed="the world ended", row={"more": 30}),
        trajectory("nothing", ids=(1, 2), row={"more": 40}),
    ]
    given[0] = replace(given[0], rewards={"environment": 7.0})
    try:
        found = rewards.score(given)
    finally:
        rewards.close()
    assert [one.prompt_id for one in found] == ["a", "empty", "cut", "lost", "nothing"]
    assert [dict(one.rewards) for one in found] == [
        {"environment": 7.0, "length": 11.0, "cut": 0.0},
        {"length": 20.0, "cut": 0.0},
        {"length": 3.5, "cut": 1.0},
        {"length": None, "cut": None},
        {"length": 40.0, "cut": 0.0},
    ]
    with pytest.raises(InvalidRun, match="'cut'"):
        rewards.score(found)


def test_an_answer_has_the_texts_of_its_turns_and_no_stop_token():
    several = trajectory(ids=(1, 2, 3, 0, 4, 4, 5, 6), row={"x": 1}, turns=2)
    several = replace(several, sampled=np.array([0, 0, 1, 1, 0, 0, 1, 1], bool))
    seen = answer_of(several, Letters())
    assert (seen.prompt, seen.turns, seen.text, seen.ids) == ("bc", ("d", "fg"), "fg", (5, 6))
    assert (seen.row, seen.extra) == ({"x": 1}, {"turns": 2})
    assert answer_of(several, None).text is None


@pytest.mark.slow
def test_a_failure_costs_its_own_answer_and_is_counted(faulty):
    """None of them is a zero, and a hung or dead process is replaced."""
    rewards = Rewards({"faulty": faulty}, max_errors=0.1, window=100)
    ways = ["fine", *WAYS, "fine"]
    found = rewards.score([trajectory(way, row={"way": way}) for way in ways])
    assert [one.rewards["faulty"] for one in found] == [1.0, *[None] * len(WAYS), 1.0]
    figures = rewards.figures()
    assert figures.pop("reward/score_s") > 1.0
    assert figures == {"reward/errors": 4, "reward/timeouts": 1, "reward/nan": 1, "reward/none": 1}
    assert not any(rewards.figures().values())


@pytest.mark.parametrize("way", WAYS)
def test_more_failures_than_allowed_end_the_run_and_name_function_prompt_and_error(faulty, way):
    rewards = Rewards({"faulty": faulty}, max_errors=0.0)
    with pytest.raises(RewardFailed, match=rf"faulty .*prompt p-{way}.*{WAYS[way][1]}"):
        rewards.score([trajectory("fine", row={"way": "fine"}), trajectory(f"p-{way}", row={"way": way})])


def test_a_function_may_abstain_where_that_was_said(functions):
    judge = FunctionJudge(f"{functions}:faulty", abstains=True)
    rewards = Rewards({"faulty": judge}, max_errors=0.0)
    (one,) = rewards.score([trajectory(row={"way": "none"})])
    rewards.close()
    assert one.rewards == {"faulty": None}
    assert rewards.figures()["reward/none"] == 0


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("reward_functions:missing", "no attribute"),
        ("no_such_module:f", "no_such_module"),
        ("f", "module:name"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(functions, path, told):
    with pytest.raises(InvalidRun, match=told):
        FunctionJudge(path)


@given(
    bad=st.sets(st.integers(0, 19)), rows=st.integers(1, 25), calls=st.integers(1, 4), count=st.integers(0, 20),
    alone=st.booleans(),
)  # fmt: skip
def test_every_answer_gets_one_verdict_its_own(bad, rows, calls, count, alone):
    def call(answers):
        if set(answers) & bad:
            return Failure("error", f"{answers}", alone=alone)
        return [float(one) for one in answers]

    found = list(judges._spread(range(count), rows, calls, call))
    assert sorted(place for place, _ in found) == list(range(count))
    for place, verdict in found:
        assert verdict == place if not isinstance(verdict, Failure) else (place in bad or not alone)
        assert not alone or (place in bad) == isinstance(verdict, Failure)


# ------------------------------------------------------------------ processes


@pytest.mark.slow
def test_a_hung_call_ends_with_its_process_and_all_that_it_started(functions):
    before = set(psutil.Process().children())
    isolated = Isolated(f"{functions}:child_process")
    isolated.call(0, 30)
    (process,) = set(psutil.Process().children()) - before
    family = [process, *process.children(recursive=True)]
    assert len(family) == 2
    with pytest.raises(CallHung, match=r"0\.2 s"):
        isolated.call(60, 0.2)
    psutil.wait_procs(family, timeout=10)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    isolated.close()


@pytest.mark.slow
def test_a_process_does_not_outlive_whoever_started_it():
    code = (
        "import os, threading, time\n"
        "from bestiary.training.rl.isolated import Isolated\n"
        "one = Isolated('time:sleep'); one.start()\n"
        "threading.Thread(target=one.call, args=(60, 60), daemon=True).start(); time.sleep(0.2)\n"
        "print(one._process.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True, timeout=60).stdout)
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)


def test_a_process_apart_has_its_own_folder_little_memory_and_no_secrets(functions, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    apart = Limits(apart=True, memory_bytes=1 << 30)
    where = Isolated(f"{functions}:where", limits=apart)
    folder, names = where.call(None, 10)
    assert folder != os.getcwd()
    assert "SOME_TOKEN" not in names
    where.close()
    assert not os.path.exists(folder)
    memory = Isolated(f"{functions}:memory", limits=apart)
    assert memory.call(1000, 10) == 1000
    with pytest.raises(CallRaised, match="MemoryError"):
        memory.call(2 << 30, 10)
    memory.close()


# ------------------------------------------------------------------ endpoints


class Endpoint(BaseHTTPRequestHandler):
    """Gives the length of an answer's ids, or fails as its row says, `times` times for each."""

    failed: dict = {}  # noqa: RUF012
    followed: list = []  # noqa: RUF012

    def do_GET(self):
        Endpoint.followed.append(self.headers["Authorization"])
        return self.say({"rewards": [1.0]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
        assert self.headers["Authorization"] == "Bearer x"
        for one in asked:
            way = one["row"].get("way")
            Endpoint.failed[one["prompt_id"]] = failed = Endpoint.failed.get(one["prompt_id"], 0) + 1
            if way and failed <= one["row"].get("times", 1000):
                return getattr(self, way)()
        return self.say({"rewards": [len(one["ids"]) for one in asked]})

    def say(self, body, status=200):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def busy(self):
        self.say({}, 503)

    def refused(self):
        self.say({}, 422)

    def moved(self):
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def garbage(self):
        self.say(b"<html>")

    def nan(self):
        self.say({"rewards": [float("nan")]})

    def null(self):
        self.say({"rewards": [None]})

    def drop(self):
        self.close_connection = True

    def drip(self):
        self.send_response(200)
        self.end_headers()
        for _ in range(40):
            self.wfile.write(b" ")
            time.sleep(0.05)

    def endless(self):
        """More than is read, and no end of it; whoever asked goes away."""
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def nested(self):
        self.say(b'{"rewards": ' + b"[" * 10**5)

    def vast(self):
        self.say({"rewards": [10**400]})

    def log_message(self, *told):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    Endpoint.failed.clear()
    Endpoint.followed.clear()
    judge = EndpointJudge(
        f"http://127.0.0.1:{server.server_port}/score",
        timeout_s=10.0,
        rows=3,
        retries=1,
        headers={"Authorization": "Bearer x"},
    )
    judge._waits_s = (0.01, 0.02)
    yield judge
    server.shutdown()
    server.server_close()


def test_an_endpoint_is_asked_again_where_that_helps(endpoint):
    ways = ["busy", "drop", None, "garbage"]
    given = [trajectory(str(n), row={"way": way, "times": 1} if way else {}) for n, way in enumerate(ways)]
    rewards = Rewards({"endpoint": endpoint}, max_errors=0.0)
    assert [one.rewards["endpoint"] for one in rewards.score(given)] == [2.0] * 4


@pytest.mark.parametrize(
    ("way", "told", "count"),
    [
        ("busy", "503", "errors"),
        ("refused", "422", "errors"),
        ("moved", "302 .*see http://localhost:.*/elsewhere", "errors"),
        ("garbage", "JSONDecodeError", "errors"),
        ("nan", "nan", "nan"),
        ("null", "None", "none"),
        ("drip", "no answer in 0.5 s", "timeouts"),
        ("endless", "more than 1048576 bytes", "errors"),
        ("nested", "RecursionError", "errors"),
        ("vast", "OverflowError", "errors"),
    ],
)
def test_what_an_endpoint_does_not_judge_is_counted_and_named(endpoint, monkeypatch, way, told, count):
    monkeypatch.setattr(judges, "MOST_BYTES", 2**20)
    given = [trajectory("fine", row={}), trajectory("bad", row={"way": way})]
    if way == "drip":
        endpoint._timeout = 0.5
    rewards = Rewards({"endpoint": endpoint}, max_errors=0.5, window=2)
    assert [one.rewards["endpoint"] for one in rewards.score(given)] == [2.0, None]
    assert rewards.figures()[f"reward/{count}"] == 1
    with pytest.raises(RewardFailed, match=rf"(?s)endpoint .*prompt bad.*{told}"):
        Rewards({"endpoint": endpoint}, max_errors=0.0).score(given)
    if way == "endless":  # each time, and not tried again
        assert Endpoint.failed["bad"] == 2
    assert Endpoint.followed == []  # its headers are for this endpoint alone


def test_an_endpoint_that_is_not_there_is_named():
    with pytest.raises(RewardFailed, match=r"127\.0\.0\.1:9.*Connection refused"):
        Rewards({"gone": EndpointJudge("http://127.0.0.1:9/", retries=0)}, max_errors=0.0).score([trajectory()])


# ------------------------------------------------------------------ reward models


def scoring():
    return tiny("qwen3", torch.float64, head=HeadKind.SCORE, num_labels=1)


def test_a_reward_model_gives_each_conversation_the_score_of_its_last_token():
    model = scoring()
    given = [trajectory(str(n), ids=tuple(range(n + 1, 2 * n + 5))) for n in range(7)]
    scorer = RewardModel(model, pack_tokens=20, name="liked")
    found = Chained([scorer, Rewards({})]).score([*given, trajectory("lost", failed="the world ended")])
    assert found[-1].rewards == {"liked": None}
    for one in found[:-1]:
        with torch.no_grad():
            alone = model(torch.from_numpy(one.ids[None].astype(np.int64))).scores
        assert one.rewards["liked"] == pytest.approx(alone.item(), rel=1e-9)


def published(**changes):
    """Of a config that transformers has too."""
    config = tiny_config("qwen3", hidden_size=16, intermediate_size=24, **changes)
    config = config.with_(attention=replace(config.attention, scale=config.attention.head_dim**-0.5))
    return Qwen3(config, dtype=torch.float32)


def test_without_judges_trajectories_are_handed_on():
    given = [trajectory("p0"), trajectory("p1")]
    assert all(one is other for one, other in zip(Rewards({}).score(given), given, strict=True))


@pytest.mark.slow
def test_a_reward_model_is_read_with_its_head_and_takes_the_policys_ids_alone(tmp_path):
    policy = load("smollm")
    model = published(head=HeadKind.SCORE, num_labels=1, vocab_size=len(policy))
    policy.hf.save_pretrained(model.save_pretrained(tmp_path / "reward"))
    scorer = RewardModel.from_pretrained(tmp_path / "reward", policy, name="liked")
    given = trajectory(ids=policy.encode_text("Well said.").tolist())
    assert scorer.score([given])[0].rewards == RewardModel(model, name="liked").score([given])[0].rewards
    with pytest.raises(InvalidRun, match="another tokenizer than the policy"):
        RewardModel.from_pretrained(tmp_path / "reward", load("qwen3"))
    language = published(vocab_size=len(policy))
    policy.hf.save_pretrained(language.save_pretrained(tmp_path / "language"))
    with pytest.raises(InvalidRun, match="head = lm"):
        RewardModel.from_pretrained(tmp_path / "language", policy)


def test_a_reward_model_counts_what_it_cannot_judge_and_refuses_a_language_model():
    model = tiny("qwen3", head=HeadKind.SCORE, num_labels=1, max_position_embeddings=8)
    scorer = RewardModel(model, max_errors=0.5, window=2)
    long = trajectory("long", ids=tuple(range(1, 10)))
    assert [one.rewards["reward_model"] is None for one in scorer.score([trajectory(), long])] == [False, True]
    assert scorer.figures()["reward/errors"] == 1
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    with pytest.raises(RewardFailed, match=r"reward_model .*returned nan"):
        scorer.score([trajectory(), trajectory()])
    with pytest.raises(InvalidRun, match="head = lm"):
        RewardModel(tiny("qwen3"))
