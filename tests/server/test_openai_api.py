"""OpenAI's API over the oracle runtime: chats, completions, streams, and the routes of state and cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootstock.config import EngineConfig, ServerConfig, TierConfig
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.tiers.base import Refusal
from server.conftest import GREEDY, assert_error, user

CHAT = "/v1/chat/completions"


def text_of(tokens: list[int]) -> str:
    return ByteTokenizer().decode(tokens)


# ---- chat


def test_a_chat_is_answered_with_the_models_tokens(served: Any) -> None:
    answer = served.chat("What is a radix tree?", max_tokens=12, **GREEDY).json()
    prompt = served.chat_prompt("What is a radix tree?")
    expected = served.greedy(prompt, 12)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(expected), "refusal": None}
    assert choice["finish_reason"] == ("length" if len(expected) == 12 else "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == len(prompt) + 12


def test_drafts_show_in_usage_and_metrics_and_change_no_answer(serve: Any) -> None:
    with serve(EngineConfig(draft_tokens=4)) as served:
        fields = {**GREEDY, "max_tokens": 40, "ignore_eos": True}
        answers = [served.chat("again", **fields).json() for _ in range(30)]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        details = [answer["usage"]["completion_tokens_details"] for answer in answers]
        assert all(answer["usage"]["completion_tokens"] == 40 for answer in answers)
        drafted = sum(sum(of_one.values()) for of_one in details)
        assert served.metric("rootstock_draft_tokens_total") == drafted
        accepted = sum(of_one["accepted_prediction_tokens"] for of_one in details)
        assert served.metric("rootstock_accepted_draft_tokens_total") == accepted
        assert served.client.get("/v1/models").json()["data"][0]["speculation"] == "ngram"


def test_a_stream_begins_with_the_role_ends_with_a_reason_and_adds_up_to_the_whole_answer(
    served: Any,
) -> None:
    whole = served.chat("stream me", max_tokens=20, **GREEDY).json()["choices"][0]
    chunks = served.chunks(CHAT, messages=user("stream me"), max_tokens=20, **GREEDY)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert deltas[-1]["delta"] == {}
    reasons = [delta["finish_reason"] for delta in deltas]
    assert reasons == [None] * (len(deltas) - 1) + [whole["finish_reason"]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == whole["message"]["content"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_with_the_last_chunk_and_is_null_in_the_others(served: Any) -> None:
    chunks = served.chunks(
        CHAT,
        messages=user("usage please"),
        max_tokens=4,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens"] == len(served.chat_prompt("usage please"))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("include", [True, False])
def test_usage_can_come_with_every_chunk(served: Any, path: str, include: bool) -> None:
    """`continuous_usage_stats` of vLLM's clients, which counts only beside `include_usage`."""
    prompt = {"messages": user("more")} if path == CHAT else {"prompt": ["more", "and"]}
    for n in (1, 2):
        fields = {**prompt, "n": n, "max_tokens": 5, "ignore_eos": True}
        whole = served.client.post(path, json=fields).json()["usage"]
        options = {"include_usage": include, "continuous_usage_stats": True}
        *chunks, last = served.chunks(path, stream_options=options, **fields)
        if not include:
            assert all("usage" not in chunk for chunk in [*chunks, last])
            continue
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == whole["completion_tokens"]
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == whole["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_last_message_is_continued_without_another_field(served: Any) -> None:
    messages = [*user("Count."), {"role": "assistant", "content": "One, two"}]
    begun = {"messages": messages, "continue_final_message": True, **GREEDY, "max_tokens": 4}
    answers = [
        served.client.post(CHAT, json=begun | more)
        for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None})
    ]
    assert all(answer.is_success for answer in answers)
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    explained = served.client.post("/v1/cache/explain", json=begun | {"max_tokens": None}).json()
    new_turn = served.client.post("/v1/cache/explain", json={"messages": messages}).json()
    assert explained["prompt_tokens"] < new_turn["prompt_tokens"]
    refused = served.client.post(CHAT, json=begun | {"add_generation_prompt": True})
    assert_error(refused, 400, "invalid_parameter", "left out", param="add_generation_prompt")


