"""What can be wrong with a training run: each error names the field or file and says how to go on."""

from typing import Literal

from bestiary.kernels.errors import BestiaryError

Role = Literal["policy", "rollout", "reference", "reward", "teacher", "environment"]


class InvalidRun(BestiaryError):
    """A key or value of a run's file that is wrong, or two that contradict each other or the machine."""


class ParallelRefused(BestiaryError):
    """A mesh, a plan or a model that cannot be spread over the processes; names the field and its value."""


class CheckpointRefused(BestiaryError):
    """A checkpoint that is damaged, half written, or of another model, tokenizer, data or recipe."""


class SaveFailed(BestiaryError):
    """A checkpoint that could not be written; the ones before it are untouched."""


class Diverged(BestiaryError):
    """Losses or gradients that are not finite, or spikes, where the policy is to stop."""

    exit_code = 1


class RankLost(BestiaryError):
    """Another process of the run died or stopped answering."""


class RoleLost(BestiaryError):
    """The process of a role died or stopped answering.

    Attributes:
        role: whose, so that the controller knows what to start again.
    """

    def __init__(self, what: str, *, role: Role, read_from: str | None = None, remedy: str | None = None) -> None:
        self.role = role
        super().__init__(what, read_from=read_from, remedy=remedy)


class RewardFailed(BestiaryError):
    """Reward functions raised, hung or gave no number more often than the run allows."""


class EnvironmentFailed(BestiaryError):
    """Environments raised or hung more often than the run allows."""


class OutOfMemory(BestiaryError):
    """The model or a step did not fit; the message has the estimate and what lowers it."""
