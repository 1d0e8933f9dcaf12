"""Special tokens in a text: cuts of the text before them, and escapes of those that a client's text spells out.

A fast tokenizer first finds the added tokens that are not normalized (nearly all special ones), leftmost and longest
first. It tokenizes the text between two of them separately: normalizer, pre-tokenizer and model never see across one.
`cut_for` therefore cuts a text before each of them, and the pieces have the same tokens as the whole text. It makes
exceptions for tokens whose flags strip the space before them or look at their neighbours, and for tokenizers with
parts of unknown behaviour.

A chat template writes control tokens ("<|im_start|>") and clients' text into one string, and a tokenizer cannot tell
which is which. A user who writes "<|im_end|><|im_start|>system" would end the turn and open another. Therefore
`EscapedNames.escape` replaces the special tokens in clients' strings by escapes, which no template knows and no
tokenizer finds. `LiteralTokenizer` tokenizes a rendered text with escapes: an escape becomes the tokens of the
characters that it stands for.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from rootstock.cache.types import Tokens
from rootstock.errors import SpecialTokenInText

# A printable character, because templates print objects with `repr`. A client's own is escaped, too.
MARK = "\N{FOUR DOT PUNCTUATION}"
_STAND_IN = "\ufdd1"
_ESCAPE = re.compile(f"{MARK}(-|[0-9]{{0,6}}){MARK}")
_MARK_ITSELF = f"{MARK}{MARK}"
_NOTHING = f"{MARK}-{MARK}"
_WINDOW_CHARS = 65_536  # searched at once: `re` holds the interpreter's lock meanwhile

Cut = Callable[[str], list[str]]

# They tokenize each word on its own. (BPE with dropout is random.)
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def cut_whole(text: str) -> list[str]:
    """Leaves a text whole, for tokenizers of unknown behaviour."""
    return [text]


def cut_for(tokenizer: Any) -> Cut:
    """Returns the cut for a `tokenizers.Tokenizer` without truncation and padding, whose settings stay the same.

    A piece that begins a text may have other tokens than elsewhere.
    """
    if not is_known(tokenizer):
        return cut_whole
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    before = {token.content for token in added if not token.lstrip}
    if not before or any(token.single_word or not token.content for token in added):
        return cut_whole
    # All of them: where two overlap, the match of one excludes the other.
    found = any_of(token.content for token in added)

    def cut(text: str) -> list[str]:
        starts = [match.start() for match in found.finditer(text) if match[0] in before]
        ends = [0, *(start for start in starts if start), len(text)]
        return [text[a:b] for a, b in pairwise(ends) if a < b]

    return cut


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Compiles a pattern that finds the leftmost of some non-empty strings, the longest if several begin there.

    The strings are merged into a trie. `re` tries the branches of an alternation one by one, and holds the
    interpreter's lock meanwhile. With the 6,000 added tokens that some tokenizers have, half a megabyte of HTML took
    7.6 s as an alternation and takes 0.01 s as a trie.
    """
    unique = sorted(set(strings))
    assert unique, "there is nothing to find"
    assert unique[0], "an empty string is everywhere"
    try:
        return re.compile(_trie(unique))
    except RecursionError:  # strings that are prefixes of each other, hundreds deep
        return re.compile("|".join(map(re.escape, sorted(unique, key=lambda string: (-len(string), string)))))


def _trie(strings: list[str]) -> str:
    """Returns a pattern for sorted, unique strings. Their common prefix is written once."""
    first, last = strings[0], strings[-1]
    differing = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    prefix = first[: next(differing, min(len(first), len(last)))]
    rest = [string[len(prefix) :] for string in strings]
    ends_here = rest[0] == ""
    longer = rest[1:] if ends_here else rest
    branches = [_trie(list(group)) for _, group in groupby(longer, key=lambda string: string[0])]
    if not branches:
        return re.escape(prefix)
    body = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return re.escape(prefix) + body + ("?" if ends_here else "")


def is_known(tokenizer: Any) -> bool:
    """Returns whether all parts come with the library. A custom part may look anywhere in the text."""
    model = tokenizer.model
    if type(model).__name__ not in _MODELS or getattr(model, "dropout", None):
        return False
    if tokenizer.encode_special_tokens:  # special tokens are read as text
        return False
    try:
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor):
            if part is not None:
                part.__getstate__()
    except Exception:  # raised by the library for parts that cannot be serialized
        return False
    return True


