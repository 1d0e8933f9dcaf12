"""`rootstock serve` with a model that calls a tool and then answers, because its sampler follows a script.

Server, engine, cache, tokenizer and forward are the real ones. The model is a small, untrained Llama. The sampler
raises the logit of the script's next token, which the last turn of the rendered prompt decides: a call of a known
tool where the user says "use the tool", a picture's where the user says "look at the picture PATH", an object where
the user says "reply in JSON", the result of a tool, or a sentence. The sentence also tells the wish for reasoning, as
the template writes it, and the number of images that the prompt has. Penalties, masks of a grammar and temperature
apply as they do to any model. Where a mask forbids the script's token, the sampler calls one of the tools, or closes
the JSON that it is in. Calls are text of the model, which the server parses.

    python bench/show/scripted_server.py --port 8000    # further options are those of `rootstock serve`

With `--any-tool` it calls every tool, with arguments that follow the tool's own schema: the first one of a request,
where the last turn is the user's. Its other answers repeat what it was told.

`--usage-file FILE` adds a line of JSON to a file for each request that ends: its prompt tokens, and the cached ones.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rootstock.engine.sequence
from rootstock.bench.tiny_model import TURN_END, TinyModelSpec, ensure_tiny_model
from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Event, Finished, Request, Sink
from rootstock.engine.sampling import SampledToken, Sampler

NAME = "scripted"
TEMPLATE = Path(__file__).with_name("clients") / "hermes.jinja"
SPEC = TinyModelSpec(
    hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1, context_limit=262_144
)
NAMED = re.compile(r'"name": "(\w+)"')
REASONING = re.compile(r"<\|system\|>\n(Reasoning: \w+)<\|turn_end\|>\n")  # as the template writes it
IMAGE_LINE = "[An image, which this model cannot see]"  # the server's line for an image
MOST_REPEATED = 300  # characters
DEEPEST = 8  # objects within each other in the arguments of a call
RAISED = 1e5  # far above the model's own logits
# Where the script is left, the first of these that a mask allows. The quote comes first: within a string, brackets
# would be text, without an end.
CLOSING = (TURN_END, '"', "}", "]", "0", "true")

COMMAND = "echo rootstock-42"
ANSWER = "Hello. This is the scripted model."
OBJECT = {"city": "Paris", "degrees": 21}
# Arguments by the name of a tool: the drivers' own, and the shells of the agents.
CALLS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": "Paris"},
    "Bash": {"command": COMMAND, "description": "Print a word"},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-lc", COMMAND]},
    "bash": {"command": COMMAND, "description": "Print a word"},
    "run_shell_command": {"command": COMMAND, "is_background": False},
    "run_commands": {"commands": [COMMAND]},
}
# The arguments with which Codex's and Cline's tools read a picture.
LOOKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "view_image": lambda path: {"path": path},
    "read_files": lambda path: {"files": [{"path": path}]},
}
LOOK_AT = re.compile(r"look at the picture ([^\s<]+)", re.IGNORECASE)
# Tools by which Claude Code and Qwen Code ask for an object.
OBJECT_TOOLS = ("StructuredOutput", "structured_output")


ANY_TOOL = False  # whether tools are called that CALLS does not have; set by --any-tool


def scripts_for(prompt: str) -> list[str]:
    """Returns the answer to a rendered prompt, and the calls of its tools, for a request that forces one."""
    wish = REASONING.search(prompt)
    if wish is not None:  # a setting, not a turn of the conversation
        prompt = prompt[: wish.start()] + prompt[wish.end() :]
    turns = re.split(r"<\|(system|user|assistant|tool)\|>\n", prompt)
    spoken = [(role, text.removesuffix("\n")) for role, text in zip(turns[1::2], turns[2::2], strict=True)]
    asked = [(role, text) for role, text in spoken if role in ("user", "tool")]
    role, text = asked[-1] if asked else ("user", "")
    if ANY_TOOL:
        tools = tools_of(prompt)
    else:
        named = NAMED.findall(prompt.partition("</tools>")[0])
        tools = {name: CALLS.get(name, OBJECT) for name in named}
    calls = [call_of(name, arguments) for name, arguments in tools.items()]
    called = next((name for name in CALLS if name in tools), None)
    looking = next((name for name in LOOKS if name in tools), None)
    reporter = next((name for name in OBJECT_TOOLS if name in tools), None)
    if role == "tool":
        answer = f"The tool says: {' '.join(text.replace(TURN_END, '').split())[:200]}"
    elif ANY_TOOL and tools:
        answer = calls[0]
    elif "use the tool" in text.lower() and called is not None:
        answer = call_of(called, CALLS[called])
    elif (picture := LOOK_AT.search(text)) is not None and looking is not None:
        answer = call_of(looking, LOOKS[looking](picture[1]))
    elif "reply in json" in text.lower():
        answer = json.dumps(OBJECT) if reporter is None else call_of(reporter, OBJECT)
    elif ANY_TOOL:
        told = " / ".join(text.replace(TURN_END, "") for _, text in spoken)
        answer = f"I was told: {told[:MOST_REPEATED]}"
    else:
        images = sum(text.count(IMAGE_LINE) for _, text in asked)
        seen = [f"{wish[1]}." if wish else "", f"Images: {images}." if images else ""]
        answer = " ".join(filter(None, [ANSWER, *seen]))
    return [answer, *calls]


def tools_of(prompt: str) -> dict[str, Any]:
    """Returns arguments that fit the schema of each tool of a rendered prompt, by name."""
    _, _, listed = prompt.partition("<tools>\n")
    tools: dict[str, Any] = {}
    for line in listed.partition("\n</tools>")[0].splitlines():
        function = json.loads(line)["function"]
        schema = function.get("parameters") or {}
        found = fitting(schema, schema, DEEPEST)
        tools[function["name"]] = found if isinstance(found, dict) else {}
    return tools


def fitting(schema: Any, root: Any, depth: int) -> Any:
    """Returns a value that fits the usual keywords of a JSON schema."""
    if not isinstance(schema, dict) or depth == 0:
        return "x"
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(part, {})
        return fitting(found, root, depth - 1)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if schema.get(name):
            return schema[name][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return fitting(schema[name][0], root, depth - 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        required = schema.get("required", schema.get("properties", {}))
        properties = schema.get("properties", {})
        return {name: fitting(properties.get(name), root, depth - 1) for name in required}
    if kind == "array":
        return [fitting(schema.get("items"), root, depth - 1)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(kind, "Paris")


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_sampler(tokenizer: Any) -> type[Sampler]:
    """Makes the sampler of a tokenizer. Its arguments are those of `Sampler`, the second is the prompt."""
    end = tokenizer.token_to_id(TURN_END)
    closing = [tokenizer.token_to_id(text) for text in CLOSING]
    boosts = [(token, RAISED * (1 - place / 10)) for place, token in enumerate(closing) if token is not None]

    class ScriptedSampler(Sampler):
        def __init__(self, params: Any, prompt: NDArray[np.int32], *args: Any, **more: Any) -> None:
            super().__init__(params, prompt, *args, **more)
            text = tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            ids = (tokenizer.encode(script, add_special_tokens=False).ids for script in scripts_for(text))
            self._scripts = [[*script, end] for script in ids]

        def sample(self, logits: NDArray[np.float32]) -> SampledToken:
            row = logits.copy()
            for token, boost in boosts:
                row[token] += boost
            for place, script in enumerate(self._scripts):
                row[script[0]] = max(row[script[0]], (3 - place / 100) * RAISED)
            sampled = super().sample(row)
            self._scripts = [
                script[1:] for script in self._scripts if script[0] == sampled.token and len(script) > 1
            ]
            return sampled

    return ScriptedSampler


def use_sampler(sampler: type[Sampler]) -> None:
    """Makes engines sample by a script."""
    assert rootstock.engine.sequence.Sampler is Sampler, "engines make their samplers elsewhere"  # type: ignore[attr-defined]
    rootstock.engine.sequence.Sampler = sampler  # type: ignore[attr-defined,misc]


def record_usage(file: Path) -> None:
    submit = Engine.submit

    def submit_and_record(engine: Engine, request: Request, sink: Sink) -> None:
        def record(event: Event) -> None:
            if isinstance(event, Finished | Aborted):
                usage = event.usage
                line = {"cached": usage.cached_tokens, "prompt": usage.prompt_tokens}
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(line) + "\n")
            sink(event)

        submit(engine, request, record)

    Engine.submit = submit_and_record  # type: ignore[assignment,method-assign]


def main() -> None:
    from tokenizers import Tokenizer

    from rootstock.cli import main as command

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--usage-file", type=Path)
    parser.add_argument("--any-tool", action="store_true")
    own, others = parser.parse_known_args()
    global ANY_TOOL
    ANY_TOOL = own.any_tool
    if own.usage_file is not None:
        record_usage(own.usage_file)
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_tiny_model(SPEC, Path(folder))
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        use_sampler(scripted_sampler(tokenizer))
        options = ["--served-model-name", NAME, "--chat-template", str(TEMPLATE), "--device", "cpu"]
        sys.argv = ["rootstock", "serve", str(model), *options, *others]
        command.main()


if __name__ == "__main__":
    main()
