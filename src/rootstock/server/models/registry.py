"""The models of a server: the model of a request is found by the name in its field `model`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.retention.hint_types import RetainedLimits
from rootstock.cache.shared_budget import SharedBudget
from rootstock.config import ANY_NAME, EngineConfig, ServedModelConfig, ServerConfig, Task
from rootstock.engine.activity import MIN_MISSED_TOKENS
from rootstock.engine.build import Assembly
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.embedding import EmbeddingEngine
from rootstock.engine.stats import Health
from rootstock.errors import (
    EngineStopped,
    InvalidOption,
    MissingParameter,
    ModelNotFound,
    ModelNotLoaded,
    Unsupported,
)
from rootstock.pipeline.model import ChatRules, ServedModel
from rootstock.runtime.base import Embedder
from rootstock.server.access.guard import refuse_model_of_others
from rootstock.server.http.errors import ClientGone
from rootstock.server.http.request_bodies import PreparationQueue
from rootstock.server.models.embedding_model import AnyModel, EmbeddingModel
from rootstock.server.models.model_slots import (
    AwaitedModel,
    LoadedSlot,
    ModelSlot,
    ModelSlots,
    ModelUse,
    UnloadedSlot,
)
from rootstock.text.limits import refuse_surrogates
from rootstock.text.prompts.fingerprint import Fingerprints
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.text.prompts.public_prompts import public_heads, read_public_prompts

T = TypeVar("T")
LoadModel = Callable[[ServedModelConfig], Assembly | Embedder]

_GONE_CHECK_S = 0.25  # between two looks whether the client of a waiting request has left


def chat_rules(config: ServerConfig, own: ServedModelConfig | None = None) -> ChatRules:
    """Returns the operator's rules for conversations with a model, which may have options of its own."""
    return ChatRules(
        config.parse_special_tokens,
        config.tool_parser if own is None else own.tool_parser,
        config.drop_volatile,
        refuses_media=((own and own.media) or config.media) == "refuse",
    )


def public_heads_of(config: ServerConfig, tokenizer: PromptTokenizer) -> PublicHeads | None:
    """Returns the public heads of --public-prompts; None: there are none. Raises InvalidOption."""
    if config.public_prompts is None:
        return None
    return public_heads(
        read_public_prompts(config.public_prompts),
        tokenizer,
        parse=config.parse_special_tokens,
        drop_volatile=config.drop_volatile,
    )


def served_model(
    made: Assembly, config: ServerConfig, fingerprints: Fingerprints, own: ServedModelConfig | None = None
) -> ServedModel:
    """Makes the model of an engine. The caller starts and stops the engine. Raises InvalidOption."""
    engine, rules = made.engine, chat_rules(config, own)
    model = ServedModel.of(made, rules, None if own is None else own.name, fingerprints=fingerprints)
    engine.public_heads = public_heads_of(config, model.tokenizer)
    if config.dashboard:
        engine.scheduler.explains_misses_of = MIN_MISSED_TOKENS
    if engine.constraints is not None:
        engine.constraints.prepare()  # holds the interpreter for a second, during which no stream would go on
    return model


