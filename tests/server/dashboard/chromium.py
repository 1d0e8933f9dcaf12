"""A headless Chromium, driven over its DevTools pipe: no package and no port is needed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import HANG_S

Json = dict[str, Any]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-extensions", "--mute-audio", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)
_START_S = 60.0


class NoBrowser(Exception):
    """There is no browser, or it does not start."""


class PageError(AssertionError):
    """A script that the driver runs in a page has failed."""


def find_browser() -> str | None:
    """Returns the path of ROOTSTOCK_CHROMIUM, or of an installed Chromium. None: there is none."""
    return os.environ.get("ROOTSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


class Chromium:
    """A browser process. Its pages share nothing: each has cookies and storage of its own."""

    def __init__(self, path: str, folder: str) -> None:
        """Starts the browser with its profile in `folder`. Raises NoBrowser."""
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # The browser reads from descriptor 3 and writes to 4: neither may be one of these before they are copied.
        apart = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 16) for each in (read_commands, write_answers)]
        os.close(read_commands)
        os.close(write_answers)
        with open(f"{folder}/stderr", "wb") as errors:
            self._pid = os.posix_spawn(
                path,
                [path, *_FLAGS, f"--user-data-dir={folder}/profile", "about:blank"],
                os.environ | {"HOME": folder},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, apart[0], 3),
                    (os.POSIX_SPAWN_DUP2, apart[1], 4),
                    (os.POSIX_SPAWN_DUP2, errors.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, errors.fileno(), 2),
                ],
                setpgroup=0,
            )
        for each in apart:
            os.close(each)
        self._folder = folder
        self._rest = b""
        self._number = 0
        self._pages: dict[str, Tab] = {}
        try:
            self.call("Browser.getVersion", within_s=_START_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, session: str = "", within_s: float = HANG_S, **params: Any) -> Json:
        """Sends a command, and returns its result. Passes events on to their pages. Raises NoBrowser, PageError."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        raw = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        try:
            while raw:
                raw = raw[os.write(self._commands, raw) :]
        except BrokenPipeError:
            raise NoBrowser(self._said()) from None
        until = time.monotonic() + within_s
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                found: Json = answer["result"]
                return found
            page = self._pages.get(answer.get("sessionId", ""))
            if page is not None and "method" in answer:
                page.heard(answer["method"], answer["params"])

    def _next(self, until: float) -> Json:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._answers, 1 << 20) if ready else b""
            if not read:
                raise NoBrowser(self._said() if ready else f"no answer within {HANG_S:.0f} s: {self._said()}")
            self._rest += read
        raw, _, self._rest = self._rest.partition(b"\0")
        found: Json = json.loads(raw)
        return found

    def _said(self) -> str:
        return Path(self._folder, "stderr").read_text(errors="replace")[-400:] or "the browser has ended"

    @contextlib.contextmanager
    def tab(self, width: int, height: int = 900, scheme: str = "light", touch: bool = False) -> Iterator[Tab]:
        """Opens an empty page of a size, with a new session."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.resize(width, height, touch)
            page.prefer(scheme)
            yield page
        finally:
            del self._pages[session]
            with contextlib.suppress(NoBrowser, PageError):
                self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._commands)
        os.close(self._answers)


@dataclass
class Tab:
    """A page."""

    browser: Chromium
    session: str
    errors: list[str] = field(default_factory=list)  # of its console

    def call(self, method: str, **params: Any) -> Json:
        return self.browser.call(method, self.session, **params)

    def heard(self, event: str, params: Json) -> None:
        """Notes an error of the console, or an exception that no script has caught."""
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            told = (str(each.get("value", each.get("description"))) for each in params["args"])
            self.errors.append(" ".join(told))

    def resize(self, width: int, height: int, touch: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch, maxTouchPoints=5 if touch else 1)

    def prefer(self, scheme: str) -> None:
        """Sets the colours of the system, and no motion."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise PageError(f"{url}: {failed}")
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression, or of its promise. Raises PageError."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + HANG_S
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise PageError(f"hangs: {condition} is not true after {HANG_S:.0f} s")
            time.sleep(0.05)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Saves a picture of the page, as PNG."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def chromium(path: str | None = None) -> Iterator[Chromium]:
    """Starts a browser for the length of the block. Raises NoBrowser."""
    found = path or find_browser()
    if found is None:
        raise NoBrowser(f"none of {', '.join(BROWSERS)} is installed, and ROOTSTOCK_CHROMIUM names none")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            browser = Chromium(found, folder)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoBrowser(f"{found}: {error}") from None
        try:
            yield browser
        finally:
            browser.close()
