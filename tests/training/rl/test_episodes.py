"""Episodes between an engine and environments: whole groups, the same whatever happens on the way."""

import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.training.errors import ClusterLost, EnvironmentFailed, InvalidRun, RoleLost
from bestiary.training.rl import episodes as rl_episodes
from bestiary.training.rl.embedded import EmbeddedEngine
from bestiary.training.rl.environments import Heard
from bestiary.training.rl.episodes import Episodes
from bestiary.training.rl.isolated_environments import IsolatedEnvironments
from bestiary.training.rl.records import RecordsRefused
from bestiary.training.rl.roles import Prompt
from bestiary.training.rl.rollout import Rollout, Sampling

from ...models.tiny import tiny
from .scripted import CONTEXT, STOP, Counting, ScriptedEngine

SAMPLING = Sampling(max_tokens=5, stop_ids=(STOP, 4), n=3, seed=11)
VOCABULARY = 64
PROMPTS = [Prompt(prompt_id=f"p{n}", ids=tuple(range(1, n + 2)), row={"answer": n}) for n in range(6)]


def played(engine, prompts=PROMPTS, sampling=SAMPLING, **options):
    episodes = Episodes(engine, context=CONTEXT, **options)
    try:
        episodes.put(prompts, sampling)
        return {group[0].prompt_id: group for group in episodes.take(len(prompts))}
    finally:
        episodes.close()


def said(groups):
    """What a trajectory is but for how long it took."""
    return {
        name: [
            (
                one.ids.tolist(),
                one.sampled.tolist(),
                one.rollout_log_probs.tolist(),
                one.finish,
                one.version,
                dict(one.rewards),
                {key: value for key, value in one.extra.items() if not key.endswith("_s")},
            )
            for one in group
        ]
        for name, group in groups.items()
    }


def test_without_an_environment_an_episode_is_the_answer_that_the_engine_gives_to_its_name():
    engine = EmbeddedEngine(tiny("qwen3", torch.float64, tie_word_embeddings=False))
    engine.version = 4
    groups = played(engine)
    for prompt in PROMPTS:
        group = groups[prompt.prompt_id]
        assert [one.sample for one in group] == [0, 1, 2]
        for one in group:
            alone = engine.generate(
                [prompt.ids],
                Sampling(max_tokens=5, stop_ids=SAMPLING.stop_ids),
                keys=[(SAMPLING.seed, prompt.prompt_id, one.sample, 0)],
            )[0]
            assert one.ids.tolist() == [*prompt.ids, *alone.ids.tolist()]
            assert one.sampled.tolist() == [False] * len(prompt.ids) + [True] * len(alone)
            np.testing.assert_allclose(one.rollout_log_probs[one.sampled], alone.log_probs, rtol=1e-9)
            assert (one.group_id, one.finish, one.version) == (prompt.prompt_id, alone.finish, 4)
            assert one.extra["row"] == {"answer": len(prompt.ids) - 1}


@pytest.mark.slow
@settings(max_examples=40)
@given(
    batch=st.none() | st.integers(1, 5),
    threads=st.integers(1, 5),
    faults=st.dictionaries(st.integers(1, 6), st.just(RoleLost("the engine's process died.", role="rollout"))),
    cut=st.integers(0, len(PROMPTS)),
    environment=st.booleans(),
)
def test_company_threads_and_engines_that_die_change_no_episode(batch, threads, faults, cut, environment):
    """Nothing is lost, nothing comes twice: what died stays in flight and is asked for again with the same seed."""
    factory = (lambda: Counting(wait_s=0.001)) if environment else None
    expected = said({k: v for one in PROMPTS for k, v in played(ScriptedEngine(), [one], environment=factory).items()})
    episodes = Episodes(ScriptedEngine(faults), context=CONTEXT, environment=factory, threads=threads, batch=batch)
    found = {}
    try:
        for part in (PROMPTS[:cut], PROMPTS[cut:]):
            episodes.put(part, SAMPLING)
        while len(found) < len(PROMPTS):
            assert sorted([*found, *episodes.in_flight]) == sorted(one.prompt_id for one in PROMPTS)
            try:
                taken = episodes.take(1)
            except RoleLost:
                episodes.pause()
                episodes.resume()
                continue
            assert not {group[0].prompt_id for group in taken} & set(found)
            found |= {group[0].prompt_id: group for group in taken}
    finally:
        episodes.close()
    assert said(found) == expected
    assert Counting.open == 0


