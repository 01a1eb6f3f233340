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
        nodes: that the policy's places are spread over, as many on each.
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
