"""Several models of one server: names, loads on demand, unloads, and the races between them."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rootstock.cache.families import Family, row_bytes
from rootstock.cache.shared_budget import SharedBudget
from rootstock.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TierConfig,
)
from rootstock.engine.build import Assembly, assemble
from rootstock.engine.clearing import Clearing
from rootstock.engine.stats import Cleared
from rootstock.errors import InvalidOption, MemoryLacks, ModelTooLarge, ModelUnavailable
from rootstock.runtime.base import Batch
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.server.models import model_slots
from rootstock.server.models.model_slots import AwaitedModel
from rootstock.server.models.registry import ModelRegistry
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from rootstock.tiers.disk.tier import DiskTier
from rootstock.units import MIB
from server.conftest import GREEDY, assert_error, user
from server.dashboard.browser import Browser
from waiting import HANG_S, wait_for, wait_until

Json = dict[str, Any]
FAMILIES: dict[str, tuple[Family, ...]] = {"a": (FULL,), "b": (FULL, STATE), "c": (FULL, window(9))}
BUDGET = 400 * row_bytes(FULL, 8)


def config_of(name: str, **fields: Any) -> ServedModelConfig:
    return ServedModelConfig(name, ModelConfig(name), **fields)


class Loads:
    """A loader of oracles. `before` is called by each load, on the thread that loads."""

    def __init__(self, budget: SharedBudget) -> None:
        self.budget = budget
        self.disk_dir: Path | None = None
        self.asked: list[str] = []
        self.runtimes: dict[str, FakeRuntime] = {}
        self.before: Callable[[str], None] = lambda name: None
        self.fault: Callable[[Batch], None] = lambda batch: None

    def __call__(self, config: ServedModelConfig) -> Assembly:
        self.asked.append(config.name)
        self.before(config.name)
        tokenizer = ByteTokenizer()
        runtime = FakeRuntime(
            tokenizer.vocab_size,
            4096,
            families=FAMILIES[config.name],
            eos_token_ids=tokenizer.eos_token_ids,
            fault=lambda batch: self.fault(batch),
        )
        self.runtimes[config.name] = runtime
        tier = TierConfig(self.records_of(config), 16 * MIB, "through")
        return assemble(
            runtime, tokenizer, CacheConfig(block_size=8), EngineConfig(), tier, shared=self.budget
        )

    def records_of(self, config: ServedModelConfig) -> Path | None:
        return None if self.disk_dir is None else self.disk_dir / config.name


class Several:
    def __init__(self, registry: ModelRegistry, loads: Loads, url: str, client: httpx.Client) -> None:
        self.registry = registry
        self.loads = loads
        self.url = url
        self.client = client

    def chat(self, model: str | None, text: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"messages": user(text), "max_tokens": 5, "ignore_eos": True, **GREEDY, **fields}
        return self.client.post(
            "/v1/chat/completions", json=body if model is None else {"model": model, **body}
        )

    def expect(self, response: httpx.Response, model: str, text: str = "Hello") -> None:
        """Asserts the answer of this very model."""
        assert response.status_code == 200, response.text
        tokenizer = ByteTokenizer()
        tokens = tokenizer.encode_chat(tokenizer.render_chat(user(text), [])).tolist()
        count = len(tokens)
        for _ in range(5):
            logits = self.loads.runtimes[model].expected_logits(np.array(tokens, np.int32))
            tokens.append(int(logits.argmax()))
        expected = tokenizer.decode(tokens[count:])
        assert response.json()["choices"][0]["message"]["content"] == expected

    def status(self, model: str) -> str:
        return str(self.client.get(f"/v1/models/{model}").json()["status"]["value"])

    def post(self, action: str, model: str) -> httpx.Response:
        return self.client.post(f"/v1/models/{action}", json={"model": model})


@contextlib.contextmanager
def served(
    *models: ServedModelConfig, prepare: Callable[[Loads], None] = lambda loads: None, **server: Any
) -> Iterator[Several]:
    budget = SharedBudget(BUDGET)
    loads = Loads(budget)
    prepare(loads)
    config = ServerConfig(**{"aliases": (), **server})
    registry = ModelRegistry.of_several(
        models, loads, config, EngineConfig(max_queue=4), budget, loads.records_of
    )
    app = create_app(registry, config)
    registry.start()
    with (
        registry,
        running(app, registry) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield Several(registry, loads, url, client)


DEMAND = {"load": "demand"}


# ---- names


@pytest.fixture(scope="module")
def two() -> Iterator[Several]:
    with served(config_of("a", aliases=("first",)), config_of("b"), aliases=("gpt-4o=b",)) as several:
        yield several


@pytest.mark.parametrize(("name", "model"), [("a", "a"), ("b", "b"), ("first", "a"), ("gpt-4o", "b")])
def test_the_field_model_chooses(two: Several, name: str, model: str) -> None:
    answer = two.chat(name)
    two.expect(answer, model)
    assert answer.json()["model"] == name
    counted = two.client.post("/v1/messages/count_tokens", json={"model": name, "messages": user("Hi")})
    assert counted.json()["input_tokens"] > 0
    body = {"model": name, "messages": user("Hello")}
    assert two.client.post("/v1/cache/explain", json=body).json()["matched_tokens"] > 0


def test_an_unknown_name_is_refused_with_the_names_that_are_served(two: Several) -> None:
    assert_error(two.chat("gpt-5"), 404, "model_not_found", "'a' or 'b'", param="model")
    assert_error(two.chat(None), 400, "missing_parameter", param="model")


def test_the_model_of_any_other_name_is_refused_to_a_tenant_without_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{key: k, tenant: t}]\ntenants: {t: {models: [a]}}")
    with served(config_of("a"), config_of("b"), aliases=("*=b",), api_keys=file) as several:
        several.client.headers["Authorization"] = "Bearer k"
        assert several.chat("a").status_code == 200
        for name in (None, "b", "anything"):
            assert_error(several.chat(name), 403, "model_not_allowed", param="model")


def test_one_model_may_answer_to_any_other_name() -> None:
    with served(config_of("a"), config_of("b"), aliases=("*=b",)) as several:
        several.expect(several.chat("anything"), "b")
        several.expect(several.chat(None), "b")
        several.expect(several.chat("a"), "a")


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        (("x",), "x=MODEL"),
        (("x=c",), "name of a model"),
        (("a=b",), "no other model"),
        (("*=a", "*=b"), "one model"),
    ],
)
def test_aliases_that_name_no_model_or_two_are_refused(aliases: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidOption, match=said), served(config_of("a"), config_of("b"), aliases=aliases):
        pass
    with pytest.raises(InvalidOption, match="no other model"), served(config_of("a"), config_of("a")):
        pass


def test_models_are_listed_with_their_aliases_and_states() -> None:
    with served(config_of("a"), config_of("b", **DEMAND), aliases=("x=b",)) as several:
        listed = {one["id"]: one for one in several.client.get("/v1/models").json()["data"]}
        assert {name: one["status"]["value"] for name, one in listed.items()} == {
            "a": "loaded",
            "b": "unloaded",
            "x": "unloaded",
        }
        assert listed["x"]["root"] == "b"
        assert listed["a"]["max_model_len"] > 0
        assert "max_model_len" not in listed["b"]
        several.chat("x")
        assert several.client.get("/v1/models/x").json()["max_model_len"] > 0
        assert several.loads.asked == ["a", "b"]


def test_state_routes_tell_of_all_models_or_of_one(two: Several) -> None:
    two.chat("a"), two.chat("b")
    stats = two.client.get("/v1/cache/stats").json()
    assert set(stats["models"]) == {"a", "b"}
    assert stats["budget"]["bytes"] == BUDGET
    used = sum(one["cache"]["used_bytes"] for one in stats["models"].values())
    assert stats["budget"]["used_bytes"] == used > 0
    assert two.client.get("/v1/cache/stats?model=a").json()["cache"] == stats["models"]["a"]["cache"]
    assert_error(two.client.get("/v1/cache/stats?model=z"), 404, "model_not_found")
    assert two.client.get("/health").json()["alive"]
    metrics = two.client.get("/metrics").text
    assert 'rootstock_alive{model_name="a"} 1.0' in metrics
    assert 'rootstock_alive{model_name="b"} 1.0' in metrics
    cleared = two.client.post("/v1/cache/clear", json={"model": "a"}).json()
    assert cleared["blocks"] == stats["models"]["a"]["cache"]["cached_blocks"]
    after = two.client.get("/v1/cache/stats").json()["models"]
    assert after["a"]["cache"]["used_bytes"] == 0
    assert after["b"]["cache"]["used_bytes"] > 0
    assert two.client.post("/v1/cache/clear").json()["blocks"] == after["b"]["cache"]["cached_blocks"]


def test_an_answer_is_compared_with_one_of_another_model(two: Several) -> None:
    first = two.chat("a", "Compare this").json()["id"]
    fields = {"prompt_cache_options": {"comparison_response_id": first}}
    told = two.chat("b", "Compare this", **fields).json()["prompt_cache_diagnostics"]
    assert told["reason"] == "model_changed"


# ---- loads


def test_requests_wait_for_one_load_while_another_model_answers() -> None:
    loading, may_load = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "b":
            loading.set()
            wait_for(may_load)

    with (
        served(
            config_of("a"), config_of("b", **DEMAND), prepare=lambda loads: setattr(loads, "before", before)
        ) as several,
        ThreadPoolExecutor(4) as threads,
    ):
        waiting = [threads.submit(several.chat, "b") for _ in range(3)]
        wait_for(loading)
        several.expect(several.chat("a"), "a")
        assert several.status("b") == "loading"
        assert not any(one.done() for one in waiting)
        may_load.set()
        for one in waiting:
            several.expect(one.result(HANG_S), "b")
        assert several.loads.asked == ["a", "b"]


def test_only_so_many_requests_wait_for_loads() -> None:
    may_load = threading.Event()

    def before(name: str) -> None:
        wait_for(may_load)

    with (
        served(config_of("b", **DEMAND), prepare=lambda loads: setattr(loads, "before", before)) as several,
        ThreadPoolExecutor(5) as threads,
    ):
        asked = [threads.submit(several.chat, "b") for _ in range(5)]
        wait_until(lambda: any(one.done() for one in asked))
        [refused] = [one for one in asked if one.done()]
        assert_error(refused.result(), 429, "queue_full")
        may_load.set()
        for one in asked:
            if one is not refused:
                several.expect(one.result(HANG_S), "b")


@pytest.mark.parametrize("error", [ModelTooLarge("b", 9, "float32", 1, "main memory"), OSError("disk")])
def test_a_failed_load_fails_its_requests_and_is_not_tried_for_each(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]

    def before(name: str) -> None:
        if name == "b" and clock[0] < 101:
            raise error

    with served(
        config_of("a", pin=True),
        config_of("b", **DEMAND),
        prepare=lambda loads: setattr(loads, "before", before),
    ) as several:
        monkeypatch.setattr(several.registry.slots, "_clock", lambda: clock[0])
        for _ in range(3):
            refused = several.chat("b")
            assert_error(refused, 503, "model_unavailable", "'b'", "log")
            assert "Retry-After" in refused.headers
        assert several.loads.asked.count("b") == 1
        assert several.status("b") == "failed"
        several.expect(several.chat("a"), "a")
        clock[0] += model_slots.RETRY_S + 1
        several.expect(several.chat("b"), "b")


def test_a_model_that_does_not_load_at_the_start_stops_the_start() -> None:
    def before(name: str) -> None:
        raise ModelTooLarge(name, 9, "float32", 1, "main memory")

    with (
        pytest.raises(ModelTooLarge),
        served(config_of("a"), prepare=lambda loads: setattr(loads, "before", before)),
    ):
        pass


def test_a_client_that_leaves_during_a_load_leaves_nothing_behind() -> None:
    loading, may_load = threading.Event(), threading.Event()

    def before(name: str) -> None:
        loading.set()
        wait_for(may_load)

    with served(config_of("b", **DEMAND), prepare=lambda loads: setattr(loads, "before", before)) as several:
        with httpx.Client(base_url=several.url) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json={"model": "b", "messages": user("Hi")}, timeout=0.2)
        wait_for(loading)
        wait_until(lambda: several.registry.slots._waiting == 0)
        may_load.set()
        several.expect(several.chat("b"), "b")
        assert several.loads.asked == ["b"]


def test_a_server_stops_while_a_model_is_loaded() -> None:
    loading, may_load = threading.Event(), threading.Event()

    def before(name: str) -> None:
        loading.set()
        wait_for(may_load)

    with (
        ThreadPoolExecutor(1) as threads,
        served(config_of("b", **DEMAND), prepare=lambda loads: setattr(loads, "before", before)) as several,
    ):
        asked = threads.submit(several.chat, "b")
        wait_for(loading)
        several.registry.stop()
        assert_error(asked.result(HANG_S), 503, "engine_stopped")
        slot = several.registry.slots.all[0]
        may_load.set()
        wait_until(lambda: slot.status == "unloaded")
        assert_error(several.chat("b"), 503, "engine_stopped")


def test_a_server_stops_an_engine_whose_unload_waits_for_a_load() -> None:
    loading, may_load = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "b":
            loading.set()
            wait_for(may_load)

    prepare = lambda loads: setattr(loads, "before", before)  # noqa: E731
    with (
        ThreadPoolExecutor(1) as threads,
        served(config_of("a"), config_of("b", **DEMAND), prepare=prepare) as several,
    ):
        slots, (first, _) = several.registry.slots, several.registry.slots.all
        model = first.loaded
        assert model is not None
        engine = model.engine
        threads.submit(several.chat, "b")
        wait_for(loading)
        unloaded = slots.unload(first)
        assert unloaded is not None
        assert first.status == "unloading"
        several.registry.stop()
        assert not engine.health().alive
        unloaded.result(HANG_S)
        may_load.set()


# ---- clearing


CLEAR = "/v1/cache/clear"


def on(disk_dir: Path) -> Callable[[Loads], None]:
    def prepare(loads: Loads) -> None:
        loads.disk_dir = disk_dir

    return prepare


def records(folder: Path) -> int:
    """Returns the number of records in the directory of a model that is not loaded."""
    tier = DiskTier.open_as_found(folder)
    assert isinstance(tier, DiskTier), tier
    try:
        return len(list(tier.entries()))
    finally:
        tier.close()


def stored(several: Several, *salts: str) -> None:
    """Leaves records of both models on the disk, and model b unloaded."""
    for salt in salts:
        for model in ("a", "b"):
            assert several.chat(model, f"Hello, {salt}. " * 4, cache_salt=salt).status_code == 200
    assert several.post("unload", "b").status_code == 200


@pytest.mark.parametrize("body", [{}, {"model": "b"}, {"tiers": ["disk"]}, {"tiers": ["disk", "memory"]}])
def test_the_disk_of_an_unloaded_model_is_cleared(tmp_path: Path, body: Json) -> None:
    with served(config_of("a"), config_of("b", **DEMAND), prepare=on(tmp_path)) as several:
        stored(several, "x")
        assert records(tmp_path / "b") > 0
        told = several.client.post(CLEAR, json=body).json()
        assert [one["state"] for one in told["models"]] == ["cleared"] * len(told["models"])
        assert {one["model"] for one in told["models"]} == ({"b"} if "model" in body else {"a", "b"})
        assert records(tmp_path / "b") == 0
        assert several.status("b") == "unloaded", "clearing loads no model"


def test_memory_alone_is_cleared_and_the_disk_of_all_models_stays(tmp_path: Path) -> None:
    with served(config_of("a"), config_of("b", **DEMAND), prepare=on(tmp_path)) as several:
        stored(several, "x")
        before = records(tmp_path / "b")
        told = several.client.post(CLEAR, json={"tiers": ["memory"]}).json()
        assert told["blocks"] > 0
        assert records(tmp_path / "b") == before > 0
        stats = several.client.get("/v1/cache/stats?model=a").json()
        assert stats["cache"]["cached_blocks"] == 0
        assert stats["tier"]["records"] > 0


def test_a_tenant_clears_its_salt_on_the_disk_of_an_unloaded_model(tmp_path: Path) -> None:
    with served(config_of("a"), config_of("b", **DEMAND), prepare=on(tmp_path)) as several:
        stored(several, "x", "y")
        before = records(tmp_path / "b")
        for salt, left in (("x", before // 2), ("x", before // 2), ("z", before // 2), ("y", 0)):
            told = several.client.post(CLEAR, json={"cache_salt": salt}).json()
            assert [one["state"] for one in told["models"]] == ["cleared", "cleared"]
            assert records(tmp_path / "b") == left


def test_a_salt_of_a_model_that_was_not_loaded_yet_is_cleared_when_it_is_loaded(tmp_path: Path) -> None:
    models = (config_of("a"), config_of("b", **DEMAND))
    with served(*models, prepare=on(tmp_path)) as several:
        stored(several, "x", "y")
        before = records(tmp_path / "b")
    for salt, left in (("x", before // 2), ("z", before // 2), ("y", 0)):
        with served(*models, prepare=on(tmp_path)) as several:  # a restart
            told = several.client.post(CLEAR, json={"cache_salt": salt}).json()
            assert [one["state"] for one in told["models"]] == ["cleared", "later"]
            assert told["later"] is True
            several.post("load", "b"), several.post("unload", "b")
            assert records(tmp_path / "b") == left


def test_a_model_that_is_unloaded_meanwhile_is_cleared_and_so_are_those_after_it(tmp_path: Path) -> None:
    models = (config_of("a"), config_of("b", **DEMAND), config_of("c"))
    with served(*models, prepare=on(tmp_path)) as several:
        several.chat("c", "Hello, c. " * 4)
        several.chat("b", "Hello, b. " * 4)
        engine = several.registry.find("b").engine
        clear = engine.clear

        def unloaded_first(clearing: Clearing) -> Cleared:
            assert several.post("unload", "b").status_code == 200
            return clear(clearing)

        engine.clear = unloaded_first  # type: ignore[method-assign]
        del engine
        told = several.client.post(CLEAR)
        assert told.status_code == 200
        assert [one["state"] for one in told.json()["models"]] == ["cleared"] * 3
        assert records(tmp_path / "b") == 0
        assert several.client.get("/v1/cache/stats?model=c").json()["cache"]["cached_blocks"] == 0


def test_one_model_that_cannot_be_cleared_is_told_and_the_others_are_cleared(tmp_path: Path) -> None:
    models = (config_of("a", **DEMAND), config_of("b", **DEMAND), config_of("c"))
    with served(*models, prepare=on(tmp_path)) as several:
        several.chat("a"), several.chat("b"), several.chat("c")
        several.post("unload", "a"), several.post("unload", "b")
        held = DiskTier.open_as_found(tmp_path / "a")  # by another program
        assert isinstance(held, DiskTier)
        refused = several.client.post(CLEAR)
        held.close()
        assert_error(refused, 500, "clear_failed", "remain")
        states = {one["model"]: one["state"] for one in refused.json()["models"]}
        assert states == {"a": "failed", "b": "cleared", "c": "cleared"}
        assert records(tmp_path / "b") == 0
        assert several.client.get("/v1/cache/stats?model=c").json()["cache"]["cached_blocks"] == 0


def test_a_tenant_sees_only_the_models_that_it_may_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{key: k, tenant: t}]\ntenants: {t: {models: [a]}}\n")
    with served(config_of("a"), config_of("b"), api_keys=keys) as several:
        told = several.client.post(CLEAR, headers={"x-api-key": "k"}).json()
        assert [one["model"] for one in told["models"]] == ["a"]


@pytest.mark.parametrize(
    ("method", "path", "question"),
    [
        ("GET", "/v1/cache/stats", "stats"),
        ("GET", "/v1/cache/volatile", "volatile_spans"),
        ("GET", "/v1/cache/pins", "pins"),
        ("POST", "/v1/cache/release", "release_pin"),
    ],
)
def test_a_model_that_is_unloaded_meanwhile_has_no_answer_of_its_own(
    method: str, path: str, question: str
) -> None:
    with served(config_of("a", **DEMAND), config_of("b")) as several:
        for name in (None, "a"):
            several.chat("a")
            engine = several.registry.find("a").engine
            answer = getattr(engine, question)

            def unloaded_first(*values: Any, answer: Any = answer) -> Any:
                assert several.post("unload", "a").status_code == 200
                return answer(*values)

            setattr(engine, question, unloaded_first)
            del engine, answer
            body = {"json": {"id": "x"}} if method == "POST" else {}
            if name is None:
                told = several.client.request(method, path, **body)
                assert told.status_code == (404 if method == "POST" else 200), told.text
            elif question in ("stats", "volatile_spans"):
                asked = several.client.request(method, f"{path}?model={name}")
                assert_error(asked, 409, "model_not_loaded")


# ---- unloads


def test_an_operator_loads_and_unloads() -> None:
    with served(config_of("a"), config_of("b", **DEMAND)) as several:
        assert several.post("load", "b").json()["status"]["value"] == "loaded"
        assert several.post("load", "b").json()["status"]["value"] == "loaded"
        several.expect(several.chat("b"), "b")
        unloaded = several.post("unload", "b").json()
        assert unloaded["status"]["value"] == "unloaded"
        assert unloaded["max_model_len"] > 0, "it is described as it was loaded last"
        assert several.post("unload", "b").json()["status"]["value"] == "unloaded"
        assert_error(several.client.get("/v1/cache/stats?model=b"), 409, "model_not_loaded")
        assert set(several.client.get("/v1/cache/stats").json()["models"]) == {"a"}
        several.expect(several.chat("b"), "b")
        assert_error(several.post("load", "z"), 404, "model_not_found")


def test_the_dashboard_of_an_unloaded_model_has_ordinary_answers() -> None:
    with served(config_of("a"), config_of("b", **DEMAND)) as several:
        browser = Browser(several.url)
        listed = browser.get("/dashboard/session").json()["server"]["models"]
        assert {one["name"]: one["status"] for one in listed} == {"a": "loaded", "b": "unloaded"}
        tree = browser.get("/dashboard/tree?model=b")
        assert (tree.status_code, "x-serial" in tree.headers) == (204, False)
        browser.assert_gone("/dashboard/tree/1?model=b")
        for path in ("requests/x/stop", "tree/1/pin"):
            assert browser.post(f"/dashboard/{path}?model=b").json()["gone"] is True
        with browser.events("b") as events:
            (gone,) = events
        assert gone["gone"] is True
        assert_error(browser.get("/dashboard/tree?model=z"), 404, "model_not_found")


@pytest.mark.usefixtures("really_frozen")
def test_an_unloaded_model_that_the_dashboard_has_watched_leaves_no_engine() -> None:
    with served(config_of("a")) as several:
        browser = Browser(several.url)
        several.expect(several.chat("a"), "a")
        assert browser.get("/dashboard/tree?model=a").status_code == 200
        engine = weakref.ref(several.registry.loaded[0].engine)
        assert several.post("unload", "a").status_code == 200

        def is_gone() -> bool:
            gc.collect()  # each time: a thread of the server may let go of it later
            return engine() is None

        wait_until(is_gone)


def test_only_an_operator_loads_and_unloads() -> None:
    with served(config_of("a"), api_key="key-1", admin_key="key-2") as several:
        for action in ("load", "unload"):
            body = {"model": "a"}
            refused = several.client.post(
                f"/v1/models/{action}", json=body, headers={"Authorization": "Bearer key-1"}
            )
            assert_error(refused, 403, "admin_only")


def test_a_model_with_requests_is_not_unloaded_and_its_memory_returns() -> None:
    started, go_on = threading.Event(), threading.Event()

    def fault(batch: Batch) -> None:
        started.set()
        wait_for(go_on)

    with (
        served(config_of("a"), prepare=lambda loads: setattr(loads, "fault", fault)) as several,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(several.chat, "a")
        wait_for(started)
        assert_error(several.post("unload", "a"), 409, "model_busy")
        go_on.set()
        several.expect(asked.result(HANG_S), "a")
        assert several.loads.budget.owned_bytes > 0
        wait_until(lambda: several.post("unload", "a").status_code == 200)
        assert several.loads.budget.owned_bytes == 0


def test_an_idle_model_is_unloaded_and_a_pinned_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"idle_unload_s": 60.0}
    with served(config_of("a", **idle), config_of("b", **idle, pin=True), config_of("c")) as several:
        clock = [several.registry.slots._clock()]
        monkeypatch.setattr(several.registry.slots, "_clock", lambda: clock[0])
        for model in "abc":
            several.expect(several.chat(model), model)
        clock[0] += 61.0
        # The end of a request makes the thread look at the time again.
        several.chat("b")
        wait_until(lambda: several.status("a") == "unloaded")
        assert [several.status(model) for model in "bc"] == ["loaded", "loaded"]
        several.expect(several.chat("a"), "a")


def test_a_request_that_arrives_during_an_unload_waits_and_loads_the_model_again() -> None:
    with served(config_of("a")) as several, ThreadPoolExecutor(2) as threads:
        engine = several.registry.loaded[0].engine
        stop, stopping, may_stop = engine.stop, threading.Event(), threading.Event()

        def slow_stop() -> None:
            stopping.set()
            wait_for(may_stop)
            stop()

        engine.stop = slow_stop  # type: ignore[method-assign]
        unload = threads.submit(several.post, "unload", "a")
        wait_for(stopping)
        assert several.status("a") == "unloading"
        asked = threads.submit(several.chat, "a")
        wait_until(lambda: several.registry.slots._waiting == 1)
        may_stop.set()
        several.expect(asked.result(HANG_S), "a")
        unload.result(HANG_S)
        assert several.loads.asked == ["a", "a"]


@pytest.mark.parametrize("error", [MemoryLacks("--kv-budget", 9, "at most 1"), MemoryError()])
def test_the_least_recently_used_idle_model_makes_room(error: Exception) -> None:
    """The memory pays for two models. Pinned models, and those with requests, stay."""

    with served(config_of("a", pin=True), config_of("b"), config_of("c", **DEMAND)) as several:

        def before(name: str) -> None:
            if len(several.registry.loaded) >= 2:
                raise error

        several.loads.before = before
        several.expect(several.chat("b"), "b")
        several.expect(several.chat("a"), "a")
        several.expect(several.chat("c"), "c")
        assert [several.status(model) for model in "abc"] == ["loaded", "unloaded", "loaded"]
        several.expect(several.chat("b"), "b")
        assert [several.status(model) for model in "abc"] == ["loaded", "loaded", "unloaded"]
        assert several.post("unload", "a").status_code == 200, "an operator may unload it"


def test_a_model_is_not_unloaded_before_those_who_waited_for_it_have_used_it() -> None:
    """A client that asks for models in turn keeps nobody from theirs: each load serves those who waited for it."""

    with served(config_of("a", **DEMAND), config_of("b", **DEMAND)) as several:
        slots = several.registry.slots
        first, second = slots.all
        may_load = threading.Event()

        def before(name: str) -> None:
            wait_for(may_load)
            if several.registry.loaded:  # the memory pays for one model
                raise MemoryLacks("--kv-budget", 9, "at most 1")

        several.loads.before = before
        waits = [slots.use(first), slots.use(second), slots.use(first)]
        left = slots.use(first)
        assert isinstance(left, AwaitedModel)
        left.drop()  # its client has left
        may_load.set()
        for wait in waits:
            assert isinstance(wait, AwaitedModel)
            wait.done.result(HANG_S)
        # The load of b has ended, and not by unloading a: its requests had not come to it.
        taken = [wait.take() for wait in waits]  # type: ignore[union-attr]
        assert [use is not None for use in taken] == [True, False, True]
        assert first.status == "loaded"
        with pytest.raises(ModelUnavailable):
            slots.use(second)
        for use in taken:
            if use is not None:
                use.end()
        assert slots.unload(first) is not None, "no use is left"


def test_a_client_that_asks_for_models_in_turn_takes_no_pinned_model_away() -> None:
    models = (config_of("a", pin=True), config_of("b", **DEMAND), config_of("c", **DEMAND))
    with served(*models) as several, ThreadPoolExecutor() as threads:

        def before(name: str) -> None:
            if len(several.registry.loaded) >= 2:
                raise MemoryLacks("--kv-budget", 9, "at most 1")

        several.loads.before = before

        def flood() -> set[int]:
            return {several.chat(name).status_code for _ in range(8) for name in "bc"}

        floods = [threads.submit(flood) for _ in range(2)]
        for _ in range(12):
            several.expect(several.chat("a"), "a")
        for each in floods:
            assert each.result(HANG_S) <= {200, 503, 429}
        assert several.registry.slots._waiting == 0
        assert several.loads.asked.count("a") == 1


def test_no_model_is_unloaded_for_one_that_would_not_fit_all_the_same() -> None:
    with served(config_of("a"), config_of("b", **DEMAND)) as several:

        def before(name: str) -> None:
            raise ModelTooLarge(name, 1 << 50, "float32", 1, "main memory")

        several.expect(several.chat("a"), "a")
        several.loads.before = before
        assert_error(several.chat("b"), 503, "model_unavailable", "model_too_large")
        assert several.status("a") == "loaded"


def test_loads_unloads_and_requests_in_any_order_give_the_answers_of_each_model() -> None:
    models = [config_of(name, **DEMAND) for name in "abc"]
    with served(*models) as several, ThreadPoolExecutor(6) as threads:
        random = np.random.default_rng(3)
        asked = []
        for i in range(90):
            model = "abc"[random.integers(3)]
            if random.random() < 0.25:
                threads.submit(several.post, "unload", model)
            else:
                text = f"Tell me {i % 7}"
                asked.append((threads.submit(several.chat, model, text), model, text))
            if len(asked) % 4 == 3:  # at most four wait for loads
                for one, of, said in asked[-3:]:
                    several.expect(one.result(HANG_S), of, said)
        for one, of, said in asked:
            several.expect(one.result(HANG_S), of, said)
        assert several.loads.asked.count("a") > 1
        assert several.loads.budget.owned_bytes <= BUDGET
