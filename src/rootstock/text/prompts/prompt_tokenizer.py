"""Tokenization of prompts: escapes special tokens in clients' text, limits the length, keeps tokens of repeated text.

A conversation is cut where its tokenizer would cut it (`cut_for` in `text/special_tokens.py`), about once a
message. The tokens of each piece are kept. The result always equals the tokens of the whole text. Tenants have pieces
of their own: the time of an answer tells nothing about the texts of other tenants.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rootstock.cache.radix_node import Boundary
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.errors import EmptyPrompt, PromptTextTooLong
from rootstock.text.conversation.template import TemplateInput
from rootstock.text.conversation.types import PrefixMark
from rootstock.text.limits import refuse_surrogates
from rootstock.text.prompts.same_call import returned_calls
from rootstock.text.prompts.sampled_answers import AnswerPlace, SampledAnswers
from rootstock.text.prompts.splicing import Asker, SplicedText, splice
from rootstock.text.prompts.tenant_salt import ANYBODY, PromptOwner
from rootstock.text.special_tokens import escape_strings
from rootstock.text.tokenizer import KeptTokens, ModelTokenizer, PlacedTokens
from rootstock.units import MIB

LEAST_PIECES_BYTES = MIB
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
        escape_strings(message, escape_answer if message["role"] == "assistant" else escape)
        for message in conversation.messages
    ]
    marks = [mark for mark in conversation.marks if mark.message is None]
    for index in dict.fromkeys(mark.message for mark in conversation.marks):
        if index is not None:
            here = sorted(
                (mark for mark in conversation.marks if mark.message == index), key=lambda mark: mark.chars
            )
            places = model_tokenizer.escaped_positions(
                messages[index]["content"], [mark.chars for mark in here]
            )
            marks += [replace(mark, chars=at) for mark, at in zip(here, places, strict=True)]
    tools, options = (escape_strings(value, escape) for value in (conversation.tools, conversation.options))
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


@dataclass(frozen=True, slots=True)
class PlacedMark:
    """A client's mark, and the place of it in the prompt."""

    asked: PrefixMark
    tokens: int | None  # of the prefix that it ends; None: the chat template rewrites the marked text


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation."""

    tokens: Tokens
    place: AnswerPlace  # to which the answer is remembered
    sampled_tokens: int  # of the prompt: ids that earlier answers were sampled with
    boundaries: tuple[Boundary, ...] = ()
    marks: tuple[PlacedMark, ...] = ()


def chat_prompt(conversation: TemplateInput, tokenizer: PromptTokenizer, owner: PromptOwner) -> ChatPrompt:
    """Renders and tokenizes the prompt. Slow for long conversations: not for an event loop.

    Raises InvalidParameter, ChatTemplateMissing, ChatTemplateFailed, PromptTextTooLong and EmptyPrompt.
    """
    text = tokenizer.encode_chat(_rendered(conversation, tokenizer), _asker(conversation, owner))
    return ChatPrompt(_refuse_empty(text.tokens()), text.place, text.sampled_tokens)


def placed_chat(
    conversation: TemplateInput, tokenizer: PromptTokenizer, owner: PromptOwner = ANYBODY
) -> tuple[ChatPrompt, PlacedTokens]:
    """Renders and tokenizes like `chat_prompt`, and returns the places of the tokens too."""
    asker = _asker(conversation, owner)
    text = tokenizer.encode_chat(_rendered(conversation, tokenizer), asker)
    placed = tokenizer.placed(text, asker)
    return ChatPrompt(_refuse_empty(placed.tokens), text.place, text.sampled_tokens), placed


def _asker(conversation: TemplateInput, owner: PromptOwner) -> Asker:
    has_calls = any(message.get("tool_calls") for message in conversation.messages)
    return Asker(owner, returned_calls(conversation.messages) if has_calls else {})


def _refuse_empty(tokens: Tokens) -> Tokens:
    if len(tokens) == 0:
        raise EmptyPrompt("messages")
    return tokens


def _rendered(conversation: TemplateInput, tokenizer: PromptTokenizer) -> str:
    rendered = conversation.render(tokenizer.model_tokenizer)
    refuse_surrogates(rendered, "messages")
    return rendered


def text_tokens(tokenizer: PromptTokenizer, text: str) -> Tokens:
    """Tokenizes a plain prompt. Raises InvalidParameter and PromptTextTooLong."""
    refuse_surrogates(text, "prompt")
    return tokenizer.encode(text)


class PromptTokenizer:
    """A tokenizer of prompts that refuses those that cannot fit, before the work is done. For any thread.

    `answer_memory_bytes` bounds the memory of sampled answers, and as much is used for tokenized pieces of texts."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        limit_tokens: int,
        answer_memory_bytes: int = EngineConfig().answer_memory_bytes,
    ) -> None:
        self.model_tokenizer = tokenizer
        self.answers = SampledAnswers(tokenizer, answer_memory_bytes)
        self._limit_tokens = limit_tokens
        self._pieces = TokenizedPieces(tokenizer, max(answer_memory_bytes, LEAST_PIECES_BYTES))

    @property
    def tokenized_bytes(self) -> int:
        """Memory of the tokenized pieces of recent texts."""
        return self._pieces.held_bytes

    def refuse_more_chars(self, chars: int) -> None:
        """Refuses more characters than the limit's tokens can have. Raises PromptTextTooLong."""
        if chars > self._limit_tokens * self.model_tokenizer.longest_token_chars:
            raise PromptTextTooLong(chars, self._limit_tokens)

    def forget(self, salt: str | None) -> None:
        """Drops the texts and the answers kept for one salt, or for all."""
        self._pieces.forget(salt)
        self.answers.forget(salt)

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """Tokenizes a plain prompt. `special`: with the tokens that the model wants before every text.

        Raises PromptTextTooLong.
        """
        self._refuse_too_long(text)
        if special:
            return self.model_tokenizer.encode(text)
        return self.model_tokenizer.encode_chat(self.model_tokenizer.escape(text, KeptTokens.ALL))

    def encode_chat(self, rendered: str, asker: Asker) -> SplicedText:
        """Tokenizes a rendered conversation, with sampled ids for its answers. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        text = self._spliced(rendered, asker)
        self.answers.count_splice(text.sampled_tokens, text.restored_calls)
        return text

    def chat_tokens(self, rendered: str, asker: Asker) -> Tokens:
        """Tokenizes like `encode_chat`, for a prompt that no request has sent. Raises PromptTextTooLong."""
        self._refuse_too_long(rendered)
        return self._spliced(rendered, asker).tokens()

    def _spliced(self, rendered: str, asker: Asker) -> SplicedText:
        pieces = self.model_tokenizer.pieces(rendered)
        return splice(pieces, self._pieces.encoder(pieces, asker.owner.salt), self.answers, asker)

    def placed(self, text: SplicedText, asker: Asker) -> PlacedTokens:
        """Returns the tokens of a spliced text and their places. Sampled ids have none."""
        places = _Places(text, self.model_tokenizer)
        return PlacedTokens(
            places.text,
            text.tokens(),
            places.token_at,
            places.char_at,
            places.part_of,
            lambda other: self._spliced(other, asker).tokens(),
        )

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

    def __init__(self, tokenizer: ModelTokenizer, cap_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._cap_bytes = cap_bytes
        self._tokens: OrderedDict[_Key, Tokens] = OrderedDict()  # the most recently used last
        self._bytes = 0
        self._lock = threading.Lock()  # guards the tokens and their size

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def encoder(self, pieces: Sequence[str], salt: str) -> Callable[[int], Tokens]:
        """Returns a function that encodes a piece of a text by its index. The arrays stay the memory's."""
        if len(pieces) < 2:  # no piece that a longer text could share
            return functools.cache(lambda at: self._tokenizer.encode_chat(pieces[at]))
        return lambda at: self._piece((salt, at == 0, pieces[at]))

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


