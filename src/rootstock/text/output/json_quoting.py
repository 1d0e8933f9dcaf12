"""Grammars of a text, rewritten as grammars of that text inside a JSON string.

Most models write the input of a custom tool as a string of JSON. A grammar of the input must then spell quotes,
backslashes and control characters as JSON does. One spelling is allowed of each: the one that `json.dumps` writes.
"""

from __future__ import annotations

import json
import re

_SPECIAL = '"\\' + "".join(map(chr, range(32)))  # characters that JSON escapes
_PLAIN = r'[^"\\\x00-\x1F]'
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_SPACES = "\t\n\v\f\r"
# Shorthands of classes, and the special characters in them.
_SHORTHANDS = {
    "d": "", "D": _SPECIAL, "w": "", "W": _SPECIAL, "s": _SPACES,
    "S": "".join(char for char in _SPECIAL if char not in _SPACES),
}  # fmt: skip
_CHAR = r"\\x[0-9A-Fa-f]{2}|\\[xu]\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}|\\."
_PIECE = re.compile(
    rf"(?P<class>\[\^?\]?(?:\\.|[^\[\]\\])*\])|(?P<flags>\(\?(?P<on>[a-zA-Z]*)(?:-[a-z]+)?[:)])"
    rf"|(?P<group>\(\?P?<[A-Za-z_]\w*>|[()|*+?^$]|\{{\d+(?:,\d*)?\}})|(?P<char>{_CHAR})|(?P<other>.)",
    re.DOTALL,
)
_IN_CLASS = re.compile(rf"(?P<first>{_CHAR}|.)(?:-(?P<last>{_CHAR}|[^\]]))?", re.DOTALL)
# An opening without an end takes all up to where the end could be: behind each opening one would be searched for.
_OF_LARK = re.compile(
    r"(?P<comment>//[^\n]*)|(?P<from>\"[^\"\\\n]\"|\"\\.\")\s*\.\.\s*(?P<to>\"[^\"\\\n]\"|\"\\.\")"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\")|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)"
    r"|(?P<unclosed>\"(?:\\.|[^\"\\\n])*|/(?:\\.|[^/\\\n])+)"
    r"|%import\s+common\.(?P<common>[A-Z_]+)(?:\s*->\s*(?P<alias>[A-Z_]+))?|(?P<directive>%[a-z]+)|(?P<other>.)",
    re.DOTALL,
)
# Terminals of Lark's module `common` that hold special characters. Those with comments in them are refused.
_COMMON = {
    "CR": r"\r",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_COMMENTS = frozenset({"CPP_COMMENT", "C_COMMENT", "SH_COMMENT", "SQL_COMMENT"})


class NotQuotable(Exception):
    """A part of a grammar that has no equivalent inside a JSON string."""


def quoted_lark(grammar: str) -> str:
    """Rewrites a grammar in Lark. Raises NotQuotable."""
    return _OF_LARK.sub(_quoted_part, grammar)


def quoted_pattern(pattern: str, *, dot_all: bool = False) -> str:
    """Rewrites a regular expression. Raises NotQuotable."""
    pieces, dots = [], [dot_all]
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if match["flags"] is not None:
            if set(match["on"]) - set("is") or "-" in piece:
                raise NotQuotable(f"the flags '{piece}'")
            is_group, with_dots = piece.endswith(":"), dots[-1] or "s" in match["on"]
            dots = [*dots, with_dots] if is_group else [*dots[:-1], with_dots]
            on = match["on"].replace("s", "")
            pieces.append(f"(?{on}{piece[-1]}" if on or is_group else "")
        elif match["group"] is not None:
            dots = [*dots, dots[-1]] if piece.startswith("(") else dots
            dots = dots[:-1] if piece == ")" and len(dots) > 1 else dots
            pieces.append(piece)
        elif match["class"] is not None:
            pieces.append(_quoted_class(piece))
        elif piece == ".":
            pieces.append(_any_of(_PLAIN, _SPECIAL if dots[-1] else _SPECIAL.replace("\n", "")))
        else:
            pieces.append(_quoted_char(piece))
    return "".join(pieces)


def _quoted_part(match: re.Match[str]) -> str:
    if match["string"] is not None:
        return json.dumps(_inside(_text(match["string"])), ensure_ascii=False)
    if match["from"] is not None:
        first, last = (_text(match[name]) for name in ("from", "to"))
        return f"/{_quoted_class(f'[{re.escape(first)}-{re.escape(last)}]')}/"
    if match["regex"] is not None:
        flags = match["flags"]
        if set(flags) - set("is"):
            raise NotQuotable(f"the flags '{flags}' of a regular expression")
        quoted = quoted_pattern(match["regex"].replace(r"\/", "/"), dot_all="s" in flags)
        return f"/{quoted.replace('/', chr(92) + '/')}/{flags.replace('s', '')}"
    if match["common"] is not None:
        name = match["common"]
        if name in _COMMENTS:
            raise NotQuotable(f"'common.{name}'")
        if name in _COMMON:
            return f"{match['alias'] or name}: /{quoted_pattern(_COMMON[name])}/"
    if match["directive"] is not None and match[0] not in ("%ignore", "%llguidance"):
        raise NotQuotable(f"'{match[0]}'")
    return match[0]


def _quoted_char(piece: str) -> str:
    if piece == "[":
        raise NotQuotable("a class within a class")
    kind = piece[1:2]
    if piece.startswith("\\") and kind in _SHORTHANDS:
        return _any_of(f"[{piece}&&{_PLAIN}]", _SHORTHANDS[kind])
    char = _char(piece)
    return _literal(_inside(char)) if char in _SPECIAL else piece


def _quoted_class(text: str) -> str:
    negated = text.startswith("[^")
    body = text[2 if negated else 1 : -1]
    if "&&" in body or "--" in body or "~~" in body:
        raise NotQuotable(f"the class '{text}'")
    held: set[str] = set()
    for match in _IN_CLASS.finditer(body):
        first, last = match["first"], match["last"]
        if first.startswith("\\") and first[1] in _SHORTHANDS:
            held.update(_SHORTHANDS[first[1]])
        else:
            low = _char(first)
            high = low if last is None else _char(last)
            held.update(char for char in _SPECIAL if low <= char <= high)
    special = [char for char in _SPECIAL if (char in held) != negated]
    return _any_of(f"[{text}&&{_PLAIN}]", "".join(special))


def _char(piece: str) -> str:
    """Returns the character that a piece of a regular expression stands for."""
    if not piece.startswith("\\"):
        return piece
    if piece == "\\":
        raise NotQuotable("a backslash at the end")
    kind = piece[1]
    if kind in "xu" and len(piece) > 2:
        return chr(int(piece[2:].strip("{}"), 16))
    if kind in _ESCAPED:
        return _ESCAPED[kind]
    if kind.isalnum():  # classes of Unicode, bounds of words, references
        raise NotQuotable(f"'{piece}'")
    return kind


def _any_of(plain: str, special: str) -> str:
    spelled = [_inside(char) for char in special]
    codes = [text[-2:] for text in spelled if text.startswith("\\u00")]
    named = [_literal(text) for text in spelled if not text.startswith("\\u00")]
    if codes:
        named.append(rf"\\u00(?:{'|'.join(codes)})")
    return f"(?:{'|'.join([plain, *named])})"


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal(text: str) -> str:
    return f"(?:{''.join(char if char.isalnum() else chr(92) + char for char in text)})"


def _text(string: str) -> str:
    try:
        return str(json.loads(string))
    except ValueError:
        raise NotQuotable(f"the string {string}") from None
