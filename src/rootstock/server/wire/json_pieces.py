"""JSON text in pieces: encoding a large answer at once would hold the interpreter until it is complete."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CHUNK_CHARACTERS = 32 * 1024  # of a body that is sent in chunks

dumps: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode
quoted: Callable[[str], str] = json.encoder.encode_basestring  # a string, as `dumps` writes it


class LazyList:
    """A JSON list whose text is made on demand: each piece is the text of one or more items."""

    def __init__(self, *parts: Iterable[str]) -> None:
        self._parts = parts

    def pieces(self) -> Iterator[str]:
        return _enclosed("[]", ([piece] for piece in itertools.chain.from_iterable(self._parts)))


@dataclass(frozen=True, slots=True)
class Late:
    """A value that is made when its text is due, after all that comes before it."""

    make: Callable[[], Any]


class KeptPieces:
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
    return dumps(values)[1:-1]


def json_pieces(value: Any) -> Iterator[str]:
    """Yields the text of a value. Objects may hold LazyLists, Late values, and iterators in the place of lists."""
    if isinstance(value, LazyList):
        yield from value.pieces()
    elif isinstance(value, Late):
        yield from json_pieces(value.make())
    elif isinstance(value, Iterator):
        yield from _enclosed("[]", map(json_pieces, value))
    elif isinstance(value, dict):
        members = value.items()
        yield from _enclosed("{}", (itertools.chain([f"{dumps(k)}:"], json_pieces(v)) for k, v in members))
    else:
        yield dumps(value)


def _enclosed(brackets: str, items: Iterable[Iterable[str]]) -> Iterator[str]:
    separator = brackets[0]
    for pieces in items:
        yield separator
        yield from pieces
        separator = ","
    yield brackets if separator == brackets[0] else brackets[1]


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
