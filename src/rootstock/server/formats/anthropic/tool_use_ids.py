"""Ids of calls: the engine's, in the form that Anthropic's clients accept.

They want letters, digits, "_" and "-", and Anthropic's own ids begin with "toolu_". The translation is a bijection: a
call that a client sends back has the id that the engine gave it.
"""

from __future__ import annotations

import re

_OURS, _THEIRS = "call_", "toolu_"
_CODED = "toolu_0x"
_PLAIN = re.compile(r"(?!0x)[A-Za-z0-9_-]+")


def tool_use_id(call_id: str) -> str:
    """Returns the id of a call in an answer."""
    rest = call_id.removeprefix(_OURS)
    if rest != call_id and _PLAIN.fullmatch(rest):
        return _THEIRS + rest
    return _CODED + call_id.encode(errors="surrogatepass").hex()


def call_id_of(tool_use_id: str) -> str:
    """Returns the engine's id of a call or of a result that a client sends."""
    if tool_use_id.startswith(_CODED):
        try:
            return bytes.fromhex(tool_use_id.removeprefix(_CODED)).decode()
        except ValueError:
            return tool_use_id
    rest = tool_use_id.removeprefix(_THEIRS)
    return _OURS + rest if rest != tool_use_id and _PLAIN.fullmatch(rest) else tool_use_id
