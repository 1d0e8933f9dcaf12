"""A request that asks is told why its prompt was not found in the cache, in the shape of each of three APIs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootstock.config import ServerConfig, TierConfig
from rootstock.engine.cost_model import LoadSpeed, PrefillSpeed
from rootstock.testing.fake_runtime import FULL, STATE
from server.anthropic.streams import events_in, message_of
from server.responses.events import checked, parsed
from waiting import wait_until

Json = dict[str, Any]
RULES = "You are a helpful assistant of a small library, which has many books about trees."
ASKED = "What is a tree, and what is it for?"
OTHER = "How many books are there, and who reads them?"


@dataclass
class Api(ABC):
    """A client of one API. Answers have one token, and tell their id and their diagnostics."""

    client: httpx.Client
    path: str
    headers: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def body(self, question: str, rules: str, tools: tuple[str, ...]) -> Json: ...

    @abstractmethod
    def asking(self, earlier: str | None) -> Json: ...

    def told(self, body: Json) -> Any:
        """Returns the diagnostics in the body of a whole answer."""
        return body.get("prompt_cache_diagnostics")

    @abstractmethod
    def of_stream(self, text: str) -> Json:
        """Returns the body that a stream's events add up to."""

    def post(
        self, question: str = ASKED, rules: str = RULES, tools: tuple[str, ...] = (), **fields: Any
    ) -> httpx.Response:
        body = {"temperature": 0, "ignore_eos": True, **self.body(question, rules, tools), **fields}
        response = self.client.post(self.path, json=body, headers=self.headers)
        assert response.status_code == 200, response.text
        return response

    def ask(self, *prompt: Any, **fields: Any) -> str:
        """Asks without diagnostics, and returns the id of the answer."""
        body = self.post(*prompt, **fields).json()
        assert self.told(body) is None
        id: str = body["id"]
        return id

    def diagnose(self, earlier: str | None, *prompt: Any, **fields: Any) -> Any:
        return self.told(self.post(*prompt, **self.asking(earlier), **fields).json())

    def diagnose_stream(self, earlier: str | None, *prompt: Any, **fields: Any) -> Any:
        return self.told(
            self.of_stream(self.post(*prompt, **self.asking(earlier), stream=True, **fields).text)
        )


class Anthropic(Api):
    def body(self, question: str, rules: str, tools: tuple[str, ...]) -> Json:
        schemas = [{"name": name, "input_schema": {"type": "object"}} for name in tools]
        messages = [{"role": "user", "content": question}]
        return {"max_tokens": 1, "system": rules, "messages": messages, "tools": schemas}

    def asking(self, earlier: str | None) -> Json:
        return {"diagnostics": {"previous_message_id": earlier}}

    def told(self, body: Json) -> Any:
        return body.get("diagnostics")

    def of_stream(self, text: str) -> Json:
        return message_of(list(events_in(text)))


class Chat(Api):
    def body(self, question: str, rules: str, tools: tuple[str, ...]) -> Json:
        functions = [{"type": "function", "function": {"name": name}} for name in tools]
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        return {"max_tokens": 1, "messages": messages, "tools": functions}

    def asking(self, earlier: str | None) -> Json:
        return {"prompt_cache_options": {"comparison_response_id": earlier}}

    def of_stream(self, text: str) -> Json:
        chunks = [json.loads(line[len("data: ") :]) for line in text.split("\n\n")[:-2]]
        *before, last = chunks
        assert all("prompt_cache_diagnostics" not in chunk for chunk in before)
        assert last["choices"] == []
        body: Json = last
        return body


class Responses(Api):
    def body(self, question: str, rules: str, tools: tuple[str, ...]) -> Json:
        functions = [{"type": "function", "name": name} for name in tools]
        return {"max_output_tokens": 1, "instructions": rules, "input": question, "tools": functions}

    asking = Chat.asking

    def of_stream(self, text: str) -> Json:
        events = parsed(text)
        assert not any("prompt_cache_diagnostics" in event.get("response", {}) for event in events[:-1])
        return checked(events)


APIS: dict[str, Callable[..., Api]] = {
    "messages": lambda client, **more: Anthropic(client, "/v1/messages", **more),
    "chat": lambda client, **more: Chat(client, "/v1/chat/completions", **more),
    "responses": lambda client, **more: Responses(client, "/v1/responses", **more),
}
each_api = pytest.mark.parametrize("name", APIS)


def cause(told: Any) -> str:
    found: str = told["rootstock"]["cause"]
    return found


def reason(told: Any) -> Any:
    """Returns the part that has changed, which the APIs tell in different words; None: no part has."""
    if "type" not in told:
        told = told["cache_miss_reason"] or {}
        return told.get("type")
    return told.get("reason") or told["type"]


def changed(name: str, part: str) -> str:
    of_input = name != "messages" and part in ("system", "messages")
    return "input_changed" if of_input else f"{part}_changed"