class EscapedNames:
    """Escapes of the special tokens with these names (their text), in both directions."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names) - {""}
        self._names = sorted(self.names)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._found = any_of(self._names) if self._names else None
        self._first_chars = {name[0] for name in self._names}
        self._last_chars = {name[-1] for name in self._names}
        self._beginnings = {name[:end] for name in self._names for end in range(1, len(name))}
        self._ends = {name[start:] for name in self._names for start in range(1, len(name))}
        self._longest_part = max(map(len, self._beginnings), default=0)

    def spelled_in(self, text: str) -> list[str]:
        """Returns the special tokens that `text` spells out, in order."""
        return [match[0] for match in self._matches(text)]

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yields the same matches as `finditer`, window by window."""
        if self._found is None:
            return
        at = 0
        while at < len(text):
            end = at + _WINDOW_CHARS
            match = self._found.search(text, at, end + self._longest_part)
            if match is None or match.start() >= end:
                at = end
            else:
                yield match
                at = match.end()

    def escape(self, text: str, but: Collection[str] = ()) -> str:
        """Returns `text` with every special token escaped, except those in `but`."""
        if MARK in text:
            text = text.replace(MARK, _MARK_ITSELF)
        if self._found is None:
            return text
        pieces: list[str] = []
        at = 0
        for match in self._matches(text):
            if match[0] not in but:
                pieces += (text[at : match.start()], f"{MARK}{self._index[match[0]]}{MARK}")
                at = match.end()
        return self._with_guarded_ends("".join([*pieces, text[at:]]))

    def _with_guarded_ends(self, text: str) -> str:
        """Puts an empty escape beside a part of a special token at either end of `text`.

        The template's text there, or another of the client's strings, could complete it. Templates trim, so spaces at
        the ends do not count.
        """
        end = len(text.rstrip())
        tail = text[max(0, end - self._longest_part) : end]
        if any(char in tail for char in self._first_chars) and any(
            tail[start:] in self._beginnings for start in range(len(tail))
        ):
            text = text[:end] + _NOTHING + text[end:]
        start = len(text) - len(text.lstrip())
        head = text[start : start + self._longest_part]
        if any(char in head for char in self._last_chars) and any(
            head[:end] in self._ends for end in range(1, len(head) + 1)
        ):
            text = text[:start] + _NOTHING + text[start:]
        return text

    def unescape(self, text: str) -> str:
        """Returns the text of which `escape` made `text`."""
        return _ESCAPE.sub(lambda match: self._spelled(match[1]), text)

    def _spelled(self, code: str) -> str:
        match code:
            case "":
                return MARK
            case "-":
                return ""
            case _ if int(code) < len(self._names):
                return self._names[int(code)]
            case _:  # a text that was cut inside an escape
                return f"{MARK}{code}{MARK}"

    def positions(self, escaped: str, chars: Sequence[int]) -> list[int]:
        """Returns where the first so many characters of the original end in its escaped form. `chars` ascend."""
        found: list[int] = []
        before = at = 0  # characters of the original, and of the escaped text
        for match in _ESCAPE.finditer(escaped):
            while len(found) < len(chars) and before + match.start() - at >= chars[len(found)]:
                found.append(at + max(0, chars[len(found)] - before))
            if len(found) == len(chars):
                break
            before += match.start() - at + len(self._spelled(match[1]))
            at = match.end()
        return found + [at + max(0, count - before) for count in chars[len(found) :]]


def escape_strings(value: Any, escape: Callable[[str], str]) -> Any:
    """Returns a JSON value with all of its strings escaped. Its depth was bounded when it was parsed."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(name): escape_strings(each, escape) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [escape_strings(each, escape) for each in value]
    return value


class LiteralTokenizer:
    """A twin of a tokenizer that reads escapes as plain text and all other special tokens as control tokens.

    It tokenizes like the tokenizer would if escaped special tokens were not in its vocabulary. The twin
    ignores special tokens and knows a secret stand-in for each, which `encode` writes where a control token is meant.
    Special are the added tokens with `names`.
    The two share their model. Building the twin takes as long as loading the tokenizer: 0.6 s for 128,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, names: EscapedNames) -> None:
        """Raises Exception, the library's own, for a tokenizer with parts written in Python: it cannot be copied."""
        self._names = names
        serialized = tokenizer.to_str()
        self._twin = Tokenizer.from_str(serialized)
        # JSON rounds the scores of a Unigram model, and where two cuts of a text are equal, that changes the cut.
        self._twin.model = tokenizer.model
        self._twin.encode_special_tokens = True
        secret = secrets.token_hex(8)
        added = tokenizer.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.content in names.names}
        self._twin.add_special_tokens(
            [AddedToken(token.content, normalized=token.normalized) for token in special.values()]
        )
        self._stand_ins = {
            token.content: f"{_STAND_IN}{secret}.{id}{_STAND_IN}" for id, token in special.items()
        }
        self._twin.add_tokens(
            [
                AddedToken(
                    self._stand_ins[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=False,
                    special=False,
                )
                for token in special.values()
            ]
        )
        known = set(tokenizer.get_vocab().values())
        meant = {_id_of(self._twin, self._stand_ins[token.content]): id for id, token in special.items()}
        if not known.isdisjoint(meant):
            raise ValueError("the ids of the vocabulary have gaps, into which new tokens fall")
        self._meant = np.arange(max(known | set(meant)) + 1, dtype=np.int32)
        self._meant[list(meant)] = list(meant.values())
        model = json.loads(serialized)["model"]
        unknown = (model.get("unk_token"), model.get("unk_id"))  # which plain text may have
        self._control_ids = [id for id, token in special.items() if not {id, token.content} & set(unknown)]
        # Added tokens that are not special are found before shorter special ones that they contain.
        self._found = any_of(token.content for token in added.values()) if added else None

    def encode(self, rendered: str) -> Tokens:
        """Tokenizes a rendered text with escapes. Other threads run meanwhile.

        Raises SpecialTokenInText if the tokenizer's model makes a special token of plain text: the vocabulary of a
        Unigram model holds the names among its ordinary pieces.
        """
        text = rendered
        if self._found is not None:
            text = self._found.sub(lambda match: self._stand_ins.get(match[0], match[0]), text)
        text = self._names.unescape(text)
        encoding = self._twin.encode_batch_fast([text], add_special_tokens=False)[0]
        ids = np.array(encoding.ids, dtype=np.int32)
        made_of_text = ids[np.isin(ids, self._control_ids)]
        if len(made_of_text):
            raise SpecialTokenInText(self._twin.id_to_token(int(made_of_text[0])) or "")
        meant: Tokens = self._meant[ids]
        return meant


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None, "the token was added"
    return id
