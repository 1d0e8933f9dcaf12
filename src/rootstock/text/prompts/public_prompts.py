"""The file of `--public-prompts`: system prompts with tools, and texts, whose K/V all tenants share.

The public head of a system prompt is the part of its rendering that does not depend on the beginning of the first
message after it. A prompt has the head if it begins with all of its tokens, so that no text is compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.types import Tokens
from rootstock.errors import InvalidOption, RequestError
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.conversation.types import Conversation, Message, Text
from rootstock.text.conversation.volatile_heads import without_volatile_heads
from rootstock.text.limits import refuse_surrogates
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, escaped
from rootstock.text.prompts.text_alignment import shared
from rootstock.units import MIB, in_units

OPTION = "--public-prompts"
MAX_FILE_BYTES = 64 * MIB
MAX_PROMPTS = 4096
_FIELDS = ("system", "messages", "tools", "chat_template_kwargs", "text")

# Beginnings of possible next messages: tokenizers merge across the boundary, differently for each kind of character.
_NEXT = ("Yes?", "no", "7", " x", "\n", "(", "ü", "語", "<")


@dataclass(frozen=True, slots=True)
class PublicPrompt:
    """A line of the file."""

    place: str  # for errors
    conversation: Conversation | None  # of system messages alone; None: a text
    text: str = ""


def read_public_prompts(path: Path) -> tuple[PublicPrompt, ...]:
    """Reads a JSONL file. Raises InvalidOption, which names the line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        lines = raw.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(OPTION, str(path), f"a file in UTF-8 that can be read ({error})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidOption(OPTION, str(path), f"a file of at most {in_units(MAX_FILE_BYTES)}")
    prompts = [_prompt(line, f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidOption(OPTION, str(path), f"a file of at most {MAX_PROMPTS:,} lines")
    return tuple(prompts)


def _prompt(line: str, place: str) -> PublicPrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidOption(OPTION, place, "a JSON object") from None
    if not isinstance(entry, dict) or not entry or entry.keys() - set(_FIELDS):
        raise InvalidOption(OPTION, place, f"an object with some of {', '.join(_FIELDS)}")
    try:
        if "text" in entry:
            return _text(entry, place)
        return PublicPrompt(place, _conversation(entry, place))
    except RequestError as error:
        raise InvalidOption(OPTION, place, f"a prompt that can be used ({error.message})") from None


def _text(entry: Mapping[str, Any], place: str) -> PublicPrompt:
    text = entry["text"]
    if not isinstance(text, str) or not text or len(entry) > 1:
        raise InvalidOption(OPTION, place, "an object with 'text' and nothing else")
    refuse_surrogates(text, "text")
    return PublicPrompt(place, None, text)


def _conversation(entry: Mapping[str, Any], place: str) -> Conversation:
    messages, system = entry.get("messages", []), entry.get("system")
    if system is not None:
        messages = [{"role": "system", "content": system}, *(messages if isinstance(messages, list) else [])]
    tools, options = entry.get("tools"), entry.get("chat_template_kwargs")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise InvalidOption(OPTION, place, "an object whose 'messages' are a list of objects")
    if not isinstance(tools or [], list) or not all(isinstance(each, dict) for each in tools or ()):
        raise InvalidOption(OPTION, place, "an object whose 'tools' are a list of objects")
    if not isinstance(options, dict | None):
        raise InvalidOption(OPTION, place, "an object whose 'chat_template_kwargs' are an object")
    conversation = conversation_of(messages, tools, None, options)
    if any(message.role not in ("system", "developer") for message in conversation.messages):
        raise InvalidOption(OPTION, place, "a conversation of system messages alone: others are private")
    if not messages and not tools:
        raise InvalidOption(OPTION, place, "an object with a system message, tools or a text")
    return conversation


def public_heads(
    prompts: Sequence[PublicPrompt], tokenizer: PromptTokenizer, *, parse: bool, drop_volatile: bool
) -> PublicHeads:
    """Renders and tokenizes public prompts like clients' prompts. Raises InvalidOption."""
    heads = []
    for prompt in prompts:
        try:
            heads.append(_head(_continued(prompt, tokenizer, parse=parse, drop_volatile=drop_volatile)))
        except RequestError as error:
            raise InvalidOption(OPTION, prompt.place, f"a prompt of this model ({error.message})") from None
        if not len(heads[-1]):
            raise InvalidOption(OPTION, prompt.place, "a prompt that the model's chat template shows")
    return PublicHeads(heads)


def _head(continued: Sequence[Tokens]) -> Tokens:
    """Returns the tokens that all continuations have in common."""
    first, *others = continued
    return first[: min(shared(first, other) for other in others)]


def _continued(
    prompt: PublicPrompt, tokenizer: PromptTokenizer, *, parse: bool, drop_volatile: bool
) -> list[Tokens]:
    model_tokenizer = tokenizer.model_tokenizer
    if prompt.conversation is None:
        return [model_tokenizer.encode(prompt.text + following) for following in _NEXT]
    continued = []
    for following in _NEXT:
        user = Message("user", (Text(following),))
        conversation = replace(prompt.conversation, messages=[*prompt.conversation.messages, user])
        if drop_volatile:
            conversation, _ = without_volatile_heads(conversation)
        template = escaped(template_input(conversation, model_tokenizer), tokenizer, parse=parse)
        continued.append(model_tokenizer.encode_chat(template.render(model_tokenizer)))
    return continued
