"""The common prefix of two texts, in characters and in tokens, without tokenizing the whole second text.

Tokenizers merge across any place in a text, so equal text before a place does not mean equal tokens. But tokens
depend only on the text near them: a window around the place where the texts diverge is tokenized in both, and the
window's tokens of the first text are compared with the tokens that the whole text has there. If they differ (some
tokenizers treat the beginning of a text in a special way), the whole second text is tokenized.
"""

from __future__ import annotations

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.text.tokenizer import ModelTokenizer, PlacedTokens

_WINDOW_TOKENS = 64  # before the place
_WINDOW_CHARS = 64  # after it
_CERTAIN_TOKENS = 16  # before the place: these must be equal in window and text
_STEP_CHARS = 4096


def common_tokens(tokenizer: ModelTokenizer, placed: PlacedTokens, other: str) -> int:
    """Returns the length of the common prefix in tokens."""
    chars = common_chars(placed.text, other)
    if chars == len(placed.text) == len(other):
        return len(placed.tokens)
    near = _common_tokens_near(tokenizer, placed, other, chars)
    return shared(placed.tokens, placed.encode(other)) if near is None else near


def _common_tokens_near(
    tokenizer: ModelTokenizer, placed: PlacedTokens, other: str, chars: int
) -> int | None:
    at = placed.token_at(min(chars, len(placed.text) - 1))
    if at is None:
        return None
    first = max(0, at - _WINDOW_TOKENS)
    start = placed.char_at(first)
    if start is None:
        first, start = placed.part_of(at)
        if first >= at:  # the other text may not begin a part here
            return None
    begins_part = placed.part_of(first) == (first, start)
    own = tokenizer.encode_chat(placed.text[start : chars + _WINDOW_CHARS])
    count = shared(own, tokenizer.encode_chat(other[start : chars + _WINDOW_CHARS]))
    certain = count if begins_part else min(count, _CERTAIN_TOKENS)
    if certain == 0 and not begins_part:
        return None
    for extra in (0, 1, -1):  # the window may begin with one token more or less than the text has there
        end = first + count - extra
        if end >= certain and np.array_equal(
            placed.tokens[end - certain : end], own[count - certain : count]
        ):
            return end
    return None


def shared(one: Tokens, other: Tokens) -> int:
    """Returns the length of the common prefix."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def common_chars(one: str, other: str) -> int:
    """Returns the length of the common prefix, at memory speed."""
    low, high = 0, min(len(one), len(other))
    step = _STEP_CHARS
    while low < high:  # equal before `low`; far steps first: long texts are compared only once
        middle = low + min(step, high - low)
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high, step = middle - 1, max(1, (middle - low) // 2)
    return low
