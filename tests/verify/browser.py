"""A headless Chromium for tests, spoken to over a pipe in its own protocol; nothing but the standard library."""

import base64
import json
import os
import select
import shutil
import struct
import subprocess
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60


def executable() -> str:
    """The browser of this machine. Without one the test is skipped, and fails under CI=true."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true and none of {', '.join(NAMES)} is installed: the page must be seen in a browser")
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium-headless-shell)")
    return found


class Browser:
    """One page of a headless Chromium.

    Attributes:
        complaints: console messages, exceptions and log entries (a blocked request, a broken policy) since the start.
    """

    def __init__(self, path: str) -> None:
        self.complaints: list[str] = []
        self._profile = TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._in, self._out, self._buffer, self._id = ours_in, ours_out, b"", 0

        def pipes() -> None:  # Chromium reads from descriptor 3 and writes to descriptor 4
            low, high = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(low, 3)
            os.dup2(high, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [path, *options, "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser, by its own command: the process may be a shell around it."""
        self._session = None
        self.send("Browser.close")
        self._process.wait(timeout=SECONDS)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise RuntimeError(f"the browser says nothing (exit status {self._process.poll()})")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._notice(message)
        return message

    def _notice(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(f"a request to {params['request']['url']}")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, file: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Loads a page at a size of the screen; below 600 the browser behaves as on a phone."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def screenshot(self, *, scale: float = 1.0) -> bytes:
        """A PNG of what the screen shows, made smaller by `scale`."""
        x, y, width, height = self.ask("[scrollX, scrollY, innerWidth, innerHeight]")
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": scale}
        shot = self.send("Page.captureScreenshot", format="png", clip=clip)
        return base64.b64decode(shot["data"])


@dataclass
class Picture:
    """A decoded PNG: `rows[y]` holds the bytes of one line, `channels` a pixel."""

    width: int
    height: int
    channels: int
    rows: list[bytes] = field(repr=False)

    def pixel(self, x: int, y: int) -> tuple[int, ...]:
        """Red, green, blue."""
        return tuple(self.rows[y][x * self.channels : x * self.channels + 3])

    def colours(self) -> dict[tuple[int, ...], int]:
        """How often each colour stands in the picture."""
        places = ((x, y) for y in range(self.height) for x in range(self.width))
        return Counter(self.pixel(x, y) for x, y in places)


def picture(png: bytes) -> Picture:
    """Decodes an 8-bit RGB or RGBA PNG without interlacing, as browsers write them."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, data, header = 8, b"", b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, body = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        place += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    raw, size = zlib.decompress(data), width * channels
    rows: list[bytes] = []
    above = bytes(size)
    for y in range(height):
        start = y * (size + 1)
        above = _unfiltered(raw[start], raw[start + 1 : start + 1 + size], above, channels)
        rows.append(above)
    return Picture(width, height, channels, rows)


def _unfiltered(kind: int, line: bytes, above: bytes, channels: int) -> bytes:
    """One line with PNG's prediction (none, left, up, mean, Paeth) undone."""
    out = bytearray(line)
    for i in range(len(out)):
        left = out[i - channels] if i >= channels else 0
        up = above[i]
        corner = above[i - channels] if i >= channels else 0
        if kind == 1:
            out[i] = (out[i] + left) & 255
        elif kind == 2:
            out[i] = (out[i] + up) & 255
        elif kind == 3:
            out[i] = (out[i] + (left + up) // 2) & 255
        elif kind == 4:
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda value: abs(guess - value))
            out[i] = (out[i] + nearest) & 255
    return bytes(out)
