"""Detection of a model's output format: a conversation with a call is rendered, and the formats try to read it back.

Models' names say nothing here: a template that writes a call in a known form is enough. The marks around reasoning
are found in the same way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rootstock.errors import ChatTemplateFailed, ChatTemplateMissing, InvalidOption
from rootstock.text.conversation.types import Tool
from rootstock.text.output.deltas import CallEnded, CallStarted, ContentDelta, ReasoningDelta
from rootstock.text.output.formats import (
    KNOWN_REASONING,
    MESSAGE_REASONING,
    OUTPUT_FORMATS,
    PLAIN,
    OutputFormat,
    ReasoningMarks,
)
from rootstock.text.output.parser import parsed
from rootstock.text.output.writing import written
from rootstock.text.tokenizer import Message, ModelTokenizer

log = logging.getLogger(__name__)

_QUESTION = "Kestrel7391"  # letters and digits: no template trims or escapes them
_THOUGHTS = "Merlin2846"
_ANSWER = "Osprey5120"
_TOOL = "find_falcon"
_PLACE = "by the sea"
_ARGUMENTS = {"place": _PLACE, "count": 7, "more": {"list": [1, "a"], "wide": True}}
_CALL_IDS = ("call00001", f"functions.{_TOOL}:0")  # the strictest templates want nine characters
_SORTED_ARGUMENTS = {"count": 7, "more": {"list": [1, "a"], "wide": True}, "place": _PLACE}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "Where to look"},
        "count": {"type": "integer", "description": "How many"},
        "more": {"type": "object", "description": "Other settings"},
    },
    "required": ["place"],
}
_TOOLS = (Tool(_TOOL, "Finds falcons", _PARAMETERS),)
_TEMPLATE_TOOL = {
    "type": "function",
    "function": {"name": _TOOL, "description": "Finds falcons", "parameters": _PARAMETERS},
}
_ASKED: Message = {"role": "user", "content": _QUESTION}
_OPENING = re.compile(r"(<[^<>\s]{1,64}>|\[[A-Z_]{1,64}\])\s*\Z")
_CLOSING = re.compile(r"\s*(</?[^<>\s]{1,64}>|\[/[A-Z_]{1,64}\])")
_THINKING_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"enable_thinking": True, "thinking": True},
    {},
    {"enable_thinking": False, "thinking": False},
)


def detect(tokenizer: ModelTokenizer) -> OutputFormat:
    """Returns the format in which a model's answers are written, by its chat template."""
    calls = _format_of_calls(tokenizer)
    found = calls.with_reasoning(_reasoning(tokenizer))
    log.info("answers: calls in the format %r, reasoning %s", found.name, _shown(found))
    return for_tokenizer(found, tokenizer)


def named(name: str, tokenizer: ModelTokenizer) -> OutputFormat:
    """Returns the format with a name, and the marks of reasoning that are detected. Raises InvalidOption."""
    chosen = OUTPUT_FORMATS.get(name)
    if chosen is None:
        raise InvalidOption("--tool-parser", name, f"one of {', '.join(sorted(OUTPUT_FORMATS))}")
    return for_tokenizer(chosen.with_reasoning(_reasoning(tokenizer)), tokenizer)


def for_tokenizer(format: OutputFormat, tokenizer: ModelTokenizer) -> OutputFormat:
    """Fills in the ids of the tokens that make up the format's marks."""
    parts: set[str] = set()
    for mark in format.marks:
        parts |= {mark, mark.strip(), *re.findall(r"<[^<>]*>|\[[^\[\]]*\]", mark)}
    tokens: dict[str, int] = {}
    for part in parts - {""}:
        ids = tokenizer.encode_chat(part)
        if len(ids) == 1 and tokenizer.token_bytes(int(ids[0])) == part.encode():
            tokens[part] = int(ids[0])
    return replace(format, tokens=tokens)


def visible_tokens(format: OutputFormat, tokenizer: ModelTokenizer) -> frozenset[int]:
    """Returns the special tokens that the parser must see as text, but for those that end an answer."""
    return frozenset(id for id in format.tokens.values() if tokenizer.is_hidden(id)) - set(
        tokenizer.eos_token_ids
    )


def _shown(format: OutputFormat) -> str:
    reasoning = getattr(format.shape, "reasoning", None)
    return f"between {reasoning.opening!r} and {reasoning.closing!r}" if reasoning else "in no marks"


def _format_of_calls(tokenizer: ModelTokenizer) -> OutputFormat:
    """Returns the format that reads the rendered call back, leaves the least other text, and would write it so."""
    has_calls = False
    for rendered in _rendered_calls(tokenizer):
        has_calls = True
        fits = {
            format.name: (other_text, not _writes(format, rendered))
            for format in OUTPUT_FORMATS.values()
            if (other_text := _other_text(format, rendered)) is not None
        }
        if fits:
            return OUTPUT_FORMATS[min(fits, key=fits.__getitem__)]
    if has_calls:
        log.warning("answers: the chat template writes calls in an unknown form; they stay text")
        return PLAIN
    return _format_of_instructions(tokenizer)


def _writes(format: OutputFormat, rendered: str) -> bool:
    calls = [(_TOOL, _ARGUMENTS)]
    return written(format, calls) in rendered or written(format, [(_TOOL, _SORTED_ARGUMENTS)]) in rendered


