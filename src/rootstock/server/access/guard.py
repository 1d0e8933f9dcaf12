"""Access: API keys and their tenants, and the middleware that refuses a request by its head or its size."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from fastapi import Depends, Header, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock.config import MAX_SALT_LENGTH, ServerConfig
from rootstock.errors import (
    AdminOnly,
    BodyTooLarge,
    ContentTypeNotJson,
    CsrfTokenMissing,
    Draining,
    HostNotAllowed,
    InvalidOption,
    InvalidParameter,
    KeyNotAllowed,
    KeysDiffer,
    MalformedHttp,
    ModelNotAllowed,
    OriginNotAllowed,
    RateLimited,
    RootstockError,
    TooManyBodyBytes,
    Unauthorized,
    WebSocketRefused,
)
from rootstock.server.access.login_sessions import LOGIN_PATH, LoginSession, LoginSessions
from rootstock.server.access.rate_limits import Meter, RateLimiter
from rootstock.server.access.rules import NO_LIMITS, AccessRules, Role, digest_of, read_rules
from rootstock.server.access.tenant_labels import shown_tenant
from rootstock.server.access.wrong_keys import WrongKeys
from rootstock.server.http.drain import Drain
from rootstock.server.http.errors import BodyRefused, ErrorForms, error_response
from rootstock.server.request_info import REQUEST_STATE, RequestInfo
from rootstock.server.wire.hints.headers import HINT_HEADERS, header_hints
from rootstock.server.wire.sender import Sender
from rootstock.text.prompts.tenant_salt import refuse_long
from rootstock.units import MIB

log = logging.getLogger(__name__)

Headers = Mapping[bytes, bytes]

SALT_HEADER = "X-Cache-Salt"
# Need no API key, and count in no limit.
OPEN_PATHS = frozenset({"/", "/health", "/livez", "/ping", "/readyz", "/dashboard/session"})
DASHBOARD = (
    "/dashboard/"  # with which the dashboard's routes begin: pages of other origins may use none of them
)
OPEN_FILES = f"{DASHBOARD}page/"  # of the dashboard: its scripts need no key
_KEYLESS_PROBES = frozenset({"/livez", "/readyz"})  # their answers are the same with any key
METRICS_PATHS = frozenset({"/metrics"})  # that a key of the role metrics may use besides
MAX_HELD_BODY_BYTES = 256 * MIB  # of all requests that are being received or answered

# The guard's entries in a request's state.
_STATE, _METER, _MODELS = "rootstock_caller", "rootstock_meter", "rootstock_models"
_ANTHROPIC = "/v1/messages"  # with which the routes of Anthropic's API begin
_SESSION = "rootstock_session"  # a browser's session
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE_OF_BROWSERS = (b"same-origin", b"none")  # none: the user's own action, such as a bookmark
_NAVIGATION = (b"navigate", b"document")  # Sec-Fetch-Mode and -Dest of a link that replaces the whole page
_JSON = re.compile(rb"application/(?:[a-z0-9!#$&^_.+-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(rb";\s*charset\s*=\s*\"?([^\s\";]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, identified by its key."""

    tenant: str = ""  # that the key is bound to; "": none, and X-Cache-Salt may name one
    has_admin_key: bool = False
    is_operator: bool = False  # may see information about all tenants, unless a header names one
    operator_has_key: bool = False  # a key of the operator's exists: other senders are no operators
    allowed_paths: frozenset[str] | None = None  # None: all

    @property
    def may_explain(self) -> bool:
        return self.has_admin_key or not self.operator_has_key

    def may_ask(self, path: str) -> bool:
        """Returns whether the sender may use the routes of a path."""
        return self.allowed_paths is None or path in self.allowed_paths


