"""Weights that come in pieces, at the caller's pace, to an engine that wants one iterator."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from bestiary.training.rl.buckets import Bucket, tensors_of
from bestiary.training.rl.weight_sync import SyncFailed, WeightReceiver


class Inflow:
    """`WeightReceiver.receive` in a thread of its own, fed bucket by bucket.

    Whatever ends the stream early, the engine sees an iterator that ends: vLLM can be loaded again after that, and not
    after an error inside its own loading. `finish` tells.

    Args:
        engine: that receives.
        patience_s: without a bucket after which the sender counts as gone.
    """

    def __init__(self, engine: WeightReceiver, patience_s: float) -> None:
        self._engine, self._patience = engine, patience_s
        self._changed = threading.Condition()
        self._bucket: Bucket | None = None
        self._next, self._ended, self._given_up = 0, False, False
        self._unfilled: list[str] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._receive, name="weights", daemon=True)
        self._thread.start()

    def put(self, number: int, bucket: Bucket) -> None:
        """The next bucket, by its number from 0 on; returns once the engine has taken the one before it.

        Raises:
            SyncFailed: the engine could make nothing of what came, or the stream was given up.
        """
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._over or (self._next == number and self._bucket is None), self._patience
            )
            self._check()
            if not free:
                raise SyncFailed(
                    f"bucket {number} of the weights found no room in {self._patience:g} s.", remedy="sync again"
                )
            self._bucket, self._next = bucket, number + 1
            self._changed.notify_all()

    def finish(self, buckets: int) -> list[str]:
        """What `receive` returned, once all buckets are taken.

        Args:
            buckets: that were sent.
        Raises:
            SyncFailed: as `put`, or others were sent.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._next == buckets, self._patience)
            if self._next != buckets and self._error is None:
                self._error = SyncFailed(f"{self._next} of {buckets} buckets of weights came.", remedy="sync again")
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        self._check()
        return self._unfilled

    def give_up(self) -> None:
        """End it; the engine has half of something, and says so."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _over(self) -> bool:
        return self._ended or self._given_up or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._given_up:
            raise SyncFailed("the stream of weights was given up for another one.", remedy="one sync at a time")

    def _receive(self) -> None:
        try:
            self._unfilled = self._engine.receive(tensors_of(self._buckets()))
        except Exception as error:  # noqa: BLE001 (told by `put` and `finish`)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _buckets(self) -> Iterator[Bucket]:
        while True:
            with self._changed:
                there = self._changed.wait_for(lambda: self._bucket is not None or self._over, self._patience)
                if not there:
                    self._error = SyncFailed(
                        f"no weights came for {self._patience:g} s in the middle of a sync.", remedy="sync again"
                    )
                if self._bucket is None or self._given_up:
                    return
                bucket, self._bucket = self._bucket, None
                self._changed.notify_all()
            yield bucket
