"""Routes that turn prompts into tokens and tokens into text, in the shapes of vLLM and of SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from rootstock.cache.types import Tokens
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import SentBy
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.formats.openai.schema import PromptRequest
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import Label, Wire
from rootstock.server.wire.json_pieces import LazyList, items_text
from rootstock.server.wire.sender import Sender
from rootstock.text.limits import MAX_PROMPTS, refuse_more_than, refuse_surrogates
from rootstock.text.tokenizer import ModelTokenizer, token_text

MAX_DETOKENIZED = 262_144  # tokens of one request
_LONG_ANSWER_TOKENS = 2_048  # an answer with more of them is not encoded on the event loop
_TOKENS_PER_PIECE = 2_048


class TokenizeRequest(PromptRequest):
    """Either `messages`, as in a chat, or `prompt`: a text, or several."""

    add_special_tokens: Annotated[
        bool | None, Field(description="tokens that the model wants before every text; true for a 'prompt'")
    ] = None
    return_token_strs: Annotated[bool | None, Field(description="also the text of each token")] = None


class DetokenizeRequest(Wire):
    model: Label | None = None
    # Any: pydantic would report each wrong element of each alternative.
    tokens: Annotated[Any, Field(description="a list of token ids, or a list of such lists")]
    skip_special_tokens: Annotated[bool | None, Field(description="in 'text'")] = None


class Tokenized(Wire):
    """The answer to /tokenize, for the OpenAPI document. Several prompts have a list of each."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class Detokenized(Wire):
    """The answer to /detokenize, for the OpenAPI document. Several lists of tokens have a list of texts."""

    prompt: Annotated[str | list[str], Field(description="with special tokens, as vLLM's")]
    text: Annotated[str | list[str], Field(description="without special tokens, as SGLang's")]


def tokenization_routes(models: ModelRegistry, answerer: Answerer) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"], route_class=BoundedJsonRoute, responses=documented_errors(*MODEL_ROUTE)
    )

    @router.post("/v1/tokenize", response_class=Response, responses={200: {"model": Tokenized}})
    @router.post("/tokenize", response_class=Response, responses={200: {"model": Tokenized}})
    async def tokenize(body: TokenizeRequest, request: Request, sender: SentBy) -> Response:
        """Returns the tokens of a prompt, or of a chat as a request to answer it would have them."""

        def made(model: ServedModel) -> tuple[ServedModel, list[Tokens]]:
            return model, prompts_of(model, body, sender)

        model, prompts = await models.run(body.model, request, made)
        is_list = isinstance(body.prompt, list)

        def answer() -> Json:
            counts = list(map(len, prompts))
            told = map(_numbers, prompts)
            texts = None
            if body.return_token_strs:
                strings = (_strings(tokens, model.model_tokenizer) for tokens in prompts)
                texts = strings if is_list else next(strings)
            return {
                "tokens": told if is_list else next(told),
                "count": counts if is_list else counts[0],
                "max_model_len": model.context_limit,
                "token_strs": texts,
            }

        is_long = sum(map(len, prompts)) > _LONG_ANSWER_TOKENS
        return await answerer.respond(answer, is_long=is_long, headers={})

    @router.post("/v1/detokenize", responses={200: {"model": Detokenized}})
    @router.post("/detokenize", responses={200: {"model": Detokenized}})
    async def detokenize(body: DetokenizeRequest, request: Request, _sender: SentBy) -> dict[str, Any]:
        """Returns the text of tokens."""
        return await models.run(body.model, request, lambda model: detokenized(model, body))

    return router


def prompts_of(model: ServedModel, body: TokenizeRequest, sender: Sender) -> list[Tokens]:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    if (body.messages is None) == (body.prompt is None):
        raise InvalidParameter("messages", body.messages, "given, or else 'prompt', and not both")
    if body.messages is not None:
        if body.add_special_tokens:
            raise Unsupported("add_special_tokens", "A chat template writes them itself.")
        conversation = body.conversation(body.messages, model.model_tokenizer)
        return [model.rendered_chat(conversation, sender.owner(body.cache_salt)).prompt.tokens]
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    refuse_more_than(MAX_PROMPTS, given, "prompt")
    for i, text in enumerate(given):
        path = f"prompt[{i}]" if isinstance(body.prompt, list) else "prompt"
        if not isinstance(text, str):
            raise InvalidParameter(path, text, "a string")
        refuse_surrogates(text, path)
    model.tokenizer.refuse_more_chars(sum(map(len, given)))
    special = body.add_special_tokens is not False
    return [model.tokenizer.encode(text, special=special) for text in given]


def detokenized(model: ServedModel, body: DetokenizeRequest) -> Json:
    """Decodes tokens: not for an event loop. Raises InvalidParameter."""
    tokens = body.tokens
    is_nested = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    lists = tokens if is_nested else [tokens]
    refuse_more_than(MAX_PROMPTS, lists, "tokens")
    total = 0
    for i, each in enumerate(lists):
        path = f"tokens[{i}]" if is_nested else "tokens"
        if not isinstance(each, list) or not set(map(type, each)) <= {int}:
            raise InvalidParameter(path, each, "a list of token ids, or a list of such lists")
        total += len(each)
        if total > MAX_DETOKENIZED:
            raise InvalidParameter(path, "…", f"at most {MAX_DETOKENIZED:,} token ids in one request")
        wrong = next((token for token in each if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(path, wrong, f"token ids from 0 to {model.vocab_size - 1}")
    prompts = [_text(each, model.model_tokenizer) for each in lists]
    texts = prompts
    if body.skip_special_tokens is not False:
        texts = list(map(model.model_tokenizer.decode, lists))
    return {"prompt": prompts, "text": texts} if is_nested else {"prompt": prompts[0], "text": texts[0]}


def _text(tokens: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """Returns the text of tokens with the names of special ones."""
    return "".join(
        "".join(token_text(tokenizer, token) for token in run) if hidden else tokenizer.decode(list(run))
        for hidden, run in groupby(tokens, tokenizer.is_hidden)
    )


def _numbers(tokens: Tokens) -> LazyList:
    return LazyList(items_text(part.tolist()) for part in _parts(tokens))


def _strings(tokens: Tokens, tokenizer: ModelTokenizer) -> LazyList:
    return LazyList(
        items_text([token_text(tokenizer, token) for token in part.tolist()]) for part in _parts(tokens)
    )


def _parts(tokens: Tokens) -> Iterator[Tokens]:
    return (tokens[at : at + _TOKENS_PER_PIECE] for at in range(0, len(tokens), _TOKENS_PER_PIECE))
