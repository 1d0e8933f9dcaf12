"""Log-probabilities as OpenAI's chats and Responses have them, and slices of them for pieces of JSON."""

from __future__ import annotations

from collections.abc import Iterator

from rootstock.engine.request import Logprobs, TokenLogprob
from rootstock.server.wire.api_call import Json
from rootstock.text.tokenizer import ModelTokenizer, token_text

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in
_ENTRIES_PER_PIECE = 512  # less than a millisecond of encoding


def logprob_body(one: TokenLogprob, tokenizer: ModelTokenizer) -> Json:
    """Returns a token with its alternatives."""

    def scored(token: int, logprob: float) -> Json:
        return {
            "token": token_text(tokenizer, token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return scored(one.token, one.logprob) | {"top_logprobs": [scored(*each) for each in one.top]}


def slices(scored: Logprobs) -> Iterator[Logprobs]:
    """Returns slices of rows with as many entries as one piece of JSON has."""
    rows = max(1, _ENTRIES_PER_PIECE // (1 + scored.top_tokens.shape[1]))
    return (scored[at : at + rows] for at in range(0, len(scored), rows))