class Keys:
    """The API keys of a server. A lookup takes as long for a right key as for a wrong one.

    Raises InvalidOption, for the file of keys or for a key that is in it and in an option.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._path = config.api_keys
        self._version = self._version_of_file()
        self.rules = AccessRules()
        self._followers: list[Callable[[AccessRules], None]] = []
        self._callers: dict[bytes, Caller] = {}
        self._anonymous: Caller | None = None
        self._use(AccessRules() if self._path is None else read_rules(self._path))

    def _use(self, rules: AccessRules) -> None:
        """Replaces all keys by the keys of the options and of `rules`."""
        config, callers = self._config, dict[bytes, Caller]()
        has_operator = config.admin_key is not None or any(
            rule.role is Role.OPERATOR for rule in rules.keys.values()
        )

        def add(digest: bytes, caller: Caller) -> None:
            keyed = self._keyed(digest)
            if keyed in callers:
                raise InvalidOption("--api-keys", str(self._path), "a file without the key of another option")
            callers[keyed] = replace(caller, operator_has_key=has_operator)

        for key, tenant in config.tenant_keys.items():
            add(digest_of(key), Caller(tenant))
        for digest, rule in rules.keys.items():
            match rule.role:
                case Role.USER:
                    add(digest, Caller(rule.tenant))
                case Role.OPERATOR:
                    add(digest, Caller(rule.tenant, has_admin_key=True, is_operator=True))
                case Role.METRICS:
                    add(digest, Caller(allowed_paths=METRICS_PATHS))
        # Without an admin key, a client that is bound to no tenant is the operator.
        unbound = Caller(is_operator=not has_operator, operator_has_key=has_operator)
        if config.api_key is not None:
            add(digest_of(config.api_key), unbound)
        anonymous = None if callers else unbound
        if config.admin_key is not None:
            add(digest_of(config.admin_key), Caller(has_admin_key=True, is_operator=True))
        self.rules, self._callers, self._anonymous = rules, callers, anonymous
        for follower in self._followers:
            follower(rules)

    def follow(self, follower: Callable[[AccessRules], None]) -> None:
        """Calls `follower` with the rules, now and whenever they change."""
        self._followers.append(follower)
        follower(self.rules)

    @property
    def are_needed(self) -> bool:
        """True if requests need a key. A file of keys has at least one at all times."""
        return self._anonymous is None

    @property
    def is_current(self) -> bool:
        """True if the file of keys is as it was read last. Costs a system call."""
        return self._path is None or self._version == self._version_of_file()

    def reload(self) -> None:
        """Reads the file of keys again. Keeps the keys if it cannot be used. Do not call it on an event loop."""
        assert self._path is not None
        self._version = self._version_of_file()
        try:
            self._use(read_rules(self._path))
        except InvalidOption as error:
            log.error(
                "The file of keys has changed and cannot be used. The earlier keys stay. %s", error.message
            )
        else:
            log.warning("The file of keys has changed: %d keys are in it now.", len(self.rules.keys))

    def _version_of_file(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def caller(self, headers: Headers) -> Caller | Unauthorized:
        """Returns the sender whose key Authorization or x-api-key holds, or why the headers name none."""
        sent = {self._keyed(digest_of(key)) for key in _keys_in(headers)}
        if len(sent) > 1 and self._callers:  # a server without keys reads none
            return KeysDiffer()
        found = self._callers.get(sent.pop()) if sent else None
        return found or self._anonymous or Unauthorized()

    def _keyed(self, digest: bytes) -> bytes:
        # With a secret of this process: the time of a lookup tells nothing about the API keys.
        return hmac.digest(self._secret, digest, "sha256")


def _keys_in(headers: Headers) -> Iterator[bytes]:
    """Yields the keys that are sent: OpenAI's clients use Authorization, Anthropic's use either header."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and bearer.strip():
        yield bearer.strip()
    if key := headers.get(b"x-api-key", b"").strip():
        yield key


def caller_of(request: Request) -> Caller:
    """Returns the sender that the guard has identified, or an anonymous one on an open path without a key."""
    caller = getattr(request.state, _STATE, None)
    return caller if isinstance(caller, Caller) else Caller()


def shown_tenant_of(scope: Scope) -> str:
    """Returns the tenant of a request, as an operator sees it."""
    request = Request(scope)
    return shown_tenant(caller_of(request).tenant, request.headers.get(SALT_HEADER, ""))


def is_request_of_api(path: str) -> bool:
    """Returns whether a POST to a path is a client's request, which limits count and which has a trace."""
    return path not in OPEN_PATHS and not path.startswith(DASHBOARD)


def is_identified(request: Request) -> bool:
    """Returns whether the guard knows the sender: on an open path, a request without a key has none."""
    return isinstance(getattr(request.state, _STATE, None), Caller)


