"""The dashboard and the chat page in a browser: what people see at each width, and what they can do there.

Without a Chromium these tests are skipped; ROOTSTOCK_CHROMIUM names one that is not on the path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.dashboard import scenes
from server.dashboard.chromium import Chromium, NoBrowser, Tab, chromium
from server.dashboard.scenes import Scene, scene
from server.dashboard.screens import PHONE, choose, click, dashboard, problems, said, unfold

WIDTHS = (360, 390, 820, 1440)
CHAT_PAGE = Path(__file__).parents[3] / "docs" / "chat.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    try:
        opened = chromium()
        found = opened.__enter__()
    except NoBrowser as error:
        pytest.skip(f"no Chromium runs: {error}")
    yield found
    opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A server with past and open requests, pins, and a model that nobody has loaded."""
    with scene(tmp_path_factory.mktemp("busy")) as one:
        one.past(24)
        one.pin(6)
        one.load(7)
        yield one


@pytest.fixture(scope="module")
def narrow(browser: Chromium) -> Iterator[Tab]:
    with browser.tab(400) as tab:
        tab.open("data:text/html,<!doctype html><body>")
        yield tab


def at_each_width(tab: Tab) -> list[str]:
    found = []
    for width in WIDTHS:
        tab.resize(width, 900, touch=width < PHONE)
        tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found += [f"{width} px: {problem}" for problem in problems(tab)]
    return found


@pytest.mark.parametrize("key", [scenes.OPERATOR, "key-long", scenes.UNBOUND])
def test_nothing_is_cut_off_or_covered(browser: Chromium, busy: Scene, key: str) -> None:
    with dashboard(browser, busy.url, key, 1440) as tab:
        if key != scenes.UNBOUND:
            unfold(tab)
        assert at_each_width(tab) == []
        assert tab.errors == []


def test_a_server_without_keys_is_seen_as_well(browser: Chromium, tmp_path: Path) -> None:
    with (
        scene(tmp_path, keys=False, several=False, tiers="host") as one,
        dashboard(browser, one.url, "", 390) as tab,
    ):
        assert at_each_width(tab) == []
        one.past(4)
        unfold(tab)
        assert at_each_width(tab) == []
        tab.until("document.getElementById('memory').innerText.includes('host memory')")
        assert "disk" not in said(tab, "#memory") + said(tab, "#rates")
        tab.until("document.getElementById('inside-blocks') !== null")
        assert "behind the last whole block" in said(tab, "#inside-blocks")
        assert tab.errors == []


def test_requests_of_an_hour_ago_stay_listed(browser: Chromium, tmp_path: Path) -> None:
    with (
        scene(tmp_path, several=False, tiers="none") as one,
        dashboard(browser, one.url, "key-red", 820) as tab,
    ):
        tab.until("document.querySelector('#requests .empty').innerText !== ''")
        assert said(tab, "#requests .empty") == "No request has come in the last 15 minutes."
        one.past(8)
        one.grow_old(3600)
        tab.until("document.querySelector('#requests tbody').innerText.includes('60 min ago')")
        assert said(tab, "#requests .empty") == ""


def test_a_page_says_that_the_server_drains_and_that_it_is_away(browser: Chromium, tmp_path: Path) -> None:
    with scene(tmp_path) as one, dashboard(browser, one.url, scenes.OPERATOR, 390) as tab:
        one.past(3)
        unfold(tab)
        assert said(tab, "#banner") == ""
        one.drain.is_draining = True
        tab.until("document.getElementById('banner').innerText.includes('draining')")
        assert at_each_width(tab) == []
        assert tab.run(
            "document.getElementById('chat-send').disabled && document.getElementById('clear').disabled"
        )
        one.leave()
        tab.until("document.getElementById('banner').innerText.includes('away')")
        tab.run("window.scrollTo(0, document.body.scrollHeight)")
        assert tab.run("document.getElementById('banner').getBoundingClientRect().top") == 0, (
            "it stays in view"
        )
        assert at_each_width(tab) == []