def test_cached_tokens_equal_the_prompt_tokens_that_were_not_computed(served: Any) -> None:
    for text in ("a first long question about trees", "a first long question about forests"):
        before = served.assembly.engine.stats()
        usage = served.chat(text, max_tokens=1, ignore_eos=True).json()["usage"]
        after = served.assembly.engine.stats()
        computed = after.counters.computed_tokens - before.counters.computed_tokens
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] - cached == computed
        assert cached == after.cache.hit_tokens - before.cache.hit_tokens
    assert cached >= len("a first long question about ")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_share_their_prompt_which_is_counted_once(served: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 6, "ignore_eos": True, "temperature": 2.0}
    text = f"{'streamed' if stream else 'whole'} answers to a question that is longer than a block"
    prompt = served.chat_prompt(text)
    before = served.assembly.engine.stats()
    if stream:
        options = {"include_usage": True}
        chunks = served.chunks(CHAT, messages=user(text), stream_options=options, **fields)
        usage = chunks.pop()["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert {choice["index"] for choice in choices} == {0, 1, 2}
        assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
        texts = [""] * 3
        for choice in choices:
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        answer = served.chat(text, **fields).json()
        usage = answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    computed = served.assembly.engine.stats().counters.computed_tokens - before.counters.computed_tokens
    assert len(set(texts)) == 3  # one seed, three different choices
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 18
    # The first choice computes the prompt, each other one its last token; then each has five decodes.
    not_cached = len(prompt) - usage["prompt_tokens_details"]["cached_tokens"]
    assert computed == not_cached + 2 + 3 * 5


def test_a_seed_makes_an_answer_repeatable_beside_other_requests(served: Any) -> None:
    fields = {"seed": 11, "temperature": 1.5, "max_tokens": 16, "top_p": 0.9, "n": 2}
    first = served.chat("seeded", **fields).json()["choices"]
    served.chat("noise", max_tokens=5)
    again = served.chat("seeded", **fields).json()["choices"]
    assert [one["message"] for one in first] == [one["message"] for one in again]


def test_logprobs_name_the_token_its_bytes_and_the_best_alternatives(served: Any) -> None:
    answer = served.chat("log", max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY).json()
    content = answer["choices"][0]["logprobs"]["content"]
    tokens = served.greedy(served.chat_prompt("log"), 5)
    assert [entry["bytes"] for entry in content] == [
        list(ByteTokenizer().token_bytes(token)) for token in tokens
    ]
    logits = served.runtime.expected_logits(np.array(served.chat_prompt("log"), np.int32)).astype(np.float64)
    expected = logits.max() - math.log(np.exp(logits).sum())
    assert content[0]["logprob"] == pytest.approx(expected, abs=1e-5)
    assert len(content[0]["top_logprobs"]) == 3
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    plain = served.chat("log", max_tokens=5, **GREEDY).json()
    assert plain["choices"][0]["logprobs"] is None


def test_streamed_logprobs_are_those_of_the_whole_answer(served: Any) -> None:
    fields = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = served.chat("same", **fields).json()["choices"][0]["logprobs"]["content"]
    streamed = []
    for chunk in served.chunks(CHAT, messages=user("same"), **fields):
        streamed += (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    assert streamed == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_cut_from_it(served: Any, stream: bool) -> None:
    # Letters only: any part of the text can be the stop string.
    bias = {str(token): -100 for token in range(PADDED_LOGITS) if not 97 <= token < 123}
    fields: dict[str, Any] = {"max_tokens": 30, "logit_bias": bias, **GREEDY}
    text = served.chat("stop", **fields).json()["choices"][0]["message"]["content"]
    assert len(text) == 30
    stop = text[12:15]
    until = text[: text.index(stop)]
    if stream:
        chunks = served.chunks(CHAT, messages=user("stop"), stop=["??", stop], **fields)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == until
        end = choices[-1]
    else:
        end = served.chat("stop", stop=stop, **fields).json()["choices"][0]
        assert end["message"]["content"] == until
    assert end["finish_reason"] == "stop"
    assert end["stop_reason"] == stop


def test_a_stop_token_ends_the_answer_and_has_no_text(served: Any) -> None:
    tokens = served.greedy(served.chat_prompt("token"), 8)
    answer = served.chat("token", max_tokens=8, stop_token_ids=[tokens[4]], **GREEDY).json()
    first = tokens.index(tokens[4])
    assert answer["choices"][0]["message"]["content"] == text_of(tokens[:first])
    assert answer["choices"][0]["stop_reason"] == tokens[4]
    assert answer["usage"]["completion_tokens"] == first + 1


def test_end_of_sequence_ends_an_answer_unless_it_is_ignored_or_too_early(served: Any) -> None:
    only_end = {"logit_bias": {str(ByteTokenizer.END): 100}}
    assert served.chat("end", max_tokens=9, **only_end).json()["usage"]["completion_tokens"] == 1
    ignored = served.chat("end", max_tokens=9, ignore_eos=True, **only_end).json()
    assert ignored["usage"]["completion_tokens"] == 9
    assert ignored["choices"][0]["message"]["content"] == ""
    liked = {"logit_bias": {str(ByteTokenizer.END): 99}, "temperature": 0}
    late = served.chat("end", max_tokens=9, min_tokens=4, **liked).json()
    assert late["usage"]["completion_tokens"] == 5
    assert late["choices"][0]["finish_reason"] == "stop"


def test_max_completion_tokens_overrides_max_tokens(served: Any) -> None:
    answer = served.chat("m", max_tokens=9, max_completion_tokens=2, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 2


def test_an_answer_without_a_limit_ends_with_the_context(serve: Any) -> None:
    with serve(context_limit=40) as served:
        answer = served.chat("to the end", ignore_eos=True).json()
        assert answer["usage"]["total_tokens"] == 40
        assert answer["choices"][0]["finish_reason"] == "length"


def test_null_means_the_default(served: Any) -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "seed",
        "logit_bias",
        "logprobs",
        "tools",
        "user",
    ]
    assert served.chat("x", max_tokens=1, **dict.fromkeys(fields)).status_code == 200


def test_the_models_own_sampling_defaults_apply_to_absent_fields(serve: Any) -> None:
    with serve(defaults=SamplingDefaults(temperature=0.0)) as served:
        expected = text_of(served.greedy(served.chat_prompt("default"), 10))
        assert served.chat("default", max_tokens=10).json()["choices"][0]["message"]["content"] == expected
        hot = served.chat("default", max_tokens=10, temperature=3.0, seed=1).json()
        assert hot["choices"][0]["message"]["content"] != expected


# ---- completions


def test_a_completion_takes_text_token_ids_or_a_list_of_either(served: Any) -> None:
    ids = ByteTokenizer().encode("once upon").tolist()
    expected = text_of(served.greedy(ids, 6))
    for prompt, count in (("once upon", 1), (ids, 1), (["once upon", "once upon"], 2), ([ids, ids, ids], 3)):
        answer = served.complete(prompt, max_tokens=6, **GREEDY).json()
        assert [choice["text"] for choice in answer["choices"]] == [expected] * count
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["prompt_tokens"] == count * len(ids)
        assert answer["object"] == "text_completion"
    mixed = served.complete(["once upon", ids], max_tokens=6, n=2, **GREEDY).json()
    assert [choice["text"] for choice in mixed["choices"]] == [expected] * 4
    assert mixed["usage"]["prompt_tokens"] == 2 * len(ids)


def test_a_completion_has_16_tokens_by_default(served: Any) -> None:
    assert served.complete("x", ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_a_streamed_completion_adds_up_to_the_whole_one(served: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "echo": True, **GREEDY}
    whole = served.complete("stream on", **fields).json()["choices"][0]
    chunks = served.chunks("/v1/completions", prompt="stream on", **fields)
    assert chunks[0]["choices"][0]["text"] == "stream on"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_and_no_completion_scores_the_prompt(served: Any, as_ids: bool) -> None:
    text = "to be scored"
    ids = ByteTokenizer().encode(text).tolist()
    [choice] = served.complete(ids if as_ids else text, max_tokens=0, echo=True, logprobs=2).json()["choices"]
    assert choice["text"] == text
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for i in range(1, len(ids)):
        logits = served.runtime.expected_logits(np.array(ids[:i], np.int32)).astype(np.float64)
        expected = logits[ids[i]] - math.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert logprobs["token_logprobs"][i] == pytest.approx(expected, abs=1e-4)
        assert text[i] in logprobs["top_logprobs"][i]
        assert 1 <= len(logprobs["top_logprobs"][i]) <= 3


def test_logprobs_of_the_completion_follow_those_of_the_echoed_prompt(served: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "echo": True, "logprobs": 0, "ignore_eos": True, **GREEDY}
    [choice] = served.complete("abc", **fields).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 6
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    chunks = served.chunks("/v1/completions", prompt="abc", **fields)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [lp for part in streamed for lp in part["token_logprobs"]] == choice["logprobs"]["token_logprobs"]


# ---- tenants and hints


def test_a_salt_separates_tenants_and_a_prompt_cache_key_does_not(served: Any) -> None:
    def cached(headers: dict[str, str] | None = None, **fields: Any) -> int:
        body = {"messages": user("a secret of some length"), "max_tokens": 1, **fields}
        usage = served.client.post(CHAT, json=body, headers=headers).json()["usage"]
        assert usage["prompt_tokens"] == len(served.chat_prompt("a secret of some length"))
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    served.client.post("/v1/cache/clear")
    everything = len(served.chat_prompt("a secret of some length")) - 1
    assert cached() == 0
    assert cached(prompt_cache_key="mine") == everything  # a hint, and never a key
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") == everything
    assert cached(cache_salt="b") == 0
    assert cached({"X-Cache-Salt": "a"}) == 0  # the header names another namespace than the field
    assert cached({"X-Cache-Salt": "a"}) == everything
    assert cached({"X-Cache-Salt": "a"}, cache_salt="b") == 0
    assert cached(cache_salt="a\0b") == 0


# ---- state, cache


def test_the_served_model_is_listed_with_its_limit(served: Any) -> None:
    [model] = served.client.get("/v1/models").json()["data"]
    assert model["id"] == "fake"
    assert model["max_model_len"] == 4096
    assert served.client.get("/v1/models/fake").json() == model


def test_health_of_a_running_and_of_a_stopped_engine(serve: Any) -> None:
    with serve() as served:
        healthy = served.client.get("/health")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
        served.assembly.engine.stop()
        dead = served.client.get("/health")
        assert (dead.status_code, dead.json()["status"]) == (503, "dead")
        answer = served.chat("anyone?")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stopped"
        assert 'rootstock_alive{model_name="fake"} 0.0' in served.client.get("/metrics").text


def test_stats_equal_a_recount_and_clearing_frees_all_blocks(serve: Any) -> None:
    with serve() as served:
        for text in ("one two three", "one two four", "one"):
            served.complete(text, max_tokens=3, ignore_eos=True)
        stats = served.client.get("/v1/cache/stats").json()["cache"]
        assert stats["asked_tokens"] == stats["hit_tokens"] + stats["missed_tokens"] == 13 + 12 + 3
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
        assert stats["resident_bytes"] == stats["cached_blocks"] * stats["block_bytes"]
        cleared = served.client.post("/v1/cache/clear").json()
        resident = {"blocks": stats["cached_blocks"], "bytes": stats["resident_bytes"]}
        assert cleared == resident | {"later": False, "models": cleared["models"]}
        assert served.client.get("/v1/cache/stats").json()["cache"]["cached_blocks"] == 0


@pytest.mark.parametrize("tells", ["own", "all"])
def test_explain_names_the_divergence_in_tokens_and_in_text(serve: Any, tells: str) -> None:
    with serve(server=ServerConfig(explain=tells)) as served:
        served.chat("The capital of France", max_tokens=1)
        body = {"messages": user("The capital of Spain")}
        found = served.client.post("/v1/cache/explain", json=body).json()
        common = len(served.chat_prompt("The capital of ")) - 2  # without the end of the turn
        assert found["matched_tokens"] == common
        assert found["cap"] == ("diverged" if tells == "all" else "not_cached")
        assert found["divergence"]["position"] == common
        assert found["divergence"]["before"].endswith("The capital of ")
        assert found["divergence"]["asked"] == {"token": ord("S"), "text": "S"}
        assert found["divergence"]["cached"] == (
            [{"token": ord("F"), "text": "F"}] if tells == "all" else None
        )
        assert "'S'" in found["message"]
        assert ("'F'" in found["message"]) == (tells == "all")
        for name in ("evicted_tokens", "pending_tokens"):
            assert found[name] == (0 if tells == "all" else None)


def test_explain_of_whole_prompts_and_of_unknown_ones_changes_no_stats(serve: Any) -> None:
    with serve() as served:

        def explain(**body: Any) -> Any:
            return served.client.post("/v1/cache/explain", json=body).json()

        assert explain(prompt="nothing yet")["cap"] == "nothing_cached"
        served.complete("all of this", max_tokens=0)
        before = served.assembly.engine.stats().cache
        whole = explain(prompt="all of this")
        assert (whole["cap"], whole["matched_tokens"], whole["divergence"]) == ("last_token", 10, None)
        assert explain(prompt=list(b"all of this")) == whole
        assert explain(prompt="all of this", cache_salt="other")["cap"] == "nothing_cached"
        assert served.assembly.engine.stats().cache == before


def test_stats_keep_the_keys_of_counters(serve: Any, tmp_path: Path) -> None:
    """`asdict` would turn Counter(loaded=2) into a Counter of its items: {"loaded,2": 1}."""
    with serve(tier=TierConfig(tmp_path / "tier"), blocks=200) as served:
        connector = served.assembly.engine.tier_connector
        assert connector is not None
        connector.counters.loads["loaded"] += 2777
        connector.counters.choices["load"] += 3
        connector.counters.stores_refused[Refusal.QUEUE_FULL] += 4
        counters = served.client.get("/v1/cache/stats").json()["tier"]["counters"]
    assert counters["loads"] == {"loaded": 2777}
    assert counters["choices"] == {"load": 3}
    assert counters["stores_refused"] == {"queue_full": 4}


def test_metrics_count_requests_and_tokens(serve: Any) -> None:
    with serve() as served:
        for _ in range(2):
            served.complete("count these", max_tokens=4, ignore_eos=True)
        served.complete("", max_tokens=4)
        assert served.metric("rootstock_prompt_tokens_total") == 22
        assert served.metric("rootstock_cached_prompt_tokens_total") == 10
        assert served.metric("rootstock_completion_tokens_total") == 8
        assert served.metric("rootstock_requests_total", outcome="ok", route="/v1/completions") == 2
        assert served.metric("rootstock_ttft_seconds_count") == 2
        assert served.metric("rootstock_itl_seconds_count") == 6
        assert served.metric("rootstock_engine_requests", state="running") == 0


def test_metrics_show_the_prefill_tokens_that_fit_the_itl_target(serve: Any) -> None:
    with serve(EngineConfig(itl_target_s=3600.0, chunk_tokens=100)) as served:
        served.complete("count these", max_tokens=4, ignore_eos=True)
        assert served.metric("rootstock_prefill_chunk_tokens") == 99, "one token of the step is a decode"


def test_an_alias_names_the_model_in_requests_answers_and_lists(serve: Any) -> None:
    with serve(server=ServerConfig(aliases=("gpt-4o", "a/b"))) as served:
        name = served.assembly.description.name
        listed = served.client.get("/v1/models").json()["data"]
        assert [(one["id"], one["root"]) for one in listed] == [(name, name), ("gpt-4o", name), ("a/b", name)]
        for asked, answered in (("gpt-4o", "gpt-4o"), ("a/b", "a/b"), (name, name), (None, name)):
            for answer in (
                served.chat("x", max_tokens=1, model=asked),
                served.complete("x", max_tokens=1, model=asked),
            ):
                assert answer.json()["model"] == answered
            chunks = served.chunks("/v1/completions", prompt="x", max_tokens=1, model=asked)
            assert {chunk["model"] for chunk in chunks} == {answered}
            assert served.client.get(f"/v1/models/{answered}").json()["id"] == answered
        assert_error(served.chat("x", model="gpt-4"), 404, "model_not_found", "gpt-4", "--alias")
        assert_error(served.chat("x", model="*"), 404, "model_not_found")
        assert served.client.get("/v1/models/gpt-4").status_code == 404


def test_any_valid_name_is_accepted_unless_aliases_are_given(serve: Any) -> None:
    with serve(server=ServerConfig()) as served:
        assert served.chat("x", max_tokens=1, model="any").json()["model"] == "any"
        assert len(served.client.get("/v1/models").json()["data"]) == 1
    with serve(server=ServerConfig(aliases=("*", "gpt-4o"))) as served:
        name = served.assembly.description.name
        assert [one["id"] for one in served.client.get("/v1/models").json()["data"]] == [name, "gpt-4o"]
        assert served.client.get("/v1/models/any/thing").json()["id"] == "any/thing"
        for asked, answered in (("any \u2713", "any \u2713"), ("*", "*"), ("", name)):
            assert served.chat("x", max_tokens=1, model=asked).json()["model"] == answered
        half = served.client.post(
            "/v1/completions",
            content=b'{"model": "\\ud800", "prompt": "x"}',
            headers={"Content-Type": "application/json"},
        )
        assert_error(half, 400, "invalid_parameter", param="model")
