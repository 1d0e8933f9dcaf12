"""The tokens of a model as bytes, as grammars need them.

A token that never has text, such as an end of turn, is the byte FF and its name: no text of a grammar leads to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from rootstock.engine.tokenizer import ModelTokenizer

Ids = NDArray[np.intp]

_HIDDEN = b"\xff"  # no byte of any UTF-8 text
_CHECKED_TOKENS = 512
_CONTEXT = "a"


class TokensWithoutOwnText(Exception):
    """A tokenizer whose tokens have another text beside other tokens: no grammar can follow its answers."""


class Vocabulary:
    """The first `size` token ids with their bytes. Ids beyond the tokenizer's have none.

    An end of the answer is not one of the model's tokens here but an id of its own, `end`: a model may have several
    end tokens, or none, and a request may ignore them.
    """

    def __init__(self, tokenizer: ModelTokenizer, size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes about a second for 100,000 tokens. Raises TokensWithoutOwnText."""
        self._tokenizer = tokenizer
        self.size = size
        self.end = size
        self.eos_token_ids = np.array([id for id in eos_token_ids if 0 <= id < size], dtype=np.intp)
        eos = set(self.eos_token_ids.tolist())
        self.hidden = [id for id in range(size) if id in eos or tokenizer.is_hidden(id)]
        hidden = set(self.hidden)
        visible = [id for id in range(size) if id not in hidden]
        self.pieces = [_HIDDEN + tokenizer.token_bytes(id) if id in hidden else b"" for id in range(size)]
        for id, piece in zip(visible, _bytes_in_text(tokenizer, visible), strict=True):
            self.pieces[id] = piece
        self._longest = max((len(self.pieces[id]) for id in visible), default=0)
        self._by_bytes = {self.pieces[id]: id for id in reversed(visible) if self.pieces[id]}
        self._sorted = sorted((self.pieces[id], id) for id in visible)
        self.matcher_tokenizer = self._matcher_tokenizer()

    def _matcher_tokenizer(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Wrapped(self))
        return LLTokenizer(wrapper, n_vocab=self.size + 1, eos_token=self.end)

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
            ids = self._tokenizer.encode_chat(before + text).tolist()
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


class _Wrapped:
    """A vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = vocabulary.end
        self.tokens = [*vocabulary.pieces, _HIDDEN + b"<|end of the answer|>"]
        self.special_token_ids = [*vocabulary.hidden, vocabulary.end]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def _bytes_in_text(tokenizer: ModelTokenizer, visible: Sequence[int]) -> list[bytes]:
    """Returns the bytes that each token adds to a text.

    They are the tokenizer's `token_bytes` if a sample of tokens agrees with `decode`. Tokenizers of whole words put
    a space before each: their tokens are decoded one by one.
    """
    step = max(1, len(visible) // _CHECKED_TOKENS)
    sample = visible[::step]
    context = tokenizer.encode_chat(_CONTEXT).tolist()
    before = tokenizer.decode(context)

    def agree(pieces: dict[int, bytes]) -> bool:
        for first, second in zip(sample, [*sample[1:], *sample[:1]], strict=True):
            both = pieces[first] + pieces[second]
            if _is_text(both) and tokenizer.decode([*context, first, second]) != before + both.decode():
                return False
        return True

    told = {id: tokenizer.token_bytes(id) for id in visible}
    if agree(told):
        return list(told.values())
    decoded = {id: tokenizer.decode([*context, id]).removeprefix(before).encode() for id in visible}
    if agree(decoded):
        return list(decoded.values())
    raise TokensWithoutOwnText


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