def test_what_an_environment_says_is_appended_unsampled_and_its_rewards_add_up():
    (group,) = played(ScriptedEngine(constrained=True), PROMPTS[2:3], environment=Counting).values()
    assert any(one.extra["turns"] > 1 for one in group)
    for one in group:
        heard, turns = [], []
        for word, own in zip(one.ids.tolist()[4:], one.sampled.tolist()[4:], strict=True):
            (turns if own else heard).append(word)
        assert one.ids[:3].tolist() == [1, 2, 3]
        assert heard == [each for turn in range(one.extra["turns"] - 1) for each in (20 + turn, 30)]
        assert one.rewards == {"heard": float(sum(turns))}
        assert one.extra["last"] == one.extra["turns"] - 1
        assert (one.allowed[one.sampled, 0] == one.ids[one.sampled]).all()
        assert (one.allowed[~one.sampled] == -1).all()
    assert len({int(one.ids[3]) for one in group}) == 1  # a group begins alike


class Endless(Counting):
    def step(self, said):
        return Heard(ids=(7, 7, 7), rewards={"heard": 1.0})


def test_a_context_or_a_number_of_turns_that_is_used_up_ends_an_episode_as_cut_off():
    sampling = Sampling(max_tokens=4, stop_ids=(STOP,), n=2)
    (group,) = played(ScriptedEngine(), PROMPTS[:1], sampling, environment=Endless).values()
    for one in group:
        assert one.finish == "length"
        assert CONTEXT - 3 <= len(one) <= CONTEXT
        assert one.sampled[-1]
        assert one.rewards == {"heard": one.extra["turns"] + 100.0}
    (group,) = played(ScriptedEngine(), PROMPTS[:1], sampling, environment=Endless, max_turns=2).values()
    assert {(one.extra["turns"], one.finish) for one in group} == {(2, "length")}


class Bad(Counting):
    """Fails in one way, for prompts of one token."""

    def __init__(self, way, hung):
        super().__init__()
        self.way, self.hung = way, hung

    def reset(self, prompt, *, seed):
        self.bad = len(prompt.ids) == 1
        if self.bad and self.way == "reset":
            raise OSError("no such world")
        return super().reset(prompt, seed=seed)

    def step(self, said):
        if self.bad and self.way == "raises":
            raise OSError("the world ended")
        if self.bad and self.way == "hangs":
            self.hung.wait(10)
        heard = super().step(said)
        wrong = WRONG.get(self.way) if self.bad else None
        return heard if wrong is None else wrong


WRONG = {
    "nan": Heard(done=True, rewards={"heard": float("nan")}),
    "ids": Heard(ids=(3, VOCABULARY)),
    "huge ids": Heard(ids=(1 << 40,)),
    "negative ids": Heard(ids=(-1,)),
    "extra": Heard(extra={"grid": np.zeros(2)}),
    "extra nan": Heard(extra={"score": float("nan")}),
}


@pytest.mark.parametrize("way", ["reset", "raises", "hangs", *WRONG])
def test_a_world_that_fails_costs_its_episodes_and_too_many_of_them_the_run(way):
    hung = threading.Event()
    options = {"environment": lambda: Bad(way, hung), "timeout_s": 1.0 if way == "hangs" else 60.0, "threads": 3}
    options["vocabulary"] = None if way == "huge ids" else VOCABULARY
    try:
        groups = played(ScriptedEngine(), **options)
        for one in groups.pop("p0"):
            assert one.rewards == {}
            assert one.extra["failed"]
        assert not any("failed" in one.extra for group in groups.values() for one in group)
        with pytest.raises(EnvironmentFailed, match=r"p0.*(no such world|world ended|1 s|nan|has the id|not JSON)"):
            played(ScriptedEngine(), max_errors=0.0, **options)
    finally:
        hung.set()
    until = time.monotonic() + 5
    while Counting.open and time.monotonic() < until:
        time.sleep(0.01)
    assert Counting.open == 0


