"""Agents in conversations with a server over HTTP, and for each request its cached and its possible cached tokens.

An agent gets rules and tools, then a question, and reasons and calls a tool a few times before it answers. At the
next question the template drops the reasoning of the turn before. The model is tiny, with random weights: each token
that it samples is replaced by the next token of a script. The answer is parsed and sent back in the next request, as
agents do.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
from numpy.typing import NDArray

import rootstock.engine.sequence as sequence_module
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.sampling import SampledToken, Sampler
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.prompts.text_alignment import shared

Tokens = NDArray[np.int32]
Json = dict[str, Any]

BLOCK_SIZE = 16
_WORDS = (
    "branch leaf root water soil light season growth paper shelf reader question answer library catalogue number "
    "record title author village river stone winter summer garden market window letter morning evening"
)
WORDS = tuple(_WORDS.split())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {subject} in the catalogue of the library and answers with its entry.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
    for name, subject in (
        ("look_up", "a word"),
        ("find_title", "the title of a book"),
        ("count", "how often"),
    )
]
_SAID = re.compile(
    r"<think>\n(?P<reasoning>.*)\n</think>\n\n(?P<content>[^<]*)"
    r"(?:<tool_call>\n(?P<call>.*)\n</tool_call>)?",
    re.DOTALL,
)


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


@dataclass
class Agent:
    """Conversation of `turns` questions, each with `steps` calls of a tool before the answer."""

    name: str
    rules: str
    turns: int
    steps: int
    seed: int
    messages: list[Json] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed} {self.name}")
        self.messages = [{"role": "system", "content": self.rules}, self._question()]
        self._turn = self._step = 0

    @property
    def done(self) -> bool:
        return self._turn == self.turns

    def will_say(self) -> str:
        """Returns the script of the model's next answer."""
        thought = f"<think>\n{prose(self._rng, self._rng.randint(5, 15))}\n</think>\n\n"
        if self._step == self.steps:
            return thought + prose(self._rng, self._rng.randint(5, 15))
        called = json.dumps({"name": "look_up", "arguments": {"word": self._rng.choice(WORDS)}})
        return f"{thought}<tool_call>\n{called}\n</tool_call>"

    def heard(self, message: Json) -> None:
        """Continues the conversation with the server's answer."""
        calls = message.get("tool_calls")
        fields = ("role", "content", "reasoning_content", *(["tool_calls"] if calls else []))
        self.messages.append({name: message[name] for name in fields})
        if calls:
            result = prose(self._rng, self._rng.randint(10, 40))
            self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
            self._step += 1
        else:
            self._turn, self._step = self._turn + 1, 0
            if not self.done:
                self.messages.append(self._question())

    def _question(self) -> Json:
        return {"role": "user", "content": f"{self.name} asks: {prose(self._rng, self._rng.randint(10, 40))}"}


def message_of(script: str, id: str = "") -> Json:
    """Returns a model's text as the message that a server makes of it. `id` is of its call."""
    parts = _SAID.fullmatch(script)
    assert parts is not None, script
    message: Json = {
        "role": "assistant",
        "content": parts["content"] or None,
        "reasoning_content": parts["reasoning"],
    }
    if parts["call"]:
        called = json.loads(parts["call"])
        function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
        message["tool_calls"] = [{"id": id, "type": "function", "function": function}]
    return message


@dataclass(frozen=True)
class Asked:
    """Request with the cached tokens of its prompt, and the most that could have been cached."""

    agent: str
    prompt: Tokens
    said: Tokens
    cached: int
    best: int  # longest prefix that earlier prompts and answers share with it, without its last token

    @property
    def whole(self) -> Tokens:
        return np.concatenate((self.prompt, self.said))


class World:
    """Server in this process, with a record of its requests."""

    def __init__(self, made: Assembly, client: openai.OpenAI, script: dict[bytes, list[int]]) -> None:
        self.made = made
        self.asked: list[Asked] = []
        self._client = client
        self._script = script
        self._known: list[Tokens] = []  # prompts, and prompts with their answers
        self._lock = threading.Lock()

    def prompt_of(self, agent: Agent) -> Tokens:
        template = template_input(conversation_of(agent.messages, TOOLS), self.made.tokenizer)
        return self.made.tokenizer.encode_chat(template.render(self.made.tokenizer))

    def ask(self, agent: Agent) -> Callable[[], None]:
        """Notes how much could be cached now. Returns a call that sends the request and waits for its end."""
        prompt, will_say = self.prompt_of(agent), agent.will_say()
        end = self.made.tokenizer.eos_token_ids[0]
        said = np.array([*self.made.tokenizer.encode_chat(will_say).tolist(), end], np.int32)
        with self._lock:
            best = min(max((shared(known, prompt) for known in self._known), default=0), len(prompt) - 1)
            self._script[prompt.tobytes()] = said.tolist()
            self._known.append(prompt)

        def send() -> None:
            answer = self._client.chat.completions.create(
                model=self.made.description.name, messages=agent.messages, tools=TOOLS, temperature=0
            )  # type: ignore[call-overload]
            message, usage = answer.choices[0].message.to_dict(), answer.usage
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            expected = message_of(will_say, *ids)
            assert {name: message.get(name) for name in expected} == expected, (message, will_say)
            assert usage.prompt_tokens == len(prompt)
            with self._lock:
                self._known.append(np.concatenate((prompt, said)))
                cached = usage.prompt_tokens_details.cached_tokens
                self.asked.append(Asked(agent.name, prompt, said, cached, best))
            agent.heard(message)

        return send

    def run_alone(self, agent: Agent) -> None:
        while not agent.done:
            self.ask(agent)()

    def run_interleaved(self, agents: Sequence[Agent], seed: int, at_once: int = 4) -> None:
        """Runs one to `at_once` agents at a time, drawn at random, until all are done."""
        rng = random.Random(seed)
        while waiting := [agent for agent in agents if not agent.done]:
            chosen = rng.sample(waiting, min(len(waiting), rng.randint(1, at_once)))
            threads = [threading.Thread(target=self.ask(agent)) for agent in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@contextlib.contextmanager
def served(model: Path, budget_bytes: int | None = None, chunk_tokens: int = 512) -> Iterator[World]:
    """Serves the model over HTTP, with all sampled tokens replaced by the script."""
    script: dict[bytes, list[int]] = {}

    class Scripted(Sampler):
        def __init__(self, params: Any, prompt: Tokens, *rest: Any, **more: Any) -> None:
            super().__init__(params, prompt, *rest, **more)
            self._left = script[prompt.tobytes()][self._sampled :]

        def sample(self, logits: Any) -> SampledToken:
            super().sample(logits)
            return SampledToken(self._left.pop(0), None)

    made = build_engine(
        ModelConfig(str(model), device="cpu", dtype="float32", threads=1),
        CacheConfig(BLOCK_SIZE, budget_bytes),
        EngineConfig(chunk_tokens=chunk_tokens),
    )
    app = create_app(made)
    own, sequence_module.Sampler = sequence_module.Sampler, Scripted  # type: ignore[misc, attr-defined]
    try:
        with made.engine, running(app, made.engine) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
            yield World(made, client, script)
    finally:
        sequence_module.Sampler = own  # type: ignore[misc, attr-defined]
