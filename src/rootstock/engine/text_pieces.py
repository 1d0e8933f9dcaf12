"""Cuts of a text into pieces that give the same tokens one by one as the whole text.

A fast tokenizer first finds the added tokens that are not normalized (nearly all special ones), leftmost and longest
first. It tokenizes the text between two of them separately: normalizer, pre-tokenizer and model never see across one.
Therefore a text may be cut before each of them. Exceptions: tokens whose flags strip the space before them or look at
their neighbours, and tokenizers with parts of unknown behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from typing import Any

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
