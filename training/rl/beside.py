"""Processes on Ray beside a model that trains in this one: the engines and the teacher of distillation."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

from bestiary.bridges.contents import contents
from bestiary.bridges.fields import FLOAT_TYPES
from bestiary.bridges.hub import resolve, split_revision
from bestiary.training.config import RunConfig
from bestiary.training.contents import NOTHING, Contents
from bestiary.training.errors import Role
from bestiary.training.rl.cluster import session
from bestiary.training.rl.groups import Group, Pool, RoleWorker
from bestiary.training.rl.placement import BesideSection
from bestiary.training.rl.remote_teacher import RemoteTeacher
from bestiary.training.rl.student_engines import student_engine
from bestiary.training.rl.teacher import teacher_process
from bestiary.training.rl.workers import RolloutWorker, TeacherWorker

_MIB = 2**20
_THREADS = 4  # calls that a process answers at a time


class Beside:
    """Groups of processes, which whoever asks for the first of them starts, all at the same time.

    Args:
        config: of a run with `rollouts.engines` or `placement.teacher`.

    Attributes:
        teacher: asks its processes; None: there are none.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stack = ExitStack()
        self._groups: dict[Role, Group] = {}
        section = config.placement
        self.teacher: RemoteTeacher | None = None
        self._contents: Contents = NOTHING
        if section is not None and section.teacher:
            self._contents = {"loss.teacher": contents(*split_revision(str(config.loss.teacher)))}
            self.teacher = RemoteTeacher(partial(self.group, "teacher"), bucket_bytes=section.bucket_mib * _MIB)

    def group(self, role: Role) -> Group:
        """The processes of a role.

        Raises:
            InvalidRun: no room for them.   MissingLibrary: ray or verl.
        """
        if not self._groups:
            self._start()
        return self._groups[role]

    def close(self) -> None:
        """End all of them."""
        self._groups = {}
        self._stack.close()

    def _start(self) -> None:
        wanted = {role: one for role, one in self._wanted().items() if one[2]}
        sizes = {role: size for role, (_, _, size) in wanted.items()}
        stack, patience = self._stack, self._config.loop.timeout_s
        section = self._config.placement or BesideSection()
        places = max(sizes.values()) if section.together else sum(sizes.values())
        stack.enter_context(session(max(places * (len(wanted) if section.together else 1), os.cpu_count() or 1)))
        shared = Pool(places, len(wanted), nodes=None, timeout_s=patience) if section.together else None
        if shared is not None:
            stack.callback(shared.close)
        for role, (worker, make, size) in wanted.items():
            pool = shared or Pool(size, 1, nodes=None, timeout_s=patience)
            if pool is not shared:
                stack.callback(pool.close)
            self._groups[role] = Group(role, worker, make, size=size, pool=pool, threads=_THREADS, timeout_s=patience)
            stack.callback(self._groups[role].close)

    def _wanted(self) -> dict[Role, tuple[type[RoleWorker], Any, int]]:
        """Of each role what its processes host, who makes it there, and how many they are."""
        config, precision = self._config, self._config.precision
        found: dict[Role, tuple[type[RoleWorker], Any, int]] = {}
        name = precision.compute or precision.parameters
        if config.rollouts is not None:
            src = str(resolve(config.model.src, revision=config.model.revision))
            dtype = None if name is None else FLOAT_TYPES[name]
            found["rollout"] = (
                RolloutWorker,
                partial(student_engine, src, dtype, config.rollouts.rows),
                config.rollouts.engines,
            )
        if config.loss.teacher is not None:
            make = partial(
                teacher_process,
                config.loss.teacher,
                name,
                config.loop.deterministic,
                os.getcwd(),
                self._contents,
            )
            found["teacher"] = (TeacherWorker, make, config.teachers)
        return found
