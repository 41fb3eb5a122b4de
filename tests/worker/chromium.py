"""Headless Chromium over its debugging pipe: no library, no port. Chrome DevTools Protocol, JSON between NUL bytes."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests import others

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0
KEYS = {"Tab": 9, "End": 35, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find_browser() -> str | None:
    """CHROMIUM names one; else the first that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page in a browser of its own. `problems` are console errors and exceptions, `load`ed pages' too."""

    def __init__(self, browser: str) -> None:
        self._browser = browser
        self._number = 0
        self._buffer = b""
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory()
        to_browser, self._in = os.pipe()
        self._out, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        words = " ".join(
            [
                f'exec "{self._browser}" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run',
                f'--remote-debugging-pipe --user-data-dir="{self._profile.name}" about:blank',
                f"3<&{to_browser} 4>&{from_browser}",
            ]
        )
        self._process = subprocess.Popen(
            ["bash", "-c", words],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        # One of its own: the first in the list may be no page, or not be there yet.
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._in)
        os.close(self._out)
        others.end(self._process)
        shutil.rmtree(self._profile.name, ignore_errors=True)
        self._profile._finalizer.detach()  # type: ignore[attr-defined]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def view(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def load(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What JavaScript makes of it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, what: str = "") -> None:
        end = time.monotonic() + LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < end, f"{what or expression} never came; problems: {self.problems}"
            time.sleep(0.1)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            code = KEYS.get(key, 0)  # without it the browser itself does nothing at the key
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """The whole page, as far down as it goes."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def roles(self) -> dict[str, list[str]]:
        """role -> the names under it, as a screen reader is told."""
        found: dict[str, list[str]] = {}
        for node in self.call("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored"):
                role = node.get("role", {}).get("value", "")
                found.setdefault(role, []).append(node.get("name", {}).get("value", ""))
        return found

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        return self._receive(lambda answer: answer.get("id") == self._number)

    def _receive(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            while b"\0" not in self._buffer:
                data = os.read(self._out, 1 << 20)
                assert data, "the browser has ended"
                self._buffer += data
            raw, self._buffer = self._buffer.split(b"\0", 1)
            answer = json.loads(raw)
            self._note(answer)
            if wanted(answer):
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(parameters["entry"]))
