"""HTTP client of any server that speaks OpenAI's chat API, and what that server can do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from rootstock.cli.server_client import server_client
from rootstock.errors import StartupError

Json = dict[str, Any]

MOST_ANSWER_BYTES = 32 << 20
TOP_LOGPROBS = 5
# Fields that some servers refuse. They are left out, one after the other, until a server takes the rest.
OPTIONAL_FIELDS = ("ignore_eos", "seed", "top_logprobs", "logprobs")


class AskFailed(Exception):
    """Request that got no answer: the status and text of the server, or what became of the connection."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of an answer, with the log-probabilities of the likeliest tokens in its place."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of one choice, and its usage. None: the server did not say."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    scored: tuple[Scored, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def said(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        return self.text, self.reasoning, self.calls

    def as_message(self) -> Json:
        """Returns the answer as the assistant's message of a history."""
        message: Json = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{i:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(self.calls)
            ]
        return message


@dataclass(slots=True)
class Abilities:
    """Abilities of a server, as its answers showed them."""

    model: str
    dropped: tuple[str, ...] = ()  # optional fields that it refuses
    has_logprobs: bool = False
    says_cached: bool = False
    tokenizes: str = (
        ""  # by /tokenize: "messages" of a chat, or the text of /apply-template, "template"; "": not
    )
    cold_by: str = (
        ""  # how a prompt finds nothing: by "cache_salt", "cache_prompt" or a "flood"; "": it cannot
    )


