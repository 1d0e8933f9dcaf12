"""Tokenizers: the interface that the engine and the server use, and the tokenizers of transformers."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.errors import (
    ChatTemplateFailed,
    ChatTemplateInvalid,
    ChatTemplateMissing,
    SpecialTokenInText,
    TokenizerUnusable,
)
from rootstock.text.chat_template import TemplateNames, names_in
from rootstock.text.images import IMAGE_MARK, with_images
from rootstock.text.special_tokens import MARK, EscapedNames, LiteralTokenizer, cut_for, cut_whole

log = logging.getLogger(__name__)

Message = Mapping[str, Any]  # {"role": …, "content": …}, as chat templates take them
Tool = Mapping[str, Any]

_SLICE_CHARS = 16_384
_MAX_DETAIL_CHARS = 300  # of messages of other libraries


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """A text, its tokens, and their positions in the text as far as the tokenizer tells them."""

    text: str
    tokens: Tokens
    token_at: Callable[[int], int | None]  # the index of the token that a character belongs to
    char_at: Callable[[int], int | None]  # the character at which the token of an index begins
    # The start (token, character) of the part that holds a token. A part is tokenized by its text alone.
    part_of: Callable[[int], tuple[int, int]]
    encode: Callable[[str], Tokens]  # tokenizes another text in the same way


class KeptTokens(Enum):
    """Control tokens that a text spells out and that stay control tokens."""

    NONE = "none"
    OF_ANSWERS = "of_answers"  # those that a model's answer may hold as text, such as the end of reasoning
    ALL = "all"


class ModelTokenizer(Protocol):
    """Interface of a tokenizer. Any thread may call any method."""

    def __hash__(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def longest_token_chars(self) -> int:
        """Length of the longest token in characters."""
        ...

    def encode(self, text: str) -> Tokens:
        """Tokenizes a plain prompt, with the tokens that the model wants before every text.

        A special token spelled out in the text becomes a control token.
        """
        ...

    def escape(self, text: str, kept: KeptTokens) -> str:
        """Escapes the control tokens that `text` spells out, so that `encode_chat` reads them as plain text.

        Control tokens are the special tokens and the other added tokens that the chat template writes. Raises
        SpecialTokenInText if this tokenizer can only read them as control tokens.
        """
        ...

    def escaped_positions(self, escaped: str, chars: Sequence[int]) -> list[int]:
        """Returns where the first so many characters of a text end in its escaped form, for ascending `chars`."""
        ...

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        """Renders a conversation up to the assistant's next turn, unless `options` say otherwise.

        Raises ChatTemplateMissing and ChatTemplateFailed.
        """
        ...

    @property
    def template_names(self) -> TemplateNames:
        """Variables that the chat template reads and `render_chat` takes as options, and its literals."""
        ...

    def encode_chat(self, rendered: str) -> Tokens:
        """Tokenizes a rendered conversation, which has all of its special tokens and may have escapes and markers."""
        ...

    def pieces(self, rendered: str) -> list[str]:
        """Cuts a text so that `encode_chat` of the pieces, one after another, gives its tokens.

        The first piece has the tokens of a piece that begins a text. A later piece has the tokens of one that does
        not begin a text, or of both if they are the same.
        """
        ...

    def place_chat(self, rendered: str) -> PlacedTokens:
        """Tokenizes like `encode_chat`, and returns the places of the tokens too."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns text without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        ...

    def is_hidden(self, token: int) -> bool:
        """Returns whether a token never has text: it is special, or not in the vocabulary."""
        ...

    def is_added(self, token: int) -> bool:
        """Returns whether a token is found in a text before the rest is tokenized, as special tokens are."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token, also of a special one. Keeps leading spaces and halves of characters."""
        ...


