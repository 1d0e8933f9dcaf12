"""G2: the share of each prompt that stays cached: events of docs/clients.md, and the server's own answers sent back.

Events: requests of a coding agent's shape (`coding_agent.py`) are sent to `rootstock serve` on the demo's tiny model
with a template like Qwen3's, which prints the system text before the tools. Each event is a pair of requests with a
cache salt of its own. Its figure is the share of the second prompt that the answer reports as cached.

Answers: the tiny model writes random words at temperature 1, and the client sends each answer back as text. Its
tokens are rarely those that a tokenizer makes of the text. Calls are forced, and their arguments are sent back
re-serialised. The figure is the share of the generated tokens that the next request finds in the cache. The last
token of an answer was sampled and never computed, so that it is not counted.

Sampled ids: the same on the oracle runtime, with answers cut into tokens at random places (`sampled_ids.py`), with a
memory of answers and without.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
from coding_agent import events
from common import ROOT, argument_parser, at_least, at_most, conclude, exactly
from sampled_ids import first_prompt_is_the_tokenizers, shares_found

from rootstock.bench.serving import ServerProcess
from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model

Json = dict[str, Any]
TEMPLATE = ROOT / "tests" / "engine" / "prompts" / "templates" / "qwen3.jinja"
CONTEXT_LIMIT = 65_536
ANSWER_MEMORY = 64 * 1024**2
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "maxLength": 12},
                "count": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["word", "count"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--answers", type=int, default=40, help="conversations of each kind over HTTP")
    parser.add_argument("--conversations", type=int, default=20, help="of each kind on the oracle runtime")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    bars = {}
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_tiny_model(TinyModelSpec(context_limit=CONTEXT_LIMIT), Path(folder))
        options = [
            str(model),
            "--port",
            "0",
            "--alias",
            "*",
            "--kv-budget",
            "2GiB",
            "--chat-template",
            str(TEMPLATE),
        ]
        with ServerProcess(options) as server, httpx.Client(base_url=server.url, timeout=600.0) as client:
            for event in events():
                share = _share_of_event(client, event.name, event.before, event.after)
                print(f"{event.name}: {share:.4f}, the bar is {event.least}", flush=True)
                figures[event.name] = round(share, 4)
                bars[event.name] = at_least(event.least)
            for kind, ask in (("text", _text_found), ("calls", _call_found)):
                found = [ask(client, number) for number in range(given.answers)]
                figures[f"{kind}_found_again"] = statistics.fmean(found)
                figures[f"{kind}_worst"] = min(found)
                bars[f"{kind}_found_again"] = exactly(1.0)
    found_ids, figures["sampled_ids"] = shares_found(given.conversations, ANSWER_MEMORY)
    without, _ = shares_found(given.conversations, 0)
    for kind in found_ids:
        figures[f"ids_found_{kind}"], figures[f"ids_without_{kind}"] = found_ids[kind], without[kind]
        bars |= {f"ids_found_{kind}": exactly(1.0), f"ids_without_{kind}": at_most(0.9)}
    figures["first_prompt_is_the_tokenizers"] = first_prompt_is_the_tokenizers()
    bars["first_prompt_is_the_tokenizers"] = exactly(True)
    conclude("G2", figures, bars)


def _share_of_event(client: httpx.Client, salt: str, before: Json, after: Json) -> float:
    usage: Json = {}
    for body in (before, after):
        answer = client.post("/v1/messages?beta=true", json={**body, "max_tokens": 1, "cache_salt": salt})
        answer.raise_for_status()
        usage = answer.json()["usage"]
    read = usage["cache_read_input_tokens"]
    return float(read / (read + usage["input_tokens"] + usage["cache_creation_input_tokens"]))


def _text_found(client: httpx.Client, number: int) -> float:
    messages: list[Json] = [{"role": "user", "content": f"Tell me of tree {number}."}]
    first = _chat(client, messages, seed=number, temperature=1.0, max_tokens=60)
    answer = first["choices"][0]["message"]
    messages += [_sent_back(answer), {"role": "user", "content": "And?"}]
    return _found(first, _chat(client, messages, max_tokens=1))


def _call_found(client: httpx.Client, number: int) -> float:
    messages: list[Json] = [{"role": "user", "content": f"Look tree {number} up."}]
    fields: Json = {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "max_tokens": 200}
    first = _chat(client, messages, seed=number, **fields)
    answer = _sent_back(first["choices"][0]["message"])
    for call in answer["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        spaced = json.dumps(arguments, indent=2, sort_keys=number % 2 == 0)
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":")) if number % 3 else spaced
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "a tree"}]
    return _found(first, _chat(client, messages, tools=[TOOL], max_tokens=1))


def _chat(client: httpx.Client, messages: list[Json], **fields: Any) -> Json:
    answer = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})
    answer.raise_for_status()
    body: Json = answer.json()
    return body


def _sent_back(message: Json) -> Json:
    return {name: value for name, value in message.items() if value is not None and name != "refusal"}


def _found(first: Json, second: Json) -> float:
    """Returns the share of the first answer's computed tokens that the second request found."""
    prompt, made = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"] - 1
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    return float(min(1.0, (cached - prompt) / made))


if __name__ == "__main__":
    main()
