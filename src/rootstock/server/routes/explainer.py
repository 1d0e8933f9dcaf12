"""Explanations of prompts, of each wire format: how much is cached, and why not more."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from fastapi import Request

from rootstock.cache.explain import Explanation
from rootstock.cache.types import Tokens
from rootstock.config import ServerConfig
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import caller_of, refuse_unless
from rootstock.server.answers.prompt_bodies import ApiPrompt, PreparedPrompt
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender
from rootstock.text.prompts.explained import explained_in_words, text_before
from rootstock.text.tokenizer import ModelTokenizer, token_text


class Explainer:
    """An explainer of the prompts that wire formats make of their bodies."""

    def __init__(self, models: ModelRegistry, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    async def explain(self, prompt: ApiPrompt, request: Request, sender: Sender) -> Json:
        """Explains a prompt, on another thread. Raises AdminOnly, ModelNotFound, RequestError and ClientGone."""
        refuse_unless(caller_of(request).may_explain, self._config)
        return await self._models.run(
            prompt.model, request, lambda model: self._told(model, prompt.prepare(model, sender))
        )

    def _told(self, model: ServedModel, prompt: PreparedPrompt) -> Json:
        explanation = model.engine.explain(prompt.tokens, prompt.namespace(model.engine))
        if self._config.explain == "own":
            explanation = explanation.of_the_prompt()
        told = _explained(explanation, prompt.tokens, model.model_tokenizer)
        told["message"] = " ".join([told["message"], *map(str, prompt.dropped)])
        return told | {
            "sampled_tokens": prompt.sampled_tokens,
            "dropped": [asdict(head) for head in prompt.dropped],
            "media": dict(Counter(medium.kind for medium in prompt.media)),
        }


def _explained(explanation: Explanation, tokens: Tokens, tokenizer: ModelTokenizer) -> Json:
    """Returns the JSON of an explanation, with the text of its tokens."""
    at = explanation.divergence
    divergence = None
    if at is not None:

        def shown(token: int) -> Json:
            return {"token": token, "text": token_text(tokenizer, token)}

        others = explanation.cached_tokens_there
        divergence = {
            "position": at,
            "before": text_before(tokens, at, tokenizer),
            "asked": shown(int(tokens[at])),
            "cached": None if others is None else [shown(token) for token in others],
        }
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "matched_tokens": explanation.matched_tokens,
        "found_tokens": explanation.found_tokens,
        "cap": explanation.cap,
        "capped_by": explanation.capped_by,
        "message": explained_in_words(explanation, tokens, tokenizer),
        "divergence": divergence,
        "evicted_tokens": explanation.evicted_tokens,
        "pending_tokens": explanation.pending_tokens,
        "below": None if explanation.below is None else asdict(explanation.below),
    }
