"""Files wherever fsspec reaches them: listed, identified, and read in bounded blocks through failures.

A file is never copied to the local disk and never read whole: `ResumingFile` holds one block, and after a failure it
opens the file again and goes on at the byte it had reached.
"""

import hashlib
import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from bestiary.training.data.errors import InvalidPlan, StorageFailed

Result = TypeVar("Result")
LOGGER = logging.getLogger(__name__)
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # a retry changes nothing
HASHED_WHOLE = 8 << 20  # a local file up to this size is identified by all its bytes, a larger one by samples
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How long flaky storage is put up with.

    Attributes:
        attempts: at most, the first included.
        first_wait_s: before the second attempt; doubled before each further one.
        longest_wait_s: the ceiling of the doubling.
    """

    attempts: int = 6
    first_wait_s: float = 0.25
    longest_wait_s: float = 20.0

    def __call__(self, work: Callable[[], Result], name: str) -> Result:
        """The result of `work`, tried until it succeeds.

        Raises:
            StorageFailed: the file is not there or not readable, or the last attempt failed.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return work()
            except PERMANENT as error:
                raise StorageFailed(
                    f"{name}: {type(error).__name__}: {error}.", remedy="check the path and the credentials"
                ) from error
            except Exception as error:  # object stores raise whatever their client library does
                if attempt == self.attempts:
                    raise StorageFailed(
                        f"{name}: {type(error).__name__}: {error}, {attempt} times.",
                        remedy="raise Retry.attempts or Retry.longest_wait_s if the storage recovers by itself",
                    ) from error
                wait = min(self.first_wait_s * 2 ** (attempt - 1), self.longest_wait_s)
                LOGGER.warning("%s: %s: %s; attempt %d in %.2f s", name, type(error).__name__, error, attempt + 1, wait)
                time.sleep(wait)
        raise InvalidPlan(f"Retry.attempts = {self.attempts}.", remedy="at least 1")


DEFAULT_RETRY = Retry()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a data set: where it is, and what tells whether it is still the same one.

    Attributes:
        path: as fsspec opens it, protocol included.   size: in bytes.
        identity: the store's ETag or checksum, or a hash of the content where the file is local.
    """

    path: str
    size: int
    identity: str


def expand(patterns: Iterable[str], options: Mapping[str, Any], retry: Retry) -> tuple[FileEntry, ...]:
    """The files behind paths and globs, in the order given, each glob sorted.

    Raises:
        InvalidPlan: a pattern without a file, or a file named twice.
        StorageFailed: the store cannot be asked.
    """
    entries: dict[str, FileEntry] = {}
    for pattern in patterns:
        filesystem, path = fsspec.core.url_to_fs(pattern, **options)
        found = retry(lambda fs=filesystem, at=path: _matches(fs, at), pattern)  # type: ignore[misc]
        if not found:
            raise InvalidPlan(f"no file matches {pattern!r}.", remedy="check the path; globs know *, ?, [] and **")
        for info in found:
            full = filesystem.unstrip_protocol(info["name"])
            if full in entries:
                raise InvalidPlan(f"{full} is named twice.", remedy="name it once; a weight above 1 repeats a source")
            entries[full] = FileEntry(full, int(info["size"]), _identity(filesystem, info, retry))
    return tuple(entries.values())


def _matches(filesystem: Any, path: str) -> list[dict[str, Any]]:
    if any(character in path for character in "*?["):
        found = filesystem.glob(path, detail=True)
        return [found[name] for name in sorted(found) if found[name]["type"] == "file"]
    return [filesystem.info(path)]


def _identity(filesystem: Any, info: Mapping[str, Any], retry: Retry) -> str:
    for name in ("ETag", "etag", "md5Hash", "content_md5", "sha256"):
        if info.get(name):
            return str(info[name]).strip('"')
    path, size = info["name"], int(info["size"])

    def digest() -> str:
        hashed = hashlib.sha256(str(size).encode())
        with filesystem.open(path, "rb") as file:
            if size <= HASHED_WHOLE:
                while block := file.read(1 << 20):
                    hashed.update(block)
            else:
                for sample in range(SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    hashed.update(file.read(SAMPLE_BYTES))
        return hashed.hexdigest()[:16]

    return retry(digest, path)


class ResumingFile(io.RawIOBase):
    """A readable, seekable file that survives failures of its storage, holding at most one block.

    Args:
        entry: the file.   options: of its filesystem.
        block: bytes asked for at once.

    Raises:
        StorageFailed: while reading, after the last attempt, or where the file ends before its size.
    """

    def __init__(self, entry: FileEntry, options: Mapping[str, Any], retry: Retry, block: int) -> None:
        super().__init__()
        self._entry, self._options, self._retry, self._block = entry, options, retry, block
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always: the next read starts there."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the place of the next read; nothing is fetched."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        return self._at

    def tell(self) -> int:
        """The place of the next read."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with at most a block; 0 at the end of the file."""
        wanted = min(len(buffer), self._block, self._entry.size - self._at)
        if wanted <= 0:
            return 0
        data = self._retry(lambda: self._read(wanted), f"{self._entry.path} at byte {self._at}")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        try:
            if self._file is None:
                # One block and no read-ahead: fsspec's other caches grow with what is read.
                filesystem, path = fsspec.core.url_to_fs(self._entry.path, **self._options)
                self._file = filesystem.open(path, "rb", block_size=self._block, cache_type="readahead")
            if self._file.tell() != self._at:
                self._file.seek(self._at)
            data: bytes = self._file.read(wanted)
            if not data:
                raise EOFError(f"ends at byte {self._at} of {self._entry.size}")
            return data
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Let go of the storage."""
        if not self.closed:
            self._drop()
        super().close()
