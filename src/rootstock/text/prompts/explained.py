"""An explanation of a cache hit with the text that its token ids stand for."""

from __future__ import annotations

from rootstock.cache.explain import Explanation
from rootstock.cache.types import Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.text.tokenizer import ModelTokenizer, token_text

_CONTEXT_CHARS = 80
_QUOTED_CHARS = 40


def explained_in_words(explanation: Explanation, tokens: Tokens, tokenizer: ModelTokenizer) -> str:
    """Returns the explanation's message, with the text at which the prompt leaves the cached prefixes."""
    message, at = explanation.message, explanation.divergence
    if explanation.below is not None:
        message += f" {explanation.below.message}"
    if at is None:
        return message
    before, asked = text_before(tokens, at, tokenizer), token_text(tokenizer, int(tokens[at]))
    message += f" After {before[-_QUOTED_CHARS:]!r} it says {asked!r}"
    if explanation.volatile is not None:
        differing = (explanation.volatile.asked, explanation.volatile.cached)
        own, other = (repr(tokenizer.decode(part.tolist())[:_QUOTED_CHARS]) for part in differing)
        message += f" ({own}, in the cached prefix {other}, with equal text behind)"
    if explanation.cached_tokens_there:
        cached = (repr(token_text(tokenizer, token)) for token in explanation.cached_tokens_there)
        message += f", cached prefixes say {', '.join(cached)}"
    return f"{message}."


def volatile_in_words(span: VolatileSpan) -> str:
    """Returns advice about a volatile span."""
    return (
        f"Prompts agree before and after these {span.longest:,} tokens. Send text that changes behind text that does "
        f"not, or leave it out: {span.recomputed_tokens:,} tokens were computed again because of it."
    )


def text_before(tokens: Tokens, position: int, tokenizer: ModelTokenizer) -> str:
    """Returns the end of the text before a position of the prompt."""
    return tokenizer.decode(tokens[max(0, position - _CONTEXT_CHARS) : position].tolist())[-_CONTEXT_CHARS:]
