"""A headless Chromium, driven over its DevTools pipe: no driver program, no port, no package. JSON messages end in a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# it reads from descriptor 3 and writes to 4: the ends of our pipes go there, by way of numbers that are neither
_START = """
import fcntl, os, sys
for end, place in [(fcntl.fcntl(int(end), fcntl.F_DUPFD, 10), place) for end, place in zip(sys.argv[1:3], (3, 4))]:
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
_SECONDS = 30.0  # for any answer: a browser that is this slow hangs


def find() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        words = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--force-device-scale-factor=1",
            f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        ends = (command_read, answer_write)
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, *map(str, ends), *words],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._commands)  # it ends when the pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        try:
            self._profile.cleanup()
        except OSError:  # a child of it may still be writing there
            shutil.rmtree(self._profile.name, ignore_errors=True)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.send(method, self._session, **parameters)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._answers, 1 << 20)
            if not received:
                raise RuntimeError("the browser has ended")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Loads it from disk and waits until it says that it is drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.body && document.body.dataset.drawn === 'true'")

    def evaluate(self, expression: str) -> Any:
        """A value, or what a promise resolves to."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.05)

    def settle(self) -> None:
        """Two frames later, whatever was asked for is on the screen."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def hover(self, selector: str, number: int = 0) -> None:
        """The pointer in the middle of the n-th element, which is scrolled into view."""
        place = self.evaluate(
            f"(() => {{ const found = document.querySelectorAll({json.dumps(selector)})[{number}];"
            " found.scrollIntoView({block: 'center', behavior: 'instant'}); const r = found.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self.settle()
        for shift in (2, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] + shift, y=place[1])
        self.settle()

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """All of the page, however long."""
        self.settle()
        height = min(16000, int(self.evaluate("document.documentElement.scrollHeight")))
        width = int(self.evaluate("window.innerWidth"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Everything that went to the console as an error or a warning, and every exception."""
        self.settle()
        found = []
        for event in self.events:
            method, about = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(str(about["args"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(str(about["entry"]))
        return found

    def requests(self) -> list[Mapping[str, Any]]:
        """Whatever was asked for, the page itself included."""
        self.settle()
        return [event["params"]["request"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
