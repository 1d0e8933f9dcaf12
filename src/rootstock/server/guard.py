"""Checks of a request's head before any route: who asks, from where, and how much is sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock.config import ServerConfig
from rootstock.errors import (
    BodyTooLarge,
    ContentTypeNotJson,
    HostNotAllowed,
    MalformedHttp,
    OriginNotAllowed,
    RootstockError,
    TooManyBodyBytes,
    Unauthorized,
)
from rootstock.server.access import Caller, Keys, remember_caller
from rootstock.server.errors import BodyRefused, error_response
from rootstock.units import MIB

Headers = Mapping[bytes, bytes]

OPEN_PATHS = frozenset({"/", "/health"})  # need no API key
MAX_HELD_BODY_BYTES = 256 * MIB  # of all requests that are being received or answered

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE_OF_BROWSERS = (b"same-origin", b"none")  # none: the user's own doing, such as a bookmark
_JSON = re.compile(rb"application/(?:[a-z0-9!#$&^_.+-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(rb";\s*charset\s*=\s*\"?([^\s\";]*)", re.IGNORECASE)


class Guard:
    """ASGI middleware that refuses a request by its head, and a body by its size.

    `config.allowed_origins` and `config.allowed_hosts` keep web pages from using a server that listens where only its
    user should reach it: by requests across origins, and by a name that an attacker lets point here (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, max_held_body_bytes: int = MAX_HELD_BODY_BYTES
    ) -> None:
        self._app = app
        self._keys = Keys(config)
        self._max_body_bytes = config.max_body_bytes
        self._max_held_bytes = max(max_held_body_bytes, config.max_body_bytes)
        self._held_bytes = 0
        self._origins = frozenset(config.allowed_origins)
        self._hosts = _names_of(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # of several the first, as everywhere behind this
        caller = self._keys.caller(headers.get(b"authorization", b""))
        if caller is not None:
            remember_caller(scope.setdefault("state", {}), caller)
        refusal = self._refusal(scope["method"], scope["path"], headers, caller)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # of a copy: the connection sends no body, as it knows the method
            scope = {**scope, "method": "GET"}
        held_bytes = 0

        async def receive_counted() -> Message:
            nonlocal held_bytes
            message = await receive()
            count = len(message.get("body", b""))
            if held_bytes + count > self._max_body_bytes:  # sent in chunks, without a length
                raise BodyRefused(BodyTooLarge(self._max_body_bytes))
            if self._held_bytes + count > self._max_held_bytes:
                raise BodyRefused(TooManyBodyBytes(self._max_held_bytes))
            held_bytes += count
            self._held_bytes += count
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held_bytes -= held_bytes

    def _refusal(
        self, method: str, path: str, headers: Headers, caller: Caller | None
    ) -> RootstockError | None:
        if not self._knows_host(headers.get(b"host")):
            return HostNotAllowed(_text(headers[b"host"]))
        if self._is_foreign(method, headers):
            return OriginNotAllowed(_text(headers.get(b"origin", b"another site")))
        if path not in OPEN_PATHS and caller is None:
            return Unauthorized()
        length = headers.get(b"content-length", b"0").strip()
        if not re.fullmatch(rb"[0-9]{1,20}", length):
            return MalformedHttp("its Content-Length is not a number")
        if int(length) > self._max_body_bytes:
            return BodyTooLarge(self._max_body_bytes)
        if method not in _SAFE_METHODS:
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

    def _is_foreign(self, method: str, headers: Headers) -> bool:
        """Whether a web page of another origin asks, that is not allowed to."""
        origin = headers.get(b"origin")
        site = headers.get(b"sec-fetch-site")  # browsers' own word, that pages cannot change
        if origin is None:
            return method not in _SAFE_METHODS and site is not None and site not in _SAME_SITE_OF_BROWSERS
        if "*" in self._origins or _text(origin) in self._origins:
            return False
        if site is not None:
            return site not in _SAME_SITE_OF_BROWSERS
        _, _, authority = origin.partition(b"://")
        return authority.lower() != headers.get(b"host", b"").lower()


def _refusal_of_content_type(headers: Headers, has_body: bool) -> RootstockError | None:
    """A page may send any other content type across origins without asking first."""
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


def _names_of(config: ServerConfig) -> frozenset[str] | None:
    """The names by which a server may be asked; None: by any. A server for this machine only has few."""
    bound = config.host.lower()
    local = bound == "localhost" or (_is_address(bound) and ipaddress.ip_address(bound).is_loopback)
    if "*" in config.allowed_hosts or not (local or config.allowed_hosts):
        return None
    return frozenset({bound, "localhost", "*.localhost", *config.allowed_hosts})


def _name_of(host: str) -> str:
    """The name or address of a Host header, without port, brackets and the root's dot."""
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
