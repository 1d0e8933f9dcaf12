"""The screens of the dashboard, measured: what lies outside of its panel, is clipped, covered or too small.

`problems` is the judge. It looks at one page as it is drawn, at one width, by `measure.js`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from server.dashboard.chromium import Chromium, Tab

WIDTHS = (360, 390, 820, 1024, 1440)
PHONE = 500  # narrower screens are touched

_MEASURE = Path(__file__).with_name("measure.js").read_text()


def problems(tab: Tab) -> list[str]:
    """Returns what a person could not read, reach or press on a page as it is now."""
    found: list[str] = tab.run(_MEASURE)
    return found


@contextlib.contextmanager
def dashboard(
    browser: Chromium, url: str, key: str, width: int, scheme: str = "light", height: int = 900
) -> Iterator[Tab]:
    """Opens the dashboard with a key; "": the server has none. Waits for its panels."""
    with browser.tab(width, height, scheme, touch=width < PHONE) as tab:
        tab.open(url)
        if key:
            log_in(tab, key)
        tab.until("!document.getElementById('panels').hidden")
        tab.until("document.getElementById('status').className")
        yield tab


def log_in(tab: Tab, key: str) -> None:
    tab.until("!document.getElementById('login').hidden")
    tab.run(f"document.getElementById('key').value = {json.dumps(key)}")
    click(tab, "#login-form button")


def click(tab: Tab, selector: str) -> None:
    """Presses the first element of a selector that can be pressed."""
    where = json.dumps(selector)
    tab.until(
        f"[...document.querySelectorAll({where})].some((one) => !one.disabled && one.checkVisibility())"
    )
    tab.run(
        f"[...document.querySelectorAll({where})].find((one) => !one.disabled && one.checkVisibility()).click()"
    )


def unfold(tab: Tab) -> None:
    """Shows all that a page can show of a cache that is not empty: a selected node, and every table."""
    tab.run("document.getElementById('tree').scrollIntoView()")
    tab.until("document.getElementById('tree').dataset.nodes > 0")
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    for key in ("ArrowDown", "ArrowDown"):
        _press(tab, key)
    # A node may be evicted before it is described: then the one above it.
    tab.until(
        "document.querySelector('#node dl') || (document.getElementById('node').innerText.includes('gone') "
        f"&& {_PRESS % json.dumps('ArrowUp')} && false)"
    )
    tab.until("document.querySelector('#tree-table td')")
    tab.run("window.scrollTo(0, 0)")


_PRESS = (
    "document.getElementById('tree').dispatchEvent(new KeyboardEvent('keydown', {key: %s, bubbles: true}))"
)


def _press(tab: Tab, key: str) -> None:
    tab.run(_PRESS % json.dumps(key))


def choose(tab: Tab, model: str) -> None:
    """Chooses the model that the page shows."""
    tab.run(
        f"(() => {{ const list = document.getElementById('model'); list.value = {json.dumps(model)}; "
        "list.dispatchEvent(new Event('change')); })()"
    )


def said(tab: Tab, selector: str) -> str:
    """Returns the visible text of an element, "" if it is not seen."""
    where = json.dumps(selector)
    found: str = tab.run(
        f"(() => {{ const one = document.querySelector({where}); "
        "return one && one.checkVisibility() ? one.innerText.trim() : ''; })()"
    )
    return found
