"""A headless Chromium driven over the WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1500,900",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self._address}{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self.call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def resize(self, width: int, height: int) -> None:
        """Lay pages out for a screen of this many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self.call("POST", "/goog/cdp/execute", command)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def console(self) -> list[str]:
        """Errors that the page logged, failed loads included."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Skips the test where Chromium or its driver is missing."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for path in map(shutil.which, names) if path), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    log = profile / "driver.log"
    process = subprocess.Popen([driver, "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = next(
            line.rsplit(b" ", 1)[1].strip(b".\n").decode()
            for line in process.stdout
            if b"successfully on port" in line
        )
        root = Browser(f"http://127.0.0.1:{port}")
        arguments = [*_OPTIONS, f"--user-data-dir={profile / 'profile'}"]
        wanted = {
            "goog:chromeOptions": {"binary": chromium, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = root.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        browser = Browser(f"http://127.0.0.1:{port}/session/{session['sessionId']}")
        try:
            yield browser
        finally:
            with contextlib.suppress(urllib.error.URLError):
                browser.call("DELETE", "")
    finally:
        process.terminate()
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
