"""Target of a workload: any server that speaks OpenAI's chat API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from rootstock.bench.workloads import Symbols, as_text
from rootstock.errors import StartupError


@dataclass(slots=True)
class Sample:
    """One request and its result. Times are of `time.monotonic`, in seconds."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)  # of every token, or of every piece of text
    ended_at: float = 0.0
    answer: bytes = b""
    prompt_tokens: int | None = None  # None: the server did not say
    cached_tokens: int | None = None
    completion_tokens: int = 0
    error: str | None = None


Done = Callable[[Sample], None]  # called once for each request, on a thread of the target


class Dialogue(Protocol):
    def ask(self, new: Symbols, answer_tokens: int, done: Done) -> None:
        """Sends the next turn. The caller waits until the last one is done."""
        ...


class Target(Protocol):
    def open(self, prefix: Symbols) -> Dialogue: ...


class UrlTarget:
    """Server as a target: `with UrlTarget(url, …) as target:` streams chats, one thread for each open request.

    Every prompt begins with a random word, so that a first run finds nothing cached on any server and no cache must
    be cleared. Raises StartupError if the server does not answer.
    """

    def __init__(
        self,
        url: str,
        at_once: int,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1") + "/v1/"
        self._client = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=at_once + 1, max_keepalive_connections=at_once + 1),
            # The environment's proxies cannot reach this machine's own ports.
            trust_env=urlsplit(base).hostname not in ("localhost", "127.0.0.1", "::1"),
        )
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="bench")
        self._model = model
        self._more: dict[str, Any] = {"ignore_eos": True}  # known to most servers of open models
        self._nonce = uuid.uuid4().hex

    def __enter__(self) -> UrlTarget:
        try:
            if self._model is None:
                self._model = str(self._client.get("models").raise_for_status().json()["data"][0]["id"])
            self._probe()
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            self._close()
            raise StartupError(
                f"The server did not answer as OpenAI's API does ({type(error).__name__}: {error}). Check --url, "
                "--api-key and --served-model-name."
            ) from error
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def model(self) -> str:
        assert self._model is not None, "the target is not open"
        return self._model

    def begin_with(self, word: str) -> None:
        """Changes the first word: no later prompt shares a prefix with an earlier one of another word."""
        self._nonce = word

    def open(self, prefix: Symbols) -> Dialogue:
        return _UrlDialogue(self, {"role": "system", "content": f"{self._nonce} {as_text(prefix)}"})

    def start(self, job: Callable[[], None]) -> None:
        self._threads.submit(job)

    def stream(self, messages: list[dict[str, str]], answer_tokens: int) -> Iterator[dict[str, Any]]:
        """Yields the chunks of an answer. Raises httpx.HTTPError and ValueError."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise httpx.HTTPStatusError(
                    f"{response.status_code}: {response.text[:300]}",
                    request=response.request,
                    response=response,
                )
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield _checked(json.loads(data))

    def _probe(self) -> None:
        """Sends a first request: it warms the server up and shows whether the server refuses extra fields."""
        messages = [{"role": "user", "content": f"{self._nonce} hello"}]
        try:
            list(self.stream(messages, 4))
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (400, 422):
                raise
            self._more = {}
            list(self.stream(messages, 4))

    def _close(self) -> None:
        # Does not wait: on Ctrl-C some threads are in the middle of an answer.
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


class _UrlDialogue:
    def __init__(self, target: UrlTarget, system: dict[str, str]) -> None:
        self._target = target
        self._messages = [system]

    def ask(self, new: Symbols, answer_tokens: int, done: Done) -> None:
        # Results of tools are sent as a user's messages: not every chat template supports tools.
        self._messages.append({"role": "user", "content": as_text(new)})
        sample = Sample(time.monotonic())
        self._target.start(lambda: self._receive(sample, answer_tokens, done))

    def _receive(self, sample: Sample, answer_tokens: int, done: Done) -> None:
        pieces: list[str] = []
        try:
            for chunk in self._target.stream(self._messages, answer_tokens):
                for choice in chunk.get("choices") or ():
                    if text := (choice.get("delta") or {}).get("content"):
                        sample.token_times.append(time.monotonic())
                        pieces.append(text)
                if usage := chunk.get("usage"):
                    sample.prompt_tokens = usage.get("prompt_tokens")
                    sample.completion_tokens = usage.get("completion_tokens") or 0
                    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except Exception as error:  # a failed request is a result
            sample.error = f"{type(error).__name__}: {error}"
        sample.ended_at = time.monotonic()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        sample.answer = "".join(pieces).encode()
        if sample.completion_tokens == 0:  # no usage: a piece is a token with most servers
            sample.completion_tokens = len(pieces)
        done(sample)


def _checked(chunk: Any) -> dict[str, Any]:
    if not isinstance(chunk, dict) or chunk.get("error"):
        raise ValueError(f"the stream says {str(chunk)[:300]}")
    return chunk