def _format_of_instructions(tokenizer: ModelTokenizer) -> OutputFormat:
    """Returns the format that a template tells the model to write, or whose tokens the model has.

    Some templates show the tools and leave out the calls of earlier answers.
    """
    with contextlib.suppress(ChatTemplateMissing, ChatTemplateFailed):
        if _TOOL in tokenizer.render_chat([_ASKED], [_TEMPLATE_TOOL]):
            text = "\n".join(tokenizer.template_names.literals)
            for format in OUTPUT_FORMATS.values():
                if format.openings and all(opening in text for opening in format.openings):
                    return format
            for format in OUTPUT_FORMATS.values():
                tokens = for_tokenizer(format, tokenizer).tokens
                if format.openings and all(opening in tokens for opening in format.openings):
                    return format
    return PLAIN


def _rendered_calls(tokenizer: ModelTokenizer) -> Iterator[str]:
    """Yields the text after the question, for each form of arguments and ids that the template takes.

    A template may take the arguments as an object or as JSON text, and drop or quote the other form.
    """
    for content in ("", None):
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            for id in _CALL_IDS:
                call = {"id": id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
                calls: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
                result: Message = {"role": "tool", "content": "None.", "tool_call_id": id, "name": _TOOL}
                for messages in ([_ASKED, calls], [_ASKED, calls, result]):
                    rendered = _rendered(tokenizer, messages, [_TEMPLATE_TOOL], add_generation_prompt=False)
                    if rendered is not None and _PLACE in rendered:
                        yield rendered


def _rendered(
    tokenizer: ModelTokenizer, messages: Sequence[Message], tools: Sequence[Any] = (), **options: Any
) -> str | None:
    """Returns the text after the last question. None: the template refuses the conversation, or drops it."""
    try:
        rendered = tokenizer.render_chat(messages, tools, **options)
    except (ChatTemplateMissing, ChatTemplateFailed):
        return None
    _, question, after = rendered.rpartition(_QUESTION)
    return after if question else None


def _other_text(format: OutputFormat, rendered: str) -> int | None:
    """Counts the characters that a format leaves as text. None: it does not find the call."""
    deltas = parsed(format, rendered, _TOOLS)
    names = [delta.name for delta in deltas if isinstance(delta, CallStarted)]
    arguments = [delta.arguments for delta in deltas if isinstance(delta, CallEnded)]
    if names != [_TOOL] or arguments != [_ARGUMENTS]:
        return None
    return sum(len(delta.text) for delta in deltas if isinstance(delta, ContentDelta | ReasoningDelta))


def _reasoning(tokenizer: ModelTokenizer) -> ReasoningMarks | None:
    """Finds the marks around reasoning: of an earlier answer, in the prompt's end, or in the template's own text."""
    for rendered in _rendered_thoughts(tokenizer):
        before, thoughts, after = rendered.partition(_THOUGHTS)
        if thoughts and (marks := _marks_around(before, after)) is not None:
            return marks
    ends = [
        end for options in _THINKING_OPTIONS if (end := _rendered(tokenizer, [_ASKED], **options)) is not None
    ]
    known = [marks for marks in KNOWN_REASONING if any(_is_at_end_of(end, marks) for end in ends)]
    literals = tokenizer.template_names.literals
    known += [marks for marks in KNOWN_REASONING if any(marks.closing in literal for literal in literals)]
    return known[0] if known else None


def _rendered_thoughts(tokenizer: ModelTokenizer) -> Iterator[str]:
    fields = {"reasoning_content": _THOUGHTS, "reasoning": _THOUGHTS, "thinking": _THOUGHTS}
    parts = [{"type": "thinking", "thinking": _THOUGHTS}, {"type": "text", "text": _ANSWER}]
    answers: Iterable[Message] = (
        {"role": "assistant", "content": _ANSWER, **fields},
        {"role": "assistant", "content": parts},
    )
    for answer in answers:
        for options in _THINKING_OPTIONS:
            for messages in ([_ASKED, answer], [_ASKED, answer, {"role": "user", "content": "And?"}]):
                rendered = _rendered(tokenizer, messages, add_generation_prompt=False, **options)
                if rendered is not None:
                    yield rendered


def _marks_around(before: str, after: str) -> ReasoningMarks | None:
    for marks in (*KNOWN_REASONING, MESSAGE_REASONING):
        if before.rstrip().endswith(marks.opening.rstrip()) and after.lstrip().startswith(marks.closing):
            return marks
    opening, closing = _OPENING.search(before), _CLOSING.match(after)
    if closing is None:
        return None
    if opening is None or opening[1] == closing[1]:
        return None
    marks = ReasoningMarks(opening[1], closing[1])
    return marks if _belong_together(marks) else None


def _belong_together(marks: ReasoningMarks) -> bool:
    """Returns whether two tags have a name in common: <think> and </think>, but not <|im_start|> and <|im_end|>."""
    names = [re.sub(r"[^a-z]", "", tag.lower()) for tag in (marks.opening, marks.closing)]
    bare = [re.sub("^(start|begin)|(start|begin|end)$|^end", "", name) for name in names]
    return bare[0] == bare[1] and any(word in bare[0] for word in ("think", "reason", "thought"))


def _is_at_end_of(prompt: str, marks: ReasoningMarks) -> bool:
    bare = prompt.rstrip()
    return bare.endswith((marks.opening.rstrip(), marks.closing))
