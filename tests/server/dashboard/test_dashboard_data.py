"""The feed, the tree and the nodes of a server without keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from rootstock.cache.families import SlidingWindow
from rootstock.config import ServerConfig
from rootstock.server.routes.dashboard.feed import (
    MAX_STRANGERS,
    MAX_VIEWERS,
    MAX_VIEWERS_OF_TENANT,
    Feed,
    difference,
)
from rootstock.server.routes.dashboard.trees import LEAST_PAUSE_S, MOST_PAUSE_S, Trees, pause_s
from rootstock.server.routes.dashboard.views import MAX_SHOWN_TOKENS, Names, Texts, View
from rootstock.testing.fake_runtime import FULL, STATE
from server.conftest import Served, served_by_oracle
from server.dashboard.browser import Browser, Json

HEAD = "You are an agent with a shell and an editor, and you are careful with both of them. " * 3
WINDOW = SlidingWindow(layers=1, bytes_per_token=2, window=64)
ALL = View(None, reads_prompts=True)
Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = ServerConfig(aliases=(), show_prompts=True)
    with served_by_oracle(server=config, families=(FULL, WINDOW, STATE)) as one:
        yield one


def feed_of(served: Served, **options: float) -> Feed:
    texts = Texts(served.assembly.tokenizer, show_prompts=False)
    return Feed(served.assembly.engine, Names(ServerConfig()), texts, every_s=0.01, **options)  # type: ignore[arg-type]


def events_of(feed: Feed, count: int) -> list[Json]:
    async def take() -> list[Json]:
        found: list[Json] = []
        stream = feed.events(ALL, lambda: True)
        async for text in stream:
            if text.startswith("data: "):
                found.append(json.loads(text.removeprefix("data: ")))
            if len(found) == count:
                break
        await stream.aclose()
        return found

    return asyncio.run(take())


def test_phases_and_sources_of_a_request_are_told(served: Served) -> None:
    served.complete(HEAD + "first", max_tokens=3)
    served.complete(HEAD + "second", max_tokens=3)
    sections = Browser(served.url).sections("requests", "rates", "pool", "health")
    latest = list(sections["requests"].values())[-1]
    assert [span[0] for span in latest["spans"]] == ["queued", "prefill", "decode"]
    begins = [span[1] for span in latest["spans"]]
    assert begins == sorted(begins)
    assert all(
        before[2] == after[1] for before, after in zip(latest["spans"], latest["spans"][1:], strict=False)
    )
    assert latest["outcome"] in ("length", "stop")
    assert latest["cached"] <= latest["prompt"] == len(HEAD) + len("second")
    cache = served.assembly.engine.stats().cache
    hits = sections["rates"]["windows"]["900"]
    assert hits["memory"] + hits["host"] + hits["disk"] == cache.hit_tokens
    assert hits["computed"] == cache.missed_tokens
    assert sum(sum(span) for span in sections["rates"]["history"]) == cache.asked_tokens
    assert sections["pool"]["used"] == cache.used_bytes
    assert sections["pool"]["hit_tokens"] == cache.hit_tokens
    assert sections["pool"]["inside_block_tokens"] == cache.inside_block_tokens
    assert [family["name"] for family in sections["pool"]["families"]] == [
        family.name for family in cache.families
    ]
    assert sections["health"] == {"alive": True, "detail": "ok"}


def test_a_miss_is_explained_with_the_tokens_around_it(served: Served) -> None:
    served.complete(f"At 10:15 {HEAD}", max_tokens=2)
    served.complete(f"At 10:16 {HEAD}", max_tokens=2)
    sections = Browser(served.url).sections("misses", "volatile")
    miss = list(sections["misses"].values())[-1]
    assert miss["cause"] in ("volatile_span", "no_checkpoint")
    assert miss["missed"] <= miss["prompt"]
    prompt = f"Zebras begin otherwise. {HEAD}"
    served.complete(prompt, max_tokens=2)
    missed = list(Browser(served.url).sections("misses")["misses"].values())[-1]
    assert (missed["cause"], missed["position"]) == ("nothing_cached", 0)
    assert (missed["missed"], missed["cached"]) == (len(prompt), 0)
    asked = "".join(token["text"] for token in missed["asked"])
    assert len(asked) >= 16
    assert prompt.startswith(asked)
    assert not missed["before"]


def test_the_tree_agrees_with_the_cache(served: Served) -> None:
    served.complete(HEAD + "a branch", max_tokens=2)
    served.complete(HEAD + "one more", max_tokens=2)
    head, columns = Browser(served.url).tree()
    engine = served.assembly.engine
    stats = engine.stats().cache
    lengths = [end - start for start, end in zip(columns["start"], columns["end"], strict=True)]
    assert head["nodes"] == len(lengths) <= stats.nodes
    if head["nodes"] == stats.nodes:
        assert sum(lengths) == stats.cached_tokens
    for row, parent in enumerate(columns["parent"]):
        assert parent < row
        assert columns["start"][row] == (0 if parent < 0 else columns["end"][int(parent)])
    assert len(set(columns["number"])) == head["nodes"]
    assert any(int(flags) & 2 for flags in columns["flags"]), "no checkpoint"


def test_a_node_is_described_with_its_text(served: Served) -> None:
    browser = Browser(served.url)
    served.complete(HEAD + "to describe", max_tokens=2)
    _, columns = browser.tree()
    texts = []
    for number, memory in zip(map(int, columns["number"]), columns["bytes"], strict=True):
        node = browser.get(f"/dashboard/tree/{number}").json()
        assert node["end"] > node["start"]
        texts.append(node["text"])
        assert node["bytes"] == memory
        assert node["withheld"] is False
        assert len(node["head"]) + len(node["tail"]) == min(node["end"] - node["start"], MAX_SHOWN_TOKENS)
    assert any(text and text in HEAD for text in texts)
    browser.assert_gone("/dashboard/tree/4000000000")
    browser.assert_gone("/dashboard/tree/-1")
    assert browser.get("/dashboard/tree/none").status_code == 400


def test_text_is_withheld_unless_the_option_shows_it(serve: Serve) -> None:
    with serve() as served:
        served.complete(HEAD, max_tokens=2)
        browser = Browser(served.url)
        assert browser.get("/dashboard/session").json()["show_prompts"] is False
        _, columns = browser.tree()
        nodes = [browser.get(f"/dashboard/tree/{int(number)}").json() for number in columns["number"]]
        assert all(node["text"] is None for node in nodes)
        miss = next(iter(browser.sections("misses")["misses"].values()))
        assert miss["asked"]
        assert all(token["text"] is None for token in miss["before"] + miss["asked"])


def test_a_model_that_is_not_served_is_refused(served: Served) -> None:
    for path in ("events", "tree", "tree/1"):
        refused = served.client.get(f"/dashboard/{path}?model=none")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"


def test_later_events_have_the_changes_only(served: Served) -> None:
    feed = feed_of(served)
    (first,) = events_of(feed, 1)
    assert {"health", "rates", "requests", "misses", "volatile"} <= set(first)
    assert first["requests"]["first"] is True

    async def while_idle() -> int:
        count = 0
        stream = feed.events(ALL, lambda: feed.cost.snapshots < before + 20)
        async for text in stream:
            count += text.startswith("data: ")
        return count

    before = feed.cost.snapshots
    assert asyncio.run(while_idle()) <= 3  # the first one, and the figures that come a moment later


def test_a_difference_has_changed_entries_and_gone_ids() -> None:
    old: Json = {"requests": {"a": 1, "b": 2}, "pool": {"used": 1}}
    new: Json = {"requests": {"b": 3, "c": 4}, "pool": {"used": 1}}
    assert difference(old, new) == {"requests": {"set": {"b": 3, "c": 4}, "gone": ["a"]}}
    assert difference({}, new) == {
        "requests": {"set": {"b": 3, "c": 4}, "gone": [], "first": True},
        "pool": {"used": 1},
    }
    assert difference(new, new) == {}


def test_no_work_is_done_while_no_page_watches(served: Served) -> None:
    feed = feed_of(served)
    events_of(feed, 1)
    assert feed.viewers == 0
    before = feed.cost.snapshots
    asyncio.run(asyncio.sleep(0.1))
    assert feed.cost.snapshots == before


def test_the_number_of_pages_is_bounded(served: Served) -> None:
    feed = feed_of(served, most=1)

    async def two() -> str:
        one = feed.events(ALL, lambda: True)
        await anext(one)
        other = feed.events(ALL, lambda: True)
        text = await anext(other)
        await one.aclose()
        return text

    assert json.loads(asyncio.run(two()).removeprefix("data: ")) == {"full": True}
    assert feed.viewers == 0


def test_a_tenant_leaves_room_for_the_pages_of_others(served: Served) -> None:
    feed, view = feed_of(served), View(frozenset({"salt"}), reads_prompts=True)

    async def watch() -> None:
        streams = [feed.events(view, lambda: True) for _ in range(MAX_VIEWERS_OF_TENANT)]
        for stream in streams:
            await anext(stream)
        assert feed.is_full_for(view)
        assert not feed.is_full_for(ALL)
        assert not feed.is_full_for(View(frozenset({"other"}), reads_prompts=True))
        await streams.pop().aclose()
        assert not feed.is_full_for(view)
        for stream in streams:
            await stream.aclose()

    asyncio.run(watch())
    assert feed.viewers == 0


def test_one_snapshot_serves_all_pages(served: Served) -> None:
    feed = feed_of(served)

    async def three() -> None:
        streams = [feed.events(ALL, lambda: True) for _ in range(3)]
        for stream in streams:
            await anext(stream)  # the time to connect again
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert feed.viewers == 3
        for stream in streams:
            await stream.aclose()

    asyncio.run(three())
    assert feed.viewers == 0


def test_the_feed_ends_with_its_session_and_with_the_engine(serve: Serve) -> None:
    with serve() as served:
        browser = Browser(served.url)
        with browser.events() as events:
            next(events)
            served.assembly.engine.stop()
            last = {}
            for event in events:
                last = event
            assert last["health"]["alive"] is False


def test_an_evicted_node_is_gone_and_no_error(serve: Serve) -> None:
    with serve() as served:
        served.complete(HEAD, max_tokens=2)
        browser = Browser(served.url)
        numbers = [int(number) for number in browser.tree()[1]["number"]]
        assert numbers
        served.client.post("/v1/cache/clear")
        for number in numbers:
            browser.assert_gone(f"/dashboard/tree/{number}")
            told = browser.post(f"/dashboard/tree/{number}/pin")
            assert (told.status_code, told.json()["gone"]) == (200, True)


def test_a_request_that_has_ended_cannot_be_stopped_and_that_is_no_error(served: Served) -> None:
    told = Browser(served.url).post("/dashboard/requests/ended/stop")
    assert (told.status_code, told.json()) == (
        200,
        {"gone": True, "message": "This request has ended already."},
    )


def test_a_full_feed_says_so_in_the_stream(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            next(stack.enter_context(Browser(served.url).events()))
        with Browser(served.url).events() as events:
            assert list(events) == [{"full": True}]


def test_streams_that_no_page_has_asked_for_leave_places_to_pages(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(MAX_VIEWERS):  # as a page of another site could make a browser ask
            params = {"page": "guessed"} if number % 2 else {}
            events = stack.enter_context(Browser(served.url).stream(params))
            assert ("full" in next(events)) is (number >= MAX_STRANGERS)
        for _ in range(MAX_VIEWERS - MAX_STRANGERS):
            assert "health" in next(stack.enter_context(Browser(served.url).events()))
        assert next(stack.enter_context(Browser(served.url).events())) == {"full": True}


def test_a_picture_that_was_seen_is_not_sent_again(served: Served) -> None:
    browser = Browser(served.url)
    served.complete(HEAD + "seen", max_tokens=2)
    first = browser.get("/dashboard/tree")
    again = browser.get(f"/dashboard/tree?seen={first.headers['x-serial']}")
    if again.headers["x-serial"] == first.headers["x-serial"]:
        assert (again.status_code, again.content) == (204, b"")
        assert float(again.headers["x-next-s"]) > 0
    else:  # the pause was over
        assert again.status_code == 200


def test_the_pause_between_two_walks_follows_the_processor_time_of_one() -> None:
    assert pause_s(0.0) == LEAST_PAUSE_S
    assert pause_s(0.05) == 5.0
    assert pause_s(1000.0) == MOST_PAUSE_S


def test_a_page_gets_the_picture_that_is_due_and_not_the_one_before(served: Served) -> None:
    now = 0.0
    trees = Trees(served.assembly.engine, Names(ServerConfig()), lambda: now)

    async def two() -> tuple[int, int]:
        nonlocal now
        first = await trees.latest()
        assert (await trees.latest()).serial == first.serial, "it is not due yet"
        assert 0 < trees.next_s <= MOST_PAUSE_S
        served.complete("A prompt that begins otherwise. " + HEAD, max_tokens=2)
        now += MOST_PAUSE_S
        second = await trees.latest()
        assert second.serial == first.serial + 1
        return len(first.number), len(second.number)

    before, after = asyncio.run(two())
    assert after > before
