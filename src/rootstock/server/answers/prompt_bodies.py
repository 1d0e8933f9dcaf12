"""Prompts in the bodies of routes that explain, pin or warm them: `{"api": "messages", "body": {…}}`.

Such a route takes the body that the named API's own route answers, with all fields that clients send there. A
misspelled field would be ignored like fields of the answer: another prefix would then be pinned, or the prefix under
another salt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Generic, Protocol, TypeVar

from fastapi import APIRouter
from pydantic import Field, ValidationError, model_validator

from rootstock.cache.keys import Namespace
from rootstock.cache.radix_node import Boundary
from rootstock.cache.types import Tokens
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import MOST_OF_OWNER
from rootstock.errors import InvalidParameter, RequestError, Unsupported, shown
from rootstock.pipeline.model import PromptModel, RenderedChat
from rootstock.server.http.errors import ErrorForm, error_body, wrong_body
from rootstock.server.wire.fields import ClosedWire, Wire
from rootstock.server.wire.sender import Sender
from rootstock.text.conversation.types import Medium
from rootstock.text.conversation.volatile_heads import DroppedHead
from rootstock.text.limits import MAX_LABEL_CHARS
from rootstock.text.prompts.prompt_tokenizer import PlacedMark

MAX_UNKNOWN_FIELDS = 16
_ALIKE = 0.75  # two letters of four may be swapped


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt of a body, rendered and tokenized."""

    tokens: Tokens
    salt: str
    sampled_tokens: int = 0  # ids of earlier answers
    dropped: tuple[DroppedHead, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    adapter: str = ""
    media: tuple[Medium, ...] = ()  # that lines of the prompt stand for
    marks: tuple[PlacedMark, ...] = ()  # of prefixes that a client wants to keep

    def namespace(self, engine: Engine) -> Namespace:
        """Returns the namespace of its prefixes in the engine's cache."""
        return engine.namespace(self.salt, self.adapter)

    @staticmethod
    def of_chat(chat: RenderedChat) -> PreparedPrompt:
        prompt = chat.prompt
        return PreparedPrompt(
            prompt.tokens,
            chat.owner.salt,
            prompt.sampled_tokens,
            chat.dropped,
            prompt.boundaries,
            chat.adapter,
            chat.template.media,
            prompt.marks,
        )


class PromptSchema(Protocol):
    """The schema of a body that names a model."""

    model: str | None


BodyT = TypeVar("BodyT", bound=Wire)


@dataclass(frozen=True, slots=True)
class PromptReader(Generic[BodyT]):
    """How the bodies of one route make prompts."""

    route: str  # the path of the route that answers such a body
    schema: type[BodyT]
    other_fields: frozenset[str]  # of the answer: known, and ignored here
    prepare: Callable[[PromptModel, BodyT, Sender], PreparedPrompt]  # not for an event loop
    rename: Callable[[RequestError, BodyT], None]  # gives an error the client's name of a field


@dataclass(frozen=True, slots=True)
class WireApi:
    """The parts of a wire format that the server needs. `create_app` lists the formats."""

    routes: APIRouter
    prompts: Mapping[str, PromptReader[Any]]  # by the name of an API, as clients write it
    operations: Mapping[str, str]  # of traces, by the path of a route that asks a model
    root: str | None = None  # paths that begin with it have errors of the form; None: OpenAI's form
    error_form: ErrorForm = error_body


ApiName = Annotated[str, Field(description="such as chat, completions, messages or responses")]
ApiBody = Annotated[dict[str, Any], Field(description="the body of a request to that API")]


class PromptOfApi(ClosedWire):
    """The name of an API, and a body that its route answers. A body alone, without both, is OpenAI's."""

    api: ApiName | None = None
    body: ApiBody

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        return data if isinstance(data, dict) and "api" in data else {"body": data}


class PromptsOfApis(ClosedWire):
    """Either one prompt, as in PromptOfApi, or several as `prompts`."""

    api: ApiName | None = None
    body: ApiBody | None = None
    prompts: Annotated[list[PromptOfApi], Field(max_length=MOST_OF_OWNER, fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not data.keys() & {"api", "prompts"}:
            return {"body": data}
        if "api" in data:
            return data
        return {"prompts": data["prompts"], "body": {name: data[name] for name in data if name != "prompts"}}


@dataclass(frozen=True, slots=True)
class ApiPrompt:
    """A body that has been checked, and from which a prompt can be made."""

    reader: PromptReader[Any]
    body: Any

    @property
    def model(self) -> str | None:
        """The name of the model, as the client wrote it."""
        schema: PromptSchema = self.body
        return schema.model

    def prepare(self, model: PromptModel, sender: Sender) -> PreparedPrompt:
        """Renders and tokenizes: not for an event loop. Raises RequestError."""
        return self.reader.prepare(model, self.body, sender)

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Gives errors the client's names of fields."""
        try:
            yield
        except RequestError as error:
            self.reader.rename(error, self.body)
            raise

    def refuse_misspelled(self) -> None:
        """Raises Unsupported."""
        refuse_misspelled(self.body, self.reader.other_fields)


class Prompts:
    """The table of the APIs whose bodies make prompts. A body without an API is one of the first in the table."""

    def __init__(self, readers: Mapping[str, PromptReader[Any]]) -> None:
        self.readers = readers

    @classmethod
    def of(cls, apis: Sequence[WireApi]) -> Prompts:
        return cls({name: reader for api in apis for name, reader in api.prompts.items()})

    def read(self, api: str | None, body: Any, at: Sequence[str | int] = (), whole: Any = None) -> ApiPrompt:
        """Checks a body. `at` is its place in `whole`, for the names of wrong fields.

        Raises InvalidParameter, InvalidJson, MissingParameter and Unsupported.
        """
        reader = self.readers.get(api) if api else next(iter(self.readers.values()))
        if reader is None:
            raise InvalidParameter("api", api, f"one of {', '.join(self.readers)}")
        try:
            return ApiPrompt(reader, reader.schema.model_validate(body, from_attributes=True))
        except ValidationError as error:
            found = error.errors(include_url=False)
            placed = [{**each, "loc": ("body", *at, *each["loc"])} for each in found]
            raise wrong_body(placed, body if whole is None else whole) from None

    def read_declared(self, route: str, body: Any) -> ApiPrompt:
        """Checks the body of a request to a route. Raises as `read` does."""
        api = next(name for name, reader in self.readers.items() if reader.route == route)
        return self.read(api, body)


def refuse_misspelled(body: Wire, other_fields: Collection[str] = ()) -> None:
    """Refuses a field that no table knows and that looks like one of the body's own, or very many unknown ones.

    Raises Unsupported.
    """
    unknown = [str(name) for name in body.model_extra or () if name not in other_fields]
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise Unsupported(
            shown(unknown[0]), f"Nor are others: at most {MAX_UNKNOWN_FIELDS} unknown fields are ignored."
        )
    for name in unknown:
        meant = get_close_matches(name[:MAX_LABEL_CHARS], type(body).model_fields, 1, _ALIKE)
        if meant:
            raise Unsupported(name[:MAX_LABEL_CHARS], f"Send {meant[0]!r} if that is meant, or leave it out.")
