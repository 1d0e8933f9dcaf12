"""JSON text made in pieces: encoding a large answer in one go would hold the interpreter for all of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

CHUNK_CHARACTERS = 32 * 1024  # of a body that is sent in chunks

_dumps: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode


class LazyList:
    """A JSON list whose text is made when it is asked for: each piece is the text of one or more items."""

    def __init__(self, *parts: Iterable[str]) -> None:
        self._parts = parts

    def pieces(self) -> Iterator[str]:
        separator = "["
        for piece in itertools.chain.from_iterable(self._parts):
            yield separator
            yield piece
            separator = ","
        yield "]" if separator == "," else "[]"


class Kept:
    """An iterator's pieces, made once and kept for every later iteration."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._rest = pieces
        self._made: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for at in itertools.count():
            if at == len(self._made):
                piece = next(self._rest, None)
                if piece is None:
                    return
                self._made.append(piece)
            yield self._made[at]


def items_text(values: Sequence[Any]) -> str:
    """Returns the text of at least one item of a list, without the brackets."""
    return _dumps(values)[1:-1]


def json_pieces(value: Any) -> Iterator[str]:
    """Yields the text of a value in which objects may hold LazyLists, and iterators in the place of lists."""
    if isinstance(value, LazyList):
        yield from value.pieces()
    elif isinstance(value, Iterator):
        separator = "["
        for item in value:
            yield separator
            yield from json_pieces(item)
            separator = ","
        yield "]" if separator == "," else "[]"
    elif isinstance(value, dict) and value:
        separator = "{"
        for name, member in value.items():
            yield f"{separator}{_dumps(name)}:"
            yield from json_pieces(member)
            separator = ","
        yield "}"
    else:
        yield _dumps(value)


def in_chunks(pieces: Iterable[str]) -> Iterator[str]:
    """Joins pieces into chunks of at least CHUNK_CHARACTERS, the last one excepted."""
    chunk: list[str] = []
    characters = 0
    for piece in pieces:
        chunk.append(piece)
        characters += len(piece)
        if characters >= CHUNK_CHARACTERS:
            yield "".join(chunk)
            chunk, characters = [], 0
    if chunk:
        yield "".join(chunk)
