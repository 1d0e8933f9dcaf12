"""The page at `/`, its files and its headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from rootstock.config import ServerConfig
from rootstock.server.routes.dashboard.routes import page_files
from server.conftest import Served, served_by_oracle

HTML = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    with served_by_oracle(server=ServerConfig(aliases=())) as one:
        yield one


def test_a_browser_gets_the_page_and_other_clients_get_json(open_server: Served) -> None:
    page = open_server.client.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>Rootstock</title>" in page.text
    told = open_server.client.get("/")
    assert told.json() == {"server": "rootstock", "docs": "/docs", "health": "/health"}
    assert told.headers["vary"] == page.headers["vary"] == "Accept"


def test_the_page_may_run_its_own_files_only(open_server: Served) -> None:
    policy = open_server.client.get("/", headers=HTML).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy


def test_every_file_of_the_page_is_served_with_its_type(open_server: Served) -> None:
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    for name in page_files():
        response = open_server.client.get(f"/dashboard/page/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        again = open_server.client.get(
            f"/dashboard/page/{name}", headers={"if-none-match": response.headers["etag"]}
        )
        assert again.status_code == 304
        assert not again.content


@pytest.mark.parametrize("name", ["none.js", "..%2froutes.py", "%2e%2e/routes.py", "routes.py", ""])
def test_no_other_file_is_served(open_server: Served, name: str) -> None:
    assert open_server.client.get(f"/dashboard/page/{name}").status_code == 404


def test_the_page_loads_only_files_that_exist_and_has_no_inline_script() -> None:
    files = page_files()
    page = files["index.html"].body.decode()
    for reference in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert reference.removeprefix("dashboard/page/") in files, reference
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\son[a-z]+=|\bstyle=|https?://", page)
    for name, file in files.items():
        text = file.body.decode()
        if name.endswith(".js"):
            for module in re.findall(r'from "\./([^"]+)"', text):
                assert module in files, f"{name} imports {module}"
            assert "innerHTML" not in text
            assert "eval(" not in text
            assert len(text.splitlines()) <= 400
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


WIDE = re.compile(r"@media \(min-width: [^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")


def test_the_rules_without_a_width_are_those_of_a_narrow_screen() -> None:
    sheet = page_files()["style.css"].body.decode()
    narrow = WIDE.sub("", sheet)
    assert len(narrow) < len(sheet)
    for columns in re.findall(r"grid-template-columns:([^;}]*)", narrow):
        assert not re.search(r"\d(?:px|rem|em)", columns), f"a fixed width on every screen:{columns}"
    assert "max-width: 62rem" not in narrow, "a rule of a narrow screen is overridden by those of all screens"


def test_the_attribute_hidden_outranks_every_rule() -> None:
    sheet = page_files()["style.css"].body.decode()
    assert "[hidden] { display: none !important; }" in sheet
    assert ":not([hidden])" not in sheet, "it raises the rank of a rule above those for widths"
    assert sheet.count("!important") == 1


def test_ids_of_the_scripts_are_in_the_page() -> None:
    files = page_files()
    page = files["index.html"].body.decode()
    for name, file in files.items():
        for id in re.findall(r'byId\("([^"]+)"\)', file.body.decode()):
            assert f'id="{id}"' in page, f"{name} asks for #{id}"


def test_without_the_dashboard_there_is_only_json(
    serve: Callable[..., AbstractContextManager[Served]],
) -> None:
    with serve(server=ServerConfig(aliases=(), dashboard=False)) as served:
        assert served.client.get("/", headers=HTML).json()["server"] == "rootstock"
        for path in ("session", "events", "tree", "page/app.js"):
            assert served.client.get(f"/dashboard/{path}").status_code == 404
