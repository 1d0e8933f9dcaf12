"""A model in this process: generate, chat and stream, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.explain import Explanation
from rootstock.cache.retention.hint_types import CacheHints, RetentionWish
from rootstock.cache.types import Tokens
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.clearing import Clearing
from rootstock.engine.engine import Engine
from rootstock.engine.request import Finished, Request, TokenEvent, requests_for
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.stats import Cleared, EngineStats
from rootstock.errors import (
    EmptyPrompt,
    EngineStopped,
    InvalidParameter,
    LLMClosed,
    LLMForked,
    RequestError,
    RootstockError,
)
from rootstock.llm.generation import GenerationEvents, Indexed, events_of
from rootstock.llm.options import Options, configuration
from rootstock.llm.outputs import CollectedAnswer, RequestOutput, TextDelta, delta_of, output_of
from rootstock.llm.params import SamplingParams, warn_of_default
from rootstock.openmp import wait_briefly
from rootstock.option_table import OPTIONS, in_library_words
from rootstock.pipeline.model import ChatRules, PreparedChat, ServedModel
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.select import locate_model
from rootstock.text.constraints.openai_fields import constraint_of
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import refuse_unread_variables
from rootstock.text.prompts.explained import explained_in_words
from rootstock.text.prompts.prompt_tokenizer import text_tokens
from rootstock.text.prompts.tenant_salt import PromptOwner, salt_of
from rootstock.text.tokenizer import ModelTokenizer

S = TypeVar("S")
T = TypeVar("T")

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]  # text, or token ids
Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Params = (
    SamplingParams | Sequence[SamplingParams] | None
)  # for all, or one for each prompt; None: the model's


class PromptOptions(TypedDict, total=False):
    """Options of a prompt beside its sampling. Each may be left out."""

    cache_salt: str | None  # prefixes are shared only with prompts of the same salt
    adapter: str | None  # a LoRA adapter by its name; without one the base model answers


class ChatOptions(PromptOptions, total=False):
    """Options of a chat beside its messages and its sampling. Each may be left out."""

    tools: Sequence[Tool] | None  # OpenAI's: functions that the model may call
    tool_choice: Any  # "auto", "none", "required", or a function by its name as OpenAI's API has it
    response_format: Mapping[str, Any] | None  # OpenAI's, of the type "json_schema" or "json_object"
    reasoning_budget: int | None  # tokens of reasoning, after which its end is forced
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the template, such as `enable_thinking`
    continue_final_message: bool  # the answer goes on with the last message's text
    session: str | None  # names the conversation: the time until its next request is learnt
    ttl_s: float | None  # the time for which prompt and answer are kept after their last use, within bounds


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt, ready for the engine."""

    text: str | None
    tokens: Tokens
    chat: PreparedChat | None = None  # None: a prompt of text or of token ids
    hints: CacheHints | None = None


@dataclass(frozen=True, slots=True)
class _Use:
    """The namespace of one call's prompts."""

    cache_salt: str | None
    adapter: str | None  # its name

    @property
    def salt(self) -> str:
        return salt_of("", self.cache_salt)


