"""Routes of the dashboard: the page and its files, the session, the live feed, the tree, stopping and pinning.

A thing that is gone meanwhile (an evicted node, a request that has ended, a released pin) has an ordinary answer with
status 200, `{"gone": true, "message": …}`, and so has a change that is refused, `{"refused": true, "message": …}`: a
browser reports each other status as an error of the page.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rootstock._version import __version__
from rootstock.cache.keys import Namespace
from rootstock.cache.retention.pins import PinRefused
from rootstock.config import ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import RequestId
from rootstock.errors import (
    EngineStopped,
    InvalidParameter,
    ModelBusy,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RouteNotFound,
)
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import (
    OPEN_FILES,
    Keys,
    SentBy,
    caller_of,
    is_identified,
    is_operator,
    refuse_model_of_others,
    refuse_unless,
    session_of,
)
from rootstock.server.access.login_sessions import SESSION_S, LoginSessions, cookie_name
from rootstock.server.http.drain import Drain
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.routes.dashboard.feed import Feed, event_text
from rootstock.server.routes.dashboard.trees import Trees
from rootstock.server.routes.dashboard.views import Names, Texts, View, models_json, node_json
from rootstock.server.routes.pin_routes import owner_of_pins, pin_body, release_pin
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender

_NODE_GONE = "This node is gone: it was evicted or cleared."
_REQUEST_GONE = "This request has ended already."
_PIN_GONE = "This pin is gone: it was released, or dropped to make room for a request."
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page loads its own files only, and runs no script that is written into it.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}
_DATA_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, as it is sent."""

    body: bytes = field(repr=False)
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**_PAGE_HEADERS, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def page_files() -> dict[str, PageFile]:
    """Reads the files of the page, which are a part of the package."""
    found = {}
    for each in files(__package__).joinpath("page").iterdir():
        kind = _TYPES.get(each.name.rpartition(".")[2])
        if kind is not None:
            body = each.read_bytes()
            found[each.name] = PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


@dataclass(frozen=True, slots=True)
class _Watched:
    """A model, and the pictures that the dashboard makes of its engine."""

    model: ServedModel
    feed: Feed
    trees: Trees
    texts: Texts

    def name_of(self, namespace: Namespace) -> str | None:
        """Returns the name by which requests choose the model or the adapter; None: the adapter has none now."""
        if not namespace.adapter:
            return self.model.name
        named = self.model.engine.adapters.all
        return next((each.name for each in named if each.fingerprint == namespace.adapter), None)


class Dashboard:
    """The watched models of a server. A model is watched from the first page that asks for it."""

    def __init__(self, models: ModelRegistry, config: ServerConfig, drain: Drain) -> None:
        self.models = models
        self.config = config
        self.drain = drain
        # A stream that names it comes from the server's own page: pages of other sites cannot read it. It gives no
        # rights.
        self.page_token = secrets.token_urlsafe(16)
        self.names = Names(config)
        self._watched: dict[Engine, _Watched] = {}
        self._lock = threading.Lock()  # of the watched models
        models.slots.follow_unloads(self._drop_unloaded)

    def server_json(self, view: View) -> Json:
        """Returns the section of the feed that is of the whole server."""
        return {"draining": self.drain.is_draining, "models": models_json(self.models, view)}

    def watched(self, name: str | None, view: View) -> _Watched | None:
        """Returns a model that a view may have, the first loaded one without a name; None: it is not loaded now.

        Raises ModelNotFound.
        """
        slots = view.slots(self.models)
        if name is not None:
            slots = [slot for slot in slots if slot.name == name]
            if not slots and name not in filter(view.may_use, self.models.names):
                raise ModelNotFound(name, [slot.name for slot in view.slots(self.models)])
        with self._lock:
            model = next((one for slot in slots if (one := slot.loaded) is not None), None)
            if model is None:
                return None
            found = self._watched.get(model.engine)
            if found is None:
                texts = Texts(model.model_tokenizer, self.config.show_prompts)
                feed = Feed(model.engine, self.names, texts, server=self.server_json)
                trees = Trees(model.engine, self.names)
                found = self._watched[model.engine] = _Watched(model, feed, trees, texts)
            return found

    def _drop_unloaded(self) -> None:
        """Forgets the models that are not loaded any more, which frees their memory. For any thread."""
        with self._lock:
            engines = {each.engine for each in self.models.loaded}
            self._watched = {engine: each for engine, each in self._watched.items() if engine in engines}