def token_text(tokenizer: ModelTokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def text_with_special_tokens(tokenizer: ModelTokenizer, tokens: Tokens) -> str:
    """Returns the text of tokens with the names of special ones. Halves of characters become U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, tokens.tolist())).decode("utf-8", errors="replace")


class HFTokenizer:
    """A transformers tokenizer. Fast ones are called past their wrapper, whose settings are not thread-safe."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()  # a tokenizer.json may bring limits of its training along
            self._fast.no_padding()
            self._cut = cut_for(self._fast)
            added = self._fast.get_added_tokens_decoder()
            vocabulary = self._fast.get_vocab()
            decoder = self._fast.decoder
            self._decoder_types = _type_names(json.loads(decoder.__getstate__()) if decoder else None)
        else:
            self._cut = cut_whole
            added = tokenizer.added_tokens_decoder
            vocabulary = tokenizer.get_vocab()
            self._decoder_types = {"ByteFallback", "Metaspace"}
        self._added = {int(id): str(token.content) for id, token in added.items()}
        self._special = frozenset(int(id) for id, token in added.items() if token.special)
        self.longest_token_chars = max(map(len, (*vocabulary, *self._added.values())), default=1)
        special = {str(token.content) for token in added.values() if token.special}
        template = self.template_names
        searched = {name for name in self._added.values() if any(name in text for text in template.searched)}
        # Some tokenizers do not flag the tokens that open and end a turn. The template writes them.
        written = {
            name
            for name in set(self._added.values()) - special - searched
            if name.strip() and any(name in text for text in template.literals)
        }
        self._names = EscapedNames(special | written)
        self._literal = _literal_tokenizer(self._fast, self._names)
        # A model writes the tokens that are not special as text, and clients send them back in its messages. It does
        # not write those that open and end turns.
        self._kept = {
            KeptTokens.NONE: frozenset[str](),
            KeptTokens.OF_ANSWERS: frozenset(searched | (written - self._names_of_turns(written))),
            KeptTokens.ALL: self._names.names,
        }
        self._names_are_normalized = _normalizes(self._fast, added.values(), self._names.names)
        eos = tokenizer.eos_token_id
        self._eos: tuple[int, ...] = (
            tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
        )

    @classmethod
    def load(
        cls, model: str, chat_template: str | None = None, *, trust_remote_code: bool = False
    ) -> HFTokenizer:
        """Loads the tokenizer of a model's directory or hub name. `chat_template` replaces the model's own.

        Raises TokenizerUnusable or ChatTemplateInvalid.
        """
        from transformers import (
            AutoTokenizer,
        )  # takes seconds to import, and the fake runtime needs none of it

        try:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        except Exception as error:  # a tokenizer's own code may raise anything
            if _has_no_tokenizer_file(model):
                raise TokenizerUnusable(model, "the directory has no tokenizer file") from error
            message = " ".join(str(error).split())[:_MAX_DETAIL_CHARS]
            raise TokenizerUnusable(model, f"{type(error).__name__}: {message}".rstrip(". ")) from error
        if _is_made_up(tokenizer, model):
            raise TokenizerUnusable(model, "the directory has no vocabulary")
        if not tokenizer.chat_template:
            tokenizer.chat_template = _template_of_processor(model)
        own = tokenizer.chat_template if chat_template is None else chat_template
        _refuse_broken_template(own, repr(model) if chat_template is None else "--chat-template")
        return cls(tokenizer, chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    def encode(self, text: str) -> Tokens:
        if self._fast is None:
            return np.array(self._tokenizer.encode(text), dtype=np.int32)
        # A batch of one: `Tokenizer.encode` holds the interpreter's lock, for 0.3 s in 360 kB of text.
        return np.array(self._fast.encode_batch_fast([text])[0].ids, dtype=np.int32)

    def encode_chat(self, rendered: str) -> Tokens:
        if IMAGE_MARK in rendered:
            return with_images(rendered, self.encode_chat)
        if self._fast is None:
            return np.array(self._tokenizer.encode(rendered, add_special_tokens=False), dtype=np.int32)
        if MARK in rendered and self._literal is not None:
            return self._literal.encode(rendered)
        encoding = self._fast.encode_batch_fast([rendered], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=np.int32)

    def _names_of_turns(self, names: Collection[str]) -> set[str]:
        """Returns the names that the chat template writes around plain messages."""
        said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        rendered = ""
        for messages in (said, [{"role": "system", "content": "x"}, *said]):
            with contextlib.suppress(ChatTemplateMissing, ChatTemplateFailed):
                rendered += self.render_chat(messages, [], add_generation_prompt=False)
        return {name for name in names if name in rendered}

    def escape(self, text: str, kept: KeptTokens) -> str:
        but = self._kept[kept]
        if kept is not KeptTokens.ALL:
            self._refuse_hidden(text)
        if self._literal is not None:
            return self._names.escape(text, but)
        found = [name for name in self._names.spelled_in(text) if name not in but]
        if found:
            raise SpecialTokenInText(found[0])
        return text

    def _refuse_hidden(self, text: str) -> None:
        """Refuses a text that spells out control tokens only after the template or the normalizer has changed it."""
        spelled: int | None = None
        for changed in self._changed(text):
            if (hidden := self._names.spelled_in(changed)) and spelled is None:
                spelled = len(self._names.spelled_in(text))
            if spelled is not None and len(hidden) > spelled:
                raise SpecialTokenInText(hidden[0])

    def _changed(self, text: str) -> Iterator[str]:
        """Yields `text` as the template may leave it, and as the tokenizer normalizes it."""
        removed = self.template_names.removed
        if any(part in text for part in removed):
            bare = text
            for _ in removed:  # the template removes each of them once, in an order of its own
                for part in removed:
                    bare = bare.replace(part, "")
            yield bare
        if self._names_are_normalized:
            assert self._fast is not None
            normalize = self._fast.normalizer.normalize_str
            # In slices: the library holds the interpreter's lock.
            slices = (text[at : at + _SLICE_CHARS] for at in range(0, len(text), _SLICE_CHARS))
            yield "".join(normalize(each) for each in slices)

    def escaped_positions(self, escaped: str, chars: Sequence[int]) -> list[int]:
        return self._names.positions(escaped, chars)

    def pieces(self, rendered: str) -> list[str]:
        return self._cut(rendered)

    def place_chat(self, rendered: str) -> PlacedTokens:
        if self._fast is None or MARK in rendered or IMAGE_MARK in rendered:
            tokens = self.encode_chat(rendered)
            return PlacedTokens(rendered, tokens, no_position, no_position, single_part, self.encode_chat)
        encoding = self._fast.encode_batch([rendered], add_special_tokens=False)[0]

        def char_at(token: int) -> int | None:
            span = encoding.token_to_chars(token)
            return None if span is None else int(span[0])

        tokens = np.array(encoding.ids, dtype=np.int32)
        return PlacedTokens(rendered, tokens, encoding.char_to_token, char_at, single_part, self.encode_chat)

    @cached_property
    def template_names(self) -> TemplateNames:
        template = self._tokenizer.chat_template or {}
        sources = [template] if isinstance(template, str) else list(template.values())
        found = [names_in(source) for source in sources]
        taken = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "self"}
        taken -= {"add_generation_prompt", "documents"}
        taken |= {*self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *self._tokenizer.special_tokens_map}
        return TemplateNames(
            frozenset[str]().union(*(names.variables for names in found)) - taken,
            frozenset[str]().union(*(names.literals for names in found)),
            frozenset[str]().union(*(names.removed for names in found)),
            frozenset[str]().union(*(names.searched for names in found)),
            frozenset[str]().union(*(names.attributes for names in found)),
        )

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        if not self._tokenizer.chat_template:
            raise ChatTemplateMissing
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                **({"add_generation_prompt": True} | options | {"tokenize": False}),
            )
        except Exception as error:  # a template is a program of the model's makers and may raise anything
            raise ChatTemplateFailed(str(error) or type(error).__name__) from error
        return str(rendered)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._fast is None:
            visible = [token for token in tokens if not self.is_hidden(token)]
            return str(self._tokenizer.decode(visible, clean_up_tokenization_spaces=False))
        return str(self._fast.decode(tokens, skip_special_tokens=True))

    def is_hidden(self, token: int) -> bool:
        return token in self._special or self._piece(token) is None

    def is_added(self, token: int) -> bool:
        return token in self._added

    def token_bytes(self, token: int) -> bytes:
        piece = self._added.get(token)
        if piece is not None:
            return piece.encode()
        piece = self._piece(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoder_types:
            if all(char in _BYTE_OF_CHAR for char in piece):
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            return piece.encode()
        if "ByteFallback" in self._decoder_types and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes([int(byte[1], 16)])
        if self._decoder_types & {"Replace", "Metaspace"}:
            return piece.replace("\u2581", " ").encode()
        if "WordPiece" in self._decoder_types:
            return piece.removeprefix("##").encode() if piece.startswith("##") else f" {piece}".encode()
        return piece.encode()

    def _piece(self, token: int) -> str | None:
        if self._fast is not None:
            piece = self._fast.id_to_token(token)
        else:
            piece = self._tokenizer.convert_ids_to_tokens(token) if token < len(self._tokenizer) else None
        return None if piece is None else str(piece)


def _literal_tokenizer(fast: Any, names: EscapedNames) -> LiteralTokenizer | None:
    """Builds the literal twin of a tokenizer. None: this one cannot read special tokens as text."""
    if fast is None:
        return None
    try:
        return LiteralTokenizer(fast, names)
    except Exception as error:  # the library's own, of no type that it names
        log.warning("special tokens in messages will be refused: the tokenizer cannot be copied (%s)", error)
        return None


def _normalizes(fast: Any, added: Iterable[Any], names: Collection[str]) -> bool:
    """Returns whether special tokens are matched after normalization, which can turn other text into their names."""
    if fast is None or fast.normalizer is None:
        return False
    return any(token.content in names and token.normalized for token in added)


def _has_no_tokenizer_file(model: str) -> bool:
    """Returns whether a directory holds none of the files that tokenizers are read from; False for a hub name."""
    directory = Path(model)
    names = ("tokenizer*.json", "*.model*", "*.tiktoken", "tekken.json", "vocab*")
    found = (path for name in names for path in directory.glob(name) if path.name != "tokenizer_config.json")
    return directory.is_dir() and next(found, None) is None


def _template_of_processor(model: str) -> str | None:
    """Returns the chat template that older models of text and images have in a file of their processor."""
    file = Path(model) / "chat_template.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError):
        return None
    found = content.get("chat_template") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def _is_made_up(tokenizer: Any, model: str) -> bool:
    """Returns whether transformers has made a tokenizer without a vocabulary, of special tokens only.

    It does so, without a warning, for model types that have a tokenizer class of their own.
    """
    directory = Path(model)
    files = [name for name in getattr(tokenizer, "vocab_files_names", {}).values() if isinstance(name, str)]
    if directory.is_dir() and any((directory / name).is_file() for name in files):
        return False
    ids = tokenizer.encode(string.printable, add_special_tokens=False)
    return not tokenizer.decode(ids, skip_special_tokens=True).strip()


def _refuse_broken_template(template: Any, source: str) -> None:
    """Compiles Jinja as transformers will. Raises ChatTemplateInvalid."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    named = template if isinstance(template, dict) else {} if template is None else {"": template}
    for text in named.values():
        if not isinstance(text, str):
            raise ChatTemplateInvalid(source, f"it is a {type(text).__name__}, not text")
        try:
            _compile_jinja_template(text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f"line {line}: "
            raise ChatTemplateInvalid(source, f"{place}{error.message}".rstrip(".")) from error
        except RecursionError as error:
            raise ChatTemplateInvalid(source, "it is nested too deeply") from error


def no_position(_: int) -> None:
    return None


def single_part(_: int) -> tuple[int, int]:
    return 0, 0


def _byte_of_char() -> dict[str, int]:
    """Inverts GPT-2's `bytes_to_unicode` (Radford et al. 2019), by which byte-level BPE writes a byte as a character.

    A printable Latin-1 byte is written as itself, each other byte as a character from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _type_names(decoder: Any) -> set[str]:
    """Returns the "type" of a serialised decoder and of all its parts."""
    if isinstance(decoder, dict):
        own = {decoder["type"]} if isinstance(decoder.get("type"), str) else set()
        return own.union(*(_type_names(value) for value in decoder.values()))
    if isinstance(decoder, list):
        return set[str]().union(*(_type_names(value) for value in decoder))
    return set()
