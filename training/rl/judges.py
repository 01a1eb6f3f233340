"""Who gives rewards: Python functions in processes of their own, and endpoints that are asked over HTTP.

A judge says something of every answer: a number, None, or why there is none. A call that fails for several answers is
made again for each of them alone, so a failure costs only the answer that it comes from.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from queue import SimpleQueue
from typing import Protocol

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.answer import Answer, numbers
from bestiary.training.rl.isolated import CallFailed, CallHung, Isolated, Limits
from bestiary.training.rl.verdicts import Failure, Verdict, verdict

_WAITS_S = (0.25, 30.0)  # first and longest, between attempts
MOST_BYTES = 16 * 2**20  # of an endpoint's answer, whatever it says beside the rewards
_SAID = 200  # characters of its words in an error


class Judge(Protocol):
    """A reward function, wherever it runs."""

    def judge(self, answers: Sequence[Answer]) -> Iterator[tuple[int, Verdict]]:
        """A verdict on each, with its place among them, in any order; ends when the last is given or nobody asks."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class FunctionJudge:
    """A Python function by its import path, see `answer.RewardFunction`.

    It runs in processes of its own and is imported only there. One whose call hangs or dies is replaced.

    Args:
        path: `module:name`.
        timeout_s: of a call.   rows: answers in a call, at most.   processes: calls at one time.
        abstains: None says that an answer is not this function's to judge; otherwise it counts as an error.
        limits: of each process.

    Raises:
        InvalidRun: no such function, or its module raises or hangs.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float = 30.0,
        rows: int = 64,
        processes: int = 1,
        abstains: bool = False,
        limits: Limits | None = None,
    ) -> None:
        _check(path, timeout_s=timeout_s, rows=rows, processes=processes)
        self._timeout, self._rows, self._abstains = timeout_s, rows, abstains
        made = [Isolated(path, "bestiary.training.rl.answer:judging", limits or Limits()) for _ in range(processes)]
        try:
            made[0].start()
        except CallFailed as error:
            raise InvalidRun(
                f"the reward function {path!r} cannot be loaded: {error}.", remedy="module:name of something installed"
            ) from error
        self._all = made
        self._free: SimpleQueue[Isolated] = SimpleQueue()
        for one in made:
            self._free.put(one)

    def judge(self, answers: Sequence[Answer]) -> Iterator[tuple[int, Verdict]]:
        """See `Judge`."""
        return _spread(answers, self._rows, len(self._all), self._call)

    def close(self) -> None:
        """See `Judge`."""
        for one in self._all:
            one.close()

    def _call(self, answers: Sequence[Answer]) -> list[Verdict] | Failure:
        process = self._free.get()
        try:
            found = process.call([asdict(one) for one in answers], self._timeout)
        except CallFailed as error:
            return Failure("timeout" if isinstance(error, CallHung) else "error", str(error))
        finally:
            self._free.put(process)
        return [verdict(value, abstains=self._abstains) for value in found]


class EndpointJudge:
    """A reward function behind HTTP.

    POST of `{"answers": [{prompt_id, sample, prompt, text, turns, prompt_ids, ids, row, finish, extra}, …]}`, answered
    by `{"rewards": [number or null, …]}`, in that order. What may pass by itself (no connection, no answer in time or
    none of that form, status 408, 429, 5xx) is tried again after a wait that doubles; any other status is an error of
    the answers sent, and so is an answer of more than `MOST_BYTES`, the rest of which is not read. No redirection is
    followed: it would lose the answers, and take `headers` to whoever it names.

    Args:
        url: http or https.
        timeout_s: of an attempt.   retries: further attempts.
        rows: answers in a request, at most.   requests: at one time.
        abstains: see `FunctionJudge`.   headers: sent along, an authorization for example.

    Attributes:
        headers: all that are sent.

    Raises:
        InvalidRun: no such url, or a number outside its range.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        retries: int = 3,
        rows: int = 64,
        requests: int = 4,
        abstains: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        _check(url, timeout_s=timeout_s, rows=rows, requests=requests)
        if urllib.parse.urlsplit(url).scheme not in ("http", "https") or retries < 0:
            raise InvalidRun(f"reward endpoint {url!r} with retries = {retries}.", remedy="http(s)://…, from 0 on")
        self._url, self._timeout, self._retries = url, timeout_s, retries
        self._rows, self._requests, self._abstains = rows, requests, abstains
        self.headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        self._waits_s = _WAITS_S
        self._opener = urllib.request.build_opener(_Staying)

    def judge(self, answers: Sequence[Answer]) -> Iterator[tuple[int, Verdict]]:
        """See `Judge`."""
        return _spread(answers, self._rows, self._requests, self._call)

    def close(self) -> None:
        """See `Judge`."""

    def _call(self, answers: Sequence[Answer]) -> list[Verdict] | Failure:
        body = json.dumps({"answers": [asdict(one) for one in answers]}).encode()
        wait_s, longest = self._waits_s
        failure = Failure("error", "never asked")
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, longest)
            try:
                found = json.loads(self._post(body))
                values = numbers(found["rewards"], len(answers))
                return [verdict(value, abstains=self._abstains) for value in values]
            except urllib.error.HTTPError as error:
                error.close()
                place = error.headers.get("Location")
                elsewhere = (
                    "" if place is None else f", see {place[:_SAID]}: no redirection is followed, give the url itself"
                )
                failure = Failure("error", f"{self._url} answers {error.code} {error.reason[:_SAID]}{elsewhere}")
                if error.code not in (408, 429) and error.code < 500:
                    return failure
            except TimeoutError:
                failure = Failure("timeout", f"{self._url} gave no answer in {self._timeout:g} s")
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.URLError) and isinstance(error.reason, TimeoutError):
                    failure = Failure("timeout", f"{self._url} took no connection in {self._timeout:g} s", alone=False)
                else:
                    failure = Failure("error", f"{self._url}: {type(error).__name__}: {error}", alone=False)
            except _TooLong:
                return Failure("error", f"{self._url} answers more than {MOST_BYTES} bytes")
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                failure = Failure("error", f"{self._url} answers no rewards: {type(error).__name__}: {error}")
        return failure

    def _post(self, body: bytes) -> bytes:
        """The answer's bytes; a timeout of a socket is one of each byte, so time is looked at between them."""
        until = time.monotonic() + self._timeout
        request = urllib.request.Request(self._url, data=body, headers=self.headers, method="POST")
        parts, size = list[bytes](), 0
        with self._opener.open(request, timeout=self._timeout) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise _TooLong
                if time.monotonic() > until:
                    raise TimeoutError
        return b"".join(parts)


