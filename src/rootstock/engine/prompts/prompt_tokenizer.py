"""Prompts to tokens, within a limit; of conversations that were seen before, only what is new is tokenized.

A conversation is cut where its tokenizer would cut it (`engine/text_pieces.py`), about once a message. The tokens
of each piece are kept. The result always equals the tokens of the whole text. Tenants have pieces of their own:
how long an answer takes tells nobody what others have written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.tokenizer import ModelTokenizer, PlacedTokens
from rootstock.errors import PromptTextTooLong
from rootstock.units import MIB

CAP_BYTES = 64 * MIB
# A text of more characters per token of the limit is first counted by slices: texts have about four.
_LIKELY_CHARS_PER_TOKEN = 8
_SLICE_CHARS = 65_536
_ENTRY_BYTES = 520  # of what holds a piece and its tokens, besides these; 113 of them are a salt

_Key = tuple[str, bool, str]  # the salt, whether it begins the text, the piece


class PromptTokenizer:
    """Tokenizes prompts and refuses those that cannot fit, before the work is done. For any thread."""

    def __init__(self, tokenizer: ModelTokenizer, limit_tokens: int) -> None:
        self.model_tokenizer = tokenizer
        self._limit_tokens = limit_tokens
        self._pieces = TokenizedPieces(tokenizer)

    def refuse_more_chars(self, chars: int) -> None:
        """Refuses texts that have, together, too many characters for any tokens. Raises PromptTextTooLong."""
        if chars > self._limit_tokens * self.model_tokenizer.longest_token_chars:
            raise PromptTextTooLong(chars, self._limit_tokens)

    def forget(self, salt: str | None) -> None:
        """Drops the texts kept for one salt, or for all."""
        self._pieces.forget(salt)

    def encode(self, text: str) -> Tokens:
        """Tokenizes a plain prompt. Raises PromptTextTooLong."""
        self._refuse_too_long(text)
        return self.model_tokenizer.encode(text)

    def encode_chat(self, rendered: str, salt: str) -> Tokens:
        """Tokenizes a rendered conversation, the caller's own array. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        return self._pieces.encode_chat(rendered, salt)

    def place_chat(self, rendered: str) -> PlacedTokens:
        """Tokenizes like `encode_chat`, with the places of the tokens. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        return self.model_tokenizer.place_chat(rendered)

    def _refuse_too_long(self, text: str) -> None:
        """Refuses a text that has too many characters for any tokens, and one whose slices have twice the tokens.

        Cutting a text changes a few tokens beside the cut. A text whose slices have twice as many tokens as the limit
        has more than the limit. Refusing it costs no more work than tokenizing a text that fits.
        """
        if len(text) <= self._limit_tokens * _LIKELY_CHARS_PER_TOKEN:
            return
        self.refuse_more_chars(len(text))
        count = 0
        for start in range(0, len(text), _SLICE_CHARS):
            count += len(self.model_tokenizer.encode_chat(text[start : start + _SLICE_CHARS]))
            if count > 2 * self._limit_tokens:
                raise PromptTextTooLong(len(text), self._limit_tokens)


class TokenizedPieces:
    """Keeps the pieces that were used last, up to `cap_bytes`. For any thread."""

    def __init__(self, tokenizer: ModelTokenizer, cap_bytes: int = CAP_BYTES) -> None:
        self._tokenizer = tokenizer
        self._cap_bytes = cap_bytes
        self._tokens: OrderedDict[_Key, Tokens] = OrderedDict()  # the last used last
        self._bytes = 0
        self._lock = threading.Lock()  # of the three

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def encode_chat(self, rendered: str, salt: str) -> Tokens:
        """Encodes like the tokenizer. The caller owns the returned array."""
        pieces = self._tokenizer.pieces(rendered)
        if len(pieces) < 2:  # nothing that could be shared by a longer text
            return self._tokenizer.encode_chat(rendered)
        found = [self._piece((salt, at == 0, piece)) for at, piece in enumerate(pieces)]
        return np.concatenate(found)

    def forget(self, salt: str | None) -> None:
        """Drops the pieces of one salt, or all."""
        with self._lock:
            for key in [key for key in self._tokens if salt is None or key[0] == salt]:
                self._bytes -= _size(key, self._tokens.pop(key))

    def _piece(self, key: _Key) -> Tokens:
        with self._lock:
            tokens = self._tokens.get(key)
            if tokens is not None:
                self._tokens.move_to_end(key)
                return tokens
        tokens = self._tokenizer.encode_chat(key[2])
        with self._lock:
            if key not in self._tokens:  # else another thread was as quick
                self._tokens[key] = tokens
                self._bytes += _size(key, tokens)
                while self._bytes > self._cap_bytes:
                    self._bytes -= _size(*self._tokens.popitem(last=False))
        return tokens


def _size(key: _Key, tokens: Tokens) -> int:
    return _ENTRY_BYTES + 4 * len(key[2]) + tokens.nbytes
