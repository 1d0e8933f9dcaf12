"""Check of JSON that streams: the part of a growing text up to which it is the beginning of a JSON value.

Anthropic's clients parse the arguments of a call while they arrive, and end the whole stream at a text that cannot
become JSON.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACES = " \t\n\r"
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_NUMBER_BEGINS = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")
_MAX_SCALAR_CHARS = 400


class _Expects(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()  # of a list
    KEY = auto()
    KEY_OR_END = auto()  # of an object
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()  # the value is complete
    STRING = auto()  # more of it, or its end
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()  # more of a number or a word, or the character after it


class JsonPrefix:
    """A text that grows as long as it is the beginning of a JSON value."""

    def __init__(self) -> None:
        self.is_broken = False
        self._closings: list[str] = []  # of the open lists and objects
        self._expects = _Expects.VALUE
        self._scalar = ""
        self._is_key = False
        self._hex_digits = 0

    def accepted(self, text: str) -> str:
        """Returns the beginning of `text` that continues the value: all of it, unless the text breaks here."""
        if self.is_broken:
            return ""
        for at, char in enumerate(text):
            if not self._takes(char):
                self.is_broken = True
                return text[:at]
        return text

    def _takes(self, char: str) -> bool:
        match self._expects:
            case _Expects.STRING:
                if char == '"':
                    self._expects = _Expects.COLON if self._is_key else self._after_value()
                elif char == "\\":
                    self._expects = _Expects.ESCAPE
                return char >= " "
            case _Expects.ESCAPE:
                self._expects, self._hex_digits = (_Expects.HEX, 4) if char == "u" else (_Expects.STRING, 0)
                return char in '"\\/bfnrtu'
            case _Expects.HEX:
                self._hex_digits -= 1
                if self._hex_digits == 0:
                    self._expects = _Expects.STRING
                return char in "0123456789abcdefABCDEF"
            case _Expects.SCALAR:
                if char not in ",]}" and char not in _SPACES:
                    self._scalar += char
                    return self._is_scalar_begun()
                if _SCALAR.fullmatch(self._scalar) is None:
                    return False
                self._expects = self._after_value()
        return char in _SPACES or self._takes_structure(char)

    def _takes_structure(self, char: str) -> bool:
        expects = self._expects
        ends = expects in (_Expects.COMMA_OR_END, _Expects.ITEM_OR_END, _Expects.KEY_OR_END)
        if ends and char == self._closings[-1]:
            self._closings.pop()
            self._expects = self._after_value()
            return True
        match expects:
            case _Expects.KEY | _Expects.KEY_OR_END:
                self._expects, self._is_key = _Expects.STRING, True
                return char == '"'
            case _Expects.COLON:
                self._expects = _Expects.VALUE
                return char == ":"
            case _Expects.COMMA_OR_END:
                self._expects = _Expects.KEY if self._closings[-1] == "}" else _Expects.VALUE
                return char == ","
            case _Expects.VALUE | _Expects.ITEM_OR_END:
                return self._begins_value(char)
        return False

    def _begins_value(self, char: str) -> bool:
        match char:
            case '"':
                self._expects, self._is_key = _Expects.STRING, False
            case "{":
                self._closings.append("}")
                self._expects = _Expects.KEY_OR_END
            case "[":
                self._closings.append("]")
                self._expects = _Expects.ITEM_OR_END
            case _:
                self._scalar, self._expects = char, _Expects.SCALAR
                return self._is_scalar_begun()
        return True

    def _is_scalar_begun(self) -> bool:
        scalar = self._scalar
        if len(scalar) > _MAX_SCALAR_CHARS:
            return False
        return _NUMBER_BEGINS.fullmatch(scalar) is not None or any(word.startswith(scalar) for word in _WORDS)

    def _after_value(self) -> _Expects:
        return _Expects.COMMA_OR_END if self._closings else _Expects.NOTHING