def session_of(request: Request) -> LoginSession | None:
    """Returns the browser's session by which the sender is known; None: there is none, or a key was sent."""
    session = getattr(request.state, _SESSION, None)
    return session if isinstance(session, LoginSession) else None


async def sender_of(
    request: Request,
    _named: Annotated[
        str,
        Header(
            alias=SALT_HEADER,
            description="the tenant, set by a proxy that knows its users; the tenant of an API key overrides it",
        ),
    ] = "",
) -> Sender:
    """Returns the sender of a request. It is a coroutine, because a plain function would run on another thread."""
    tenant = _tenant_in_head(request)
    if any(name in HINT_HEADERS for name, _ in request.scope["headers"]):
        return Sender(tenant, header_hints(request.headers))
    return Sender(tenant)


def _tenant_in_head(request: Request) -> str:
    """Returns the tenant of the key, or else of X-Cache-Salt, or else "". Raises InvalidParameter."""
    named = request.headers.getlist(SALT_HEADER)
    if len(named) > 1:
        # A proxy that adds its header to the client's own would leave the choice to the client.
        raise InvalidParameter(SALT_HEADER, named, "sent once: a proxy must replace a client's header")
    tenant = caller_of(request).tenant or (named[0] if named else "")
    if tenant:
        refuse_long(tenant, SALT_HEADER)
    return tenant


SentBy = Annotated[Sender, Depends(sender_of)]


def allowed_models(request: Request) -> frozenset[str] | None:
    """Returns the names of models that the request's tenant may use; None: all."""
    models: frozenset[str] | None = getattr(request.state, _MODELS, None)
    return models


def may_use_model(request: Request, name: str) -> bool:
    """Returns whether the list of models of the request's tenant has a name. Without a list it may use all."""
    models = allowed_models(request)
    return models is None or name in models


def refuse_model_of_others(request: Request, name: str) -> None:
    """Raises ModelNotAllowed for a name that is not in the list of models of the request's tenant."""
    if not may_use_model(request, name):
        raise ModelNotAllowed(name)


def meter_of(request: Request) -> Meter | None:
    """Returns the meter of the request's tokens. None: its tenant has no limits."""
    meter: Meter | None = getattr(request.state, _METER, None)
    return meter


def is_operator(request: Request) -> bool:
    """Returns whether the sender may see information about all tenants.

    The sender has the admin key, or the server has no admin key and neither a key nor a header names a tenant.
    """
    caller = caller_of(request)
    return caller.has_admin_key or (caller.is_operator and not any(request.headers.getlist(SALT_HEADER)))


def is_for_metrics(request: Request) -> bool:
    """Returns whether the sender's key has the role metrics, which the operator gives to a scraper."""
    return caller_of(request).allowed_paths is not None


def may_read_prompts(request: Request, config: ServerConfig) -> bool:
    """Returns whether the sender may read tokens and texts of the prompts with its own salt.

    Prompts of one salt may be of several parties, unless a key is bound to it: a header names it for any client.
    """
    caller = caller_of(request)
    return caller.has_admin_key or bool(caller.tenant) or (config.explain == "all" and caller.may_explain)


def names_tenant(request: Request) -> bool:
    """Returns whether the request is for one tenant, without the admin key."""
    return not caller_of(request).has_admin_key and bool(_tenant_in_head(request))


def refuse_unless(allowed: bool, config: ServerConfig) -> None:
    if not allowed:
        raise AdminOnly(config.admin_key is not None or config.api_keys is not None)


