"""The dashboard of a server with several models, tiers and a drain: the data of its feed, and its changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.engine.tiers.connector import Space
from rootstock.server.routes.dashboard import views
from server.conftest import assert_error
from server.dashboard import scenes
from server.dashboard.browser import Browser
from server.dashboard.scenes import Scene, scene
from server.test_models import config_of
from server.test_models import served as served_several
from waiting import wait_for, wait_until

DEMAND = {"load": "demand"}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path) as found:
        yield found


def logged_in(url: str, key: str) -> Browser:
    browser = Browser(url)
    assert browser.log_in(key).status_code == 200
    return browser


def change(browser: Browser, action: str, model: str) -> Any:
    return browser.post(f"/dashboard/models/{action}?model={model}")


def states(browser: Browser) -> dict[str, str]:
    told = browser.get("/dashboard/session").json()["server"]["models"]
    return {model["name"]: model["status"] for model in told}


def test_all_models_are_listed_with_their_states_tasks_and_adapters(one: Scene) -> None:
    operator = logged_in(one.url, scenes.OPERATOR)
    listed = operator.sections("server")["server"]["models"]
    assert [(model["name"], model["status"], model["task"]) for model in listed] == [
        (scenes.MODEL, "loaded", "generate"),
        (scenes.ON_DEMAND, "unloaded", None),
        (scenes.EMBEDDING, "loaded", "embed"),
    ]
    assert [model["adapters"] for model in listed] == [list(scenes.ADAPTERS), ["reviewer"], []]
    assert all(model["may_unload"] for model in listed)


def test_an_operator_loads_and_unloads_a_model(one: Scene) -> None:
    operator = logged_in(one.url, scenes.OPERATOR)
    with operator.events(scenes.ON_DEMAND) as events:
        (gone,) = events
        assert gone["gone"] is True
        assert gone["server"]["models"][1]["status"] == "unloaded", "the page can offer to load it"
    assert change(operator, "load", scenes.ON_DEMAND).json() == {"loaded": scenes.ON_DEMAND}
    assert states(operator)[scenes.ON_DEMAND] == "loaded"
    assert operator.sections("health", model=scenes.ON_DEMAND)["health"]["alive"] is True
    assert change(operator, "unload", scenes.ON_DEMAND).json() == {"unloaded": scenes.ON_DEMAND}
    assert states(operator)[scenes.ON_DEMAND] == "unloaded"
    assert_error(change(operator, "load", "none"), 404, "model_not_found")


@pytest.mark.parametrize("key", ["key-red", scenes.UNBOUND])
@pytest.mark.parametrize("action", ["load", "unload"])
def test_only_an_operator_changes_models(one: Scene, key: str, action: str) -> None:
    browser = logged_in(one.url, key)
    assert_error(change(browser, action, scenes.ON_DEMAND), 403, "admin_only")
    assert states(browser)[scenes.MODEL] == "loaded"


def test_a_change_that_is_refused_is_no_error_of_the_page(one: Scene) -> None:
    operator = logged_in(one.url, scenes.OPERATOR)
    one.load(1)
    told = change(operator, "unload", scenes.MODEL)
    assert told.status_code == 200
    assert told.json()["refused"] is True
    assert "requests use it" in told.json()["message"]


def test_a_failed_load_is_told_by_its_cause() -> None:
    def fail(loads: Any) -> None:
        def failing(name: str) -> None:
            if name == "b":
                raise RuntimeError("a secret of the loader")

        loads.before = failing

    with served_several(config_of("a"), config_of("b", **DEMAND), prepare=fail) as several:
        browser = Browser(several.url)
        told = browser.client.post("/dashboard/models/load?model=b").json()
        assert told["refused"] is True
        listed = browser.sections("server")["server"]["models"]
        assert [(model["status"], model["error"]) for model in listed] == [
            ("loaded", None),
            ("failed", "model_unavailable"),
        ]
        assert "secret" not in str(told) + str(listed)


def test_a_page_sees_a_load_that_is_under_way() -> None:
    goes_on = threading.Event()

    def hold(loads: Any) -> None:
        loads.before = lambda name: wait_for(goes_on) if name == "b" else None

    with served_several(config_of("a"), config_of("b", **DEMAND), prepare=hold) as several:
        browser = Browser(several.url)
        asking = threading.Thread(target=several.chat, args=("b",))
        asking.start()
        wait_until(lambda: several.registry.slot("b").status == "loading")
        assert states(browser) == {"a": "loaded", "b": "loading"}
        goes_on.set()
        asking.join()
        assert states(browser) == {"a": "loaded", "b": "loaded"}


def test_a_drain_is_seen_and_loads_nothing(one: Scene) -> None:
    operator = logged_in(one.url, scenes.OPERATOR)
    with operator.events() as events:
        assert next(events)["server"]["draining"] is False
        one.drain.is_draining = True
        assert any("server" in event and event["server"]["draining"] for event in events)
    told = change(operator, "load", scenes.ON_DEMAND).json()
    assert told == {"refused": True, "message": "Not loaded: the server is draining."}
    assert states(operator)[scenes.ON_DEMAND] == "unloaded"


def limited(tmp_path: Path, *models: str) -> ServerConfig:
    keys = tmp_path / "keys"
    keys.write_text(
        "keys: [{key: ops, role: operator}, {key: r, tenant: red}]\n"
        f"tenants: {{red: {{models: [{', '.join(models)}]}}}}\n"
    )
    return ServerConfig(aliases=("fast=b",), api_keys=keys)


@pytest.mark.parametrize(("allowed", "shown"), [("a", ["a"]), ("fast", ["b"])])
def test_a_tenant_sees_only_models_that_it_may_use(tmp_path: Path, allowed: str, shown: list[str]) -> None:
    config = limited(tmp_path, allowed)
    with served_several(
        config_of("a"), config_of("b"), aliases=config.aliases, api_keys=config.api_keys
    ) as several:
        red, operator = logged_in(several.url, "r"), logged_in(several.url, "ops")
        assert list(states(operator)) == ["a", "b"]
        assert list(states(red)) == shown
        other = "b" if shown == ["a"] else "a"
        for path in (f"events?model={other}", f"tree?model={other}", f"tree/1?model={other}"):
            refused = red.get(f"/dashboard/{path}")
            assert_error(refused, 404, "model_not_found")
            assert f"'{other}'" not in refused.json()["error"]["message"].partition(".")[2]
        assert red.sections("health", model=shown[0])["health"]["alive"] is True


def test_host_memory_and_the_disk_are_two_things(tmp_path: Path) -> None:
    expected = {
        "host and disk": ["host memory", "disk"],
        "host": ["host memory"],
        "disk": ["disk"],
        "none": None,
    }
    for tiers, names in expected.items():
        with scene(tmp_path / tiers, several=False, tiers=tiers) as one:
            one.past(3)
            pool = logged_in(one.url, scenes.OPERATOR).sections("pool")["pool"]
            found = [tier["name"] for tier in pool["tiers"]] if "tiers" in pool else None
            assert found == names
            assert all(0 < tier["cap"] >= tier["used"] >= 0 for tier in pool.get("tiers", ()))


def test_the_bytes_of_host_memory_are_measured(tmp_path: Path) -> None:
    with scene(tmp_path, several=False, tiers="host") as one:
        one.past(3)
        connector = one.engine.tier_connector
        assert connector is not None
        assert connector.measure() == Space(0, 0, 0, 0, 8 << 20)


def test_the_count_of_open_requests_has_those_that_are_not_listed(
    one: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "MAX_REQUESTS", 2)
    one.load(5)
    operator, red = logged_in(one.url, scenes.OPERATOR), logged_in(one.url, "key-red")
    told = operator.sections("open", "requests")
    assert (told["open"], len(told["requests"])) == (5, 2)
    assert red.sections("open")["open"] == 2, "of its own"


def test_misses_before_the_first_page_are_explained(one: Scene) -> None:
    one.past(4)
    misses = logged_in(one.url, scenes.OPERATOR).sections("misses")["misses"]
    assert misses, "the models were loaded after the application was made"
