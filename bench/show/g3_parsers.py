"""G3: the parser of answers, on generated calls of every format, on damaged answers, and beside another library.

generated  answers with calls of made-up tools, in each format: the calls are read back, and random cuts of the
           text give the same deltas as the whole
damaged    answers with one to four faults: no exception, no lost text, no dependence on the cuts
work       function calls for a hostile text of twice the length, divided by those for the text
compared   the same generated calls through the parsers of mlx-lm (`--mlx-lm DIR`, an unpacked wheel) and of
           SGLang (`--sglang DIR`)
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, at_most, conclude, exactly

from engine.output import answers
from rootstock.engine.output.deltas import CallEnded, source
from rootstock.engine.output.formats import OutputFormat
from rootstock.engine.output.parser import OutputParser
from rootstock.engine.output.writing import written

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


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--answers", type=int, default=200, help="of each format")
    parser.add_argument("--cuts", type=int, default=5, help="of each answer")
    parser.add_argument("--damaged", type=int, default=10_000, help="answers, over all formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mlx-lm", type=Path, help="the folder that holds mlx_lm")
    parser.add_argument("--sglang", type=Path, help="the folder that holds sglang")
    parser.add_argument(
        "--list", action="store_true", help="print the calls that another library reads otherwise"
    )
    args = parser.parse_args()

    figures: dict[str, Any] = {"formats": len(answers.CALL_FORMATS)}
    figures |= generated(args.answers, args.cuts, args.seed)
    figures |= damaged(args.damaged, args.seed)
    figures["work_ratio"] = round(max(work_ratio(format, unit) for format, unit in hostile()), 3)
    for name, directory, load in (("mlx_lm", args.mlx_lm, mlx_lm), ("sglang", args.sglang, sglang)):
        if directory is not None:
            figures |= compared(name, load(directory), args.answers, args.seed, listing=args.list)
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
    return work(format, unit, 2 * times) / work(format, unit, times)


def work(format: OutputFormat, unit: str, times: int) -> int:
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    parser = OutputParser(format, answers.TOOLS, answers.PROMPTS.get(format.name, ""), answers.numbered())
    sys.setprofile(count)
    try:
        for _ in range(times):
            parser.push(unit)
        parser.finish()
    finally:
        sys.setprofile(None)
    return counted


# ---- other libraries

Parse = Callable[[str], Sequence[tuple[str, Any]]]


def compared(
    library: str, parsers: dict[str, Parse], most: int, seed: int, *, listing: bool
) -> dict[str, Any]:
    """Counts, for each format, the answers whose calls the library reads otherwise than they were written."""
    differences: dict[str, int] = {}
    for format in answers.CALL_FORMATS:
        if format.name not in parsers:
            continue
        rng = random.Random(f"{seed} {format.name}")
        differences[format.name] = 0
        for _ in range(most):
            calls = answers.calls_for(format, rng, most=1)
            text = written(format, calls)
            try:
                found: Any = list(parsers[format.name](text))
            except Exception as error:  # its own
                found = repr(error)
            if found != calls:
                differences[format.name] += 1
                if listing:
                    print(f"{library}, {format.name}: {text!r} is {found}", flush=True)
    return {f"{library}_formats": len(differences), f"{library}_otherwise": differences}


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
    """Loads the detectors without the packages of the server around them."""
    sys.path.insert(0, str(directory))
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    tools = [protocol.Tool(**tool) for tool in template_tools()]

    def parse_with(name: str) -> Parse:
        module, _, cls = name.partition(".")
        detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), cls)

        def parse(text: str) -> list[tuple[str, Any]]:
            found = detector().detect_and_parse(text, tools).calls
            return [(call.name, json.loads(call.parameters)) for call in found]

        return parse

    return {name: parse_with(theirs) for name, theirs in SGLANG.items()}


if __name__ == "__main__":
    main()
