"""The checks that every driver of a client makes, and the lines that it prints. It imports nothing of Rootstock.

A driver is run as `python DRIVER URL MODEL` by the interpreter that has the client. It prints a line of JSON for each
check: its name, whether it passed, and a detail. A check returns the detail, and raises where it fails.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

# Clients ask home about updates and costs, and send telemetry. None of that can be reached, or should be.
os.environ |= {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "DO_NOT_TRACK": "1",
}

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
KEY = "none"

CITY, DEGREES = "Paris", 21
ANSWER = "scripted model"  # a part of it
ASK = "Say who you are."
ASK_TOOL = "What is the weather in Paris? Use the tool."
ASK_JSON = "Where is it how warm? Reply in JSON."
TOOL = "get_weather"
TOOL_RESULT = "sunny, 21 degrees"
# The scripted model tells the wish for reasoning that its prompt has, and the number of images.
THINKS, THINKS_HIGH, SEES = "Reasoning: on.", "Reasoning: high.", "Images: 1."

# A picture of one pixel, in base64.
IMAGE = base64.b64encode(Path(__file__).with_name("picture.png").read_bytes()).decode()
IMAGE_TYPE = "image/png"
IMAGE_URL = f"data:{IMAGE_TYPE};base64,{IMAGE}"

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
# In the form of OpenAI's chat completions.
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Tells the weather.",
            "parameters": WEATHER,
            "strict": True,
        },
    }
]

Check = Callable[[], str]


class Report(BaseModel):
    """A temperature."""

    model_config = ConfigDict(extra="forbid")

    city: str
    degrees: int


def rules(api: str = "") -> str:
    """Returns a system prompt as long as an agent's: a new turn is a small part of such a prompt.

    All clients get the same text behind a first sentence of their own, so that none finds another's prompt cached.
    """
    lines = (f"Rule {n}: answer in one sentence and name no more than {n} cities." for n in range(300))
    return " ".join([f"You serve {Path(sys.argv[0]).stem} {api}.", *lines])


def said(text: str | None, part: str = ANSWER) -> str:
    assert part in (text or ""), f"the answer is {text!r}"
    return str(text)


def called(name: str, city: object) -> str:
    assert (name, city) == (TOOL, CITY), f"the call is {name!r} for {city!r}"
    return f"{name}({city})"


def streamed(parts: Iterable[str | None]) -> str:
    """Checks that an answer comes in more than one piece."""
    pieces = [part for part in parts if part]
    assert len(pieces) > 1, f"the stream has {len(pieces)} pieces"
    return said("".join(pieces))


def reported(city: object, degrees: object) -> str:
    assert (city, degrees) == (CITY, DEGREES), f"the object is {city!r}, {degrees!r}"
    return f"{city}, {degrees}"


def parsed(report: Report | None) -> str:
    assert report is not None, "no object was parsed"
    return reported(report.city, report.degrees)


def share(cached: int | None, prompt: int) -> str:
    return f"{cached or 0}/{prompt}"


def call_in(message: Any) -> str:
    """Checks the call in a message of OpenAI's chat completions."""
    [call] = message.tool_calls
    return called(call.function.name, json.loads(call.function.arguments)["city"])


def of_chat_completions(ask: Callable[..., Any]) -> list[Check]:
    """Makes the checks of a client whose `ask(messages, **fields)` answers as OpenAI's chat completions do."""

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def chat() -> str:
        return said(ask([user(ASK)]).choices[0].message.content)

    def stream() -> str:
        chunks = ask([user(ASK)], stream=True)
        return streamed(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)

    def converse(messages: list[Any]) -> str:
        """Executes a call, and adds all messages of the turn."""
        choice = ask(messages, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        detail = call_in(choice.message)
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": TOOL_RESULT}
        messages += [choice.message, result]
        messages.append(ask(messages, tools=TOOLS).choices[0].message)
        said(messages[-1].content, TOOL_RESULT)
        return detail

    def tool() -> str:
        return converse([user(ASK_TOOL)])

    def second_turn() -> str:
        messages: list[Any] = [{"role": "system", "content": rules()}, user(ASK_TOOL)]
        converse(messages)
        usage = ask([*messages, user(ASK)], tools=TOOLS).usage
        return share(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)

    def image_second_turn() -> str:
        image = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
        asked = {"role": "user", "content": [{"type": "text", "text": ASK}, image]}
        messages: list[Any] = [{"role": "system", "content": rules()}, asked]
        messages.append(ask(messages).choices[0].message)
        said(messages[-1].content, SEES)
        answer = ask([*messages, user(ASK)])
        said(answer.choices[0].message.content, SEES)
        return share(answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens)

    def effort() -> str:
        return said(ask([user(ASK)], reasoning_effort="high").choices[0].message.content, THINKS_HIGH)

    return [chat, stream, tool, second_turn, image_second_turn, effort]


def run(checks: Iterable[Check]) -> None:
    for check in checks:
        try:
            line = {"check": check.__name__, "ok": True, "detail": check()}
        except Exception as error:
            line = {"check": check.__name__, "ok": False, "detail": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(line), flush=True)
