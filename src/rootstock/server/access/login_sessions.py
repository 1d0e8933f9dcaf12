"""Sessions of browsers: a key is sent once, and a cookie stands for it afterwards.

A browser cannot add a key to each request of a page without keeping it where scripts can read it. The cookie is
HttpOnly and SameSite=Strict, and names a session whose key never leaves the server's memory. A request that changes
anything must also carry the session's CSRF token, which only a page of this server can read.

A session ends by logging out, after SESSION_S, with the process, and when its key is no longer valid: the key is
looked up for each request.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LOGIN_PATH = "/dashboard/login"
COOKIE = "rootstock_session"
CSRF_HEADER = b"x-csrf-token"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 256  # the oldest end first
MAX_SESSIONS_OF_KEY = 16
_MAX_COOKIES_BYTES = 8192

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class LoginSession:
    token: str = field(repr=False)  # the cookie's value
    csrf: str = field(repr=False)
    key: bytes = field(repr=False)
    opened_at: float

    @property
    def headers(self) -> Headers:
        """The headers of a request that sends the session's key."""
        return {b"x-api-key": self.key}

    def allows_change(self, headers: Headers) -> bool:
        """Returns whether the headers hold the session's CSRF token."""
        return hmac.compare_digest(headers.get(CSRF_HEADER, b""), self.csrf.encode())


class LoginSessions:
    """The open sessions of one server. Used on the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[str, LoginSession] = OrderedDict()  # by token, the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: bytes) -> LoginSession:
        """Opens a session for a key that was accepted."""
        of_key = [session for session in self._open.values() if session.key == key]
        if len(of_key) >= MAX_SESSIONS_OF_KEY:
            self.close(of_key[0])
        session = LoginSession(secrets.token_urlsafe(32), secrets.token_urlsafe(32), key, self._clock())
        self._open[session.token] = session
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return session

    def close(self, session: LoginSession) -> None:
        self._open.pop(session.token, None)

    def is_open(self, session: LoginSession) -> bool:
        return self._open.get(session.token) is session and self._clock() - session.opened_at < SESSION_S

    def find(self, headers: Headers) -> LoginSession | None:
        """Returns the open session that a cookie names. A request that sends a key has none."""
        if b"authorization" in headers or b"x-api-key" in headers:
            return None
        token = _cookie(headers, cookie_name(headers))
        session = None if token is None else self._open.get(token)
        if session is None or self.is_open(session):
            return session
        self.close(session)
        return None


def cookie_name(headers: Headers) -> str:
    """Returns the name of the session's cookie: cookies do not tell the ports of one host apart."""
    _, colon, port = headers.get(b"host", b"").rpartition(b":")
    return f"{COOKIE}_{port.decode()}" if colon and port.isdigit() and len(port) <= 5 else COOKIE


def _cookie(headers: Headers, name: str) -> str | None:
    cookies = headers.get(b"cookie", b"")
    if len(cookies) > _MAX_COOKIES_BYTES:
        return None
    for pair in cookies.decode("latin-1").split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value
    return None