class _Places:
    """The places of a spliced text's tokens, found part by part when they are asked for."""

    def __init__(self, text: SplicedText, tokenizer: ModelTokenizer) -> None:
        self.text = "".join(part.text for part in text.parts)
        self._parts = text.parts
        self._chars = [0, *accumulate(len(part.text) for part in text.parts)]
        self._tokens = [0, *accumulate(len(part.tokens) for part in text.parts)]
        self._placed = functools.cache(lambda at: tokenizer.place_chat(text.parts[at].text))

    def token_at(self, char: int) -> int | None:
        at = bisect_right(self._chars, char) - 1
        if not 0 <= at < len(self._parts) or self._parts[at].is_spliced:
            return None
        token = self._placed(at).token_at(char - self._chars[at])
        return None if token is None else self._tokens[at] + token

    def char_at(self, token: int) -> int | None:
        at = bisect_right(self._tokens, token) - 1
        if not 0 <= at < len(self._parts) or self._parts[at].is_spliced:
            return None
        char = self._placed(at).char_at(token - self._tokens[at])
        return None if char is None else self._chars[at] + char

    def part_of(self, token: int) -> tuple[int, int]:
        at = min(bisect_right(self._tokens, token), len(self._parts)) - 1
        return self._tokens[at], self._chars[at]
