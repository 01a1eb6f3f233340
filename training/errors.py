"""What can be wrong with a training run: each error names the field or file and says how to go on."""

from typing import Literal

from bestiary.kernels.errors import BestiaryError

Role = Literal["policy", "rollout", "reference", "reward", "teacher", "environment"]


class InvalidRun(BestiaryError):
    """A key or value of a run's file that is wrong, or two that contradict each other or the machine.

    Remedy: correct the key in the run's file; `bestiary RECIPE --help` shows a whole one.
    """


class ParallelRefused(BestiaryError):
    """A mesh, a plan or a model that cannot be spread over the processes; names the field and its value.

    Remedy: choose sizes that divide heads, widths and the number of processes, as the message says.
    """


class CheckpointRefused(BestiaryError):
    """A checkpoint that is damaged, half written, or of another model, tokenizer, data or recipe.

    Remedy: resume with the files the run began with, from an earlier step, or start under another `out`.
    """


class SaveFailed(BestiaryError):
    """A checkpoint that could not be written; the ones before it are untouched.

    Remedy: free the disk or repair the folder; the run resumes from the checkpoint before.
    """


class FolderTaken(BestiaryError):
    """A run's folder in which another run is at work; names its process and host.

    Remedy: wait for that run or end it, or start under another `out`.
    """


class Diverged(BestiaryError):
    """Losses or gradients that are not finite, or spikes, where the policy is to stop.

    Remedy: lower `optim.lr`, look at the batch that the message names, or change the policy for spikes.
    """

    exit_code = 1


class RankLost(BestiaryError):
    """Another process of the run died or stopped answering.

    Remedy: read the first process's error in the log, then start the same command again: it resumes.
    """


class RoleLost(BestiaryError):
    """The process of a role died or stopped answering.

    Remedy: read the role's log; with restarts left the run goes on by itself, else start it again.

    Attributes:
        role: whose, so that the controller knows what to start again.
    """

    def __init__(self, what: str, *, role: Role, read_from: str | None = None, remedy: str | None = None) -> None:
        self.role = role
        super().__init__(what, read_from=read_from, remedy=remedy)


class ClusterLost(BestiaryError):
    """The head of the Ray cluster is gone, and with it whoever worked for the run.

    Remedy: start the cluster again, then the same command: it resumes.
    """


class RewardFailed(BestiaryError):
    """Reward functions raised, hung or gave no number more often than the run allows.

    Remedy: run the reward function on the answers in the message; raise its timeout or the allowed share.
    """


class EnvironmentFailed(BestiaryError):
    """Environments raised or hung more often than the run allows.

    Remedy: run the environment on the messages in the error; raise its timeout or the allowed share.
    """


class OutOfMemory(BestiaryError):
    """The model or a step did not fit; the message has the estimate and what lowers it.

    Remedy: what the message says saves most: shorter packs, `model.checkpointing`, `lora`, more processes.
    """
