"""A headless Chromium, where there is one, that tests drive through its own pipe by Python's library alone."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE = 30.0  # seconds, on a machine that does other things


class Page:
    """One tab, in the words of the DevTools protocol."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._rest = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []  # what went to the console, or was thrown
        self.asked: list[str] = []  # addresses
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and keeps what happens meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._answers], [], [], PATIENCE)[0], f"no answer to {method}"
                read = os.read(self._answers, 2**16)
                assert read, "the browser has ended"
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(text)
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._note(found.get("method"), found.get("params", {}))

    def _note(self, event: str | None, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(str(values["args"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(values["entry"]))
        elif event == "Network.requestWillBeSent":
            self.asked.append(values["request"]["url"])

    def run(self, script: str) -> Any:
        """Evaluates JavaScript, and returns its value."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until JavaScript is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} did not come true"
            time.sleep(0.02)

    def resize(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def open_page() -> Iterator[Page]:
    """Starts a browser with one page, and ends it."""
    assert PATH
    read_requests, write_requests = os.pipe()
    read_answers, write_answers = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_requests, write_answers)]  # out of the way of 3 and 4

    def take_places() -> None:  # where Chromium looks for its pipe
        for place, end in ((3, high[0]), (4, high[1])):
            os.dup2(end, place)
            os.set_inheritable(place, True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [PATH, *options],
            preexec_fn=take_places,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Page(write_requests, read_answers)
        finally:
            process.terminate()  # which ends its children too
            process.wait(PATIENCE)
            for end in (read_requests, write_requests, read_answers, write_answers, *high):
                os.close(end)