class _TooLong(Exception):
    """An answer of more bytes than are read."""


class _Staying(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirection."""

    def redirect_request(self, *_told: object) -> None:
        """No further request."""


def _check(what: str, *, timeout_s: float, **counts: int) -> None:
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise InvalidRun(f"{what}: timeout_s = {timeout_s}.", remedy="seconds, above 0")
    for name, count in counts.items():
        if count < 1:
            raise InvalidRun(f"{what}: {name} = {count}.", remedy="at least 1")


def _spread(
    answers: Sequence[Answer],
    rows: int,
    calls: int,
    call: Callable[[Sequence[Answer]], list[Verdict] | Failure],
) -> Iterator[tuple[int, Verdict]]:
    """Calls about a few answers each, several at a time; those that fail again for each answer alone."""
    share = max(1, min(rows, -(-len(answers) // calls)))
    places = range(len(answers))
    waiting = deque(places[start : start + share] for start in places[::share])
    running: dict[Future[list[Verdict] | Failure], range] = {}
    pool = ThreadPoolExecutor(calls, thread_name_prefix="reward")
    try:
        while waiting or running:
            while waiting and len(running) < calls:
                part = waiting.popleft()
                running[pool.submit(call, [answers[place] for place in part])] = part
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                part, found = running.pop(done), done.result()
                if isinstance(found, Failure) and found.alone and len(part) > 1:
                    waiting.extendleft(part[n : n + 1] for n in reversed(range(len(part))))
                elif isinstance(found, Failure):
                    yield from ((place, found) for place in part)
                else:
                    yield from zip(part, found, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
