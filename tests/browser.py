"""Drive headless Chromium over its debugging pipe: open pages, run scripts in them, and collect what they report."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser with one tab. `problems`: errors, refused loads and warnings of the pages since the last `open`."""

    def __init__(self, profile: Path) -> None:
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "--hide-scrollbars", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers to 4
        command = ["bash", "-c", f'exec 3<&{read} 4>&{write}; exec "$@"', "bash", str(CHROMIUM), *flags]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(read, write), stdout=nothing, stderr=nothing)
        for end in (read, write):
            os.close(end)
        self._number, self._rest, self._session, self._loaded = 0, b"", "", False
        self.problems: list[str] = []
        self.shown = ("", 0)  # address and width, as `open` has left them
        tab = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(30)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the DevTools protocol."""
        if method.startswith("Emulation."):
            self.shown = ("", 0)
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "result" in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            self._rest += (piece := os.read(self._from, 1 << 20))
            assert piece, "the browser has ended"
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        method, event = message.get("method"), message.get("params", {})
        bad = method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert")
        if method == "Runtime.exceptionThrown" or bad:
            self.problems.append(json.dumps(event)[:500])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        self._loaded |= method == "Page.loadEventFired"
        return message

    def open(self, address: str, width: int = 1400, *, dark: bool = False) -> None:
        """Load a page in a window of this width, and wait for it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[theme])
        self.problems, self._loaded = [], False
        self.call("Page.navigate", url=address)
        self._wait_for_load()
        self.shown = address, width

    def reload(self) -> None:
        """Reload the page by a script of its own, and wait: a script that is run meanwhile may get an error."""
        self._loaded = False
        self.run("setTimeout(() => location.reload())")
        self._wait_for_load()

    def _wait_for_load(self) -> None:
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """Return the JSON value of a script, awaited if it is a promise."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, script: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def draw(self) -> None:
        """Scroll to the end and back, and wait until every chart is drawn."""
        self.run(
            "(async () => { for (let y = 0; y < document.documentElement.scrollHeight; y += 600) {"
            "scrollTo({top: y, behavior: 'instant'}); "
            "await new Promise(r => requestAnimationFrame(() => setTimeout(r, 40)));"
            "} scrollTo({top: 0, behavior: 'instant'}); })()"
        )
        self.until("[...document.querySelectorAll('.plot')].every((p) => p.querySelector('svg.main-svg'))")

    def screenshot(self, path: Path, top: float = 0, height: float = 900) -> None:
        """Write a part of the page as PNG."""
        width = self.call("Page.getLayoutMetrics")["cssContentSize"]["width"]
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
