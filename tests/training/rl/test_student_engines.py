"""Distillation with engines and a teacher on Ray: the run of one process, also after deaths."""

import json
import os
import signal
from functools import partial

import pytest
import torch

from bestiary.tools import cli
from bestiary.training import run as training_run
from bestiary.training.config import load_run_config
from bestiary.training.errors import InvalidRun, RoleLost
from bestiary.training.recipes.distill import Distill
from bestiary.training.rl.remote_teacher import RemoteTeacher
from bestiary.training.rl.student_engines import StudentEngines
from bestiary.training.rl.teacher import LocalTeacher
from bestiary.training.rl.workers import TeacherWorker
from bestiary.training.run import beside, dist, run
from bestiary.verify.weights import perturb

from ...models.tiny import tiny
from ..ray_session import session as session  # the fixture
from ..recipes_case import pack, singles, step
from ..test_run import metrics
from ..test_run import place as place  # the fixture
from ..test_run_recipes import ON_POLICY, changes
from ..test_run_recipes import files as files

EXACT = [*ON_POLICY, "precision.parameters=float64", "loop.timeout_s=200"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_and_teacher_on_ray_say_what_they_do_in_one_process_and_one_that_dies_is_replaced(
    files, session, tmp_path, monkeypatch
):
    """An engine is killed behind the second step, the teacher behind the third: the steps are those of a run without
    other processes and deaths."""
    given = partial(changes, "distill")
    run(load_run_config(files / "run.json", given(tmp_path / "own", *EXACT), recipe="distill"))
    generate, calls, made, groups = StudentEngines.generate, [], [], []

    def killing(engines, *arguments, **more):
        calls.append(engines.version)
        groups[:] = made[0].group("rollout"), made[0].group("teacher")
        if len(calls) == 3:
            os.kill(groups[0].pids[0], signal.SIGKILL)
        if len(calls) == 4:
            os.kill(groups[1].pids[0], signal.SIGKILL)
        return generate(engines, *arguments, **more)

    def kept(config):
        made.append(beside(config))
        return made[-1]

    monkeypatch.setattr(training_run, "beside", kept)
    monkeypatch.setattr(StudentEngines, "generate", killing)
    placed = ["rollouts.engines=1", "placement={teacher: 1, together: [teacher], bucket_mib: 1}"]
    run(load_run_config(files / "run.json", given(tmp_path / "ray", *EXACT, *placed), recipe="distill"))
    assert [group.generations for group in groups] == [[2], [2]]
    ours, theirs = metrics(tmp_path / "ray"), metrics(tmp_path / "own")
    assert [row["rl/answer_tokens"] for row in ours] == [row["rl/answer_tokens"] for row in theirs]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-9)


@pytest.mark.parametrize("change", ["rollouts.engines=2", "placement.teacher=2"])
def test_processes_beside_a_student_in_several_processes_are_refused(files, tmp_path, monkeypatch, change):
    given = changes("distill", tmp_path / "two", *EXACT, change)
    config = load_run_config(files / "run.json", given, recipe="distill")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    said = change.replace(".", r"\.").replace("=", " = ")
    with pytest.raises(InvalidRun, match=f"{said} for a student in 2 processes"):
        beside(config)


@pytest.mark.parametrize(
    ("recipe", "more", "said"),
    [
        ("distill", ["loss.teacher=null"], "placement.teacher = 1 and no loss.teacher"),
        ("distill", ["placement.together=[teacher]"], r"together = \[teacher\] with .* rollouts.engines = 0"),
        ("distill", ["loss.name=mine:Loss"], "loss.name = mine:Loss, which takes the teacher itself"),
        ("dpo", [], "placement is of distill and grpo, the recipe is dpo"),
        ("distill", ["placement.teachers=1"], "placement.teachers is no known key.*(.|\n)*did you mean teacher"),
    ],
)
def test_a_teacher_that_cannot_be_placed_is_refused_by_its_key(files, tmp_path, recipe, more, said):
    given = [*changes(recipe, tmp_path, "placement.teacher=1"), *more]
    with pytest.raises(InvalidRun, match=said):
        load_run_config(files / "run.json", given, recipe=recipe)


