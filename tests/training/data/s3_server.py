"""An S3 server on loopback that is slow and fails: moto's, behind a layer that spoils some of the answers.

Run as a program: prints its port, serves until its input ends. `GET /-/sent` gives the bytes of objects sent so far.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

LATENCY_S = 0.002
SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'
)


class Spoiled:
    """Of the reads of objects, every fifth is refused with 503 and every seventh is cut off in the middle."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._reads, self._sent = 0, 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/-/sent":
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [str(self._sent).encode()]
        if environ["REQUEST_METHOD"] != "GET" or "HTTP_RANGE" not in environ:
            return self._app(environ, start_response)
        time.sleep(LATENCY_S)
        self._reads += 1
        if self._reads % 5 == 0:
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [SLOW_DOWN]
        body = b"".join(self._app(environ, start_response))
        self._sent += len(body)
        return [body[: len(body) // 2]] if self._reads % 7 == 0 else [body]


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Spoiled(), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
