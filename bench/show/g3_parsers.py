"""G3: the parser of answers, on generated calls of every format, on damaged answers, and beside another library.

generated  answers with calls of made-up tools, in each format: the calls are read back, and random cuts of the
           text give the same deltas as the whole
damaged    answers with one to four faults: no exception, no lost text, no dependence on the cuts
work       function calls for a hostile text of twice the length, divided by those for the text
compared   the same generated calls through the parsers of mlx-lm (`--mlx-lm DIR`, an unpacked wheel), of SGLang
           (`--sglang DIR`) and of openai-harmony (`--harmony`; its vocabulary is in $TIKTOKEN_ENCODINGS_BASE).
           `REASONS` explains each difference
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, at_most, conclude, exactly

from rootstock.text.output.deltas import CallEnded, source
from rootstock.text.output.formats import OutputFormat
from rootstock.text.output.parser import OutputParser
from rootstock.text.output.writing import written
from text.output import answers

HOSTILE = (
    "<tool_call>",
    "{",
    '{"name": "',
    "[look_up(",
    "<think>",
    '<tool_call>{"a":"',
    "</",
    " \n",
    "[[{{((",
)
MLX_LM = {  # our format: its parser, and whether that takes the text without the markers around
    "hermes": "json_tools",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm47",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral_json": "mistral",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "muse_spark": "muse_spark",
    "lfm2": "pythonic",
    "gemma4": "gemma4",
    "function_gemma": "function_gemma",
}
SGLANG = {
    "hermes": "hermes_detector.HermesDetector",
    "llama3_json": "llama32_detector.Llama32Detector",
    "pythonic": "pythonic_detector.PythonicDetector",
    "mistral_json": "mistral_detector.MistralDetector",
    "mistral": "mistral_detector.MistralDetector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "deepseek_v3": "deepseekv3_detector.DeepSeekV3Detector",
    "deepseek_v31": "deepseekv31_detector.DeepSeekV31Detector",
    "deepseek_v32": "deepseekv32_detector.DeepSeekV32Detector",
    "deepseek_v4": "deepseekv4_detector.DeepSeekV4Detector",
    "glm45": "glm4_moe_detector.Glm4MoeDetector",
    "glm47": "glm47_moe_detector.Glm47MoeDetector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "minimax_m2": "minimax_m2.MinimaxM2Detector",
    "gemma4": "gemma4_detector.Gemma4Detector",
    "lfm2": "lfm2_detector.Lfm2Detector",
    "command": "cohere_command4_detector.CohereCommand4Detector",
    "harmony": "gpt_oss_detector.GptOssDetector",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why libraries read calls of some formats otherwise than they were written."""

    libraries: frozenset[str]
    formats: frozenset[str]
    text: str
    holds: Callable[[str, dict[str, Any]], bool]  # of a call's name and arguments


def _has_hyphen(name: str, _: dict[str, Any]) -> bool:
    return "-" in name


def _text_of(pattern: str) -> Callable[[str, dict[str, Any]], bool]:
    """Returns whether a pattern is in a text among the arguments, which no list or object holds."""

    def holds(_: str, arguments: dict[str, Any]) -> bool:
        return any(isinstance(value, str) and re.search(pattern, value) for value in arguments.values())

    return holds