def test_a_model_on_demand_is_shown_loaded_and_unloaded(browser: Chromium, tmp_path: Path) -> None:
    with scene(tmp_path) as one, dashboard(browser, one.url, scenes.OPERATOR, 1440) as tab:
        one.past(3)
        unfold(tab)
        assert f"{scenes.ON_DEMAND}\nnot loaded" in said(tab, "#models").replace(" not", "\nnot")
        choose(tab, scenes.ON_DEMAND)
        tab.until("document.getElementById('banner').innerText.includes('is not loaded')")
        assert at_each_width(tab) == []
        click(tab, f"[aria-label='Load {scenes.ON_DEMAND}']")
        tab.until("document.getElementById('status-text').innerText === 'live'")
        assert one.registry.slot(scenes.ON_DEMAND).status == "loaded"
        tab.run("document.getElementById('tree').scrollIntoView()")
        tab.until("document.getElementById('tree').dataset.nodes === '0'")  # and none of the other model's
        click(tab, f"[aria-label='Unload {scenes.ON_DEMAND}']")
        click(tab, "#confirm-yes")
        tab.until("document.getElementById('banner').innerText.includes('is not loaded')")
        choose(tab, scenes.MODEL)
        tab.until("document.getElementById('status-text').innerText === 'live'")
        tab.run("document.getElementById('tree').scrollIntoView()")
        tab.until("document.getElementById('tree').dataset.nodes > 0")  # the tree comes back
        assert tab.errors == []


def test_a_tenant_cannot_load_a_model(browser: Chromium, busy: Scene) -> None:
    with dashboard(browser, busy.url, "key-long", 820) as tab:
        assert scenes.ON_DEMAND in said(tab, "#models")
        assert (
            tab.run(
                "document.querySelector(\"#models [aria-label^='Load'], #models [aria-label^='Unload']\")"
            )
            is None
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_page_fits_each_screen(browser: Chromium, busy: Scene, scheme: str) -> None:
    with browser.tab(1440, scheme=scheme) as tab:
        tab.open(CHAT_PAGE.as_uri())
        assert at_each_width(tab) == []
        tab.run(
            f"document.getElementById('url').value = {busy.url!r}; document.getElementById('key').value = 'key-red'"
        )
        click(tab, "#connect")
        tab.until("!document.getElementById('send').disabled")
        assert at_each_width(tab) == []
        assert tab.errors == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p style='width: 2000px'>wide</p>", "the page is"),
        ("<div class=card style='width: 99px'><p style='width: 150px'>out</p></div>", "outside of its panel"),
        ("<p style='width: 40px; overflow: hidden; white-space: nowrap'>cut off here</p>", "its content is"),
        ("<p style='height: 9px; overflow: hidden'>one<br>two</p>", "clipped below"),
        ("<button style='height: 12px'>x</button>", "px to press"),
        ("<p style='font-size: 8px'>tiny</p>", "letters of"),
        ("<p>over</p><p style='margin-top: -30px'>under</p>", "text over text"),
        ("<p>NaN of undefined</p>", "reads"),
        (
            "<div class=card>one</div><div class=card style='margin-top: -9px'>two</div>",
            "panel over panel",
        ),
        (
            "<div id=panels><p id=note hidden></p><div class=card style='width: 50%'>half</div></div>",
            "of their space",
        ),
        (
            "<div id=panels><div class=card><canvas id=tree width=20></canvas></div><p id=note hidden></p></div>",
            "the canvas is",
        ),
    ],
)
def test_the_judge_finds_each_kind_of_problem(narrow: Tab, body: str, problem: str) -> None:
    narrow.run(f"document.body.innerHTML = {json.dumps(body)}")
    assert any(problem in one for one in problems(narrow)), problems(narrow)