def test_on_policy_is_a_flag_and_a_teacher_elsewhere_takes_no_memory_here(files, tmp_path, capsys):
    command = ["distill", str(files / "run.json"), *changes("distill", tmp_path), "data.overflow=drop", "--dry-run"]
    asked = ["--on-policy", "rollouts.max_tokens=12", "--json", "-"]
    told = []
    for more in ([], ["placement.teacher=1"]):
        assert cli.main([*command, *asked, *more]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [one["config"]["rollouts"]["share"] for one in told] == [1.0, 1.0]
    assert [one["estimate"]["bytes"]["beside"] > 0 for one in told] == [True, False]


# ---------------------------------------------------------------------- the teacher's messages, without processes


class Group:
    """Two processes of a teacher, here; a process dies at the calls given."""

    def __init__(self, model, dies=()):
        self._model, self._dies, self.calls, self.sizes, self.deaths = model, dies, [], [], 0
        self.size, self.role = 2, "teacher"
        self._hosts = [self._host() for _ in range(2)]

    def _host(self):
        made = TeacherWorker.__new__(TeacherWorker)
        made.hosted = LocalTeacher(self._model)
        made.described = made.describe()
        return made

    @property
    def members(self):
        return self

    @property
    def described(self):
        return [one.described for one in self._hosts]

    def __len__(self):
        return self.size

    def ask(self, member, name, *arguments):
        self.calls.append(name)
        if self._hosts[member] is None or len(self.calls) in self._dies:
            self._hosts[member] = None
            raise RoleLost(f"process {member} died", role="teacher")
        found = getattr(self._hosts[member], name)(*arguments)
        if name == "part" and found is not None:
            self.sizes.append(sum(len(one.data) for one in found))
        return (found,)

    def answer(self, member, name, *arguments):
        return self.ask(member, name, *arguments)[0]

    def tell(self, member, name, *arguments):
        if self._hosts[member] is not None:
            getattr(self._hosts[member], name)(*arguments)

    def wait(self, references, *, members):
        return [found for (found,) in references]

    def restart(self):
        self.deaths += 1
        self._hosts = [self._host() if one is None else one for one in self._hosts]


@pytest.mark.parametrize("dies", [(), (2, 7, 12)])
@pytest.mark.parametrize("top_k", [None, 5])
def test_what_a_teacher_says_from_elsewhere_is_bit_for_bit_what_it_says_here(top_k, dies):
    """Loss and gradients in float32, in parts of at most 300 bytes, of several packs and of one without any prelude;
    also where processes die while they are asked and while they answer."""
    student, teacher = tiny("qwen3", torch.float32).train(), tiny("qwen3", torch.float32)
    perturb(teacher, seed=3)
    packs = [pack(singles(count)) for count in (3, 2, 4, 1, 2)]
    group = Group(teacher, dies)
    ours = Distill(RemoteTeacher(lambda: group, bucket_bytes=300), "reverse_kl", top_k=top_k)
    found, expected = step(ours, student, packs), step(Distill(teacher, "reverse_kl", top_k=top_k), student, packs)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert group.deaths == len(dies)
    assert max(group.sizes) <= 300 < sum(group.sizes)
    assert all(not one._answers for one in group._hosts)
    alone = ours.batch(packs[0])
    assert torch.equal(
        ours.loss(student, alone).total, Distill(teacher, "reverse_kl", top_k=top_k).loss(student, alone).total
    )


@pytest.mark.slow
def test_a_teacher_that_dies_again_and_again_ends_the_run():
    teacher = tiny("qwen3", torch.float32)
    group = Group(teacher, range(1, 100))
    with pytest.raises(RoleLost, match=r"process \d died"):
        step(Distill(RemoteTeacher(lambda: group), top_k=2), tiny("qwen3", torch.float32), [pack(singles(1))])
    assert group.deaths == 3
