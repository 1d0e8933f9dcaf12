"""Clients of the demo: each agent is a thread that uses the `openai` package over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rootstock.bench.scenario import TOOLS, ScriptedAgent, add_step, first_messages
from rootstock.errors import StartupError

if TYPE_CHECKING:
    import openai

ANSWER_TOKENS = 32
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the demo, the same for every server."""

    agent: str
    turn: int  # from 1


@dataclass(frozen=True, slots=True)
class Sent:
    asked: Asked


@dataclass(frozen=True, slots=True)
class FirstToken:
    asked: Asked
    ttft_s: float  # from sending the request to the first piece of the answer


@dataclass(frozen=True, slots=True)
class Answered:
    asked: Asked
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    agent: str
    reason: str


Progress = Sent | FirstToken | Answered | GaveUp
Listener = Callable[[Progress], None]  # called on the agents' threads


def require_openai() -> None:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise StartupError(
            "The demo talks to the server through the openai package, which is not installed. Install it with: "
            "pip install 'rootstock[bench]'"
        ) from error


def run_agents(agents: Sequence[ScriptedAgent], url: str, model: str, tell: Listener) -> float:
    """Runs all agents at once, to their last step, and returns the seconds. Reports failures through `tell`."""
    import openai

    # The environment's proxies cannot reach this machine's own ports.
    http_client = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        http_client=http_client,
    ) as client:
        # Daemons, so that Ctrl-C need not wait for answers.
        threads = [
            threading.Thread(target=_converse, args=(client, model, agent, tell), daemon=True)
            for agent in agents
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
        return time.monotonic() - began


def _converse(client: openai.OpenAI, model: str, agent: ScriptedAgent, tell: Listener) -> None:
    messages = first_messages()
    try:
        for turn, step in enumerate(agent.steps, 1):
            add_step(messages, step)
            answer = _ask(client, model, messages, Asked(agent.name, turn), tell)
            messages.append({"role": "assistant", "content": answer.text})
    except Exception as error:  # the demo reports every failure
        tell(GaveUp(agent.name, f"{type(error).__name__}: {error}"))


def _ask(client: openai.OpenAI, model: str, messages: Any, asked: Asked, tell: Listener) -> Answered:
    tell(Sent(asked))
    began = time.monotonic()
    tools: Any = TOOLS
    chunks = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=tools,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    ttft_s, finish_reason, usage = 0.0, "", None
    pieces: list[str] = []
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                if not pieces:
                    ttft_s = time.monotonic() - began
                    tell(FirstToken(asked, ttft_s))
                pieces.append(choice.delta.content)
            finish_reason = choice.finish_reason or finish_reason
    total_s = time.monotonic() - began
    if usage is None or not finish_reason:
        raise ConnectionError("the answer ended early")
    details = usage.prompt_tokens_details
    answer = Answered(
        asked,
        ttft_s if pieces else total_s,
        total_s,
        usage.prompt_tokens,
        (details.cached_tokens or 0) if details else 0,
        "".join(pieces),
        finish_reason,
    )
    tell(answer)
    return answer