class ModelRegistry:
    """The models of a server by name. Any thread may call the methods, but for coroutines.

    An unloaded model is loaded when a request asks for it, on another thread; the request waits.
    """

    def __init__(self, slots: ModelSlots, config: ServerConfig, engine: EngineConfig) -> None:
        self.slots = slots
        self.retained_limits = RetainedLimits()  # of models that are loaded later
        self.queue = PreparationQueue(engine.max_batch, engine.max_queue)
        self._by_name, self._of_any_name = _by_name(slots.all, config.aliases)
        taken = set(self._by_name)
        for name in (name for slot in slots.all for name in adapters_of(slot)):
            if name in taken:
                allowed = "another name than those of models, aliases and other adapters"
                raise InvalidOption("--adapter", name, allowed)
            taken.add(name)

    @staticmethod
    def of_one(made: Assembly, config: ServerConfig) -> ModelRegistry:
        """Makes the registry of one model that is always loaded. The caller starts and stops its engine."""
        model = served_model(made, config, Fingerprints())
        slots = ModelSlots([ModelSlot(model.name, None, LoadedSlot(model))])
        return ModelRegistry(slots, config, made.engine.config)

    @staticmethod
    def of_several(
        models: Sequence[ServedModelConfig],
        load: LoadModel,
        config: ServerConfig,
        engine: EngineConfig,
        budget: SharedBudget | None = None,
        records_of: Callable[[ServedModelConfig], Path | None] = lambda config: None,
    ) -> ModelRegistry:
        """Makes the registry of models that `start` or requests load. `records_of` returns the directory of a model's
        disk tier. Raises InvalidOption."""
        fingerprints = Fingerprints()  # of all models: an answer may be compared with one of another model

        def loaded(own: ServedModelConfig) -> AnyModel:
            made = load(own)
            if not isinstance(made, Assembly):
                limit = own.context_limit or engine.context_limit
                return EmbeddingModel(own.name, made, EmbeddingEngine(made, engine, limit))
            model = served_model(made, config, fingerprints, own)
            model.engine.limit_retained(registry.retained_limits)
            return model

        slots = ModelSlots(
            [ModelSlot(own.name, own, UnloadedSlot()) for own in models],
            loaded,
            DeviceThread(),
            budget,
            engine,
            records_of=records_of,
        )
        registry = ModelRegistry(slots, config, engine)
        return registry

    def limit_retained(self, limits: RetainedLimits) -> None:
        """Bounds the bytes that tenants may retain and pin, of each model."""
        self.retained_limits = limits
        for model in self.loaded:
            model.engine.limit_retained(limits)

    def start(self) -> None:
        """Loads the models that are served from the start. Raises StartupError."""
        self.slots.start()

    def __enter__(self) -> ModelRegistry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops all engines. Idempotent."""
        self.slots.stop()

    # ------------------------------------------------------------------------------------------- names

    @property
    def are_several(self) -> bool:
        return len(self.slots.all) > 1

    @property
    def loaded(self) -> list[ServedModel]:
        """The generation models that are loaded now."""
        return [model for slot in self.slots.all if (model := slot.loaded) is not None]

    @property
    def loaded_embeddings(self) -> list[EmbeddingModel]:
        """The embedding models that are loaded now."""
        return [model for slot in self.slots.all if (model := slot.loaded_embedding) is not None]

    @property
    def names(self) -> list[str]:
        """The names of models, and their aliases, without the alias for any name."""
        models = [slot.name for slot in self.slots.all]
        adapters = [name for slot in self.slots.all for name in adapters_of(slot)]
        return list(dict.fromkeys([*models, *self._by_name, *adapters]))

    def is_adapter(self, asked: str) -> bool:
        """Returns whether a name belongs to a LoRA adapter."""
        return asked not in self._by_name and self._slot_of_adapter(asked) is not None

    def _slot_of_adapter(self, asked: str) -> ModelSlot | None:
        return next((slot for slot in self.slots.all if asked in adapters_of(slot)), None)

    def slot(self, asked: str | None) -> ModelSlot:
        """Returns the place of the model of a name. A request without a name gets the only model.

        Raises ModelNotFound, MissingParameter, and InvalidParameter for a name that an answer could not repeat.
        """
        if asked is None:
            if self._of_any_name is None and self.are_several:
                raise MissingParameter("model")
            return self._of_any_name or self.slots.all[0]
        found = self._by_name.get(asked) or self._slot_of_adapter(asked)
        if found is not None:
            return found
        if self._of_any_name is None:
            raise ModelNotFound(asked, self.names)
        refuse_surrogates(asked, "model")
        return self._of_any_name

    def find(self, asked: str | None) -> ServedModel:
        """Returns a loaded generation model by its name.

        Raises the errors of `slot`, ModelNotLoaded, and Unsupported for an embedding model.
        """
        slot = self.slot(asked)
        _refuse_other_task(slot, "generate")
        model = slot.loaded
        if model is None:
            raise ModelNotLoaded(slot.name)
        return self._named(asked, model)

    def _named(self, asked: str | None, model: ServedModel) -> ServedModel:
        """Returns the model with the adapter of this name, or the model itself if the name is not an adapter's.

        Raises ModelNotFound for an adapter that was unloaded meanwhile.
        """
        if asked is None or asked in self._by_name:
            return model
        adapter = model.engine.adapters.find(asked)
        if adapter is not None:
            return model.of_adapter(adapter)
        if self._of_any_name is None:
            raise ModelNotFound(asked, self.names)
        return model

    def slots_of(self, asked: str | None, request: Request) -> list[ModelSlot]:
        """Returns the slot of the generation model with this name, loaded or not; without a name, all slots.

        Raises ModelNotAllowed, Unsupported and the errors of `slot`.
        """
        if asked is None:
            return [slot for slot in self.slots.all if slot.task != "embed"]
        refuse_model_of_others(request, asked)
        slot = self.slot(asked)
        _refuse_other_task(slot, "generate")
        return [slot]

    def ask(
        self, asked: str | None, request: Request, question: Callable[[ServedModel], T]
    ) -> list[tuple[ServedModel, T]]:
        """Asks the loaded model of a name, or all loaded models. One that is unloaded meanwhile has no answer.

        Raises ModelNotAllowed, and the errors of `find` and of the question.
        """
        if asked is None:
            return self.ask_loaded(question)
        refuse_model_of_others(request, asked)
        return [self.ask_one(asked, question)]

    def ask_one(self, asked: str | None, question: Callable[[ServedModel], T]) -> tuple[ServedModel, T]:
        """Asks the loaded model of a name. Raises the errors of `find` and of the question."""
        model = self.find(asked)
        for answered in self._answers([model], question):
            return answered
        raise ModelNotLoaded(model.name)

    def ask_loaded(self, question: Callable[[ServedModel], T]) -> list[tuple[ServedModel, T]]:
        """Asks all loaded models. Raises the errors of the question."""
        return list(self._answers(self.loaded, question))

    def _answers(
        self, models: Sequence[ServedModel], question: Callable[[ServedModel], T]
    ) -> Iterator[tuple[ServedModel, T]]:
        for model in models:
            try:
                answer = question(model)
            except EngineStopped:
                if any(each.engine is model.engine for each in self.loaded):
                    raise  # it is not being unloaded: the server stops, or the engine is dead
            else:
                yield model, answer

    # ------------------------------------------------------------------------------------------- state

    @property
    def computes(self) -> bool:
        """True if an engine has running requests."""
        return bool(self.health().running)

    def health(self) -> Health:
        """Reports whether all engines work, with the sums of their numbers."""
        asked = [(slot, model) for slot in self.slots.all if (model := slot.model) is not None]
        told = [(slot, model, model.engine.health()) for slot, model in asked]
        # An engine that is not alive may have been stopped since, to be unloaded.
        found = [one for slot, model, one in told if one.alive or slot.model is model]
        dead = next((one for one in found if not one.alive), None)
        return Health(
            dead is None,
            "ok" if dead is None else dead.detail,
            sum(one.running for one in found),
            sum(one.waiting for one in found),
            sum(one.steps for one in found),
        )

    def budget_numbers(self) -> dict[str, Any] | None:
        """Returns the numbers of the budget that the models share. None: they share none."""
        budget = self.slots.budget
        if budget is None:
            return None
        return {
            "bytes": budget.budget_bytes,
            "used_bytes": budget.owned_bytes,
            "resident_bytes": budget.backed_bytes,
            "moved_bytes": budget.moved_bytes,
        }

    # -------------------------------------------------------------------------------------------- uses

    async def use(self, asked: str | None, request: Request) -> ModelUse[ServedModel]:
        """Returns a use of a generation model, which the caller ends. Waits until the model is loaded.

        Raises the errors of `use_any`, and Unsupported for an embedding model.
        """
        use = await self.use_any(asked, request, "generate")
        try:
            assert isinstance(use.model, ServedModel), "of its task"
            return ModelUse(self._named(asked, use.model), use.end)
        except BaseException:
            use.end()
            raise

    async def use_embedding(self, asked: str | None, request: Request) -> ModelUse[EmbeddingModel]:
        """Returns a use of an embedding model, which the caller ends. Waits until the model is loaded.

        Raises the errors of `use_any`, and Unsupported for a generation model.
        """
        use = await self.use_any(asked, request, "embed")
        assert isinstance(use.model, EmbeddingModel), "of its task"
        return ModelUse(use.model, use.end)

    async def use_any(
        self, asked: str | None, request: Request, task: Task | None = None
    ) -> ModelUse[AnyModel]:
        """Returns a use of a model for a task, or for any. Waits until the model is loaded.

        Raises the errors of `slot`, ModelNotAllowed, ModelUnavailable, QueueFull, EngineStopped and ClientGone, and
        Unsupported for a model of another task: before it is loaded, if its task is known.
        """
        if asked is not None:  # before the look-up: a refusal does not tell whether the model exists
            refuse_model_of_others(request, asked)
        slot = self.slot(asked)
        if asked is None:
            refuse_model_of_others(request, slot.name)
        _refuse_other_task(slot, task)
        found = self.slots.use(slot)
        if not isinstance(found, ModelUse):
            try:
                with self.slots.wait():
                    while not isinstance(found, ModelUse):
                        await unless_gone(found.done, request)
                        found = found.take() or self.slots.use(slot)
            finally:
                if isinstance(found, AwaitedModel):
                    found.drop()
        try:
            _refuse_other_task(slot, task)
        except Unsupported:
            found.end()
            raise
        return found

    async def run(self, asked: str | None, request: Request, prepare: Callable[[ServedModel], T]) -> T:
        """Calls `prepare` with a generation model on another thread, when it is this request's turn.

        Raises the errors of `use`, of `prepare` and of `PreparationQueue.run`.
        """
        use = await self.use(asked, request)
        try:
            return await self.queue.run(request, lambda: prepare(use.model))
        finally:
            use.end()

    async def unload(self, asked: str, request: Request) -> None:
        """Unloads a model. Raises the errors of `slot`, ModelBusy and ClientGone."""
        done = self.slots.unload(self.slot(asked))
        if done is not None:
            await unless_gone(done, request)


def adapters_of(slot: ModelSlot) -> list[str]:
    """Returns the names of a model's LoRA adapters: of an unloaded one, those that are loaded with it."""
    model = slot.loaded
    if model is not None:
        return [adapter.name for adapter in model.engine.adapters.all]
    return [] if slot.config is None else [adapter.name for adapter in slot.config.model.adapters]


