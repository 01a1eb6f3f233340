"""The section of a run's file that says where its roles live; without it, everything is in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bestiary.training.sections import Section

Count = Annotated[int, Field(ge=1)]
Elsewhere = Literal["rollout", "reference"]


class PlacementSection(Section):
    """Processes of each role on Ray: the cluster that RAY_ADDRESS names, or one on this machine.

    The controller and the episodes stay in the process that was started.

    Attributes:
        policy: ranks; `parallel` says how they share the model.
        rollout: engines, each with the whole model: of `rollouts.engine` embedded a copy with our generator.
        reference: processes, each with the whole model; not started where nothing asks for a reference.
        reward, environment: processes of reward functions and of environments; 0: where the controller is.
        together: roles that share the places, and GPUs, of the policy; the others have places of their own.
        nodes: that the policy's places are spread over, as many on each; the others' are wherever there is room.
        cpus: logical ones of a cluster on this machine; None: its cores, or as many as there are processes.
        bucket_mib: of weights on their way to the engines at a time.
        timeout_s: after which a process that does not answer is started anew.
    """

    policy: Count = 1
    rollout: Count = 1
    reference: Count = 1
    reward: Annotated[int, Field(ge=0)] = 1
    environment: Annotated[int, Field(ge=0)] = 0
    together: tuple[Elsewhere, ...] = ()
    nodes: Count = 1
    cpus: Count | None = None
    bucket_mib: Count = 64
    timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _even(self) -> PlacementSection:
        if self.places % self.nodes:
            raise ValueError(f"{self.places} places on {self.nodes} nodes, as many on each")
        return self

    @property
    def places(self) -> int:
        """Of the policy and who shares them."""
        counts: Mapping[str, int] = {"rollout": self.rollout, "reference": self.reference}
        return max(self.policy, *(counts[role] for role in self.together), 1)

    @property
    def processes(self) -> int:
        """That Ray is asked for at most."""
        apart = {"rollout": self.rollout, "reference": self.reference, "reward": self.reward}
        apart |= {"environment": self.environment}
        own = sum(count for role, count in apart.items() if role not in self.together)
        return self.places * (1 + len(self.together)) + own


class BesideSection(Section):
    """Processes on Ray beside a student that trains in the process that was started: `bestiary distill`.

    Its engines are `rollouts.engines`; they have places of their own.

    Attributes:
        teacher: processes, each with the whole teacher, that packs take turns at; 0: it computes where the student
            does.
        together: roles that share the places, and GPUs, of the engines; the others have places of their own.
        bucket_mib: of the teacher's answers on their way at a time.
    """

    teacher: Annotated[int, Field(ge=0)] = 0
    together: tuple[Literal["teacher"], ...] = ()
    bucket_mib: Count = 64

    def check(self, recipe: str, teacher: str | None, loss: str | None, engines: int) -> None:
        """Refuse what the rest of the file does not go with.

        Args:
            teacher, loss: loss.teacher and loss.name.   engines: rollouts.engines.
        Raises:
            ValueError: names the key.
        """
        if recipe != "distill":
            raise ValueError(f"placement is of distill and grpo, the recipe is {recipe}")
        if self.teacher and teacher is None:
            raise ValueError(f"placement.teacher = {self.teacher} and no loss.teacher: there is nobody to place")
        if self.teacher and loss is not None and ":" in loss:
            raise ValueError(
                f"placement.teacher = {self.teacher} with loss.name = {loss}, which takes the teacher itself; "
                "placement.teacher = 0"
            )
        if self.together and not (self.teacher and engines):
            raise ValueError(
                f"placement.together = [teacher] with placement.teacher = {self.teacher} and rollouts.engines = "
                f"{engines}: one of them has no places to share; at least 1 of both, or leave it out"
            )
