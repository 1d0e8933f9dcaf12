"""Limits of an engine, which refuse requests that can never work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN
from rootstock.cache.kv_cache import KVCache
from rootstock.config import EngineConfig
from rootstock.engine.request import Request
from rootstock.engine.sampling import leaves_no_token
from rootstock.errors import CompletionTooLong, EmptyPrompt, InvalidParameter, PromptTooLong
from rootstock.runtime.base import ModelDescription
from rootstock.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Properties of an engine that bound a request. A request that can never work is refused when it is submitted."""

    context_limit: int  # tokens of a prompt and its answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    makes_text: bool  # False: there is no tokenizer, and no stop string can be found

    @classmethod
    def of(
        cls,
        described: ModelDescription,
        cache: KVCache,
        config: EngineConfig,
        tokenizer: ModelTokenizer | None,
    ) -> RequestLimits:
        limits = [described.context_limit, cache.capacity_tokens]
        if config.context_limit is not None:
            limits.append(config.context_limit)
        # The tokenizer of a fine-tuned model often has an end of turn that the model's configuration does not name.
        of_tokenizer = () if tokenizer is None else tokenizer.eos_token_ids
        return cls(
            min(limits),
            described.vocab_size,
            tuple(dict.fromkeys((*described.eos_token_ids, *of_tokenizer))),
            makes_text=tokenizer is not None,
        )

    def end_tokens(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens that end the answer."""
        return (*(() if request.stop.ignore_eos else self.eos_token_ids), *request.stop.stop_tokens)

    def max_tokens(self, request: Request) -> int:
        """Returns how many tokens the answer may have."""
        left = self.context_limit - len(request.tokens)
        return left if request.stop.max_tokens is None else request.stop.max_tokens

    def refuse_impossible(self, request: Request) -> None:
        """Raises EmptyPrompt, PromptTooLong, CompletionTooLong or InvalidParameter."""
        prompt, stop = len(request.tokens), request.stop
        if prompt == 0:
            raise EmptyPrompt()
        tokens = request.tokens
        if request.images:
            if request.prompt_logprobs is not None:
                raise InvalidParameter("prompt_logprobs", request.prompt_logprobs, "absent with images")
            tokens = np.append(tokens[tokens < FIRST_IMAGE_TOKEN], 0)
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidParameter("prompt", wrong, f"token ids from 0 to {self.vocab_size - 1}")
        if prompt + (stop.max_tokens != 0) > self.context_limit:
            raise PromptTooLong(prompt, self.context_limit)
        if stop.max_tokens is not None:
            if stop.max_tokens < 0:
                raise InvalidParameter("max_tokens", stop.max_tokens, "0 or more")
            if prompt + stop.max_tokens > self.context_limit:
                raise CompletionTooLong(prompt, stop.max_tokens, self.context_limit)
        max_tokens = self.max_tokens(request)
        if stop.min_tokens > max_tokens:
            allowed = f"at most {max_tokens:,}, the most tokens that this answer can have"
            raise InvalidParameter("min_tokens", stop.min_tokens, allowed)
        if max_tokens > 0 and leaves_no_token(
            request.sampling, self.vocab_size, self.end_tokens(request), stop.min_tokens
        ):
            raise InvalidParameter(
                "logit_bias" if request.sampling.logit_bias else "min_tokens",
                dict(request.sampling.logit_bias) or stop.min_tokens,
                "such that some token may be chosen: bans, and end tokens before 'min_tokens', leave none",
            )
        if stop.stop_strings and not self.makes_text:
            raise InvalidParameter("stop", stop.stop_strings, "empty: this engine has no tokenizer")
