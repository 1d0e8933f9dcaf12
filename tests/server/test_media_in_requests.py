"""Images, audio, video and files in requests of every API: a line of the prompt, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rootstock.config import EngineConfig, ServerConfig
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.conftest import Served, assert_error, served_by_oracle
from text.prompts.chat_tokenizers import chat_tokenizer, tokenizer_of

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

IMAGE_LINE = "[An image, which this model cannot see]"
AUDIO_LINE = "[An audio recording, which this model cannot hear]"
VIDEO_LINE = "[A video, which this model cannot see]"
FILE_LINE = "[A file, which this model cannot read]"
NAMED_LINE = "[The file 'plan.pdf', which this model cannot read]"


def data(seed: str) -> str:
    """Returns the bytes of a medium, which differ by `seed` and are no sound base64."""
    return f"data:application/octet-stream;base64,{seed * 40}%"


def of_chat(seed: str) -> Iterator[tuple[Json, str]]:
    yield {"type": "image_url", "image_url": {"url": data(seed), "detail": "low"}}, IMAGE_LINE
    yield {"type": "image_url", "image_url": {"url": f"http://192.0.2.1/{seed}.png"}}, IMAGE_LINE
    yield {"type": "input_audio", "input_audio": {"data": data(seed), "format": "wav"}}, AUDIO_LINE
    yield {"type": "video_url", "video_url": {"url": data(seed)}}, VIDEO_LINE
    yield {"type": "file", "file": {"file_data": data(seed), "filename": "plan.pdf"}}, NAMED_LINE
    yield {"type": "file", "file": {"file_id": seed}}, FILE_LINE
    yield {"type": "document", "source": {"type": "base64", "data": data(seed)}}, FILE_LINE
    yield {"type": "document_url", "document_url": data(seed)}, FILE_LINE


def of_responses(seed: str) -> Iterator[tuple[Json, str]]:
    yield {"type": "input_image", "image_url": data(seed), "detail": "auto"}, IMAGE_LINE
    yield {"type": "input_image", "file_id": seed}, IMAGE_LINE
    yield {"type": "input_audio", "input_audio": {"data": data(seed), "format": "mp3"}}, AUDIO_LINE
    yield {"type": "input_video", "video_url": data(seed)}, VIDEO_LINE
    yield {"type": "input_file", "file_data": data(seed), "filename": "plan.pdf"}, NAMED_LINE
    yield {"type": "file", "file": {"file_data": data(seed), "filename": "plan.pdf"}}, NAMED_LINE
    yield {"type": "input_file", "filename": f"{'p' * 2_000}.pdf"}, NAMED_LINE.replace("plan.pdf", "p" * 128)
    yield {"type": "input_file", "file_url": f"http://192.0.2.1/{seed}"}, FILE_LINE
    yield {"type": "computer_screenshot", "image_url": data(seed)}, IMAGE_LINE


def of_messages(seed: str) -> Iterator[tuple[Json, str]]:
    for source in (
        {"type": "base64", "media_type": "image/png", "data": data(seed)},
        {"type": "url", "url": f"http://192.0.2.1/{seed}"},
        {"type": "file", "file_id": seed},
    ):
        yield {"type": "image", "source": source}, IMAGE_LINE
        yield {"type": "document", "source": source, "title": "plan.pdf"}, NAMED_LINE
        yield {"type": "document", "source": source, "context": "Of May"}, f"Of May\n{FILE_LINE}"
    inner = [{"type": "text", "text": "All"}, {"type": "image", "source": {"data": data(seed)}}]
    yield {"type": "document", "source": {"type": "content", "content": inner}}, f"All\n{IMAGE_LINE}"
    found = {"type": "search_result", "title": "T", "source": "S", "content": inner}
    yield found, f"T\nS\nAll\n{IMAGE_LINE}"
    yield {"type": "container_upload", "file_id": seed}, FILE_LINE


USER = {"role": "user", "content": "Go on."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat_place(role: str) -> Callable[[list[Json]], Json]:
    def body(content: list[Json]) -> Json:
        message: Json = {"role": role, "content": content}
        if role in ("system", "developer"):
            return {"messages": [message, USER]}
        if role == "assistant":
            return {"messages": [USER, message, USER]}
        if role == "tool":
            calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            return {"messages": [USER, calls, {**message, "tool_call_id": "call00001"}]}
        return {"messages": [message]}

    return body


def response_place(kind: str) -> Callable[[list[Json]], Json]:
    def body(content: list[Json]) -> Json:
        if kind in ("user", "assistant", "system", "developer"):
            message = {"role": kind, "content": content}
            return {"input": [message] if kind == "user" else [message, USER]}
        calls: dict[str, Json] = {
            "function_call": {"name": "look", "arguments": "{}"},
            "custom_tool_call": {"name": "look", "input": ""},
            "local_shell_call": {"action": {"type": "exec", "command": ["ls"]}},
            "computer_call": {"action": {"type": "screenshot"}},
        }
        output: Any = content
        if kind == "computer_call":  # the output is one object
            output = content[-1]
        call = {"type": kind, "call_id": "c", **calls[kind]}
        return {"input": [USER, call, {"type": f"{kind}_output", "call_id": "c", "output": output}]}

    return body


def message_place(kind: str) -> Callable[[list[Json]], Json]:
    def body(content: list[Json]) -> Json:
        match kind:
            case "system":
                return {"system": content, "messages": [USER]}
            case "later system":
                return {"messages": [USER, {"role": "system", "content": content}, USER]}
            case "assistant":
                return {"messages": [USER, {"role": "assistant", "content": content}, USER]}
            case "tool_result":
                use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
                result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
                answers = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
                return {"messages": [USER, *answers]}
        return {"messages": [{"role": "user", "content": content}]}

    return body


# Each case: the route, the body around a content, and the parts of that API.
Place = tuple[str, Callable[[list[Json]], Json], Callable[[str], Iterator[tuple[Json, str]]]]
PLACES: dict[str, Place] = {
    **{f"chat {role}": (CHAT, chat_place(role), of_chat)
       for role in ("system", "developer", "user", "assistant", "tool")},
    **{f"responses {kind}": (RESPONSES, response_place(kind), of_responses)
       for kind in ("system", "developer", "user", "assistant", "function_call", "custom_tool_call",
                    "local_shell_call", "computer_call")},
    **{f"messages {kind}": (MESSAGES, message_place(kind), of_messages)
       for kind in ("system", "later system", "user", "assistant", "tool_result")},
}  # fmt: skip


def in_content(route: str, part: Json) -> list[Json]:
    kind = "input_text" if route == RESPONSES else "text"
    return [{"type": kind, "text": "What is this?"}, part]


def as_text(route: str, line: str) -> Json:
    return {"type": "input_text" if route == RESPONSES else "text", "text": line}


def posted(served: Served, route: str, body: Json) -> Json:
    """Posts a body, whole and streamed, and returns the whole answer."""
    body = {"temperature": 0, **body, ("max_output_tokens" if route == RESPONSES else "max_tokens"): 4}
    streamed = served.client.post(route, json=body | {"stream": True})
    assert streamed.status_code == 200, streamed.text
    assert '"error":{' not in streamed.text.replace(" ", "")
    answer = served.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tokens_of(answer: Json) -> tuple[int, int]:
    """Returns the tokens of the prompt, and those that were cached."""
    usage = answer["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


@pytest.fixture(scope="module", params=["bytes", "qwen3", "llama_3", "deepseek"])
def any_template(request: Any) -> Iterator[Served]:
    if request.param == "bytes":
        with served_by_oracle() as served:
            yield served
        return
    tokenizer = chat_tokenizer(request.param)
    with served_by_oracle(tokenizer=tokenizer, vocab_size=tokenizer_of("bytes").get_vocab_size()) as served:
        yield served


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("place", PLACES)
def test_a_medium_anywhere_is_a_line_that_depends_on_none_of_its_bytes(
    any_template: Served, place: str
) -> None:
    """The prompt is that of the line as text, so that a prefix with another image is found."""
    served = any_template
    route, body, parts = PLACES[place]
    pairs = list(zip(parts("a"), parts("b"), strict=True))
    if not isinstance(served.assembly.tokenizer, ByteTokenizer):
        pairs = pairs[::4]  # a template sees the line alone, whatever the part
    for (one, line), (other, _) in pairs:
        count, _ = tokens_of(posted(served, route, body(in_content(route, one))))
        for twin in (other, as_text(route, line)):
            answer = posted(served, route, body(in_content(route, twin)))
            assert tokens_of(answer) == (count, count - 1)
            warnings = answer.get("rootstock", {}).get("warnings", [])
            assert [warning["reason"][:20] for warning in warnings] == (
                ["the model does not r"] if twin is other else []
            )


@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("responses")])
def test_a_stored_medium_is_the_same_line_at_later_turns_and_none_of_its_bytes_is_kept(
    served: Served, place: str
) -> None:
    route, body, parts = PLACES[place]
    for part, _ in parts("e" * 5_000):
        junk = {"text": "f" * 20_000, "more": ["g" * 20_000], **{f"label{i}": "h" * 1_000 for i in range(20)}}
        given = body(in_content(route, part | junk))["input"]
        given = [{**item, "junk": "i" * 20_000} for item in given]
        first = posted(served, route, {"input": given})
        kept = served.client.get(f"{route}/{first['id']}/input_items").text
        assert len(kept) < 2_000, kept
        later: list[Json] = [
            {"input": [USER], "previous_response_id": first["id"]},
            {"input": [*given, *first["output"], USER]},
        ]
        stored, whole = (posted(served, route, asked) for asked in later)
        assert tokens_of(stored)[0] == tokens_of(whole)[0]
        assert tokens_of(stored)[1] >= tokens_of(first)[0]


@pytest.mark.parametrize("kind", ["message", "function_call_output"])
def test_a_content_of_one_part_that_is_no_list_is_stored_as_its_line(served: Served, kind: str) -> None:
    picture = {"type": "input_image", "image_url": "data:," + "e" * 20_000}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": kind, "call_id": "c", "output": picture}
    items = [USER, call, result] if kind != "message" else [{"role": "user", "content": picture}]
    first = posted(served, RESPONSES, {"input": items})
    assert len(served.client.get(f"{RESPONSES}/{first['id']}/input_items").text) < 2_000


def conversation_of(route: str, parts: list[Json], turns: list[tuple[str, str]]) -> Json:
    """Returns a body with a picture in the first question, and the turns that follow."""
    first: list[Any] = [{"role": "user", "content": in_content(route, parts[0])}]
    for answer, question in turns:
        first += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return {"input" if route == RESPONSES else "messages": first}


def text_of(answer: Json) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"] or "")
    blocks = answer["content"] if "content" in answer else answer["output"][-1]["content"]
    return "".join(block.get("text", "") for block in blocks)


@pytest.mark.parametrize(
    ("route", "parts"), [(CHAT, of_chat), (RESPONSES, of_responses), (MESSAGES, of_messages)]
)
def test_the_turns_after_an_image_are_cached_as_without_it(
    any_template: Served, route: str, parts: Any
) -> None:
    served = any_template
    found: list[list[tuple[int, int]]] = []
    for salt, shown in (("image", next(parts("z"))[0]), ("text", as_text(route, IMAGE_LINE))):
        turns: list[tuple[str, str]] = []
        counts = []
        for question in ("And now?", "And then?", "And last?"):
            body = {**conversation_of(route, [shown], turns), "cache_salt": salt}
            answer = posted(served, route, body)
            counts.append(tokens_of(answer))
            turns.append((text_of(answer), question))
        found.append(counts)
    with_image, with_text = found
    assert with_image == with_text
    assert all(cached >= before for (_, cached), (before, _) in zip(with_image[1:], with_image, strict=False))


@pytest.fixture(scope="module")
def idle() -> Iterator[Served]:
    with served_by_oracle(EngineConfig(idle_work=True)) as served:
        yield served


@pytest.mark.parametrize("place", PLACES)
def test_all_routes_of_a_prompt_count_the_same_tokens(idle: Served, place: str) -> None:
    """Counts, explanations, warm prompts and pins have the prompt of the answer."""
    served = idle
    route, body, parts = PLACES[place]
    name = route.removeprefix("/v1/")
    for number, (part, _) in enumerate(parts("c")):
        asked = {**body(in_content(route, part)), "cache_salt": f"{place}{number}"}
        counts = set()
        warmed = served.client.post(f"/v1/cache/warm/{name}?wait=true", json=asked)
        assert warmed.status_code == 200, warmed.text
        pinned = served.client.post(f"/v1/cache/pin/{name}", json=asked)
        assert pinned.status_code == 200, pinned.text
        assert served.client.post("/v1/cache/release", json={"id": pinned.json()["id"]}).status_code == 200
        explained = served.client.post(f"/v1/cache/explain/{name}", json=asked).json()
        counts.add(explained["prompt_tokens"])
        assert sum(explained["media"].values()) == 1
        if route == MESSAGES:
            counts.add(served.client.post(f"{route}/count_tokens", json=asked).json()["input_tokens"])
        if route == RESPONSES:
            counts.add(served.client.post(f"{route}/input_tokens", json=asked).json()["input_tokens"])
        prompt, cached = tokens_of(posted(served, route, asked))
        assert counts == {prompt}
        assert cached == prompt - 1


def test_the_answer_warns_and_the_metric_counts(served: Served) -> None:
    def counted() -> float:
        return served.metric("rootstock_unread_media_total", kind="image")

    before = counted()
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [picture, picture]}]
    answer = served.client.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()
    [warning] = answer["rootstock"]["warnings"]
    assert warning["field"] == "messages[0].content[0]"
    assert "for 1 more" in warning["reason"]
    assert counted() == before + 2
    told = served.chunks(CHAT, messages=messages, max_tokens=1, stream_options={"include_usage": True})[-1]
    assert told["rootstock"]["warnings"] == [warning]
    blocks = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    stream = served.client.post(MESSAGES, json={"messages": blocks, "max_tokens": 1, "stream": True}).text
    last = json.loads(stream.split("\n\n")[-3].partition("data: ")[2])
    assert last["rootstock"]["warnings"][0]["field"] == "messages[0].content[0]"
    item = {"role": "user", "content": [{"type": "input_image"}]}
    response = served.client.post(RESPONSES, json={"input": [item], "max_output_tokens": 1}).json()
    assert response["rootstock"]["warnings"][0]["field"] == "input[0].content[0]"
    assert "rootstock" not in served.chat("no picture", max_tokens=1).json()


def test_media_can_be_refused(serve: Any) -> None:
    with serve(server=ServerConfig(media="refuse", aliases=())) as served:
        for route, body, parts in PLACES.values():
            for part, _ in parts("d"):
                asked = body(in_content(route, part))
                for stream in (False, True):
                    answer = served.client.post(route, json=asked | {"stream": stream})
                    assert answer.status_code == 400, answer.text
                    assert "the model does not read it. Leave it out" in answer.json()["error"]["message"]
                explained = served.client.post(f"/v1/cache/explain/{route.removeprefix('/v1/')}", json=asked)
                assert explained.status_code == 400
        picture = {"type": "image_url", "image_url": {"url": "data:,"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, picture]}]
        refused = served.client.post(CHAT, json={"messages": messages})
        assert_error(refused, 400, "unsupported_parameter", "It is an image", param="messages[0].content[1]")
        assert served.chat("still there?", max_tokens=1).status_code == 200


def test_spoken_answers_and_results_of_other_servers_hold_no_bytes_in_the_prompt(served: Served) -> None:
    secret = "QUJD" * 200
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1", "data": secret}}
    drawn = {"role": "assistant", "content": "Here.", "images": [{"type": "image_url", "image_url": secret}]}
    for message, line in ((spoken, AUDIO_LINE), (drawn, f"Here.\n{IMAGE_LINE}")):
        answer = posted(served, CHAT, {"messages": [USER, message, USER]})
        twin = posted(served, CHAT, {"messages": [USER, {"role": "assistant", "content": line}, USER]})
        assert tokens_of(twin) == (tokens_of(answer)[0], tokens_of(answer)[0] - 1)

    source = {"type": "base64", "media_type": "application/pdf", "data": secret}
    document = {"type": "document", "source": source, "title": "plan.pdf"}
    fetched = {"type": "web_fetch_result", "url": "http://192.0.2.1", "content": document}
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_fetch", "input": {}}
    result = {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1", "content": fetched}
    messages = [USER, {"role": "assistant", "content": [use, result]}, USER]
    count, _ = tokens_of(posted(served, MESSAGES, {"messages": messages}))
    assert count < len(secret)
    with_line = {**result, "content": {**fetched, "content": NAMED_LINE}}
    messages[1] = {"role": "assistant", "content": [use, with_line]}
    assert tokens_of(posted(served, MESSAGES, {"messages": messages})) == (count, count - 1)


def test_a_mark_on_an_image_is_kept(served: Served) -> None:
    """Claude Code marks the last part of its request, which may be an image."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    content = [{"type": "text", "text": "x" * 64}, {"type": "image", "source": {}, "cache_control": mark}]
    answer = posted(served, MESSAGES, {"messages": [{"role": "user", "content": content}]})
    [hint] = answer["rootstock"]["hints"]
    assert hint == {"field": "messages[0].content[1].cache_control", "verdict": "accepted"}