class Server:
    """Client of one server. `with Server(url, …) as server:`. Any thread may use it."""

    def __init__(
        self, url: str, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = server_client(url, headers, httpx.Timeout(timeout_s, connect=10.0))
        self.can = Abilities(model or "")

    def __enter__(self) -> Server:
        if not self.can.model:
            try:
                self.can.model = str(self._get("/v1/models")["data"][0]["id"])
            except (AskFailed, KeyError, IndexError, TypeError) as error:
                self._client.close()
                raise StartupError(
                    f"{self._client.base_url.join('/v1/models')} names no model ({error}). "
                    "Check the URL and --api-key, or give --served-model-name."
                ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def is_up(self) -> bool:
        """Returns whether the server answers a request, in whatever way."""
        try:
            self._client.get("/v1/models", timeout=10.0)
        except httpx.HTTPError:
            return False
        return True

    def _get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def _json(self, method: str, path: str, body: Json | None) -> Any:
        try:
            with self._client.stream(method, path, json=body) as response:
                data = bytearray()
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > MOST_ANSWER_BYTES:
                        raise AskFailed(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
                if response.status_code != 200:
                    raise AskFailed(data.decode(errors="replace")[:500], response.status_code)
                return json.loads(data)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise AskFailed(f"{type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------- chats

    def _complete_body(self, body: Json) -> Json:
        """Returns a request's body with the fields that every request of the suite has."""
        full: Json = {
            "model": self.can.model,
            "temperature": 0,
            "seed": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "ignore_eos": True,
            **body,
        }
        if "prompt" in body:
            del full["top_logprobs"]
            full["logprobs"] = TOP_LOGPROBS
        return {name: value for name, value in full.items() if name not in self.can.dropped}

    def ask(self, body: Json, *, stream: bool = False) -> list[Answer]:
        """Sends a chat, or a completion of a `prompt`, and returns the answer of each choice. Raises AskFailed."""
        if stream:
            return [_of_chunks(self.chunks(body))]
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        return _of_whole(self._json("POST", path, self._complete_body(body)))

    def chunks(self, body: Json) -> Iterator[Json]:
        """Yields the chunks of a streamed chat. Closing the iterator closes the connection. Raises AskFailed."""
        whole = self._complete_body(body) | {"stream": True, "stream_options": {"include_usage": True}}
        taken = 0
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=whole) as response:
                if response.status_code != 200:
                    raise AskFailed(response.read().decode(errors="replace")[:500], response.status_code)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    taken += len(data)
                    if taken > MOST_ANSWER_BYTES:
                        raise AskFailed(f"a stream of more than {MOST_ANSWER_BYTES} bytes")
                    if data == "[DONE]":
                        return
                    if data:
                        chunk = json.loads(data)
                        if not isinstance(chunk, dict) or chunk.get("error"):
                            raise AskFailed(f"the stream says {data[:500]}")
                        yield chunk
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise AskFailed(f"{type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------ tokens

    def tokens_of(self, body: Json) -> list[int] | None:
        """Returns the token ids of a chat's prompt, if the server tells them."""
        chat: Json = {
            name: body[name]
            for name in ("messages", "tools", "chat_template_kwargs", "cache_salt")
            if name in body
        }
        try:
            if self.can.tokenizes == "messages":
                whole = {"model": self.can.model, "add_generation_prompt": True, **chat}
                return _ids(self._json("POST", "/tokenize", whole))
            if self.can.tokenizes == "template":
                text = self._json("POST", "/apply-template", chat)["prompt"]
                asked = {"content": text, "add_special": True, "parse_special": True}
                return _ids(self._json("POST", "/tokenize", asked))
        except (AskFailed, KeyError, TypeError):
            return None
        return None

    def text_of(self, ids: Sequence[int]) -> str | None:
        """Returns the text of token ids, if the server tells it."""
        try:
            told = self._json("POST", "/detokenize", {"model": self.can.model, "tokens": list(ids)})
            return str(told["prompt"] if "prompt" in told else told["content"])
        except (AskFailed, KeyError, TypeError):
            return None

    def probe(self, body: Json) -> None:
        """Finds the optional fields that the server takes, and what its answers tell. Raises StartupError."""
        for leave_out in ((), *((name,) for name in OPTIONAL_FIELDS), OPTIONAL_FIELDS):
            self.can.dropped = leave_out
            try:
                (answer,) = self.ask(body)
                break
            except AskFailed as error:
                if error.status not in (400, 422) or leave_out == OPTIONAL_FIELDS:
                    raise StartupError(f"The server refuses a plain chat: {error.reason}") from error
        self.can.has_logprobs = bool(answer.scored)
        self.can.says_cached = answer.cached_tokens is not None
        for way in ("messages", "template"):
            self.can.tokenizes = way
            ids = self.tokens_of(body)
            if ids is not None and len(ids) == answer.prompt_tokens:
                break
        else:
            self.can.tokenizes = ""


def _ids(told: Any) -> list[int]:
    return [int(each) for each in told["tokens"]]


def _of_whole(body: Any) -> list[Answer]:
    try:
        return [_with_usage(_of_choice(choice), body.get("usage")) for choice in body["choices"]]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise AskFailed(f"not an answer of OpenAI's API: {str(body)[:300]}") from error


def _of_choice(choice: Any) -> Answer:
    scored = tuple(_scored(choice.get("logprobs")))
    message = choice.get("message")
    if message is None:
        return Answer(choice["text"], scored=scored)
    calls = tuple(
        (str(each["function"]["name"]), str(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    )
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return Answer(message.get("content") or "", reasoning, calls, scored)


@dataclass(slots=True)
class _Collected:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and pieces of the arguments
    scored: list[Scored] = field(default_factory=list)
    usage: Any = None

    def add(self, chunk: Json) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.text.append(delta.get("content") or "")
            self.reasoning.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                pieces = self.calls.setdefault(call.get("index") or 0, [""])
                pieces[0] += function.get("name") or ""
                pieces.append(function.get("arguments") or "")
            self.scored += _scored(choice.get("logprobs"))


def _of_chunks(chunks: Iterator[Json]) -> Answer:
    got = _Collected()
    try:
        for chunk in chunks:
            got.add(chunk)
        calls = tuple((pieces[0], "".join(pieces[1:])) for _, pieces in sorted(got.calls.items()))
        answer = Answer("".join(got.text), "".join(got.reasoning), calls, tuple(got.scored))
        return _with_usage(answer, got.usage)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise AskFailed("not a stream of OpenAI's chat API") from error


def _with_usage(answer: Answer, usage: Any) -> Answer:
    if not usage:
        return answer
    return replace(
        answer,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _scored(logprobs: Any) -> Iterator[Scored]:
    """Yields the scored tokens, in the form of OpenAI's chats, of its completions, or of mlx-lm."""
    if not logprobs:
        return
    if logprobs.get("content"):
        for each in logprobs["content"]:
            yield Scored(str(each["token"]), float(each["logprob"]), _top(each.get("top_logprobs")))
        return
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [()] * len(tokens)
    for token, value, top in zip(tokens, values, tops, strict=False):
        yield Scored(str(token), float(value), _top(top))


def _top(told: Any) -> dict[str, float]:
    """Returns log-probabilities by token, without tokens that look alike: parts of a character do."""
    if isinstance(told, dict):
        pairs = [(str(name), float(value)) for name, value in told.items()]
    else:
        pairs = [(str(each.get("token", each.get("id"))), float(each["logprob"])) for each in told or ()]
    names = Counter(name for name, _ in pairs)
    return {name: value for name, value in pairs if names[name] == 1}