@each_api
@pytest.mark.parametrize("streams", [False, True])
def test_the_part_that_has_changed_is_named_with_the_tokens_that_it_cost(
    serve: Any, name: str, streams: bool
) -> None:
    with serve() as served:
        api = APIS[name](served.client)
        diagnose = api.diagnose_stream if streams else api.diagnose
        first = api.ask()
        for prompt, part in (
            ((ASKED, RULES, ("look_up_a_word_in_the_dictionary", "count_the_words_of_a_book")), "tools"),
            ((ASKED, "Answer in one word."), "system"),
            ((OTHER, RULES), "messages"),
        ):
            told = diagnose(first, *prompt)
            assert reason(told) == changed(name, part)
            in_numbers = told["rootstock"]
            told = told.get("cache_miss_reason", told)
            missed = told.get("cache_missed_input_tokens", told.get("cache_missed_tokens"))
            assert 0 < missed <= in_numbers["prompt_tokens"] - in_numbers["cached_tokens"]
            assert in_numbers["cause"] == "diverged"
            assert in_numbers["position"] == in_numbers["cached_tokens"]
            assert in_numbers["missed_tokens"] == in_numbers["prompt_tokens"] - in_numbers["cached_tokens"]


@each_api
@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_that_repeats_an_earlier_one_hits(serve: Any, name: str, streams: bool) -> None:
    with serve() as served:
        api = APIS[name](served.client)
        told = (api.diagnose_stream if streams else api.diagnose)(api.ask())
        if name == "messages":
            assert told is None
        else:
            assert told["type"] == "cache_hit"
            assert cause(told) == "none"


@each_api
def test_a_change_costs_nothing_if_another_request_has_left_the_prompt(serve: Any, name: str) -> None:
    with serve() as served:
        api = APIS[name](served.client)
        first = api.ask()
        api.ask(OTHER)
        told = api.diagnose(first, OTHER)
        assert cause(told) == "none"
        if name == "messages":  # compares the requests, whatever the cache holds
            expected = {"type": "messages_changed", "cache_missed_input_tokens": 0}
            assert told["cache_miss_reason"] == expected
        else:
            assert told["type"] == "cache_hit"


@each_api
def test_a_request_that_does_not_ask_is_told_nothing(served: Any, name: str) -> None:
    api = APIS[name](served.client)
    body = api.post().json()
    assert "prompt_cache_diagnostics" not in body
    assert body.get("diagnostics") is None
    assert "prompt_cache_diagnostics" not in api.post(stream=True).text


def test_a_first_turn_of_anthropics_asks_without_an_earlier_message(serve: Any) -> None:
    with serve() as served:
        api = APIS["messages"](served.client)
        told = api.diagnose(None)
        assert told["cache_miss_reason"] is None
        assert cause(told) == "nothing_cached"
        assert api.diagnose_stream(None) is None


@each_api
def test_an_earlier_answer_that_is_unknown_or_cleared_is_not_found(serve: Any, name: str) -> None:
    kind = "previous_message_not_found" if name == "messages" else "comparison_response_not_found"
    with serve() as served:
        api = APIS[name](served.client)
        first = api.ask()
        assert reason(api.diagnose("unknown")) == kind
        served.client.post("/v1/cache/clear")
        told = api.diagnose(first)
        assert (reason(told), cause(told)) == (kind, "nothing_cached")


@each_api
@pytest.mark.behaviour(9)
def test_other_tenants_answers_and_prefixes_do_not_count(serve: Any, name: str) -> None:
    with serve(server=ServerConfig(tenant_keys={"key-of-a": "a", "key-of-b": "b"})) as served:
        mine, theirs = (
            APIS[name](served.client, headers={"Authorization": f"Bearer key-of-{tenant}"}) for tenant in "ab"
        )
        first = theirs.ask()
        told = mine.diagnose(first)
        assert "not_found" in reason(told)
        assert cause(told) == "nothing_cached"
        told = mine.diagnose(mine.ask(), OTHER)
        assert (reason(told), cause(told)) == (changed(name, "messages"), "diverged")
        served.client.post("/v1/cache/clear", headers=mine.headers)
        assert "not_found" not in reason(theirs.diagnose(first, OTHER)), "only one's own are cleared"
        answered = mine.post(cache_salt="inner", **mine.asking(first)).json()
        assert cause(mine.told(answered)) == "nothing_cached"


@each_api
def test_a_span_that_changes_is_a_cause_and_its_text_stays_on_the_server(serve: Any, name: str) -> None:
    with serve() as served:
        api = APIS[name](served.client)
        first = api.ask(ASKED, "Session 7f3e of a client. " + RULES)
        response = api.post(ASKED, "Session 91 of a client. " + RULES, **api.asking(first))
        told = api.told(response.json())
        assert (reason(told), cause(told)) == (changed(name, "system"), "volatile_span")
        assert set(told["rootstock"]) == {
            "cause", "position", "prompt_tokens", "cached_tokens", "missed_tokens",
        }  # fmt: skip
        assert "7f3e" not in json.dumps(told)


@each_api
def test_a_model_without_a_checkpoint_there_is_a_cause(serve: Any, name: str) -> None:
    with serve(families=(FULL, STATE)) as served:
        api = APIS[name](served.client)
        told = api.diagnose(api.ask(), ASKED, RULES[:-20] + "other rules of it.")
        assert cause(told) == "no_checkpoint"
        assert told["rootstock"]["missed_tokens"] > 0


