"""Chromium without a window, driven over pipes by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 120.0

_FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-extensions",
          "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe")  # fmt: skip


class Chromium:
    """A browser with one tab. Use as a context manager.

    Args:
        folder: where it keeps its profile.
        width: of the window.
        height: of the window.

    Attributes:
        asked: addresses that pages have asked for.
        complaints: errors and refusals that the browser has logged.
    """

    def __init__(self, folder: Path, width: int = 1300, height: int = 1000) -> None:
        assert PROGRAM is not None
        theirs, self._ours = os.pipe()
        read, write = os.pipe()
        flags = [*_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        flags += ["--no-sandbox"] if os.getuid() == 0 else []
        shell = f'exec "$0" "$@" 3<&{theirs} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, PROGRAM, *flags], pass_fds=(theirs, write), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(write)
        self._answers = os.fdopen(read, "rb")
        self._number, self._session, self._text = 0, "", b""
        self.asked: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self._session = ""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._ours)
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._ours, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _read(self) -> Any:
        while b"\0" not in self._text:
            piece = self._answers.read1(1 << 16)
            assert piece, "the browser has ended"
            self._text += piece
        first, _, self._text = self._text.partition(b"\0")
        return json.loads(first)

    def _note(self, event: str | None, body: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(body["request"]["url"])
        elif event == "Log.entryAdded":
            self.complaints.append(f"{body['entry']['text']} {body['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(body["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Open an address, and wait until its document is read."""
        self.call("Page.navigate", url=url)
        self.settle("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self, expression: str, is_good: Callable[[Any], Any] = bool) -> Any:
        """Return the value of an expression when it is good."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_good(found := self.value(expression)):
            assert time.monotonic() < deadline, (expression, found, self.complaints)
            time.sleep(0.05)
        return found

    def held(self) -> dict[str, float]:
        """Return the memory and the nodes that the page holds, after a garbage collection."""
        for _ in range(2):
            self.call("HeapProfiler.collectGarbage")
        metrics = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return {"heap": metrics["JSHeapUsedSize"], "nodes": metrics["Nodes"], "listeners": metrics["JSEventListeners"]}

    def picture(self, path: Path) -> None:
        """Write a picture of the tab."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