class LLM:
    """A model with its KV cache and the thread that runs it. Methods may be called from any thread.

        with LLM("path/to/model", budget_bytes="2GiB") as llm:
            for output in llm.generate(["Once upon a time", "In the end"], SamplingParams(max_tokens=32)):
                print(output.text, output.cached_tokens)

    Calls that run at the same time, from threads or tasks, share the batch and the cache. `agenerate`, `achat`,
    `astream` and `achat_stream` are the same for asyncio; cancelling the task aborts its requests.

    `max_tokens` beyond the context's room is lowered to it, and the answer ends with `finish_reason` "length". An
    error of one prompt ends the whole call: the call's other requests are aborted, and a note names the prompt.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | None = None,
        parse_special_tokens: bool = False,
        sampling_defaults: str = "model",
        tool_parser: str = "auto",
        media: str = "refuse",
        progress: Callable[[str, float], None] | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Loads a model from a directory or by its Hub name, which takes seconds to minutes. Raises StartupError.

        `chat_template` is a Jinja template to use instead of the model's own. With `parse_special_tokens`, special
        tokens that messages spell out are control tokens, else plain text. `sampling_defaults` is the source of
        parameters that are None: "model" for its generation_config.json, or "openai". `tool_parser` names the format
        of calls and reasoning, which "auto" finds by the template. An image that the model does not see, or another
        medium, is an error in a message, or with `media="mention"` a line of the prompt. `progress` is called, from
        any thread, with a stage and its completed share. For the other options see `Options`.
        """
        wait_briefly()
        model = str(model) if isinstance(model, Path) else model
        config = configuration(model, options)
        OPTIONS["sampling_defaults"].check(sampling_defaults, "sampling_defaults")
        OPTIONS["media"].check(media, "media")
        with _in_library_words():
            directory = locate_model(config.model, progress or (lambda stage, done: None))
            defaults = SamplingDefaults.chosen(sampling_defaults, model, directory)
            made = build_engine(
                config.model,
                config.cache,
                config.engine,
                config.tier,
                chat_template=chat_template,
                progress=progress,
                directory=directory,
            )
        rules = ChatRules(parse_special_tokens, tool_parser, refuses_media=media == "refuse")
        self._start(made, defaults, rules)

    @classmethod
    def from_assembly(
        cls, made: Assembly, defaults: SamplingDefaults | None = None, *, parse_special_tokens: bool = False
    ) -> LLM:
        """Wraps an engine that was assembled otherwise and not started, such as one on a runtime of your own."""
        llm = cls.__new__(cls)
        llm._start(made, defaults or SamplingDefaults(), ChatRules(parse_special_tokens, refuses_media=True))
        return llm

    def _start(self, made: Assembly, defaults: SamplingDefaults, rules: ChatRules) -> None:
        self._engine = made.engine
        self._description = made.description
        with _in_library_words():
            self._model = ServedModel.of(made, rules, defaults=defaults)
        self._closed = threading.Event()
        made.engine.start()
        self._process = os.getpid()  # of the engine's thread: a fork does not have it
        # At exit the engine writes the disk tier. The finalizer ends the thread of an LLM without references.
        self._at_exit = functools.partial(_stop_at_exit, made.engine, self._process)
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(
            self, _stop_unreferenced, made.engine, self._at_exit, self._process
        )
        self._finalizer.atexit = False

    # --------------------------------------------------------------------------------------- lifetime

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends the engine's thread, after writing the cache to the disk tier if there is one. Idempotent.

        Running requests end with LLMClosed, and later calls raise it.
        """
        self._closed.set()
        self._finalizer.detach()
        atexit.unregister(self._at_exit)
        if self._process == os.getpid():
            self._engine.stop()

    @contextlib.contextmanager
    def _open(self) -> Iterator[Engine]:
        """Yields the engine for one call. Raises LLMForked, and LLMClosed, also if it is closed during the call."""
        self._require_running()
        try:
            with _in_library_words():
                yield self._engine
        except EngineStopped as error:
            if self._closed.is_set() and not isinstance(error, LLMClosed):
                raise LLMClosed from error
            raise

    def _require_running(self) -> None:
        if self._closed.is_set():
            raise LLMClosed
        if self._process != os.getpid():
            raise LLMForked

    # -------------------------------------------------------------------------------------- properties

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._model.model_tokenizer

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._engine.context_limit

    # -------------------------------------------------------------------------------- answers at once

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]:
        """Generates answers to one or many prompts, batched, and returns them in the prompts' order.

        A prompt is text or token ids. Prompts share cached prefixes only with prompts of the same `cache_salt` and
        `adapter` (`PromptOptions`).
        Raises RequestError, EngineError and LLMClosed.
        """
        asked = self._prompts(_listed(prompts))
        return self._collect(asked, _one_for_each(params, len(asked)), _use_of(options, PromptOptions))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers one or many conversations, rendered with the model's chat template, in their order.

        Messages are OpenAI's, and `ChatOptions` has the options. The text of an answer has no reasoning and no
        calls: `outputs[0].reasoning` and `outputs[0].tool_calls` have them. Raises RequestError, EngineError and
        LLMClosed.
        """
        conversations, use = _conversations(messages), _use_of(options, ChatOptions)
        asked = self._chats(conversations, options)
        return self._collect(asked, _one_for_each(params, len(asked)), use)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]:
        """Generates like `generate`, for asyncio. Cancelling the task aborts its requests."""
        listed = _listed(prompts)
        each = _one_for_each(params, len(listed))
        return await self._acollect(lambda: self._prompts(listed), each, _use_of(options, PromptOptions))

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers like `chat`, for asyncio. Cancelling the task aborts its requests."""
        conversations, use = _conversations(messages), _use_of(options, ChatOptions)
        each = _one_for_each(params, len(conversations))
        return await self._acollect(lambda: self._chats(conversations, options), each, use)

    # ------------------------------------------------------------------------------- answers in pieces

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[PromptOptions],
    ) -> Stream:
        """Submits a prompt at once and returns an iterator over the pieces of its answers."""
        return self._stream(self._prompt(prompt), params, _use_of(options, PromptOptions))

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Submits a conversation at once and returns an iterator over the pieces of its answers."""
        use = _use_of(options, ChatOptions)
        return self._stream(self._chat(messages, options), params, use)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[PromptOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Returns a generator of the pieces of the answers to a prompt. The request begins with the first of them.

        Cancelling the task aborts the request. A loop that is left early aborts it when the generator is closed:
        at once within `contextlib.aclosing`.
        """
        return self._astream(lambda: self._prompt(prompt), params, _use_of(options, PromptOptions))

    def achat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Returns a generator of the pieces of the answers to a conversation, as `astream` does."""
        use = _use_of(options, ChatOptions)
        return self._astream(lambda: self._chat(messages, options), params, use)

    # --------------------------------------------------------------------------------------- the cache

    def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Explanation:
        """Explains how much of a prompt is cached now, and the reason why no more (`message`, `cap`)."""
        return self._explain(self._prompt(prompt), _use_of(options, PromptOptions))

    def explain_chat(
        self,
        messages: Sequence[Message],
        **options: Unpack[ChatOptions],
    ) -> Explanation:
        """Explains how much of a conversation is cached now, and the reason why no more."""
        use = _use_of(options, ChatOptions)
        return self._explain(self._chat(messages, options), use)

    def _explain(self, asked: _Asked, use: _Use) -> Explanation:
        with self._open() as engine:
            found = engine.explain(asked.tokens, engine.namespace(use.salt, self._adapter(use)))
        return replace(found, message=explained_in_words(found, asked.tokens, self.tokenizer))

    # ------------------------------------------------------------------------------------ the adapters

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter in PEFT's format, on MLX in mlx-lm's, too. Calls choose it by `adapter=name`.

        Raises AdapterUnusable, AdapterExists and AdapterLimit.
        """
        with self._open() as engine:
            engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Its running requests go on to their ends. Raises AdapterNotLoaded."""
        with self._open() as engine:
            engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        """Counts hits, evictions, steps and the memory in use."""
        with self._open() as engine:
            return engine.stats()

    def clear_cache(self, *, cache_salt: str | None = None) -> Cleared:
        """Drops every cached prefix that no running request uses: of one `cache_salt`, or all."""
        salt = None if cache_salt is None else salt_of("", cache_salt)
        with self._open():
            return self._model.clear(Clearing(salt))

    # ---------------------------------------------------------------------------------------- prompts

    def _prompts(self, prompts: Sequence[Prompt]) -> list[_Asked]:
        return _each(prompts, self._prompt)

    def _prompt(self, prompt: Prompt) -> _Asked:
        self._require_running()
        if isinstance(prompt, str):
            with _in_library_words():
                return _Asked(prompt, text_tokens(self._model.tokenizer, prompt))
        return _Asked(None, _ids(prompt))

    def _chats(self, conversations: Sequence[Sequence[Message]], options: ChatOptions) -> list[_Asked]:
        return _each(conversations, lambda messages: self._chat(messages, options))

    def _chat(self, messages: Sequence[Message], options: ChatOptions) -> _Asked:
        self._require_running()
        if not messages:
            raise EmptyPrompt("messages")
        use, variables = _use_of(options, ChatOptions), dict(options.get("chat_template_kwargs") or {})
        model = replace(self._model, adapter=self._adapter(use))
        with _in_library_words():
            refuse_unread_variables(variables, self.tokenizer.template_names)
            if options.get("continue_final_message"):
                variables["continue_final_message"] = True
            conversation = conversation_of(
                messages, options.get("tools"), options.get("tool_choice"), variables
            )
            constraint = constraint_of({"response_format": options.get("response_format")})
            chat = model.prepared_chat(
                conversation, PromptOwner.of("", use.cache_salt), constraint, options.get("reasoning_budget")
            )
        return _Asked(None, chat.prompt.tokens, chat, _hints_of(options))

    def _adapter(self, use: _Use) -> str:
        """Returns the fingerprint of the call's adapter. Raises InvalidParameter."""
        if use.adapter is None:
            return ""
        found = self._engine.adapters.find(use.adapter)
        if found is None:
            names = ", ".join(named.name for named in self._engine.adapters.all) or "no adapter is loaded"
            raise InvalidParameter("adapter", use.adapter, f"the name of a loaded adapter ({names})")
        return found.fingerprint

    def _requests(self, asked: _Asked, params: SamplingParams, use: _Use) -> tuple[Request, ...]:
        id, sampling, stop = uuid.uuid4().hex, params.sampling(self._model.defaults), params.stopping()
        if asked.chat is not None:
            requests = asked.chat.requests(id, params.n, sampling, stop, hints=asked.hints)
            if params.prompt_logprobs is not None:
                requests = tuple(replace(one, prompt_logprobs=params.prompt_logprobs) for one in requests)
        else:
            requests = requests_for(
                id,
                [asked.tokens],
                params.n,
                sampling,
                stop,
                salt=use.salt,
                prompt_logprobs=params.prompt_logprobs,
                adapter=self._adapter(use),
            )
        return tuple(request.fitted(self.context_limit) for request in requests)

    # ---------------------------------------------------------------------------------------- running

    def _collect(
        self, asked: Sequence[_Asked], params: Sequence[SamplingParams], use: _Use
    ) -> list[RequestOutput]:
        batch = _Batch(asked, params, lambda one, how: self._requests(one, how, use))
        with (
            self._open() as engine,
            contextlib.closing(GenerationEvents(engine, batch.requests, batch.prompt_of)) as events,
        ):
            for indexed in events:
                batch.take(indexed)
        return batch.outputs(stacklevel=4)

    async def _acollect(
        self,
        prepare: Callable[[], Sequence[_Asked]],
        params: Sequence[SamplingParams],
        use: _Use,
    ) -> list[RequestOutput]:
        def prepared() -> _Batch:
            return _Batch(prepare(), params, lambda one, how: self._requests(one, how, use))

        batch = await asyncio.to_thread(prepared)
        with self._open() as engine:
            async with contextlib.aclosing(events_of(engine, batch.requests, batch.prompt_of)) as events:
                async for indexed in events:
                    batch.take(indexed)
        return batch.outputs()

    def _stream(self, asked: _Asked, params: SamplingParams | None, use: _Use) -> Stream:
        params = params or SamplingParams()
        requests = self._requests(asked, params, use)
        with self._open() as engine:
            events = GenerationEvents(engine, requests, [0] * len(requests))
            return Stream(events, self._open, params, _Pieces(asked.chat, len(requests)))

    async def _astream(
        self, prepare: Callable[[], _Asked], params: SamplingParams | None, use: _Use
    ) -> AsyncGenerator[TextDelta, None]:
        asked = await asyncio.to_thread(prepare)
        params = params or SamplingParams()
        requests = self._requests(asked, params, use)
        pieces = _Pieces(asked.chat, len(requests))
        with self._open() as engine:
            async with contextlib.aclosing(events_of(engine, requests, [0] * len(requests))) as events:
                async for index, event in events:
                    if isinstance(event, TokenEvent | Finished):
                        _warn_if_cut(event, params, stacklevel=2)
                        yield pieces.of(index, event)


class _Pieces:
    """Pieces of the answers to one prompt, parsed as they come if it is a chat."""

    def __init__(self, chat: PreparedChat | None, answers: int) -> None:
        self._parsers = [None if chat is None else chat.new_parser() for _ in range(answers)]

    def of(self, index: int, event: TokenEvent | Finished) -> TextDelta:
        return delta_of(index, event, self._parsers[index])


class Stream(Iterator[TextDelta]):
    """Pieces of the answers to one prompt, as they are generated. `close`, also by `with`, aborts the rest."""

    def __init__(
        self,
        events: GenerationEvents,
        opened: Callable[[], contextlib.AbstractContextManager[Engine]],
        params: SamplingParams,
        pieces: _Pieces,
    ) -> None:
        self._events = events
        self._opened = opened
        self._params = params
        self._pieces = pieces

    def __next__(self) -> TextDelta:
        """Waits for the next piece. Raises EngineError, and LLMClosed once the LLM is closed."""
        with self._opened():
            for index, event in self._events:
                if isinstance(event, TokenEvent | Finished):
                    _warn_if_cut(event, self._params, stacklevel=3)
                    return self._pieces.of(index, event)
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the answers that have not ended. Idempotent."""
        self._events.close()


class _Batch:
    """The requests of a call and their answers: prompt by prompt, the answers to one side by side."""

    def __init__(
        self,
        asked: Sequence[_Asked],
        params: Sequence[SamplingParams],
        requests_of: Callable[[_Asked, SamplingParams], tuple[Request, ...]],
    ) -> None:
        self._asked = asked
        self._params = params
        self.requests = [
            request for one, how in zip(asked, params, strict=True) for request in requests_of(one, how)
        ]
        # The prompt of each request.
        self.prompt_of = [prompt for prompt, how in enumerate(params) for _ in range(how.n)]
        self._answers = [
            CollectedAnswer(how.logprobs is not None, None if one.chat is None else one.chat.new_parser())
            for one, how in zip(asked, params, strict=True)
            for _ in range(how.n)
        ]

    def take(self, indexed: Indexed) -> None:
        index, event = indexed
        self._answers[index].take(event)

    def outputs(self, stacklevel: int = 2) -> list[RequestOutput]:
        """Puts the answers together. Warns if one was cut that the caller has set no limit for."""
        found, first = [], 0
        for one, how in zip(self._asked, self._params, strict=True):
            answers = self._answers[first : first + how.n]
            found.append(output_of(one.text, self.requests[first], answers))
            first += how.n
        cut = [
            how.max_tokens is None and any(output.finish_reason == "length" for output in answer.outputs)
            for answer, how in zip(found, self._params, strict=True)
        ]
        if any(cut):
            warn_of_default(sum(cut), stacklevel + 1)
        return found


def _warn_if_cut(event: TokenEvent | Finished, params: SamplingParams, stacklevel: int) -> None:
    """Warns if an event ends an answer by a limit that the caller has not set."""
    if params.max_tokens is None and isinstance(event, Finished) and event.reason == "length":
        warn_of_default(1, stacklevel + 1)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Makes a list of one prompt. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise InvalidParameter("prompts", prompts, "text, token ids, or a list of either")
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _ids(prompt: object) -> Tokens:
    """Copies token ids. The engine refuses those that are not in the vocabulary."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    if ids.ndim == 1 and ids.size == 0:
        raise EmptyPrompt
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < 2**31:
        raise InvalidParameter("prompt", prompt, "text or a list of token ids")
    return ids.astype(np.int32)


def _conversations(messages: Any) -> Sequence[Sequence[Message]]:
    """Makes a list of one conversation. A list of messages is one conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidParameter("messages", messages, "a list of messages, or a list of such lists")
    if len(messages) == 0:
        raise EmptyPrompt("messages")
    if isinstance(messages[0], Mapping):
        return [messages]
    return messages


def _one_for_each(params: Params, prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise InvalidParameter("params", params, f"one SamplingParams, or a list of {prompts:,}")
    return params


def _use_of(options: PromptOptions, known: type[PromptOptions]) -> _Use:
    """Returns the namespace of a call. Raises TypeError for an option that there is not."""
    names = known.__annotations__
    unknown = options.keys() - names.keys()
    if unknown:
        raise TypeError(f"there is no option {min(unknown)!r} here: there are {', '.join(names)}")
    return _Use(options.get("cache_salt"), options.get("adapter"))


def _hints_of(options: ChatOptions) -> CacheHints | None:
    session, ttl_s = options.get("session"), options.get("ttl_s")
    if session is None and ttl_s is None:
        return None
    if session is not None and not isinstance(session, str):
        raise InvalidParameter("session", session, "a string")
    if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0):
        raise InvalidParameter("ttl_s", ttl_s, "a number of seconds, more than 0")
    retentions = () if ttl_s is None else (RetentionWish("ttl_s", None, float(ttl_s)),)
    return CacheHints(session=session, session_field="session", retentions=retentions)


def _each(prompts: Sequence[S], prepare: Callable[[S], T]) -> list[T]:
    """Prepares each prompt of a call. Adds a note to an error that tells which prompt it is about."""
    prepared = []
    for index, prompt in enumerate(prompts):
        try:
            prepared.append(prepare(prompt))
        except RequestError as error:
            error.add_note(f"in prompt {index} of this call")
            raise
    return prepared


@contextlib.contextmanager
def _in_library_words() -> Iterator[None]:
    """Makes errors name the library's parameters in the place of the command line's options."""
    try:
        yield
    except RootstockError as error:
        in_library_words(error)
        raise


def _stop_at_exit(engine: Engine, process: int) -> None:
    """Stops the engine, unless this is a fork, which has no thread to wait for."""
    if process == os.getpid():
        engine.stop()


def _stop_unreferenced(engine: Engine, at_exit: Callable[[], None], process: int) -> None:
    """Stops the engine of an LLM that was collected unclosed.

    Stops it on a thread of its own, because collection may happen on the engine's thread in the middle of a step.
    """
    atexit.unregister(at_exit)
    if process != os.getpid():
        return
    with contextlib.suppress(RuntimeError):  # no thread can be started when the interpreter ends
        threading.Thread(target=engine.stop, name="rootstock-stop", daemon=True).start()
