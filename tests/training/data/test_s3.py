"""Streaming from a real S3 server that is slow and fails, with less memory than the data set, resumed in mid-shard."""

import json
import subprocess
import sys
import tracemalloc
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bestiary.training.data.encoded import encoded
from bestiary.training.data.errors import StateMismatch
from bestiary.training.data.loader import PackLoader
from bestiary.training.data.plan import Plan
from bestiary.training.data.source import Source
from bestiary.training.data.storage import Retry

from .rows import ids_of, key, unchanged

BUFFER = 64 << 10
SHARDS, ROWS, TOKENS = 3, 500, 200  # 0.55 MB a shard


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


@pytest.fixture(scope="module")
def options(endpoint: str) -> dict[str, Any]:
    """Of the client: its own retries off, so that ours are what copes."""
    return {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "eu-west-1"},
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }


@pytest.fixture(scope="module")
def plan(options: dict[str, Any]) -> Plan:
    store = fsspec.filesystem("s3", **options)
    store.retries = 1
    store.mkdir("corpus")
    for shard in range(SHARDS):
        rows = [{"input_ids": [1 + shard * ROWS + row] * TOKENS} for row in range(ROWS)]
        store.pipe(f"corpus/{shard}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    source = Source(
        name="web",
        files="s3://corpus/*.jsonl",
        encode=encoded,
        storage_options=options,
        buffer_bytes=BUFFER,
        retry=Retry(attempts=8, first_wait_s=0.001),
    )
    return Plan(sources=(source,), pack_length=2048, pad_id=0, epochs=1, look_ahead=20)


def sent(endpoint: str) -> int:
    with urllib.request.urlopen(f"{endpoint}/-/sent") as answer:
        return int(answer.read())


@pytest.mark.slow
def test_a_set_larger_than_the_buffer_streams_and_resumes_in_mid_shard(plan: Plan, endpoint: str) -> None:
    """Every row once, memory that does not grow, and a resume fetches what is left and no more."""
    size = sum(entry.size for entry in plan.listed().shards["web"])
    assert size > 20 * BUFFER
    loader = PackLoader(plan, workers=0, make=unchanged)
    next(iter(PackLoader(plan, workers=0, make=unchanged)))  # what the client loads once
    before = sent(endpoint)
    tracemalloc.start()
    packs, first = iter(loader), []
    for pack in islice(packs, 90):
        first.append((key(pack), ids_of(pack)))
        if len(first) == 30:
            early = tracemalloc.get_traced_memory()[1]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [(key(pack), ids_of(pack)) for pack in packs]
    kept = sum(2 * len(pack[0]) for pack, _ in first + rest)
    peak = tracemalloc.get_traced_memory()[1] - kept
    tracemalloc.stop()
    assert Counter(row for _, ids in first + rest for row in ids) == dict.fromkeys(range(SHARDS * ROWS), 1)
    assert peak < early, f"{peak} bytes held after {early}"
    assert peak < size * 0.75, f"{peak} bytes held of {size}, most of it the client's own"
    assert sent(endpoint) - before > size

    again = PackLoader(plan, workers=0, make=unchanged)
    again.load_state_dict(state)
    before = sent(endpoint)
    assert [key(pack) for pack in again] == [pack for pack, _ in rest]
    left = size * len(rest) / (len(first) + len(rest))
    assert sent(endpoint) - before < left * 1.6 + 10 * BUFFER, "the shard was read again from its start"


def test_an_object_that_was_replaced_is_told(plan: Plan, options: dict[str, Any]) -> None:
    """By the store's own checksum: the size is the same."""
    loader = PackLoader(plan, workers=0, make=unchanged)
    state = loader.state_dict()
    store = fsspec.filesystem("s3", **options)
    store.pipe("corpus/1.jsonl", store.cat("corpus/1.jsonl").replace(b"[501", b"[502"))
    store.invalidate_cache()
    with pytest.raises(StateMismatch, match=r"source 'web': file 1\.jsonl was \d+ bytes"):
        PackLoader(plan, workers=0, make=unchanged).load_state_dict(state)