async def unless_gone(done: Future[T], request: Request) -> T:
    """Waits for the end of work, which goes on if the client leaves. Raises ClientGone and the error of the work."""
    waited = asyncio.wrap_future(done)
    while not (await asyncio.wait([waited], timeout=_GONE_CHECK_S))[0]:
        if await request.is_disconnected():
            raise ClientGone
    return waited.result()


def _refuse_other_task(slot: ModelSlot, task: Task | None) -> None:
    """Raises Unsupported if a model is known to have another task."""
    if task is None or slot.task in (None, task):
        return
    if task == "embed":
        remedy = (
            f"{slot.name!r} generates text: its files declare no pooling (modules.json). Name an embedding "
            "model."
        )
    else:
        remedy = (
            f"{slot.name!r} is an embedding model, which generates no text and has no KV cache: "
            "POST /v1/embeddings, or name another model."
        )
    raise Unsupported("model", remedy)


def _by_name(
    slots: Sequence[ModelSlot], aliases: Sequence[str] | None
) -> tuple[Mapping[str, ModelSlot], ModelSlot | None]:
    """Returns the slots by name and alias, and the slot of any other name. Raises InvalidOption."""
    found = {slot.name: slot for slot in slots}
    if len(found) < len(slots):
        twice = next(slot.name for slot in slots if found[slot.name] is not slot)
        raise InvalidOption("model", twice, "a name that no other model of the server has")
    of_any: ModelSlot | None = None
    pairs = [(alias, slot) for slot in slots if slot.config is not None for alias in slot.config.aliases]
    if aliases is None:
        aliases = (ANY_NAME,) if len(slots) == 1 and not pairs else ()
    for written in aliases:
        alias, separator, target = written.partition("=")
        if not separator and len(slots) > 1:
            raise InvalidOption("--alias", written, f"{written}=MODEL, since the server has several models")
        if separator and target not in found:
            raise InvalidOption("--alias", written, "NAME=MODEL with the name of a model of the server")
        pairs.append((alias, found[target] if separator else slots[0]))
    names = dict(found)
    for alias, slot in pairs:
        if alias == ANY_NAME:
            if of_any not in (None, slot):
                raise InvalidOption("--alias", "*", "the alias of one model")
            of_any = slot
        elif names.setdefault(alias, slot) is not slot:
            raise InvalidOption("--alias", alias, "a name that no other model has")
    return names, of_any
