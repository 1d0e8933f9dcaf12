"""J5: the screens, measured: the dashboard and the chat page at five widths, in every state that people meet.

A server over the oracle runtime has several models, tenants with long names, tiers and pins: tests/server/dashboard/
scenes.py. Pages of the operator, of a tenant and of a key without a tenant stay open while it is empty, has past
requests, has old ones only, is under load, drains and goes away. In each state each page is measured at 360, 390,
820, 1024 and 1440 pixels: nothing is outside of the screen or of its panel, no text is clipped or covered, nothing
to press is smaller than 24 pixels, panels leave no holes, and the tree has most of its panel's width. A server
without keys and with one model is measured as well, and so are the login, a model that is not loaded, dialogs and
docs/chat.html.

axe-core must find no serious violation in either colour scheme, and the consoles must have no error.

It needs a Chromium. axe-core's axe.min.js is installed by npm where --axe names none.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, argument_parser, at_least, conclude, could_not, exactly

from server.dashboard import scenes
from server.dashboard.chromium import Chromium, NoBrowser, Tab, chromium
from server.dashboard.scenes import Scene, scene
from server.dashboard.screens import PHONE, WIDTHS, choose, click, dashboard, problems, said, unfold

SHOW = "J5"
AXE = "axe-core@4.14.1"
CHAT_PAGE = ROOT / "docs" / "chat.html"
# By role: the key, and whether its page shows requests.
ROLES = {
    "operator": (scenes.OPERATOR, True),
    "tenant": ("key-long", True),
    "unbound": (scenes.UNBOUND, False),
}
SCHEMES = ("light", "dark")
FINDINGS = """axe.run().then((told) => told.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => one.id + ": " + one.nodes.slice(0, 3).map(
    (node) => node.target + " " + (node.any[0]?.message ?? "")).join("; ")))"""


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--chromium", default=None, help="a browser's path; else an installed one is found")
    options.add_argument("--axe", default=os.environ.get("ROOTSTOCK_AXE"), help="axe-core's axe.min.js")
    options.add_argument("--pictures", type=Path, help="a folder for a picture of each screen")
    options.add_argument("--past", type=int, default=200, help="requests that have ended")
    given = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        axe = Path(given.axe) if given.axe else installed_axe(folder)
        try:
            browser = stack.enter_context(chromium(given.chromium))
        except NoBrowser as error:
            could_not(SHOW, f"no Chromium runs: {error}")
        watcher = Watcher(browser, axe.read_text(), given.pictures)
        watcher.see_all(folder, given.past)
    figures = {
        "screens": watcher.screens,
        "problems": len(watcher.problems),
        "axe_runs": watcher.axe_runs,
        "axe_serious": len(watcher.serious),
        "console_errors": len(watcher.errors),
        "loaded_by_button": watcher.loaded_by_button,
    }
    bars = {
        "screens": at_least(180),
        "problems": exactly(0),
        "axe_runs": at_least(60),
        "axe_serious": exactly(0),
        "console_errors": exactly(0),
        "loaded_by_button": exactly(True),
    }
    conclude(SHOW, figures, bars)


def installed_axe(folder: Path) -> Path:
    """Installs axe-core by npm, without scripts, and returns its file."""
    command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts"]
    try:
        subprocess.run(
            [*command, "--prefix", str(folder / "axe"), AXE], check=True, stdout=subprocess.DEVNULL
        )
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        could_not(SHOW, f"--axe names no file, and npm installs no {AXE}: {error}")
    return folder / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@dataclass
class Watcher:
    """A person with a browser, who looks at each screen at each width."""

    browser: Chromium
    axe: str
    pictures: Path | None
    screens: int = 0
    axe_runs: int = 0
    problems: list[str] = field(default_factory=list)
    serious: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    loaded_by_button: bool = False

    def see_all(self, folder: Path, past: int) -> None:
        with scene(folder / "keys") as one:
            self.see_scene(one, past)
        with (
            scene(folder / "open", keys=False, several=False, tiers="none") as one,
            self.open(one, "", "light") as tab,
        ):
            for state, shown in one.stages(20, 0, 4):
                tab.until(shown)
                self.see(tab, f"open {state}", reports=state != "away")

    def see_scene(self, one: Scene, past: int) -> None:
        """Looks at a server with keys and several models, with a page of each role in each colour scheme."""
        with contextlib.ExitStack() as stack:
            login = stack.enter_context(self.browser.tab(1440))
            login.open(one.url)
            login.until("!document.getElementById('login').hidden")
            self.see(login, "login", axe=True)
            tabs = {
                f"{role} {scheme}": (stack.enter_context(self.open(one, key, scheme)), sees)
                for role, (key, sees) in ROLES.items()
                for scheme in SCHEMES
            }
            for state, shown in one.stages(past, 30, 9):
                for name, (tab, sees) in tabs.items():
                    self.bring(tab)
                    tab.until(shown if sees or state in ("draining", "away") else "true")
                    if state == "load" and sees:
                        unfold(tab)
                    self.see(tab, f"{name} {state}", axe=True, reports=state != "away")
                if state == "empty":
                    self.see_absent(tabs)
                if state == "old":
                    self.see_chat_page(one)
                if state == "load":
                    self.see_dialogs(tabs)

    def see_absent(self, tabs: dict[str, tuple[Tab, bool]]) -> None:
        """Looks at a model that is not loaded, loads it by its button, and unloads it."""
        for name, (tab, _) in tabs.items():
            self.bring(tab)
            choose(tab, scenes.ON_DEMAND)
            tab.until("document.getElementById('banner').innerText.includes('is not loaded')")
            self.see(tab, f"{name} absent", axe=True)
        operator, _ = tabs["operator light"]
        self.bring(operator)
        click(operator, f"[aria-label='Load {scenes.ON_DEMAND}']")
        operator.until("document.getElementById('status-text').innerText === 'live'")
        click(operator, f"[aria-label='Unload {scenes.ON_DEMAND}']")
        click(operator, "#confirm-yes")
        operator.until("document.getElementById('banner').innerText.includes('is not loaded')")
        self.loaded_by_button = True
        for tab, _ in tabs.values():
            self.bring(tab)
            choose(tab, scenes.MODEL)
            tab.until("document.getElementById('status-text').innerText === 'live'")

    def see_dialogs(self, tabs: dict[str, tuple[Tab, bool]]) -> None:
        """Looks at the question before a request is stopped, at the answer, and at an answer in the chat."""
        for name in ("operator light", "operator dark"):
            tab, _ = tabs[name]
            self.bring(tab)
            click(tab, "#node .actions button")
            self.see(tab, f"{name} question", axe=True)
            click(tab, "#confirm-no")
        tab, _ = tabs["operator light"]
        self.bring(tab)
        tab.run(
            "document.getElementById('chat-text').value = 'How are you, and how is the weather? '.repeat(9)"
        )
        tab.run("document.getElementById('chat-max').value = '8'")
        click(tab, "#chat-send")
        tab.until("document.querySelector('#chat-log .message.assistant')")
        self.see(tab, "operator light chat", axe=True)
        click(tab, "#chat-stop")
        tab.until("document.getElementById('chat-log').getAttribute('aria-busy') === 'false'")

    def see_chat_page(self, one: Scene) -> None:
        """Looks at the page of docs/ that chats from anywhere: as it opens, refused, and with an answer."""
        for scheme in SCHEMES:
            with self.browser.tab(1440, scheme=scheme) as tab:
                tab.open(CHAT_PAGE.as_uri())
                self.see(tab, f"chat page {scheme} opened", axe=True)
                fill(tab, "url", one.url)
                fill(tab, "key", "key-red")
                fill(tab, "max", "20")
                click(tab, "#connect")
                tab.until("!document.getElementById('send').disabled")
                for _ in range(2):
                    fill(tab, "text", "Write a word of aLongNameWithoutAnySpace" + "AndMore" * 30)
                    click(tab, "#send")
                    tab.until("!document.getElementById('send').disabled")
                assert "prompt tokens cached" in said(tab, "#log"), said(tab, "#log")
                self.see(tab, f"chat page {scheme} answered", axe=True)

    @contextlib.contextmanager
    def open(self, one: Scene, key: str, scheme: str) -> Iterator[Tab]:
        with dashboard(self.browser, one.url, key, 1440, scheme) as tab:
            yield tab

    def bring(self, tab: Tab) -> None:
        tab.call("Page.bringToFront")

    def see(self, tab: Tab, name: str, *, axe: bool = False, reports: bool = True) -> None:
        """Measures a page at each width, and runs axe at the least and at the largest.

        `reports`: the console's errors count. A browser reports each request that its server does not take.
        """
        for width in WIDTHS:
            tab.resize(width, 900, touch=width < PHONE)
            tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            self.screens += 1
            self.note(self.problems, "problem", f"{name} {width}", problems(tab))
            if axe and width in (WIDTHS[0], WIDTHS[-1]):
                self.axe_runs += 1
                tab.run(f"{self.axe}; null")
                self.note(self.serious, "axe", f"{name} {width}", tab.run(FINDINGS))
            if self.pictures is not None:
                self.pictures.mkdir(parents=True, exist_ok=True)
                tab.picture(self.pictures / f"{name} {width}.png".replace(" ", "-"))
        if reports:
            self.note(self.errors, "console", name, tab.errors)
        tab.errors.clear()

    @staticmethod
    def note(all_found: list[str], kind: str, name: str, found: list[str]) -> None:
        for each in found:
            all_found.append(f"{name}: {each}")
            print(f"{kind}, {name}: {each}", flush=True)


def fill(tab: Tab, id: str, text: str) -> None:
    tab.run(f"document.getElementById({json.dumps(id)}).value = {json.dumps(text)}; null")


if __name__ == "__main__":
    main()
