"""Engines with weights of their own: a version comes with weights, and without one nobody is answered."""

from __future__ import annotations

from bestiary.training.rl.rollout_check import StaleWeights
from bestiary.training.rl.weight_sync import SyncFailed


class Versioned:
    """What the versions of a `WeightReceiver` are; a class of its own takes them from here.

    Args:
        version: of the weights that it begins with; None: it has none.
    """

    def __init__(self, version: int | None) -> None:
        self._version = version

    @property
    def version(self) -> int:
        """Of the weights that the last sync brought.

        Raises:
            SyncFailed: it failed, or there was none since the engine was started.
            StaleWeights: on setting, when it is another: a version comes with weights.
        """
        if self._version is None:
            raise SyncFailed(
                "this engine has no weights of any version: its last sync failed, or there was none.", remedy="sync it"
            )
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        if value != self.version:
            raise StaleWeights(
                f"the engine has weights of version {self.version} and is told {value}.",
                remedy="weight_sync.sync after every optimiser step",
            )