@each_api
def test_an_eviction_is_a_cause_although_no_part_has_changed(serve: Any, name: str) -> None:
    with serve(blocks=40, context_limit=300) as served:
        api = APIS[name](served.client)
        first = api.ask()
        served.complete("x" * 250, max_tokens=1)
        told = api.diagnose(first)
        assert cause(told) == "evicted"
        assert reason(told) == (None if name == "messages" else "unavailable")


@each_api
def test_a_cache_that_is_off_is_a_cause(serve: Any, name: str) -> None:
    with serve(reuse=False) as served:
        api = APIS[name](served.client)
        assert cause(api.diagnose(api.ask())) == "cache_off"


@each_api
def test_tokens_that_are_computed_although_the_disk_has_them_are_a_cause(
    serve: Any, tmp_path: Path, name: str
) -> None:
    with serve(blocks=40, context_limit=300, tier=TierConfig(tmp_path / "tier")) as served:
        api = APIS[name](served.client)
        first = api.ask()
        served.complete("x" * 250, max_tokens=1)
        engine = served.assembly.engine
        connector = engine.tier_connector
        wait_until(lambda: engine.stats().tier.stored_records > 0)
        slow, fast = LoadSpeed(), PrefillSpeed()
        slow.observe(1, 1000, 100.0)
        fast.observe([(0, 1000)], 1e-3)
        speeds = connector.load_or_recompute
        speeds.load_speed, speeds.prefill_speed = slow, fast
        told = api.diagnose(first)
        assert cause(told) == "on_disk"
        assert 0 < told["rootstock"]["missed_tokens"] <= told["rootstock"]["prompt_tokens"]


def test_an_edit_of_the_history_is_compared_as_it_is_rendered(serve: Any) -> None:
    """Anthropic's edits render the prompt several times. One fingerprint is kept, of the prompt that was used."""
    with serve() as served:
        api = APIS["messages"](served.client)

        def fields(turns: int) -> Json:
            messages: list[Json] = [{"role": "user", "content": ASKED}]
            for turn in range(turns):
                thought = {"type": "thinking", "thinking": f"The thought {turn}. " * 9, "signature": "x"}
                messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]})
                messages.append({"role": "user", "content": f"And {turn}?"})
            edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
            return {"messages": messages, "context_management": {"edits": [edit]}}

        first = api.ask(**fields(1))
        assert reason(api.diagnose(first, **fields(2))) == "messages_changed"
        kept = fields(2)["messages"]
        told = api.diagnose(first, **fields(1) | {"context_management": None, "messages": kept})
        assert told is None or reason(told) is None, "nothing was removed"


def test_a_dropped_volatile_head_is_no_change(serve: Any) -> None:
    with serve() as served:
        api = APIS["messages"](served.client)
        head = "x-anthropic-billing-header: cc_version=1.2.3."
        first = api.ask(ASKED, head + "3a3\n" + RULES)
        assert api.diagnose(first, ASKED, head + "77f\n" + RULES) is None


def test_the_choice_with_the_fewest_cached_tokens_is_diagnosed_and_usage_comes_beside_it(serve: Any) -> None:
    with serve() as served:
        api = APIS["chat"](served.client)
        first = api.ask()
        told = api.diagnose(first, OTHER, RULES, (), n=3)
        assert cause(told) == "diverged"
        text = api.post("Who?", stream=True, stream_options={"include_usage": True}, **api.asking(first)).text
        last = api.of_stream(text)
        assert cause(last["prompt_cache_diagnostics"]) == "diverged"
        assert last["usage"]["completion_tokens"] == 1


def test_a_stored_response_keeps_its_diagnostics(serve: Any) -> None:
    with serve() as served:
        api = APIS["responses"](served.client)
        made = api.post(OTHER, **api.asking(api.ask())).json()
        stored = served.client.get(f"/v1/responses/{made['id']}").json()
        assert stored["prompt_cache_diagnostics"] == made["prompt_cache_diagnostics"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/messages", "diagnostics", "yes"),
        ("/v1/messages", "diagnostics", {"previous_message_id": 5}),
        ("/v1/messages", "diagnostics", {"previous_message_id": "x" * 100_000}),
        ("/v1/chat/completions", "prompt_cache_options", []),
        ("/v1/chat/completions", "prompt_cache_options", {"comparison_response_id": {"a": 1}}),
        ("/v1/responses", "prompt_cache_options", {"comparison_response_id": "x" * 100_000}),
    ],
)
def test_an_id_that_is_no_short_text_is_refused(served: Any, path: str, field: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value}
    if path == "/v1/responses":
        body = {"input": "x", field: value}
    response = served.client.post(path, json=body)
    assert response.status_code == 400
    assert field in response.json()["error"]["message"] + str(response.json()["error"].get("param"))


@each_api
def test_an_id_of_half_a_character_is_refused_or_not_found(served: Any, name: str) -> None:
    api = APIS[name](served.client)
    body = json.dumps({**api.body(ASKED, RULES, ()), **api.asking("\ud800")})
    response = served.client.post(api.path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400), response.text