class Guard:
    """ASGI middleware that refuses a request by its head, and a body by its size.

    `config.allowed_origins` and `config.allowed_hosts` keep web pages away from a server that is meant for its user
    alone: they stop cross-origin requests and DNS rebinding (an attacker's host name that resolves to this server).
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        forms: ErrorForms,
        drain: Drain,
        max_held_body_bytes: int = MAX_HELD_BODY_BYTES,
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
        sessions: LoginSessions | None = None,
        wrong_keys: WrongKeys | None = None,
    ) -> None:
        self._wrong_keys = WrongKeys() if wrong_keys is None else wrong_keys
        self._sessions = LoginSessions() if sessions is None else sessions
        self._app = app
        self._forms = forms
        self._drain = drain
        self._keys = keys or Keys(config)
        self._reading_keys = anyio.Lock()
        self._limiter = RateLimiter(clock)
        self._max_body_bytes = config.max_body_bytes
        self._max_held_bytes = max(max_held_body_bytes, config.max_body_bytes)
        self._held_bytes = 0
        self._origins = frozenset(config.allowed_origins)
        self._hosts = _names_of(config, needs_key=self._keys.are_needed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # the first of repeated headers, as in the routes
        if not self._keys.is_current:
            async with self._reading_keys:
                if not self._keys.is_current:  # no other request has read it meanwhile
                    await anyio.to_thread.run_sync(self._keys.reload)
        session = self._sessions.find(headers) if b"cookie" in headers else None
        caller = self._keys.caller(headers if session is None else session.headers)
        # A key for some paths has the rights of no key on the others that are open.
        if isinstance(caller, Caller) and caller.may_ask(scope["path"]):
            scope.setdefault("state", {}).update({_STATE: caller, _SESSION: session})
        refusal = self._refusal(scope["method"], scope["path"], headers, caller)
        if (
            isinstance(caller, Unauthorized)
            and scope["path"] not in _KEYLESS_PROBES
            and any(_keys_in(headers))
        ):
            # Also on open paths, some of which show more with a right key.
            await self._wrong_keys.hold(str((scope.get("client") or ("",))[0]))
        if refusal is None and session is not None and scope["path"] != LOGIN_PATH:
            is_allowed = scope["method"] in _SAFE_METHODS or session.allows_change(headers)
            refusal = None if is_allowed else CsrfTokenMissing()
        if refusal is not None:
            await self._refused(refusal, scope)(scope, receive, send)
            return
        if not isinstance(caller, Caller) or caller.has_admin_key or caller.allowed_paths is not None:
            await self._pass_on(scope, receive, send)  # operators have no limits
            return
        # The routes refuse a name that is too long.
        named = _text(headers.get(SALT_HEADER.lower().encode(), b""))[:MAX_SALT_LENGTH]
        await self._pass_on_limited(caller.tenant or named, scope, receive, send)

    async def _pass_on_limited(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on within its tenant's limits. Each POST counts, but for probes and the dashboard's."""
        rules = self._keys.rules
        limits = rules.tenants.get(tenant, rules.default)
        if limits == NO_LIMITS:
            await self._pass_on(scope, receive, send)
            return
        scope["state"][_MODELS] = limits.models
        is_anthropic = scope["path"].startswith(_ANTHROPIC)
        if scope["method"] != "POST" or not is_request_of_api(scope["path"]):
            await self._pass_on(scope, receive, send)
            return
        try:
            use = self._limiter.enter(tenant, limits)
        except RateLimited as refusal:
            response = self._refused(refusal, scope)
            known = self._limiter.of(tenant)
            response.raw_headers += [] if known is None else known.headers(anthropic=is_anthropic)
            await response(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = use.headers(anthropic=is_anthropic)
                message = {**message, "headers": [*message.get("headers", ()), *told]}
            await send(message)

        scope["state"][_METER] = Meter(use)
        try:
            await self._pass_on(scope, receive, send_counted)
        finally:
            use.leave()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # in a copy of the scope: the connection still sees HEAD
            scope = {**scope, "method": "GET"}
        held_bytes = 0

        async def receive_counted() -> Message:
            nonlocal held_bytes
            message = await receive()
            count = len(message.get("body", b""))
            if held_bytes + count > self._max_body_bytes:  # a chunked body has no Content-Length
                raise BodyRefused(BodyTooLarge(self._max_body_bytes))
            if self._held_bytes + count > self._max_held_bytes:
                raise BodyRefused(TooManyBodyBytes(self._max_held_bytes))
            held_bytes += count
            self._held_bytes += count
            return message

        counts = scope["method"] not in _SAFE_METHODS
        self._drain.running += counts
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._drain.running -= counts
            self._held_bytes -= held_bytes

    def _refused(self, refusal: RootstockError, scope: Scope) -> Response:
        info = scope.get("state", {}).get(REQUEST_STATE)
        if isinstance(info, RequestInfo):
            info.refusal = refusal
        return error_response(refusal, self._forms.of(scope["path"]))

    def _refusal(
        self, method: str, path: str, headers: Headers, caller: Caller | Unauthorized
    ) -> RootstockError | None:
        if not self._knows_host(headers.get(b"host")):
            return HostNotAllowed(_text(headers[b"host"]))
        if self._is_foreign(method, path, headers):
            return OriginNotAllowed(_text(headers.get(b"origin", b"another site")))
        if path not in OPEN_PATHS and not path.startswith(OPEN_FILES):
            if isinstance(caller, Unauthorized):
                return caller
            if not caller.may_ask(path):
                return KeyNotAllowed(Role.METRICS)
        if (
            b"websocket" in headers.get(b"upgrade", b"").lower()
            and b"upgrade" in headers.get(b"connection", b"").lower()
        ):
            return WebSocketRefused()
        length = headers.get(b"content-length", b"0").strip()
        if not re.fullmatch(rb"[0-9]{1,20}", length):
            return MalformedHttp("its Content-Length is not a number")
        if int(length) > self._max_body_bytes:
            return BodyTooLarge(self._max_body_bytes)
        if method not in _SAFE_METHODS:
            if self._drain.is_draining and not path.startswith(DASHBOARD):  # stopping requests helps a drain
                return Draining()
            return _refusal_of_content_type(headers, int(length) > 0 or b"transfer-encoding" in headers)
        return None

    def _knows_host(self, host: bytes | None) -> bool:
        # Browsers always send a Host header. An IP address cannot have been rebound.
        if self._hosts is None or host is None:
            return True
        name = _name_of(_text(host))
        if _is_address(name) or name in self._hosts:
            return True
        return any(f"*.{parent}" in self._hosts for parent in _parents(name))

    def _is_foreign(self, method: str, path: str, headers: Headers) -> bool:
        """Returns whether the request comes from a web page of an origin that is not allowed.

        A link on another site may open any page but the dashboard's data: its streams and pictures take places.
        """
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site")  # set by the browser: pages cannot change it
        is_data = path.startswith(DASHBOARD)
        if not is_data and ("*" in self._origins or (origin is not None and _text(origin) in self._origins)):
            return False
        if site is not None:
            if site in _SAME_SITE_OF_BROWSERS:
                return False
            asked = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
            return is_data or origin is not None or method not in _SAFE_METHODS or asked != _NAVIGATION
        if origin is None:
            return False
        _, _, authority = origin.partition(b"://")
        return authority.lower() != headers.get(b"host", b"").lower()


def _refusal_of_content_type(headers: Headers, has_body: bool) -> RootstockError | None:
    """Refuses a body that is not JSON: browsers send some other content types across origins without a preflight."""
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() != b"identity":
        return ContentTypeNotJson("Content-Encoding", _text(encoding))
    declared = headers.get(b"content-type")
    if declared is None and not has_body:
        return None
    content_type, _, _ = (declared or b"").partition(b";")
    charset = _CHARSET.search(declared or b"")
    utf8 = charset is None or charset[1].lower() in (b"utf-8", b"utf8")
    if not _JSON.fullmatch(content_type.strip()) or not utf8:
        return ContentTypeNotJson("Content-Type", _text(declared or b""))
    return None


def _names_of(config: ServerConfig, *, needs_key: bool) -> frozenset[str] | None:
    """Returns the host names that requests may use; None allows all.

    A server on a loopback address, or without a key, has few: a page whose name was rebound to such a server has all
    rights that its visitor's machine has. With a key, the page lacks the key.
    """
    bound = config.host.lower()
    local = bound == "localhost" or (_is_address(bound) and ipaddress.ip_address(bound).is_loopback)
    if "*" in config.allowed_hosts or not (local or config.allowed_hosts or not needs_key):
        return None
    # The machine's own name is allowed, because others cannot rebind it.
    own = {} if local else {socket.gethostname().lower().rstrip(".")}
    return frozenset({bound, "localhost", "*.localhost", *own, *config.allowed_hosts})


def _name_of(host: str) -> str:
    """Returns the name or address of a Host header, without port, brackets and the root's dot."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _parents(name: str) -> list[str]:
    labels = name.split(".")
    return [".".join(labels[at:]) for at in range(1, len(labels))]


def _text(header: bytes) -> str:
    return header.decode("latin-1")
