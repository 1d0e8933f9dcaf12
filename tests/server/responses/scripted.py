"""A server whose model writes scripted answers, with a parser of a small format of reasoning and calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rootstock.config import CacheConfig, EngineConfig, ServerConfig
from rootstock.engine.build import assemble
from rootstock.pipeline.model import PreparedChat, ServedModel
from rootstock.runtime.base import Batch, Logits
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    Markup,
    ReasoningDelta,
)
from rootstock.text.output.reasoning_tokens import CountingParser

ASSISTANT = 256 + ByteTokenizer.SPECIAL.index("<|assistant|>")


class MarkedParser:
    """A parser of <think>reasoning</think> and <call NAME>arguments</call> in text."""

    def __init__(self) -> None:
        self._unread = ""
        self._calls = 0
        self._state = "text"
        self._arguments = ""

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._shown(self._unread)
        self._unread = ""
        if self._state == "call":
            deltas.append(CallEnded(self._calls - 1, None, self._raw("")))
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        tags = {"text": ("<think>", "<call "), "reasoning": ("</think>",), "call": ("</call>",)}[self._state]
        places = [(self._unread.find(tag), tag) for tag in tags if tag in self._unread]
        if not places:
            kept = max(
                (n for tag in tags for n in range(1, len(tag)) if self._unread.endswith(tag[:n])), default=0
            )
            certain = self._unread[: len(self._unread) - kept]
            deltas += self._shown(certain)
            self._unread = self._unread[len(certain) :]
            return False
        at, tag = min(places)
        if tag == "<call " and ">" not in self._unread[at:]:
            deltas += self._shown(self._unread[:at])
            self._unread = self._unread[at:]
            return False
        deltas += self._shown(self._unread[:at])
        self._unread = self._unread[at + len(tag) :]
        if tag == "<call ":
            self._name, _, self._unread = self._unread.partition(">")
            deltas.append(CallStarted(self._calls, f"call_{self._calls}", self._name))
            self._calls += 1
            self._state, self._arguments = "call", ""
        elif tag == "</call>":
            deltas.append(CallEnded(self._calls - 1, self._parsed(), self._raw(tag)))
            self._state = "text"
        else:
            self._state = "reasoning" if tag == "<think>" else "text"
            deltas.append(Markup(tag))
        return True

    def _raw(self, end: str) -> str:
        return f"<call {self._name}>{self._arguments}{end}"

    def _parsed(self) -> dict[str, Any] | None:
        try:
            parsed = json.loads(self._arguments)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None

    def _shown(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._state == "call":
            self._arguments += text
            return [CallArguments(self._calls - 1, text)]
        return [ReasoningDelta(text) if self._state == "reasoning" else ContentDelta(text)]


class ScriptedRuntime(FakeRuntime):
    """A runtime whose answer to a prompt is `script(prompt)`, and then the end token. A form feed fails the step."""

    def __init__(self, script: Callable[[str], str], context_limit: int) -> None:
        super().__init__(PADDED_LOGITS, context_limit, eos_token_ids=(ByteTokenizer.END,))
        self.script = script
        self._answers: dict[tuple[int, ...], list[int]] = {}  # to the prompts of the running requests

    def forward(self, batch: Batch) -> Logits:
        logits = super().forward(batch)
        pool, row = self._pools[0], 0
        for segment in batch.segments:
            end, size = segment.past + len(segment.tokens), pool.block_size
            at = np.arange(end)
            tokens = pool.tokens[segment.tables[0][at // size], at % size].tolist()
            for length in range(end - segment.logits_to_keep + 1, end + 1):
                logits[row] = 0
                logits[row, self._next(tokens[:length])] = 100
                row += 1
        return logits

    def _next(self, tokens: list[int]) -> int:
        if ASSISTANT not in tokens:
            return ByteTokenizer.END
        at = len(tokens) - tokens[::-1].index(ASSISTANT)
        prompt = tuple(tokens[:at])
        if len(tokens) == at or prompt not in self._answers:
            self._answers[prompt] = self._answer_to(prompt)
        answer = self._answers[prompt]
        token = answer[len(tokens) - at] if len(tokens) - at < len(answer) else ByteTokenizer.END
        if token == ord("\f"):
            raise RuntimeError("the script fails here")
        return token

    def _answer_to(self, prompt: tuple[int, ...]) -> list[int]:
        text = "".join(ByteTokenizer.SPECIAL[token - 256] if token >= 256 else chr(token) for token in prompt)
        return [*self.script(text.encode("latin-1").decode()).encode(), ByteTokenizer.END]


@contextlib.contextmanager
def scripted_server(
    script: Callable[[str], str], config: ServerConfig | None = None, context_limit: int = 16_384
) -> Iterator[str]:
    """Yields the URL of a server. Its prompts show calls and reasoning as MarkedParser reads them."""
    of_model = ServedModel.prepared_chat

    def prepared_chat(model: ServedModel, *asked: Any) -> PreparedChat:
        return replace(of_model(model, *asked), new_parser=lambda: CountingParser(MarkedParser()))

    runtime = ScriptedRuntime(script, context_limit)
    made = assemble(runtime, MarkedTokenizer(), CacheConfig(budget_bytes=1 << 24), EngineConfig())
    app = create_app(made, config or ServerConfig(aliases=()))
    with pytest.MonkeyPatch.context() as patch, made.engine, running(app, made.engine) as url:
        patch.setattr(ServedModel, "prepared_chat", prepared_chat)
        yield url


class MarkedTokenizer(ByteTokenizer):
    """A byte tokenizer whose template shows reasoning and calls in MarkedParser's format."""

    def render_chat(self, messages: Any, tools: Any, **options: Any) -> str:
        shown = []
        for message in messages:
            content = message.get("content") or ""
            if message.get("reasoning_content"):
                content = f"<think>{message['reasoning_content']}</think>{content}"
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                content += f"<call {call['function']['name']}>{text}</call>"
            shown.append({**message, "content": content})
        return super().render_chat(shown, tools, **options)
