"""The models of a server: the model of a request is found by the name in its field `model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from rootstock.cache.families import FullAttention
from rootstock.config import ANY_NAME, ServerConfig
from rootstock.engine.build import Assembly
from rootstock.engine.limits import refuse_surrogates
from rootstock.engine.output.detect import detect, named, visible_tokens
from rootstock.engine.prompts.fingerprint import Fingerprints
from rootstock.engine.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.engine.stats import Health
from rootstock.errors import MissingParameter, ModelNotFound
from rootstock.server.request_bodies import PreparationQueue
from rootstock.server.wire import ServedModel

T = TypeVar("T")


def served_model(made: Assembly, config: ServerConfig, fingerprints: Fingerprints) -> ServedModel:
    """Makes the model of an engine. The caller starts and stops the engine."""
    engine, tokenizer, families = made.engine, made.tokenizer, made.description.families
    output = detect(tokenizer) if config.tool_parser == "auto" else named(config.tool_parser, tokenizer)
    return ServedModel(
        made.description.name,
        made.description.vocab_size,
        PromptTokenizer(tokenizer, engine.context_limit, engine.config.answer_memory_bytes),
        made.defaults,
        engine.context_limit,
        engine.config.max_batch + engine.config.max_queue,
        engine,
        made.description,
        made.block_size,
        config.parse_special_tokens,
        wants_boundaries=not all(isinstance(family, FullAttention) for family in families),
        constraints=engine.constraints,
        output=output,
        visible_tokens=visible_tokens(output, tokenizer),
        reuses_prefixes=engine.reuses_prefixes,
        drop_volatile=config.drop_volatile,
        fingerprints=fingerprints,
    )


class ModelUse:
    """A request's use of a model, which stays loaded until the use ends."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def end(self) -> None:
        """Ends the use. Idempotent."""


class ModelRegistry:
    """The models of a server by name. Used on event loops' threads, but for queries."""

    def __init__(self, made: Sequence[Assembly], config: ServerConfig) -> None:
        fingerprints = Fingerprints()  # of all models: an answer may be compared with one of another model
        self.loaded = [served_model(one, config, fingerprints) for one in made]
        self.queue = PreparationQueue(made[0].engine.config.max_batch, made[0].engine.config.max_queue)
        self._by_name: Mapping[str, ServedModel] = {model.name: model for model in self.loaded}
        if len(self.loaded) == 1:
            only = self.loaded[0]
            aliases = {alias: only for alias in config.aliases if alias != ANY_NAME}
            self._by_name = aliases | dict(self._by_name)
            self._of_any_name = only if ANY_NAME in config.aliases else None
        else:
            self._of_any_name = None

    @property
    def names(self) -> list[str]:
        """The names of models, and their aliases, without the alias for any name."""
        models = [model.name for model in self.loaded]
        return list(dict.fromkeys([*models, *self._by_name]))

    @property
    def are_several(self) -> bool:
        return len(self.loaded) > 1

    @property
    def computes(self) -> bool:
        """Whether an engine has running requests."""
        return any(model.engine.health().running for model in self.loaded)

    def health(self) -> Health:
        """Reports whether all engines work, with the sums of their numbers."""
        found = [model.engine.health() for model in self.loaded]
        worst = next((one for one in found if not one.alive), found[0])
        return Health(
            worst.alive,
            worst.detail,
            sum(one.running for one in found),
            sum(one.waiting for one in found),
            sum(one.steps for one in found),
        )

    def find(self, asked: str | None) -> ServedModel:
        """Returns the model of a name. A request without a name gets the only model.

        Raises ModelNotFound, MissingParameter, and InvalidParameter for a name that an answer could not repeat.
        """
        if asked is None:
            if self.are_several and self._of_any_name is None:
                raise MissingParameter("model")
            return self._of_any_name or self.loaded[0]
        found = self._by_name.get(asked)
        if found is not None:
            return found
        if self._of_any_name is None:
            raise ModelNotFound(asked, self.names)
        refuse_surrogates(asked, "model")
        return self._of_any_name

    def chosen(self, asked: str | None) -> list[ServedModel]:
        """Returns the model of a name, or all models without one. Raises the errors of `find`."""
        return list(self.loaded) if asked is None else [self.find(asked)]

    async def use(self, asked: str | None, request: Request) -> ModelUse:
        """Returns a use of a model, which the caller ends. Raises the errors of `find`."""
        return ModelUse(self.find(asked))

    async def run(self, asked: str | None, request: Request, prepare: Callable[[ServedModel], T]) -> T:
        """Calls `prepare` with a model on another thread, when it is this request's turn, and returns its result.

        Raises the errors of `use`, of `prepare` and of `PreparationQueue.run`.
        """
        use = await self.use(asked, request)
        try:
            return await self.queue.run(request, lambda: prepare(use.model))
        finally:
            use.end()
