"""The tokens of a model as bytes, as grammars need them.

A token that never has text, such as an end of turn, is the byte FF and its name: no text of a grammar leads to it. An
id without a token, of which most models have some, has no bytes: nothing leads to it, in any grammar.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rootstock.text.tokenizer import ModelTokenizer

Ids = NDArray[np.intp]

_HIDDEN = b"\xff"  # no byte of any UTF-8 text
_CHECKED_TOKENS = 512
_CONTEXT = "a"


class UnfitTokens(Exception):
    """A tokenizer with whose tokens no answer can be made to follow a grammar, such as one of whole words."""


class Vocabulary:
    """The first `size` token ids with their bytes. Ids beyond the tokenizer's have none.

    An end of the answer is not one of the model's tokens here but an id of its own, `end`: a model may have several
    end tokens, or none, and a request may ignore them.
    """

    def __init__(self, tokenizer: ModelTokenizer, size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes about a second for 100,000 tokens. Raises UnfitTokens."""
        self._tokenizer = tokenizer
        self.size = size
        self.end = size
        self.eos_token_ids = np.array([id for id in eos_token_ids if 0 <= id < size], dtype=np.intp)
        eos = set(self.eos_token_ids.tolist())
        self._hidden = hidden = frozenset(id for id in range(size) if id in eos or tokenizer.is_hidden(id))
        visible = [id for id in range(size) if id not in hidden]
        told = map(tokenizer.token_bytes, range(size))
        # FF alone would be the beginning of every token without text.
        self.pieces = [_HIDDEN + piece if piece and id in hidden else piece for id, piece in enumerate(told)]
        reason = _reason_unfit(tokenizer, self.pieces, visible)
        if reason is not None:
            raise UnfitTokens(reason)
        self._longest = max((len(self.pieces[id]) for id in visible), default=0)
        self._by_bytes = {self.pieces[id]: id for id in reversed(visible) if self.pieces[id]}
        self._sorted = sorted((self.pieces[id], id) for id in visible)

    @property
    def matcher_pieces(self) -> list[bytes]:
        """Returns the bytes of each token as llguidance reads them, and of `end`."""
        return [*map(_unlike_numbers, self.pieces), _HIDDEN + b"<|end of the answer|>"]

    @property
    def matcher_special(self) -> list[int]:
        """Returns the tokens without text, and `end`."""
        return [*(id for id in sorted(self._hidden) if self.pieces[id]), self.end]

    @cached_property
    def mask_words(self) -> int:
        """32-bit words of a mask over the tokens and `end`."""
        return (self.size + 1 + 31) // 32

    def encode(self, text: bytes) -> list[int]:
        """Tokenizes text inside an answer as the model would, with tokens of exactly these bytes."""
        try:
            found = self._encode_inside(text.decode(), text)
        except UnicodeDecodeError:
            found = None
        return self._longest_pieces(text) if found is None else found

    def encode_marker(self, marker: str) -> tuple[int, ...]:
        """Tokenizes a marker, which may spell out control tokens."""
        found = self._encode_inside(marker, marker.encode(), with_names=True)
        return tuple(self._longest_pieces(marker.encode()) if found is None else found)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[id] for id in ids)

    def spelled(self, ids: Iterable[int]) -> bytes:
        """Returns the text of tokens, in which a token without text is a sequence that no text holds.

        Its name does not do: the end of a name and the text after it could look like a marker.
        """
        return b"".join(_spelled_id(id) if id in self._hidden else self.pieces[id] for id in ids)

    def beginning_with(self, prefix: bytes) -> list[int]:
        """Returns the tokens with text that begin with `prefix` and are longer."""
        found = []
        for at in range(bisect_left(self._sorted, (prefix, -1)), len(self._sorted)):
            piece, id = self._sorted[at]
            if not piece.startswith(prefix):
                break
            if len(piece) > len(prefix):
                found.append(id)
        return found

    def going_on_after(self, marker: bytes) -> list[int]:
        """Returns the tokens with text that hold `marker` and more text after it."""
        return [id for piece, id in self._sorted if marker in piece and not piece.endswith(marker)]

    def _encode_inside(self, text: str, wanted: bytes, *, with_names: bool = False) -> list[int] | None:
        """Tokenizes `text`; some tokenizers put a space before a text, so a line break stands before it then."""
        for before in ("", "\n"):
            ids: list[int] = self._tokenizer.encode_chat(before + text).tolist()
            if not all(0 <= id < self.size for id in ids):
                return None
            rest = [self.pieces[id].removeprefix(_HIDDEN) if with_names else self.pieces[id] for id in ids]
            while ids and len(b"".join(rest)) > len(wanted):
                ids, rest = ids[1:], rest[1:]
            if b"".join(rest) == wanted:
                return ids
        return None

    def _longest_pieces(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                id = self._by_bytes.get(text[at:end])
                if id is not None:
                    ids.append(id)
                    at = end
                    break
            else:
                break  # the vocabulary lacks this byte
        return ids


def _unlike_numbers(piece: bytes) -> bytes:
    """Changes the name of a token without text that looks like FF[7], by which llguidance writes the token 7.

    The beginning of such a name would be allowed wherever a token is, and could not be followed.
    """
    return _HIDDEN + piece if piece.startswith(_HIDDEN + b"[") else piece


def _reason_unfit(tokenizer: ModelTokenizer, pieces: Sequence[bytes], visible: Sequence[int]) -> str | None:
    """Returns why answers of these tokens cannot follow a grammar, or None. Compares a sample with `decode`."""
    known = {pieces[id] for id in visible}
    missing = [byte for byte in range(ord(" "), ord("~") + 1) if bytes([byte]) not in known]
    if missing:
        return f"it has no token for the character {chr(missing[0])!r} alone"
    context = tokenizer.encode_chat(_CONTEXT).tolist()
    before = tokenizer.decode(context)
    sample = visible[:: max(1, len(visible) // _CHECKED_TOKENS)]
    for first, second in zip(sample, [*sample[1:], *sample[:1]], strict=True):
        both = pieces[first] + pieces[second]
        if _is_text(both) and tokenizer.decode([*context, first, second]) != before + both.decode():
            return "it changes the text of tokens that stand side by side"
    return None


def _spelled_id(id: int) -> bytes:
    """Writes an id with bytes that no UTF-8 has, two bits at a time."""
    return _HIDDEN + bytes(0xF8 + (id >> shift & 3) for shift in range(0, 32, 2))


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