WORLDS = """
import os, time
from bestiary.training.rl.environments import Heard

class World:
    def __init__(self, turns):
        self.turns = turns

    def reset(self, prompt, *, seed):
        self.way = prompt.row.get("way")
        assert not prompt.row.get("refused"), "no such world"
        return [*prompt.ids, 11 + seed % 5]

    def step(self, said):
        if self.way == "hangs":
            while True:
                pass
        if self.way == "dies":
            os._exit(3)
        told = {"pid": os.getpid()}
        return Heard(ids=(12,), done=said.turn + 1 == self.turns, rewards={"said": len(said.ids)}, extra=told)

    def cut_off(self):
        return {"said": 100}

    def close(self):
        assert self.way != "stays", "it stays"
"""


@pytest.mark.slow
def test_an_environment_apart_is_ended_where_it_hangs_and_costs_its_episode_alone(tmp_path, monkeypatch):
    (tmp_path / "worlds_apart.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rl_episodes, "LINGER", 1000.0)
    home = IsolatedEnvironments("worlds_apart:World", {"turns": 2}, timeout_s=2.0)
    rows = [{}, {"way": "hangs"}, {"way": "dies"}, {"refused": True}, {"way": "stays"}, {}]
    prompts = [Prompt(prompt_id=f"p{n}", ids=(1, 2), row=row) for n, row in enumerate(rows)]
    groups = played(ScriptedEngine(), prompts, Sampling(max_tokens=5), environment=home, at_once=2, threads=2)
    told = {name: one.extra.get("failed", "") for name, (one,) in groups.items()}
    assert told.pop("p0") == told.pop("p5") == ""
    for name, part in (("p1", "more than 2 s"), ("p2", "exit code 3"), ("p3", "no such world"), ("p4", "it stays")):
        assert part in told[name]
    (one,) = groups["p5"]
    assert (one.rewards["said"], one.extra["turns"]) == (float(one.sampled.sum()), 2)
    assert len(home._free) == 2  # at once, and used again; one that failed last has not started again
    processes = [one._process for one in home._free if one._process is not None]
    assert one.extra["pid"] in {process.pid for process in processes}
    home.close()
    assert all(process.poll() is not None for process in processes)
    assert "worlds_apart" not in sys.modules
    with pytest.raises(InvalidRun, match="'worlds_apart:Nothing' cannot be loaded"):
        IsolatedEnvironments("worlds_apart:Nothing", timeout_s=1.0)


def test_environments_that_went_with_their_cluster_have_not_failed():
    class Gone(Counting):
        def step(self, said):
            raise ClusterLost("the head of the Ray cluster is gone.")

    with pytest.raises(ClusterLost, match="the head"):
        played(ScriptedEngine(), environment=Gone, max_errors=0.0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("environment", "faults"), [(None, {}), (Counting, {1: RuntimeError("the engine is gone")})])
def test_what_is_being_sampled_when_all_is_closed_is_thrown_away_with_its_environments(environment, faults):
    engine, Counting.open = ScriptedEngine(faults=faults), 0
    engine.may.clear()
    episodes = Episodes(engine, context=CONTEXT, environment=environment)
    episodes.put(PROMPTS[:1], SAMPLING)
    while not engine.calls:
        time.sleep(0.001)
    threading.Timer(0.1, engine.may.set).start()
    episodes.close()
    assert engine.closed
    assert Counting.open == 0


@pytest.mark.parametrize("at_once", [1, 4])
def test_no_more_environments_than_wanted_are_open(at_once):
    most = []

    class Counted(Counting):
        def reset(self, prompt, *, seed):
            most.append(Counting.open)
            return super().reset(prompt, seed=seed)

    found = played(ScriptedEngine(), environment=Counted, at_once=at_once)
    assert max(most) <= at_once
    assert said(found) == said(played(ScriptedEngine(), environment=Counting))


def test_an_environment_whose_process_died_begins_again():
    lost = []

    class Mortal(Counting):
        def step(self, said):
            if said.turn == 0 and not lost:
                lost.append(1)
                raise RoleLost("the world's process died.", role="environment")
            return super().step(said)

    episodes = Episodes(ScriptedEngine(), context=CONTEXT, environment=Mortal)
    episodes.put(PROMPTS, SAMPLING)
    with pytest.raises(RoleLost, match="world's"):
        episodes.take(len(PROMPTS))
    assert len(episodes.in_flight) == len(PROMPTS)
    episodes.resume()
    found = {group[0].prompt_id: group for group in episodes.take(len(PROMPTS))}
    episodes.close()
    assert said(found) == said(played(ScriptedEngine(), environment=Counting))


def test_episodes_whose_environments_are_quick_stay_together(monkeypatch):
    monkeypatch.setattr(rl_episodes, "LINGER", 1000.0)
    engine = ScriptedEngine(wait_s=0.02)
    played(engine, environment=Endless, max_turns=3, threads=2)
    assert [len(call) for call in engine.calls] == [len(PROMPTS) * SAMPLING.n] * 3


def test_of_many_episodes_not_each_wakes_whoever_waits(monkeypatch):
    """But one that completes a group, the first that waits for an answer, and the last that was played."""
    monkeypatch.setattr(rl_episodes, "LINGER", 1000.0)
    episodes, woken = Episodes(ScriptedEngine(), context=CONTEXT, environment=Endless, max_turns=1), []
    wake = episodes._changed.notify_all
    monkeypatch.setattr(episodes._changed, "notify_all", lambda: woken.append(1) or wake())
    episodes.put(PROMPTS[:2], Sampling(max_tokens=5, n=50))
    assert len(episodes.take(2)) == 2
    episodes.close()
    assert len(woken) < 10


def test_paused_nothing_is_sampled_and_a_conversation_over_a_sync_has_its_oldest_version():
    engine = ScriptedEngine()
    engine.may.clear()
    episodes = Episodes(engine, context=CONTEXT, environment=Endless, max_turns=2)
    episodes.put(PROMPTS[:1], Sampling(max_tokens=5))
    while not engine.calls:
        time.sleep(0.001)
    threading.Timer(0.05, engine.may.set).start()
    episodes.pause()
    before = len(engine.calls)
    assert engine.may.is_set()
    time.sleep(0.05)
    assert len(engine.calls) == before
    engine.version = 3
    episodes.resume()
    ((one,),) = episodes.take(1)
    episodes.close()
    assert engine.closed
    assert (one.version, one.extra["turns"], one.finish) == (0, 2, "length")


def test_a_fault_that_nobody_has_been_told_outlives_a_sync():
    """Only what a restart mends is forgotten by `resume`: otherwise a run that samples ahead would go on and on."""
    hung = threading.Event()
    episodes = Episodes(
        ScriptedEngine(), context=CONTEXT, environment=lambda: Bad("raises", hung), max_errors=0.0, threads=1
    )
    try:
        episodes.put(PROMPTS[:1], Sampling(max_tokens=5))
        while episodes._fault is None:
            time.sleep(0.001)
        episodes.pause()
        episodes.resume()
        episodes.put(PROMPTS[1:2], Sampling(max_tokens=5))
        with pytest.raises(EnvironmentFailed):
            episodes.take(2)
        episodes.resume()
        assert len(episodes.take(2)) == 2
    finally:
        episodes.close()


def test_prompts_that_cannot_be_played_are_refused_by_name_and_nothing_is_begun():
    engine = ScriptedEngine()
    engine.may.clear()
    episodes = Episodes(engine, context=CONTEXT, vocabulary=VOCABULARY)
    try:
        for bad, told in (
            ([PROMPTS[1], PROMPTS[1]], "p1 is in flight"),
            ([PROMPTS[1], Prompt(prompt_id="none", ids=())], "none is empty"),
            ([PROMPTS[1], Prompt(prompt_id="long", ids=(1,) * 36)], "long has 36 tokens"),
            ([PROMPTS[1], Prompt(prompt_id="foreign", ids=(1, VOCABULARY))], f"foreign has the id {VOCABULARY}"),
        ):
            with pytest.raises(InvalidRun, match=told):
                episodes.put(bad, SAMPLING)
        assert episodes.in_flight == ()
        with pytest.raises(InvalidRun, match="1 groups are asked for and 0 are in flight"):
            episodes.take(1)
    finally:
        engine.may.set()
        episodes.close()
    with pytest.raises(InvalidRun, match="the sampler is closed"):
        episodes.put(PROMPTS, SAMPLING)


def test_answers_of_an_engine_that_are_none_are_told_by_the_prompts_name():
    class Wrong(ScriptedEngine):
        def _answer(self, place, prompt, sampling, seed):
            return Rollout(place, np.array([1], np.int32), np.array([np.nan], np.float32), "stop", 0)

    with pytest.raises(RecordsRefused, match=r"answer 0 to prompt p0: .* is nan"):
        played(Wrong())
