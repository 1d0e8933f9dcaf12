"""Whether a chat template writes down what a role says: many skip the roles that they do not know."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from rootstock.engine.limits import MAX_NAME_CHARS
from rootstock.engine.tokenizer import Message, ModelTokenizer
from rootstock.errors import ChatTemplateFailed, InvalidParameter

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WORD = "Kestrel7391"  # letters and digits: no template trims or escapes it
_TOOL_NAME = "look_up"


def refuse_dropped_roles(tokenizer: ModelTokenizer, messages: Sequence[Message]) -> None:
    """`messages` as templates take them. Raises InvalidParameter and ChatTemplateMissing."""
    for i, message in enumerate(messages):
        role, path = message["role"], f"messages[{i}].role"
        if role not in ROLES and not _is_named(tokenizer, role):
            raise InvalidParameter(path, role, f"one of {', '.join(ROLES)}")
        # Templates cut the reasoning out of what the assistant said, on purpose.
        if role != "assistant" and message["content"] and not _is_rendered(tokenizer, role, i == 0):
            where = "first" if i == 0 else "after another message"
            raise InvalidParameter(
                path,
                role,
                f"a role that the model's chat template renders: it drops messages of this one {where}",
            )


def _is_named(tokenizer: ModelTokenizer, role: str) -> bool:
    """Whether the template has a word for it, as Llama's has for `ipython`."""
    plain = len(role) <= MAX_NAME_CHARS and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", role) is not None
    return plain and role in tokenizer.template_names.literals


@functools.lru_cache(maxsize=256)
def _is_rendered(tokenizer: ModelTokenizer, role: str, is_first: bool) -> bool:
    """Renders short conversations with one message of the role. A refusal by the template counts as rendered: it
    refuses the request as well, with its own words."""
    probes = _probes(role, is_first)
    refused = 0
    for messages in probes:
        tool = {"type": "function", "function": {"name": _TOOL_NAME, "parameters": {"type": "object"}}}
        try:
            if _WORD in tokenizer.render_chat(messages, [tool] if role == "tool" else []):
                return True
        except ChatTemplateFailed:
            refused += 1
    return refused == len(probes)


def _probes(role: str, is_first: bool) -> list[list[Message]]:
    said: Message = {"role": role, "content": _WORD}
    asked: Message = {"role": "user", "content": "Yes?"}
    answered: Message = {"role": "assistant", "content": "No."}
    if is_first:
        return [[said], [said, asked]]
    # Nine characters, as the strictest templates want them.
    id = "call00000"
    call = {"id": id, "type": "function", "function": {"name": _TOOL_NAME, "arguments": {}}}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {**said, "tool_call_id": id, "name": _TOOL_NAME}
    return [[asked, said], [asked, answered, said], [asked, answered, said, asked], [asked, calls, result]]