def _json_of(pattern: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda _, arguments: re.search(pattern, json.dumps(arguments)) is not None


_STRIPPED = "glm45 glm47 longcat minimax_m2 minicpm5 muse_spark deepseek_v32 deepseek_v4"
REASONS = tuple(
    Reason(frozenset(libraries.split()), frozenset(formats.split()), text, holds)
    for libraries, formats, text, holds in (
        ("mlx_lm", "lfm2 function_gemma", "no name with a hyphen", _has_hyphen),
        ("mlx_lm", "function_gemma", "no lists and objects", _json_of(r": [\[{]")),
        ("mlx_lm", "function_gemma", "no brackets in a text", _text_of(r"[{}]")),
        ("mlx_lm sglang", _STRIPPED, "no space around a text", _text_of(r"\A\s|\s\Z")),
        ("mlx_lm", "longcat", "no call without arguments", _json_of(r"\A\{\}\Z")),
        ("mlx_lm sglang", "qwen3_coder", "the text null is no text", _text_of(r"\Anull\Z")),
        ("sglang", "glm45", "null is the text None", _json_of(r'"note": null')),
        ("sglang", "glm45 glm47", "a text that is JSON is no text", _text_of(r'(?s)\A\s*null\s*\Z|\A".*"\Z')),
        ("sglang", "minimax_m2", "a text that may be null is null", _json_of(r'"note": "')),
        ("sglang", "lfm2 pythonic", "no name with a hyphen", _has_hyphen),
        ("sglang", "pythonic", "no numbers below zero", _json_of(r"-\d")),
        ("sglang", "harmony", "no <| in a text", _json_of(r"<\|")),
        ("sglang", "gemma4", "null is text", _json_of("null")),
        ("sglang", "gemma4", "a number with an exponent is text", _json_of(r"\de[+-]?\d")),
    )
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--answers", type=int, default=200, help="of each format")
    parser.add_argument("--cuts", type=int, default=5, help="of each answer")
    parser.add_argument("--damaged", type=int, default=10_000, help="answers, over all formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mlx-lm", type=Path, help="the folder that holds mlx_lm")
    parser.add_argument("--sglang", type=Path, help="the folder that holds sglang")
    parser.add_argument("--harmony", action="store_true", help="compare with openai-harmony")
    parser.add_argument(
        "--list", action="store_true", help="print the calls that another library reads otherwise"
    )
    args = parser.parse_args()

    figures: dict[str, Any] = {"formats": len(answers.CALL_FORMATS)}
    figures |= generated(args.answers, args.cuts, args.seed)
    figures |= damaged(args.damaged, args.seed)
    figures["work_ratio"] = round(max(work_ratio(format, unit) for format, unit in hostile()), 3)
    libraries: dict[str, dict[str, Parse]] = {}
    if args.mlx_lm is not None:
        libraries["mlx_lm"] = mlx_lm(args.mlx_lm)
    if args.sglang is not None:
        libraries["sglang"] = sglang(args.sglang)
    if args.harmony:
        libraries["openai_harmony"] = openai_harmony()
    figures["not_explained"] = 0
    for name, parsers in libraries.items():
        found = compared(name, parsers, args.answers, args.seed, listing=args.list)
        figures["not_explained"] += found.pop("not_explained")
        figures |= found
    bars = {
        "formats": at_least(13),
        "answers_of_a_format": at_least(200),
        "calls_read_otherwise": exactly(0),
        "cuts_that_differ": exactly(0),
        "damaged": at_least(10_000),
        "exceptions": exactly(0),
        "lost_text": exactly(0),
        "damaged_cuts_that_differ": exactly(0),
        "work_ratio": at_most(2.5),
        "not_explained": exactly(0),
    }
    conclude("G3", figures, bars)


def generated(most: int, cuts: int, seed: int) -> dict[str, int]:
    otherwise = differ = calls_made = 0
    for format in answers.CALL_FORMATS:
        rng = random.Random(f"{seed} {format.name}")
        for _ in range(most):
            calls = answers.calls_for(format, rng)
            calls_made += len(calls)
            text = written(format, calls)
            whole = answers.streamed(format, [text])
            otherwise += answers.found_calls(whole) != calls
            for _ in range(cuts):
                differ += answers.streamed(format, answers.cut_at_random(rng, text)) != whole
    return {
        "answers_of_a_format": most,
        "calls": calls_made,
        "calls_read_otherwise": otherwise,
        "cuts_that_differ": differ,
    }


def damaged(most: int, seed: int) -> dict[str, Any]:
    counted: Counter[str] = Counter()
    for number in range(most):
        format = answers.with_think(answers.CALL_FORMATS[number % len(answers.CALL_FORMATS)])
        rng = random.Random(f"{seed} damaged {number}")
        before = rng.choice(("", "Text.\n", "<think>\nhm\n</think>\n\n", "<think>hm"))
        text = answers.damaged(format, rng, before + written(format, answers.calls_for(format, rng)))
        try:
            whole = answers.streamed(format, [text])
            counted["lost_text"] += "".join(map(source, whole)) != text
            cut = answers.streamed(format, answers.cut_at_random(rng, text))
            counted["damaged_cuts_that_differ"] += cut != whole
        except Exception as error:  # any is a fault
            counted["exceptions"] += 1
            print(f"{format.name}: {error!r} for {text!r}", flush=True)
            continue
        ends = [delta for delta in whole if isinstance(delta, CallEnded)]
        counted["damaged_calls_whole"] += sum(end.arguments is not None for end in ends)
        counted["damaged_calls_malformed"] += sum(end.arguments is None for end in ends)
    names = (
        "exceptions",
        "lost_text",
        "damaged_cuts_that_differ",
        "damaged_calls_whole",
        "damaged_calls_malformed",
    )
    return {"damaged": most} | {name: counted[name] for name in names}


def hostile() -> list[tuple[OutputFormat, str]]:
    made = [(answers.with_think(format), unit) for format in answers.CALL_FORMATS for unit in HOSTILE]
    return made + [(format, mark) for format in answers.CALL_FORMATS for mark in sorted(format.marks)]


def work_ratio(format: OutputFormat, unit: str, times: int = 60) -> float:
    """Returns the growth of work with the length of a text that repeats `unit`, one push for each."""
    prompt = answers.PROMPTS.get(format.name, "")

    def work(times: int) -> int:
        parser = OutputParser(format, answers.TOOLS, prompt, answers.numbered())
        return answers.calls_to_parse(parser, unit, times)

    return work(2 * times) / work(times)


# ---- other libraries

Parse = Callable[[str], Sequence[tuple[str, Any]]]


def compared(
    library: str, parsers: dict[str, Parse], most: int, seed: int, *, listing: bool
) -> dict[str, Any]:
    """Counts, by format and reason, the answers whose calls the library reads otherwise than they were written."""
    formats = [format for format in answers.CALL_FORMATS if format.name in parsers]
    otherwise: Counter[str] = Counter()
    not_explained = 0
    for format in formats:
        rng = random.Random(f"{seed} {format.name}")
        reasons = [each for each in REASONS if library in each.libraries and format.name in each.formats]
        for _ in range(most):
            calls = answers.calls_for(format, rng, most=1)
            text = written(format, calls)
            try:
                found: Any = list(parsers[format.name](text))
            except Exception as error:  # its own
                found = repr(error)
            if found == calls:
                continue
            reason = next((each.text for each in reasons if each.holds(*calls[0])), None)
            not_explained += reason is None
            otherwise[f"{format.name}: {reason}"] += 1
            if listing or reason is None:
                print(f"{library}, {format.name} ({reason}): {text!r} is {found}", flush=True)
    return {
        f"{library}_formats": len(formats),
        f"{library}_answers": most * len(formats),
        f"{library}_otherwise": dict(otherwise),
        "not_explained": not_explained,
    }


def template_tools() -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters or {})}}
        for tool in answers.TOOLS
    ]


