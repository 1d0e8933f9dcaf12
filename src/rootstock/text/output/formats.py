"""Formats of models' answers, as data: how a call is written, and which texts and tokens enclose the reasoning.

The notes name the models whose chat templates write the format. `detect.py` finds a model's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal

from rootstock.text.constraints.asked import ReasoningBounds


class CallIds(Enum):
    """The ids of a format's calls. A template may refuse the ids of another form."""

    RANDOM = "random"  # call_ and 24 letters and digits
    NINE_CHARS = "nine_chars"  # nine letters and digits, the model's if it writes one
    TEN_CHARS = "ten_chars"  # ten lowercase letters and digits, the model's if it writes one
    NUMBERED = "numbered"  # the model's: functions.NAME:NUMBER


class ValueType(Enum):
    """The type of a value that is written without JSON's quotes."""

    OF_SCHEMA = "of_schema"  # of the parameter in the tool's JSON schema
    STRING = "string"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls that are JSON objects of a name and arguments: one, several, or an array of them.

    Without an opening, a call begins a line and names one of the request's tools.
    """

    opening: str = ""
    closing: str = ""
    array: bool = False  # the template writes an array; both are read
    name_key: str = (
        "name"  # that the template writes; other usual ones are read. "": the name is the arguments' key
    )
    arguments_key: str = "arguments"
    padding: str = "\n"  # between the markers and the JSON, as the template writes it


@dataclass(frozen=True, slots=True)
class HeaderCalls:
    """Calls with a header, which holds the name, before arguments in JSON."""

    opening: str
    header: str  # a pattern of the header with the groups "name" and perhaps "id"
    header_end: str
    written_header: str  # as the template writes it, with {name} and perhaps {index} or {id}
    closing: str = ""
    section: tuple[str, str] = ("", "")  # around all calls
    tail: str = ""  # between the arguments and the closing
    separator: str = ""  # between two calls, as the template writes it


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls whose name and arguments stand in tags. Their arguments are translated to JSON while they come."""

    opening: str
    name_ends: tuple[str, ...]  # one that opens a key or closes the call is not part of the tag
    key_opening: str
    key_ends: Mapping[str, ValueType]
    value_closing: str
    closing: str
    tag_end: str = ""  # the tag of the name goes on until here
    value_opening: str = ""
    padding: str = ""  # around values, as the template writes it
    section: tuple[str, str] = ("", "")
    section_holds: Literal["one call", "all calls"] = "all calls"  # as the template writes it; both are read
    newline: str = "\n"  # between tags, as the template writes it


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Calls written as calls of Python functions with keyword arguments: [f(a=1), g(b="x")].

    Without an opening, a list begins a line and names one of the request's tools.
    """

    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class BareKeyCalls:
    """Calls written as call:NAME{key:value,…}, with marks instead of the quotes of strings."""

    opening: str
    closing: str
    quote: str


CallFormat = JsonCalls | HeaderCalls | TaggedCalls | PythonicCalls | BareKeyCalls


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer that is text, with marks around reasoning and calls. None: it has no such part."""

    calls: CallFormat | None = None
    reasoning: ReasoningMarks | None = None
    frame: tuple[str, ...] = ()  # other marks, which no client sees


@dataclass(frozen=True, slots=True)
class Harmony:
    """An answer of messages in channels, of gpt-oss: analysis, commentary (which may go to a function) and final."""


