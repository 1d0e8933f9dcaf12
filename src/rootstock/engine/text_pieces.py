"""Where a text can be cut so that its pieces, tokenised one by one, give the tokens of the whole.

A fast tokenizer first finds the added tokens that are not normalized (nearly all special ones are such), leftmost and
longest first, and treats what lies between two of them on its own: normalizer, pre-tokenizer and model never see
across one. So a text may be cut before each of them. Exceptions are told apart here, by the flags of the tokens: one
that takes the space before it along, or that looks at its neighbours; and by what the tokenizer is made of, if that
cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from typing import Any

Cut = Callable[[str], list[str]]

# They tokenise one word at a time and remember nothing of the last one. (BPE with dropout is random.)
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def cut_whole(text: str) -> list[str]:
    """For tokenizers of which nothing is known."""
    return [text]


def cut_for(tokenizer: Any) -> Cut:
    """Of a `tokenizers.Tokenizer` without truncation and padding, whose settings are not changed any more. A piece
    that begins a text may have other tokens than it would have elsewhere."""
    if not is_known(tokenizer):
        return cut_whole
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    before = {token.content for token in added if not token.lstrip}
    if not before or any(token.single_word or not token.content for token in added):
        return cut_whole
    # All of them: where they overlap, one decides what can be another.
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
    """Whether all that it is made of comes with the library: a part that somebody wrote may look anywhere."""
    model = tokenizer.model
    if type(model).__name__ not in _MODELS or getattr(model, "dropout", None):
        return False
    if tokenizer.encode_special_tokens:  # they are to be read as text
        return False
    try:
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor):
            if part is not None:
                part.__getstate__()
    except Exception:  # the library raises it for what cannot be written down
        return False
    return True
