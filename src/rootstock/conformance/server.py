"""HTTP client of any server that speaks OpenAI's chat API, and what that server can do."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from rootstock.cli.server_client import server_client
from rootstock.errors import StartupError

Json = dict[str, Any]

MOST_ANSWER_BYTES = 32 << 20
MOST_COUNT = 1 << 53  # of tokens: what JSON's numbers hold exactly
MOST_ID = (1 << 63) - 1
# A server that is busy, or that limits rates, is asked again.
BUSY, BUSY_WITHIN_S, BUSY_EVERY_S = (429, 503), 60.0, 1.0
_SHOWN_CHARS = 300
TOP_LOGPROBS = 5
# Fields that some servers refuse. They are left out, one after the other, until a server takes the rest.
OPTIONAL_FIELDS = ("ignore_eos", "seed", "top_logprobs", "logprobs")


class AskFailed(Exception):
    """Request that got no answer: the status and text of the server, or what became of the connection."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        told = "" if status is None else f"status {status}: "
        self.reason = told + "".join(map(_printable, reason[:_SHOWN_CHARS]))
        self.status = status
        super().__init__(self.reason)


def _printable(char: str) -> str:
    """Returns a character as a terminal may show it, without control sequences and ends of lines."""
    return char if char.isprintable() else ascii(char)[1:-1]


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
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise StartupError(
                "The API key has a character that no header may hold. Check --api-key or OPENAI_API_KEY."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers["Accept-Encoding"] = "identity"  # a few compressed bytes may stand for very many
        self._client = server_client(url, headers, httpx.Timeout(timeout_s, connect=10.0))
        self._timeout_s = timeout_s
        self.can = Abilities(model or "")

    def __enter__(self) -> Server:
        if not self.can.model:
            try:
                self.can.model = str(self._get("/v1/models")["data"][0]["id"])
            except (AskFailed, KeyError, IndexError, TypeError) as error:
                self._client.close()
                shown = self._client.base_url.copy_with(userinfo=b"").join("/v1/models")
                raise StartupError(
                    f"{shown} names no model ({error}). "
                    "Check the URL and --api-key, or give --served-model-name."
                ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def is_up(self) -> bool:
        """Returns whether the server answers a request, in whatever way but by an error of its own."""
        try:
            with self._client.stream("GET", "/v1/models", timeout=10.0) as response:
                return response.status_code < 500
        except httpx.HTTPError:
            return False

    def _get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def _json(self, method: str, path: str, body: Json | None) -> Any:
        try:
            with self._client.stream(method, path, json=body) as response:
                data = b"".join(self._pieces(response))
                if response.status_code != 200:
                    raise AskFailed(data.decode(errors="replace"), response.status_code)
                return json.loads(data)
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise AskFailed(f"{type(error).__name__}: {error}") from error

    def _pieces(self, response: httpx.Response) -> Iterator[bytes]:
        """Yields the bytes of an answer, of bounded size and within the time for a request. Raises AskFailed."""
        taken, deadline = 0, time.monotonic() + self._timeout_s
        for piece in response.iter_bytes():
            taken += len(piece)
            if taken > MOST_ANSWER_BYTES:
                raise AskFailed(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise AskFailed(f"an answer that does not end within {self._timeout_s:.0f} s")
            yield piece

    def _lines(self, response: httpx.Response) -> Iterator[bytearray]:
        rest = bytearray()
        for piece in self._pieces(response):
            rest += piece
            if b"\n" in piece:
                *lines, rest = rest.split(b"\n")
                yield from lines
        yield rest

    # ------------------------------------------------------------------------------------- chats

    def complete_body(self, body: Json, *, stream: bool = False) -> Json:
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
        if stream:
            full |= {"stream": True, "stream_options": {"include_usage": True}}
        return {name: value for name, value in full.items() if name not in self.can.dropped}

    def ask(self, body: Json, *, stream: bool = False) -> list[Answer]:
        """Sends a chat, or a completion of a `prompt`, and returns the answer of each choice. A busy server is asked
        again for a minute. Raises AskFailed."""
        deadline = time.monotonic() + BUSY_WITHIN_S
        while True:
            try:
                return [self._counted(answer) for answer in self._answers(body, stream)]
            except AskFailed as error:
                if error.status not in BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(BUSY_EVERY_S)

    def _answers(self, body: Json, stream: bool) -> list[Answer]:
        if stream:
            return [_of_chunks(self.chunks(body))]
        return _of_whole(self._json("POST", path_of(body), self.complete_body(body)))

    def _counted(self, answer: Answer) -> Answer:
        """Returns an answer with the count that a server leaves out where it is 0."""
        is_left_out = answer.cached_tokens is None and answer.prompt_tokens is not None
        return replace(answer, cached_tokens=0) if self.can.says_cached and is_left_out else answer

    def chunks(self, body: Json) -> Iterator[Json]:
        """Yields the chunks of a streamed chat. Closing the iterator closes the connection. Raises AskFailed."""
        whole = self.complete_body(body, stream=True)
        try:
            with self._client.stream("POST", path_of(body), json=whole) as response:
                if response.status_code != 200:
                    told = b"".join(self._pieces(response))
                    raise AskFailed(told.decode(errors="replace"), response.status_code)
                for line in self._lines(response):
                    data = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        chunk = json.loads(data)
                        if not isinstance(chunk, dict) or chunk.get("error"):
                            raise AskFailed(f"the stream says {data.decode(errors='replace')}")
                        yield chunk
                raise AskFailed("a stream that ends without data: [DONE]")
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
        except (AskFailed, KeyError, IndexError, TypeError):
            return None
        return None

    def text_of(self, ids: Sequence[int]) -> str | None:
        """Returns the text of token ids, if the server tells it."""
        try:
            told = self._json("POST", "/detokenize", {"model": self.can.model, "tokens": list(ids)})
            return str(told["prompt"] if "prompt" in told else told["content"])
        except (AskFailed, KeyError, IndexError, TypeError):
            return None

    def probe(self, body: Json) -> None:
        """Finds the optional fields that the server takes, and what its answers tell. Raises StartupError."""
        for leave_out in ((), *((name,) for name in OPTIONAL_FIELDS), OPTIONAL_FIELDS):
            self.can.dropped = leave_out
            try:
                answer = self.ask(body)[0]
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


def path_of(body: Json) -> str:
    """Returns the path to which a body is sent."""
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


# Errors of reading an answer that is not of OpenAI's form.
_NOT_ITS_FORM = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError)


def _whole_number(told: Any, most: int) -> int:
    if not isinstance(told, int) or isinstance(told, bool) or abs(told) > most:
        raise TypeError(f"{told!r} is no count or id of a token")
    return told


def _count(told: Any) -> int | None:
    return None if told is None else _whole_number(told, MOST_COUNT)


def _text(told: Any) -> str:
    if not isinstance(told, str | None):
        raise TypeError(f"{told!r} is no text")
    return told or ""


def _ids(told: Any) -> list[int]:
    return [_whole_number(each, MOST_ID) for each in told["tokens"]]


def _of_whole(body: Any) -> list[Answer]:
    try:
        answers = [_with_usage(_of_choice(choice), body.get("usage")) for choice in body["choices"]]
    except _NOT_ITS_FORM as error:
        raise AskFailed(f"not an answer of OpenAI's API: {str(body)[:_SHOWN_CHARS]}") from error
    if not answers:
        raise AskFailed("an answer without a choice")
    return answers


def _of_choice(choice: Any) -> Answer:
    scored = tuple(_scored(choice.get("logprobs")))
    message = choice.get("message")
    if message is None:
        return Answer(_text(choice["text"]), scored=scored)
    calls = tuple(
        (str(each["function"]["name"]), str(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Answer(_text(message.get("content")), _text(reasoning), calls, scored)


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
            self.text.append(_text(delta.get("content")))
            self.reasoning.append(_text(delta.get("reasoning_content") or delta.get("reasoning")))
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                pieces = self.calls.setdefault(call.get("index") or 0, [""])
                pieces[0] += _text(function.get("name"))
                pieces.append(_text(function.get("arguments")))
            self.scored += _scored(choice.get("logprobs"))


def _of_chunks(chunks: Iterator[Json]) -> Answer:
    got = _Collected()
    try:
        for chunk in chunks:
            got.add(chunk)
        calls = tuple((pieces[0], "".join(pieces[1:])) for _, pieces in sorted(got.calls.items()))
        answer = Answer("".join(got.text), "".join(got.reasoning), calls, tuple(got.scored))
        return _with_usage(answer, got.usage)
    except _NOT_ITS_FORM as error:
        raise AskFailed("not a stream of OpenAI's chat API") from error


def _with_usage(answer: Answer, usage: Any) -> Answer:
    if not usage:
        return answer
    return replace(
        answer,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
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