@dataclass(frozen=True)
class OutputFormat:
    name: str
    shape: Marked | Harmony
    ids: CallIds = CallIds.RANDOM
    tokens: Mapping[str, int] = field(
        default_factory=dict
    )  # ids of the marks that are one token, for a tokenizer

    @property
    def has_calls(self) -> bool:
        """Returns whether calls are parsed; they need a request's tools, too."""
        return isinstance(self.shape, Harmony) or self.shape.calls is not None

    @cached_property
    def has_reasoning(self) -> bool:
        """Returns whether an answer may hold reasoning, or marks that no client sees."""
        return isinstance(self.shape, Harmony) or self.shape.reasoning is not None or bool(self.shape.frame)

    @property
    def shows_reasoning(self) -> bool:
        """Returns whether an answer may hold reasoning."""
        return isinstance(self.shape, Harmony) or self.shape.reasoning is not None

    def reasoning_around_answers(self, prompt: str, *, calls: bool) -> ReasoningBounds | None:
        """Returns the reasoning that precedes the answers to a rendered prompt, and that a grammar leaves alone.

        With `calls`, the grammar is of calls. gpt-oss writes them in channels of their own.
        """
        if isinstance(self.shape, Harmony):
            if calls:
                return ReasoningBounds("<|end|>", "<|channel|>analysis<|message|>")
            return ReasoningBounds("<|channel|>final<|message|>", starts_inside=True)
        marks = self.shape.reasoning
        if marks is None:
            return None
        return ReasoningBounds(marks.closing, marks.opening, self.begins_in_reasoning(prompt))

    @property
    def marks(self) -> frozenset[str]:
        """Texts that special tokens may stand for, in whole or in part. They must stay visible in the text."""
        if isinstance(self.shape, Harmony):
            return HARMONY_MARKS
        found = set(self.shape.frame)
        if self.shape.reasoning is not None:
            found |= {self.shape.reasoning.opening, self.shape.reasoning.closing}
        match self.shape.calls:
            case JsonCalls() | PythonicCalls() as calls:
                found |= {calls.opening, calls.closing}
            case HeaderCalls() as calls:
                found |= {
                    calls.opening,
                    calls.closing,
                    calls.header_end,
                    calls.written_header,
                    *calls.section,
                }
            case TaggedCalls() as calls:
                found |= {calls.opening, calls.closing, calls.key_opening, *calls.key_ends, calls.tag_end}
                found |= {calls.value_opening, calls.value_closing, *calls.name_ends, *calls.section}
            case BareKeyCalls() as calls:
                found |= {calls.opening, calls.closing, calls.quote}
            case None:
                pass
        return frozenset(mark for mark in found if mark.strip())

    @property
    def openings(self) -> tuple[str, ...]:
        """Returns the marks with which calls begin, including marks that name a format."""
        if isinstance(self.shape, Harmony):
            return ("<|channel|>", "<|message|>")
        match self.shape.calls:
            case None:
                return ()
            case HeaderCalls() | TaggedCalls() as calls:
                key = (calls.key_opening,) if isinstance(calls, TaggedCalls) else (calls.header_end.strip(),)
                return tuple(each for each in (calls.section[0], calls.opening, *key) if each)
            case calls:
                return (calls.opening,) if calls.opening else ()

    def with_reasoning(self, reasoning: ReasoningMarks | None, frame: tuple[str, ...] = ()) -> OutputFormat:
        if isinstance(self.shape, Harmony):
            return self
        merged = tuple(dict.fromkeys((*self.shape.frame, *frame)))
        return replace(self, shape=replace(self.shape, reasoning=reasoning, frame=merged))

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends with the opening of reasoning, so that the answer goes on there."""
        if isinstance(self.shape, Harmony) or self.shape.reasoning is None:
            return False
        opening = self.shape.reasoning.opening.rstrip()
        return prompt[-len(opening) - _MAX_PROMPT_SPACE :].rstrip().endswith(opening)


HARMONY_MARKS = frozenset(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")
)
THINK = ReasoningMarks("<think>", "</think>")

# Marks of reasoning that no tag encloses, or that differ from each other. Others are found by their shape.
# The closing alone tells of reasoning.
KNOWN_REASONING = (
    THINK,
    ReasoningMarks("[THINK]", "[/THINK]"),  # Mistral
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<mm:think>", "</mm:think>"),
    ReasoningMarks("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ReasoningMarks("◁think▷", "◁/think▷"),  # Kimi VL
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningMarks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ReasoningMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
MESSAGE_REASONING = ReasoningMarks("<|think|>", "<|end|>")  # Solar Open: each of its messages ends so

_MAX_PROMPT_SPACE = 16
_QUOTED = ValueType.OF_SCHEMA
_DSML_KEY_ENDS = {'" string="true">': ValueType.STRING, '" string="false">': ValueType.JSON}


def _dsml(section: str, space: str = "") -> TaggedCalls:
    tag = f"｜DSML｜{space}"
    return TaggedCalls(
        opening=f'<{tag}invoke name="',
        name_ends=('"',),
        tag_end=">",
        key_opening=f'<{tag}parameter name="',
        key_ends=_DSML_KEY_ENDS,
        value_closing=f"</{tag}parameter>",
        closing=f"</{tag}invoke>",
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
    )


def _named_tags(
    section: str, prefix: str = "", function: str = "invoke", key: str = "parameter"
) -> TaggedCalls:
    """Returns calls in tags with the attribute `name`: <invoke name="f"><parameter name="a">1</parameter>…"""
    return TaggedCalls(
        opening=f'<{prefix}{function} name="',
        name_ends=('"',),
        tag_end=">",
        key_opening=f'<{prefix}{key} name="',
        key_ends={'">': _QUOTED},
        value_closing=f"</{prefix}{key}>",
        closing=f"</{prefix}{function}>",
        section=(f"<{section}>", f"</{section}>") if section else ("", ""),
    )


def _equals_tags(section: str, padding: str, newline: str = "\n") -> TaggedCalls:
    """Returns calls in tags with names after an equals sign: <function=f><parameter=a>1</parameter></function>."""
    return TaggedCalls(
        opening="<function=",
        name_ends=(">",),
        key_opening="<parameter=",
        key_ends={">": _QUOTED},
        value_closing="</parameter>",
        closing="</function>",
        padding=padding,
        section=(f"<{section}>", f"</{section}>"),
        section_holds="one call",
        newline=newline,
    )


def _suffixed_tags(suffix: str) -> TaggedCalls:
    """Returns calls with a tag per key and per value, whose names all end in `suffix`."""
    return TaggedCalls(
        opening=f"<tool_call{suffix}>",
        name_ends=(f"<tool_sep{suffix}>",),
        key_opening=f"<arg_key{suffix}>",
        key_ends={f"</arg_key{suffix}>": _QUOTED},
        value_opening=f"<arg_value{suffix}>",
        value_closing=f"</arg_value{suffix}>",
        closing=f"</tool_call{suffix}>",
        section=(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
    )


def _key_value_tags(call: str, prefix: str = "", newline: str = "\n") -> TaggedCalls:
    """Returns calls with a tag per key and per value: <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>…"""
    return TaggedCalls(
        opening=f"<{call}>",
        name_ends=("\n", f"<{prefix}arg_key>", f"</{call}>"),
        key_opening=f"<{prefix}arg_key>",
        key_ends={f"</{prefix}arg_key>": _QUOTED},
        value_opening=f"<{prefix}arg_value>",
        value_closing=f"</{prefix}arg_value>",
        closing=f"</{call}>",
        newline=newline,
    )


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_COMMAND_FRAME = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_KIMI_K3_TYPES = {"string": ValueType.STRING} | dict.fromkeys(
    ("number", "integer", "boolean", "object", "array", "null"), ValueType.JSON
)
_KIMI_K3_FRAME = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")

_CALLS: Mapping[str, CallFormat] = {
    "hermes": JsonCalls("<tool_call>", "</tool_call>"),  # Hermes, Qwen 2.5 and 3, Granite 4, MiMo VL
    "llama3_json": JsonCalls(arguments_key="parameters", padding=""),  # Llama 3.1 to 3.3
    "mistral_json": JsonCalls("[TOOL_CALLS]", array=True, padding=""),  # Mistral until v7
    "granite": JsonCalls("<|tool_call|>", array=True, padding=""),  # Granite 3
    "command": JsonCalls(  # Command R7B and A
        "<|START_ACTION|>", "<|END_ACTION|>", array=True, name_key="tool_name", arguments_key="parameters"
    ),
    "phi4_mini": JsonCalls("<|tool_call|>", "<|/tool_call|>", array=True, padding=""),
    "nemotron": JsonCalls("<TOOLCALL>", "</TOOLCALL>", array=True, padding=""),
    "tool_calls": JsonCalls(
        "<tool_calls>", "</tool_calls>", array=True, padding=""
    ),  # Jamba, Apriel, MiniMax M1
    "internlm2": JsonCalls("<|action_start|><|plugin|>", "<|action_end|>", arguments_key="parameters"),
    "gigachat3": JsonCalls("function call<|role_sep|>\n", padding=""),
    "gigachat31": JsonCalls("<|function_call|>", padding=""),
    "apertus": JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", array=True, name_key="", padding=""),
    "mistral": HeaderCalls(  # Mistral since v11, Devstral, Magistral, Ministral 3
        "[TOOL_CALLS]",
        r"(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\](?P<id>[^\[\]{}\s]+))?",
        "[ARGS]",
        "{name}",
    ),
    "deepseek_v3": HeaderCalls(  # DeepSeek V3 and R1
        _DEEPSEEK[0],
        rf"function{_DEEPSEEK_SEPARATOR}(?P<name>[^\n]+)",
        "\n```json\n",
        f"function{_DEEPSEEK_SEPARATOR}{{name}}",
        _DEEPSEEK[1],
        _DEEPSEEK_SECTION,
        tail="\n```",
        separator="\n",
    ),
    "deepseek_v31": HeaderCalls(
        _DEEPSEEK[0], r"(?P<name>[^\n]+)", _DEEPSEEK_SEPARATOR, "{name}", _DEEPSEEK[1], _DEEPSEEK_SECTION
    ),
    "kimi_k2": HeaderCalls(
        "<|tool_call_begin|>",
        r"(?P<id>(?:functions\.)?(?P<name>.+):\d+)",
        "<|tool_call_argument_begin|>",
        "functions.{name}:{index}",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "solar_open": HeaderCalls(
        "<|tool_call:begin|>",
        r"(?P<id>[^<>\s]+)<\|tool_call:name\|>(?P<name>[^<>\n]+)",
        "<|tool_call:args|>",
        "{id}<|tool_call:name|>{name}",
        "<|tool_call:end|>",
        ("<|tool_calls|>", "<|calls|>"),
    ),
    "qwen3_coder": _equals_tags("tool_call", "\n"),  # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
    "mimo": _equals_tags("tool_call", "", newline=""),  # MiMo V2
    "seed_oss": _equals_tags("seed:tool_call", ""),
    "llama3_function": HeaderCalls(  # Llama 3.1's custom tools, Functionary 3.1
        "<function=", r"(?P<name>[^<>\n]+)", ">", "{name}", "</function>"
    ),
    "glm45": _key_value_tags("tool_call"),  # GLM 4.5 and 4.6, Ling 3
    "glm47": _key_value_tags("tool_call", newline=""),  # GLM 4.7 and 5, Laguna, Spark 2.5
    "longcat": _key_value_tags("longcat_tool_call", "longcat_"),
    "hy3": _suffixed_tags(":opensource"),  # Hunyuan 3
    "minimax_m2": _named_tags("minimax:tool_call"),
    "minicpm5": replace(_named_tags("", "", "function", "param"), newline=""),
    "muse_spark": _named_tags("atem:function_calls", "atem:"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml(" calls", " "),
    "kimi_k3": TaggedCalls(
        opening='<|open|>call tool="',
        name_ends=('"',),
        tag_end="<|sep|>",
        key_opening='<|open|>argument key="',
        key_ends={f'" type="{type}"<|sep|>': value for type, value in _KIMI_K3_TYPES.items()},
        value_closing="<|close|>argument<|sep|>",
        closing="<|close|>call<|sep|>",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        newline="",
    ),
    "lfm2": PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    "pythonic": PythonicCalls(),  # Llama 3.2 and 4
    "olmo3": PythonicCalls("<function_calls>", "</function_calls>"),
    "gemma3_pythonic": PythonicCalls("```tool_code", "```"),
    "gemma4": BareKeyCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": BareKeyCalls("<start_function_call>", "<end_function_call>", "<escape>"),
}
_IDS = {
    "mistral": CallIds.NINE_CHARS,
    "mistral_json": CallIds.NINE_CHARS,
    "solar_open": CallIds.TEN_CHARS,
    "kimi_k2": CallIds.NUMBERED,
}
_FRAMES = {
    "command": _COMMAND_FRAME,
    "kimi_k3": _KIMI_K3_FRAME,
    "solar_open": ("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"),
    "gemma4": ("<|tool_response>",),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}

PLAIN = OutputFormat("none", Marked())
OUTPUT_FORMATS: Mapping[str, OutputFormat] = {
    PLAIN.name: PLAIN,
    **{
        name: OutputFormat(name, Marked(calls, None, _FRAMES.get(name, ())), _IDS.get(name, CallIds.RANDOM))
        for name, calls in _CALLS.items()
    },
    "harmony": OutputFormat("harmony", Harmony()),  # gpt-oss
}
