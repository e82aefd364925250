"""A headless Chromium, spoken to by its DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9, " ": 32, "Escape": 27}


def find_chromium():
    """Its path; where it is missing and may be installed, it is."""
    if not any(map(shutil.which, NAMES)) and os.geteuid() == 0 and shutil.which("apt-get"):
        wait = ["-o", "DPkg::Lock::Timeout=300"]  # another test process may be at it
        install = ["apt-get", *wait, "install", "-y", "--no-install-recommends", "chromium"]
        for command in (["apt-get", *wait, "update"], install):
            subprocess.run(command, check=False, capture_output=True)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("There is no Chromium, and it cannot be installed (no root, or no apt-get).")
    return found


@contextmanager
def open_browser(profile):
    """Start Chromium with a profile of its own; yields what opens pages."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    flags = ["--headless=new", "--remote-debugging-port=0", "--disable-gpu", *sandbox]
    flags += [f"--user-data-dir={profile}", "--no-first-run", "--disable-background-networking"]
    process = subprocess.Popen([find_chromium(), *flags], stderr=subprocess.DEVNULL)
    try:
        announced = Path(profile) / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not announced.is_file() or not announced.read_text().strip():
            assert process.poll() is None, "Chromium ended at once."
            assert time.monotonic() < deadline, "Chromium did not start in a minute."
            time.sleep(0.05)
        port = announced.read_text().splitlines()[0]

        def open_page(path, width=1280, height=900, dark=False):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new", method="PUT")
            with urllib.request.urlopen(request) as answer:
                url = json.load(answer)["webSocketDebuggerUrl"]
            return Page(url, Path(path), width, height, dark)

        yield open_page
    finally:
        process.terminate()
        process.wait(timeout=30)


class Page:
    """One page; `complaints` has what it wrote to the console, `requests` what it asked for."""

    def __init__(self, url, path, width, height, dark):
        self._socket = websocket.create_connection(url, timeout=60, suppress_origin=True)
        self._ids = itertools.count(1)
        self.complaints, self.requests, self._loaded = [], [], False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def _send(self, method, **params):
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _receive(self):
        message = json.loads(self._socket.recv())
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def evaluate(self, expression):
        """The value of some JavaScript."""
        answer = self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=20):
        """Until it is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} is not true after {seconds} s."
            time.sleep(0.05)

    def press(self, key):
        """Press a key with what has the focus."""
        names = {"key": key, "code": "Space" if key == " " else key}
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._send(
                "Input.dispatchKeyEvent",
                type=kind,
                windowsVirtualKeyCode=KEYS[key],
                **names,
                **(text if kind == "keyDown" else {}),
            )

    def move(self, selector, x=0.5, y=0.5, click=False):
        """Move the pointer into an element, to a fraction of its size, and perhaps click."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x, b.y, b.width, b.height]; })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self._send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self._send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def click(self, selector):
        """Click in the middle of an element."""
        self.move(selector, click=True)

    def screenshot(self, path, whole=True):
        """Save a PNG file of the page, or of what the window shows."""
        data = self._send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        if whole:
            size = self._send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            data = self._send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)[
                "data"
            ]
        Path(path).write_bytes(base64.b64decode(data))