def mlx_lm(directory: Path) -> dict[str, Parse]:
    package = types.ModuleType("mlx_tool_parsers")  # mlx_lm itself needs mlx
    package.__path__ = [str(directory / "mlx_lm" / "tool_parsers")]
    sys.modules[package.__name__] = package
    tools = template_tools()

    def parse_with(name: str) -> Parse:
        module = importlib.import_module(f"mlx_tool_parsers.{name}")

        def parse(text: str) -> list[tuple[str, Any]]:
            start, end = module.tool_call_start, module.tool_call_end
            inner = text[text.index(start) + len(start) :]
            inner = inner[: inner.rindex(end)] if end else inner
            found = module.parse_tool_call(inner.strip(), tools)
            calls = found if isinstance(found, list) else [found]
            return [(call["name"], call["arguments"]) for call in calls]

        return parse

    return {name: parse_with(theirs) for name, theirs in MLX_LM.items()}


def sglang(directory: Path) -> dict[str, Parse]:
    """Loads the detectors without the server around them. They need partial_json_parser, xgrammar and msgspec."""
    for name in ("sglang", "sglang.srt", "sglang.srt.function_call"):
        package = types.ModuleType(name)
        package.__path__ = [str(directory.joinpath(*name.split(".")))]
        sys.modules[name] = package
    protocol: Any = types.ModuleType(
        "sglang.srt.entrypoints.openai.protocol"
    )  # itself needs the whole server
    protocol.Tool = protocol.ToolChoice = types.SimpleNamespace
    sys.modules[protocol.__name__] = protocol
    tools = [
        types.SimpleNamespace(
            type="function", function=types.SimpleNamespace(strict=False, **tool["function"])
        )
        for tool in template_tools()
    ]

    def parse_with(name: str) -> Parse:
        module, _, cls = name.partition(".")
        detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), cls)

        def parse(text: str) -> list[tuple[str, Any]]:
            text = text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")  # the one form that it knows
            text = _HARMONY_HEADER.sub(_SGLANG_HARMONY_HEADER, text)
            found = detector().detect_and_parse(text, tools).calls
            return [(call.name, json.loads(call.parameters)) for call in found]

        return parse

    return {name: parse_with(theirs) for name, theirs in SGLANG.items()}


_SGLANG_HARMONY_HEADER = r"<|start|>assistant<|channel|>commentary to=\1 <|constrain|>json"
_HARMONY_HEADER = re.compile(r"^ to=(functions\.[\w-]+)<\|channel\|>commentary json")


def openai_harmony() -> dict[str, Parse]:
    harmony = importlib.import_module("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

    def parse(text: str) -> list[tuple[str, Any]]:
        ids = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(ids, role=harmony.Role.ASSISTANT)
        return [
            (each.recipient.removeprefix("functions."), json.loads(each.content[0].text))
            for each in messages
            if each.recipient is not None
        ]

    return {"harmony": parse}


if __name__ == "__main__":
    main()
