"""OpenAI's choices of a completion: text, perhaps after its prompt, and columns of log-probabilities."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.request import Finished, Logprobs, PromptScored, TokenEvent, TokenLogprob
from rootstock.server.wire.api_call import ChoiceHistory, Json
from rootstock.server.wire.json_pieces import KeptPieces, LazyList, items_text
from rootstock.server.wire.logprobs import LEAST_LOGPROB, slices
from rootstock.text.tokenizer import ModelTokenizer, token_text


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    text: str | None  # None: the client sent tokens


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts with which the choices of an answer begin."""

    prompts: Sequence[Prompt]
    choices_per_prompt: int
    scored: bool  # with log-probabilities, which come with the first choice of each prompt


class CompletionFormat:
    def __init__(self, head: Json, tokenizer: ModelTokenizer, echo: Echo | None) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._echo = echo
        self._started: set[int] = set()
        self._held: dict[int, list[TokenEvent | Finished]] = {}  # of choices whose prompt is not scored yet
        self._scored: _ScoredPrompt | None = None  # of the choice that `whole` made last
        self._offsets: dict[int, _Offsets] = {}  # by choice
        self._texts: dict[int, str] = {}  # by token
        self._decoded: dict[int, str] = {}  # texts of prompts that were given as tokens, by prompt

    chunk_object = "text_completion"
    reasoning_tokens = 0  # a completion's text is not parsed

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        echo = self._echo
        if isinstance(event, PromptScored):
            assert echo is not None
            scored = self._scored_prompt(index, echo, event.logprobs)
            for choice in range(index, index + echo.choices_per_prompt):
                self._started.add(choice)
                columns = {name: LazyList(pieces) for name, pieces in scored.columns.items()}
                yield self._choice(choice, self._prompt_text(choice, echo), columns)
                self._offsets[choice] = scored.offsets_after()
                for held in self._held.pop(choice, ()):
                    yield from self._continued(choice, held)
        elif echo is None or index in self._started:
            yield from self._continued(index, event)
        elif echo.scored:
            self._held.setdefault(index, []).append(event)
        else:
            self._started.add(index)
            yield self._choice(index, self._prompt_text(index, echo))
            yield from self._continued(index, event)

    def _continued(self, index: int, event: TokenEvent | Finished) -> Iterator[Json]:
        match event:
            case TokenEvent(text=text, logprob=logprob):
                if logprob is not None:
                    yield self._choice(index, text, self._logprobs(index, logprob))
                elif text:
                    yield self.text_choice(index, text)
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                yield self._choice(index, text) | {"finish_reason": reason, "stop_reason": stopped_by}

    def text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text)

    def parts(self, index: int, event: TokenEvent) -> Iterable[str | Json]:
        return (event.text,)

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        end, echo = history.end, self._echo
        assert end is not None
        text = history.text
        parts: list[Mapping[str, Iterable[str]]] = []
        offsets: Callable[[], _Offsets] = partial(_Offsets, self._tokenizer)
        if echo is not None:
            text = self._prompt_text(index, echo) + text
            if history.prompt_logprobs is not None:
                self._scored = self._scored_prompt(index, echo, history.prompt_logprobs)
            if self._scored is not None:
                parts.append(self._scored.columns)
                offsets = self._scored.offsets_after
        if history.logprobs is not None:
            parts.append(self._columns(history.logprobs, offsets))
        logprobs = {name: LazyList(*(part[name] for part in parts)) for name in _COLUMNS} if parts else None
        return self._choice(index, text, logprobs) | {
            "finish_reason": end.reason,
            "stop_reason": end.stopped_by,
        }

    def _prompt_text(self, index: int, echo: Echo) -> str:
        at = index // echo.choices_per_prompt
        prompt = echo.prompts[at]
        if prompt.text is not None:
            return prompt.text
        if at not in self._decoded:
            self._decoded[at] = self._tokenizer.decode(prompt.tokens.tolist())
        return self._decoded[at]

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, one: TokenLogprob) -> Json:
        offsets = self._offsets.setdefault(index, _Offsets(self._tokenizer))
        return {
            "tokens": [self._token_text(one.token)],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB)],
            "top_logprobs": [self._top(one)],
            "text_offset": [offsets.next(one.token)],
        }

    def _scored_prompt(self, index: int, echo: Echo, logprobs: Logprobs) -> _ScoredPrompt:
        prompt = echo.prompts[index // echo.choices_per_prompt]
        first, offsets = int(prompt.tokens[0]), _Offsets(self._tokenizer)
        # No token comes before the first one: it has no log-probability.
        begin = {"tokens": self._token_text(first), "text_offset": offsets.next(first)}
        columns = {
            name: KeptPieces(itertools.chain([items_text([begin.get(name)])], pieces))
            for name, pieces in self._columns(logprobs, lambda: offsets).items()
        }
        return _ScoredPrompt(columns, offsets)

    def _columns(self, scored: Logprobs, offsets: Callable[[], _Offsets]) -> dict[str, Iterator[str]]:
        """Returns the pieces of each column. `offsets` returns the offset before the first token, when it is due."""

        def pieces(items: Callable[[Logprobs], list[Any]]) -> Iterator[str]:
            return (items_text(items(part)) for part in slices(scored))

        def places() -> Iterator[str]:
            place = offsets().next
            for part in slices(scored):
                yield items_text(list(map(place, part.tokens.tolist())))

        return {
            "tokens": pieces(lambda part: list(map(self._token_text, part.tokens.tolist()))),
            "token_logprobs": pieces(lambda part: np.maximum(part.logprobs, LEAST_LOGPROB).tolist()),
            "top_logprobs": pieces(lambda part: list(map(self._top, part))),
            "text_offset": places(),
        }

    def _top(self, one: TokenLogprob) -> Json:
        return {
            self._token_text(token): max(logprob, LEAST_LOGPROB)
            for token, logprob in (*one.top, (one.token, one.logprob))
        }

    def _token_text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = token_text(self._tokenizer, token)
        return text


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    """A prompt's columns as text, encoded once for all of its choices."""

    columns: dict[str, KeptPieces]
    _offsets: _Offsets  # advanced by the pieces of `text_offset`

    def offsets_after(self) -> _Offsets:
        """Returns the offsets of a choice that follows the prompt."""
        for _ in self.columns["text_offset"]:
            pass
        return self._offsets.copy()


class _Offsets:
    """Positions of a request's tokens in its text, in characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def next(self, token: int) -> int:
        offset = self._characters
        if not self._tokenizer.is_hidden(token):
            self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset

    def copy(self) -> _Offsets:
        other = _Offsets(self._tokenizer)
        other._characters = self._characters
        other._decoder.setstate(self._decoder.getstate())
        return other
