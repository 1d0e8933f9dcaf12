"""Tokenization of prompts: escapes special tokens in clients' text, limits the length, keeps tokens of repeated text.

A conversation is cut where its tokenizer would cut it (`cut_for` in `engine/special_tokens.py`), about once a
message. The tokens of each piece are kept. The result always equals the tokens of the whole text. Tenants have pieces
of their own: the time of an answer tells nothing about the texts of other tenants.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.conversation.template import Mark, TemplateInput
from rootstock.engine.limits import refuse_surrogates
from rootstock.engine.tokenizer import KeptTokens, ModelTokenizer, PlacedTokens
from rootstock.errors import EmptyPrompt, PromptTextTooLong
from rootstock.units import MIB

CAP_BYTES = 64 * MIB
# A text with more characters per token of the limit is tokenized in slices first. About four are usual.
_LIKELY_CHARS_PER_TOKEN = 8
_SLICE_CHARS = 65_536
_ENTRY_BYTES = 520  # overhead of an entry besides its piece and tokens; the salt takes 113 of it

_Key = tuple[str, bool, str]  # the salt, whether the piece begins the text, the piece


def escaped(conversation: TemplateInput, tokenizer: PromptTokenizer, *, parse: bool = False) -> TemplateInput:
    """Returns the conversation with escapes for the control tokens that a client spells out anywhere in it.

    With `parse` they stay control tokens. Raises PromptTextTooLong, before any work on text that cannot fit, and
    SpecialTokenInText.
    """
    tokenizer.refuse_more_chars(_chars_in([conversation.messages, conversation.tools]))
    model_tokenizer = tokenizer.model_tokenizer
    of_clients = KeptTokens.ALL if parse else KeptTokens.NONE
    of_answers = KeptTokens.ALL if parse else KeptTokens.OF_ANSWERS

    def escape(text: str) -> str:
        return model_tokenizer.escape(text, of_clients)

    def escape_answer(text: str) -> str:
        return model_tokenizer.escape(text, of_answers)

    messages = [
        _escaped(message, escape_answer if message["role"] == "assistant" else escape)
        for message in conversation.messages
    ]
    marks = [mark for mark in conversation.marks if mark.message is None]
    for index in dict.fromkeys(mark.message for mark in conversation.marks):
        if index is not None:
            chars = sorted(mark.chars for mark in conversation.marks if mark.message == index)
            marks += [
                Mark(index, at) for at in model_tokenizer.escaped_positions(messages[index]["content"], chars)
            ]
    tools, options = (_escaped(value, escape) for value in (conversation.tools, conversation.options))
    return TemplateInput(messages, tools, options, tuple(marks))


def _chars_in(value: Any) -> int:
    """Counts the characters of a JSON value's strings, except the names of fields."""
    chars, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            chars += len(each)
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, Sequence):
            waiting += each
    return chars


def _escaped(value: Any, escape: Callable[[str], str]) -> Any:
    """Returns a JSON value with all of its strings escaped. Its depth was bounded when it was parsed."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(name): _escaped(each, escape) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_escaped(each, escape) for each in value]
    return value


def chat_tokens(conversation: TemplateInput, tokenizer: PromptTokenizer, salt: str) -> Tokens:
    """Renders and tokenizes the prompt. Slow for long conversations: not for an event loop.

    Raises InvalidParameter, ChatTemplateMissing, ChatTemplateFailed, PromptTextTooLong and EmptyPrompt.
    """
    return _refuse_empty(tokenizer.encode_chat(_rendered(conversation, tokenizer), salt))


def placed_chat(conversation: TemplateInput, tokenizer: PromptTokenizer) -> PlacedTokens:
    """Renders and tokenizes like `chat_tokens`, and returns the places of the tokens too."""
    placed = tokenizer.place_chat(_rendered(conversation, tokenizer))
    _refuse_empty(placed.tokens)
    return placed


def _rendered(conversation: TemplateInput, tokenizer: PromptTokenizer) -> str:
    rendered = conversation.render(tokenizer.model_tokenizer)
    refuse_surrogates(rendered, "messages")
    return rendered


def _refuse_empty(tokens: Tokens) -> Tokens:
    if len(tokens) == 0:
        raise EmptyPrompt("messages")
    return tokens


def text_tokens(tokenizer: PromptTokenizer, text: str) -> Tokens:
    """Tokenizes a plain prompt. Raises InvalidParameter and PromptTextTooLong."""
    refuse_surrogates(text, "prompt")
    return tokenizer.encode(text)


class PromptTokenizer:
    """A tokenizer of prompts that refuses those that cannot fit, before the work is done. For any thread."""

    def __init__(self, tokenizer: ModelTokenizer, limit_tokens: int) -> None:
        self.model_tokenizer = tokenizer
        self._limit_tokens = limit_tokens
        self._pieces = TokenizedPieces(tokenizer)

    def refuse_more_chars(self, chars: int) -> None:
        """Refuses more characters than the limit's tokens can have. Raises PromptTextTooLong."""
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
        """Tokenizes a rendered conversation. The caller owns the returned array. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        return self._pieces.encode_chat(rendered, salt)

    def place_chat(self, rendered: str) -> PlacedTokens:
        """Tokenizes like `encode_chat`, and returns the places of the tokens too. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        return self.model_tokenizer.place_chat(rendered)

    def _refuse_too_long(self, text: str) -> None:
        """Refuses a text by its characters, or because its slices have more than twice as many tokens as the limit.

        Cutting a text changes only a few tokens beside the cut: such a text has more tokens than the limit. Refusing
        it costs no more than twice the work of tokenizing a text that fits.
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
    """The most recently used pieces and their tokens, up to `cap_bytes`. For any thread."""

    def __init__(self, tokenizer: ModelTokenizer, cap_bytes: int = CAP_BYTES) -> None:
        self._tokenizer = tokenizer
        self._cap_bytes = cap_bytes
        self._tokens: OrderedDict[_Key, Tokens] = OrderedDict()  # the most recently used last
        self._bytes = 0
        self._lock = threading.Lock()  # guards the tokens and their size

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def encode_chat(self, rendered: str, salt: str) -> Tokens:
        """Encodes like the tokenizer. The caller owns the returned array."""
        pieces = self._tokenizer.pieces(rendered)
        if len(pieces) < 2:  # no piece that a longer text could share
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
            if key not in self._tokens:  # otherwise another thread has added it
                self._tokens[key] = tokens
                self._bytes += _size(key, tokens)
                while self._bytes > self._cap_bytes:
                    self._bytes -= _size(*self._tokens.popitem(last=False))
        return tokens


def _size(key: _Key, tokens: Tokens) -> int:
    return _ENTRY_BYTES + 4 * len(key[2]) + tokens.nbytes
