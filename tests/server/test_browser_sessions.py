"""Sessions of browsers: their cookies, their bounds, and failed logins."""

from __future__ import annotations

from rootstock.server.access import login_sessions as of
from rootstock.server.access.login_sessions import LoginSession, LoginSessions


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cookie(session: LoginSession, name: str = "rootstock_session_8000") -> dict[bytes, bytes]:
    return {b"host": b"127.0.0.1:8000", b"cookie": f"other=1; {name}={session.token}; more=2".encode()}


def test_a_cookie_finds_its_session() -> None:
    sessions = LoginSessions()
    session = sessions.open(b"key")
    assert sessions.find(cookie(session)) is session
    assert sessions.find(cookie(session) | {b"host": b"127.0.0.1:8001"}) is None
    assert sessions.find({b"cookie": f"rootstock_session={session.token}".encode()}) is session
    assert sessions.find({b"cookie": b"rootstock_session=wrong"}) is None
    assert sessions.find({b"cookie": b"rootstock_session=" + b"x" * 10_000}) is None
    assert sessions.find({}) is None


def test_a_request_with_a_key_has_no_session() -> None:
    sessions = LoginSessions()
    session = sessions.open(b"key")
    for header in (b"authorization", b"x-api-key"):
        assert sessions.find(cookie(session) | {header: b""}) is None


def test_nothing_secret_is_shown() -> None:
    session = LoginSessions().open(b"the-key")
    assert "the-key" not in repr(session)
    assert session.token not in repr(session)
    assert session.csrf not in repr(session)
    assert session.csrf != session.token


def test_a_session_ends_after_its_time() -> None:
    clock = Clock()
    sessions = LoginSessions(clock)
    session = sessions.open(b"key")
    clock.now += of.SESSION_S - 1
    assert sessions.is_open(session)
    clock.now += 1
    assert not sessions.is_open(session)
    assert sessions.find(cookie(session)) is None
    assert len(sessions) == 0


def test_the_number_of_sessions_is_bounded() -> None:
    sessions = LoginSessions()
    first = sessions.open(b"one key")
    for _ in range(of.MAX_SESSIONS_OF_KEY):
        sessions.open(b"one key")
    assert not sessions.is_open(first)
    assert len(sessions) == of.MAX_SESSIONS_OF_KEY
    for index in range(of.MAX_SESSIONS):
        sessions.open(str(index).encode())
    assert len(sessions) == of.MAX_SESSIONS


def test_a_change_needs_the_right_token() -> None:
    session = LoginSessions().open(b"key")
    assert session.allows_change({of.CSRF_HEADER: session.csrf.encode()})
    for wrong in ({}, {of.CSRF_HEADER: b""}, {of.CSRF_HEADER: session.token.encode()}):
        assert not session.allows_change(wrong)