class FeedResponse(StreamingResponse):
    """A stream of events that is closed as soon as the client has left."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(
            events, headers={**_DATA_HEADERS, "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


def wants_html(request: Request) -> bool:
    """Returns whether the sender is a browser that opens a page. Other clients accept anything, or JSON."""
    return "text/html" in request.headers.get("accept", "")


def install_dashboard(
    app: FastAPI,
    models: ModelRegistry,
    config: ServerConfig,
    sessions: LoginSessions,
    keys: Keys,
    drain: Drain,
) -> Callable[[Request], Response]:
    """Adds the routes below /dashboard. Returns the answer to a browser that asks for /."""
    dashboard, pages = Dashboard(models, config, drain), page_files()
    keys.follow(dashboard.names.use)
    app.include_router(_page_routes(pages))
    app.include_router(_session_routes(dashboard, sessions))
    app.include_router(_data_routes(dashboard, sessions, keys))
    app.include_router(_change_routes(dashboard))
    app.include_router(_model_routes(dashboard))
    return pages["index.html"].response


def _page_routes(pages: dict[str, PageFile]) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get(OPEN_FILES + "{name}")
    async def page_file(name: str, request: Request) -> Response:
        if name not in pages:
            raise RouteNotFound("GET", request.url.path)
        return pages[name].response(request)

    return router


def _session_routes(dashboard: Dashboard, sessions: LoginSessions) -> APIRouter:
    router = APIRouter(prefix="/dashboard", include_in_schema=False)

    def described(request: Request, sender: Sender, csrf: str | None) -> Json:
        if not is_identified(request):
            return {"version": __version__, "login": True}
        view = View.of(request, sender, dashboard.config)
        return {
            "version": __version__,
            "login": False,
            "csrf": csrf,
            "server": dashboard.server_json(view),
            "page": dashboard.page_token,
            "sees": "all" if view.is_all else "tenant" if view.salts else "nothing",
            "tenant": sender.tenant,
            "show_prompts": dashboard.config.show_prompts,
        }

    @router.get("/session")
    async def session(request: Request, sender: SentBy) -> Response:
        """Tells a page whether it must log in, and the token for its changes."""
        found = session_of(request)
        told = described(request, sender, None if found is None else found.csrf)
        return JSONResponse(told, headers=_DATA_HEADERS)

    @router.post("/login")
    async def login(request: Request, sender: SentBy) -> Response:
        """Opens a session for the key in the headers, which the guard has accepted."""
        headers = dict(reversed(request.scope["headers"]))
        sent = headers.get(b"x-api-key", b"").strip()
        if not sent:
            raise InvalidParameter("x-api-key", "", "the key that the session stands for")
        opened = sessions.open(sent)
        response = JSONResponse(described(request, sender, opened.csrf), headers=_DATA_HEADERS)
        response.set_cookie(
            cookie_name(headers),
            opened.token,
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            # The scheme that the browser sees: behind a proxy the server itself speaks HTTP.
            secure=request.headers.get("origin", "").startswith("https://"),
        )
        return response

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        """Ends the session."""
        found = session_of(request)
        if found is not None:
            sessions.close(found)
        response = JSONResponse({"login": True}, headers=_DATA_HEADERS)
        response.delete_cookie(cookie_name(dict(reversed(request.scope["headers"]))), httponly=True)
        return response

    return router


def _data_routes(dashboard: Dashboard, sessions: LoginSessions, keys: Keys) -> APIRouter:
    router = APIRouter(prefix="/dashboard", include_in_schema=False)

    @router.get("/events")
    async def events(request: Request, sender: SentBy, model: str | None = None, page: str = "") -> Response:
        """Sends the live feed of a model as server-sent events."""
        view = View.of(request, sender, dashboard.config)
        watched = dashboard.watched(model, view)
        if watched is None:
            return FeedResponse(_not_loaded(dashboard.server_json(view)))
        is_page = hmac.compare_digest(page.encode(), dashboard.page_token.encode())
        session, caller = session_of(request), caller_of(request)
        headers = dict(reversed(request.scope["headers"])) if session is None else session.headers

        def may_go_on() -> bool:
            # The file of keys may have taken the key away meanwhile, or given it to another tenant.
            return (session is None or sessions.is_open(session)) and keys.caller(headers) == caller

        return FeedResponse(watched.feed.events(view, may_go_on, is_page=is_page))

    @router.get("/tree")
    async def tree(
        request: Request, sender: SentBy, model: str | None = None, seen: int | None = None
    ) -> Response:
        """Sends the latest picture of the prefix tree. No content: it is the one that was seen, or there is none."""
        view = View.of(request, sender, dashboard.config)
        watched = dashboard.watched(model, view)
        if watched is None:
            return Response(status_code=204, headers=_DATA_HEADERS)
        picture = await watched.trees.latest()
        headers = {
            **_DATA_HEADERS,
            "X-Serial": str(picture.serial),
            "X-Next-S": f"{watched.trees.next_s:.1f}",
        }
        if picture.serial == seen:
            return Response(status_code=204, headers=headers)
        body = await watched.trees.encoded(picture, view)
        return Response(body, headers=headers, media_type="application/octet-stream")

    @router.get("/tree/{number}")
    async def node(number: int, request: Request, sender: SentBy, model: str | None = None) -> Response:
        """Describes a node of the tree, with its tokens."""
        view = View.of(request, sender, dashboard.config)
        watched = dashboard.watched(model, view)
        found = None if watched is None else await watched.trees.detail(number)
        if watched is None or found is None or not view.shows(found.namespace.salt):
            return _gone(_NODE_GONE)
        told = await asyncio.to_thread(node_json, found, view, dashboard.names, watched.texts)
        return JSONResponse(told, headers=_DATA_HEADERS)

    return router


def _change_routes(dashboard: Dashboard) -> APIRouter:
    router = APIRouter(prefix="/dashboard", include_in_schema=False)

    @router.post("/requests/{id}/stop")
    async def stop(id: str, request: Request, sender: SentBy, model: str | None = None) -> Response:
        """Aborts a request that the sender sees."""
        view = View.of(request, sender, dashboard.config)
        watched = dashboard.watched(model, view)
        if watched is None:
            return _gone(_REQUEST_GONE)
        engine = watched.model.engine
        if not any(str(each.id) == id and view.shows(each.salt) for each in engine.requests()):
            return _gone(_REQUEST_GONE)
        engine.abort(RequestId(id))
        return JSONResponse({"stopped": id}, headers=_DATA_HEADERS)

    @router.post("/tree/{number}/pin")
    async def pin(number: int, request: Request, sender: SentBy, model: str | None = None) -> Response:
        """Pins all tokens up to the end of a node, for the tenant of its prefix, or tells why not."""
        owner_of_pins(request, sender, dashboard.config)
        view = View.of(request, sender, dashboard.config)
        watched = dashboard.watched(model, view)
        found = None if watched is None else await watched.trees.prefix(number)
        if watched is None or found is None or not view.shows(found[0].salt):
            return _gone(_NODE_GONE)
        namespace, tokens = found
        owner = dashboard.names.tenant(namespace.salt) if view.is_all else sender.tenant
        name = watched.name_of(namespace)
        if owner is None:
            return _refused(
                "Not pinned: the tenant of this prefix is not known here: a client chose its salt."
            )
        if name is None:
            return _refused("Not pinned: the LoRA adapter of this prefix is not loaded.")
        refuse_model_of_others(request, name)
        pinned = await asyncio.to_thread(watched.model.engine.pin, tokens, owner, namespace)
        if isinstance(pinned, PinRefused):
            return _refused(f"Not pinned: {pinned.reason}.")
        return JSONResponse({"pinned": pin_body(pinned)}, headers=_DATA_HEADERS)

    @router.post("/pins/{id}/release")
    async def release(id: str, request: Request, sender: SentBy) -> Response:
        """Releases a pin. The prefix stays cached like any other."""
        owner = owner_of_pins(request, sender, dashboard.config)
        if not await asyncio.to_thread(release_pin, dashboard.models, id, owner):
            return _gone(_PIN_GONE)
        return JSONResponse({"released": id}, headers=_DATA_HEADERS)

    return router


def _model_routes(dashboard: Dashboard) -> APIRouter:
    """Routes of the operator that load and unload models, as /v1/models/load and /v1/models/unload do."""
    router = APIRouter(prefix="/dashboard/models", include_in_schema=False)
    refusals = (EngineStopped, ModelBusy, ModelUnavailable, QueueFull)

    @router.post("/load")
    async def load(request: Request, model: str) -> Response:
        """Loads a model, and waits until requests can use it."""
        refuse_unless(is_operator(request), dashboard.config)
        if dashboard.drain.is_draining:  # the guard lets changes of the dashboard pass, which help a drain
            return _refused("Not loaded: the server is draining.")
        try:
            (await dashboard.models.use_any(model, request)).end()
        except refusals as refusal:
            return _refused(refusal.message)
        return JSONResponse({"loaded": model}, headers=_DATA_HEADERS)

    @router.post("/unload")
    async def unload(request: Request, model: str) -> Response:
        """Unloads a model that no request uses."""
        refuse_unless(is_operator(request), dashboard.config)
        try:
            await dashboard.models.unload(model, request)
        except refusals as refusal:
            return _refused(refusal.message)
        return JSONResponse({"unloaded": model}, headers=_DATA_HEADERS)

    return router


async def _not_loaded(server: Json) -> AsyncGenerator[str, None]:
    yield event_text({"gone": True, "server": server})


def _gone(message: str) -> Response:
    return JSONResponse({"gone": True, "message": message}, headers=_DATA_HEADERS)


def _refused(message: str) -> Response:
    return JSONResponse({"refused": True, "message": message}, headers=_DATA_HEADERS)
