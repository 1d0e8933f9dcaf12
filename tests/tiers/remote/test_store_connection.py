"""The connection to a shared server, against a server that a test scripts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rootstock.errors import InvalidOption
from rootstock.fleet_config import RemoteConfig
from rootstock.tiers.remote.connection import StoreConnection, StoreRefused, StoreUnreachable
from shared_store import SharedStore
from waiting import join

PONG = b"+PONG\r\n"


@contextmanager
def server(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[RemoteConfig]:
    """Answers the greeting of one connection, then lets `answer` send its bytes."""
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def run() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(PONG)
                client.recv(1 << 16)
                with suppress(OSError):  # the other end may have given up
                    answer(client)

        thread = threading.Thread(target=run)
        thread.start()
        yield RemoteConfig(path=path, timeout_s=0.2)
        join(thread)


def test_values_of_many_buffers_come_back_whole(tmp_path: Path) -> None:
    parts = [memoryview(bytes([i % 256]) * (i * 7)) for i in range(1500)]  # more than one system call takes
    whole = b"".join(parts)
    with SharedStore(tmp_path) as store:
        connection = store.client()
        connection.begin(60.0)
        connection.send_value([b"SET", b"key"], 0, [])
        connection.send_value([b"SET", b"key"], len(whole), [parts[:700], parts[700:]])
        assert connection.read_replies(2) == [b"OK", b"OK"]
        assert connection.run([[b"STRLEN", b"key"], [b"GET", b"no key"]], seconds=60.0) == [len(whole), None]
        assert connection.open_value(b"key") == len(whole)
        found = [memoryview(bytearray(part.nbytes)) for part in parts]
        connection.fill(found)
        connection.end_value()
        assert b"".join(found) == whole
        assert connection.open_value(b"no key") is None
        connection.close()


def test_an_error_of_the_server_leaves_the_connection_usable(tmp_path: Path) -> None:
    with SharedStore(tmp_path) as store:
        connection = store.client()
        connection.run([[b"SADD", b"set", b"a", b"b"]])
        with pytest.raises(StoreRefused, match="WRONGTYPE"):
            connection.open_value(b"set")
        with pytest.raises(StoreRefused, match="unknown command"):
            connection.run([[b"PING"], [b"NO SUCH"], [b"PING"]])
        (members,) = connection.run([[b"SMEMBERS", b"set"]])
        assert isinstance(members, list)
        assert set(members) == {b"a", b"b"}
        connection.close()


def test_a_password_is_needed(tmp_path: Path) -> None:
    with SharedStore(tmp_path) as store:
        store.client().run([[b"CONFIG", b"SET", b"requirepass", b"secret"]])
        with pytest.raises(StoreUnreachable, match="NOAUTH"):
            store.client()
        url = f"unix://:secret@{store.config.path}"
        StoreConnection(RemoteConfig.parse(url)).close()


def test_an_error_does_not_tell_the_password(tmp_path: Path) -> None:
    """A server that does not know AUTH tells the command's arguments."""
    rename = ["--rename-command", "AUTH", ""]
    with SharedStore(tmp_path, *rename) as store:
        with pytest.raises(StoreUnreachable, match="unknown command") as raised:
            StoreConnection(replace(store.config, password="a secret"))
        assert "a secret" not in str(raised.value)
        assert raised.value.__cause__ is None


def test_a_name_that_no_host_can_have_is_unreachable() -> None:
    with pytest.raises(StoreUnreachable):
        StoreConnection(RemoteConfig("a..b"))


def drip(client: socket.socket) -> None:
    """Sends a value of which each byte comes in time, but not the whole."""
    client.sendall(b"$1000\r\n")
    for _ in range(200):
        client.sendall(b"x")
        time.sleep(0.02)


HOSTILE: dict[str, bytes | Callable[[socket.socket], None]] = {
    "nothing": lambda client: time.sleep(0.5),
    "closes": lambda client: None,
    "drips": drip,
    "an endless line": b"+" + b"x" * (1 << 20),
    "no reply": b"hello\r\n",
    "an empty line": b"\r\n",
    "no number": b"$12a\r\n",
    "a long number": b"$" + b"9" * 100 + b"\r\n",
    "a huge number": b"$" + b"9" * 18 + b"\r\n",
    "a negative size": b"$-2\r\n",
    "a huge array": b"*999999999\r\n",
    "a deep array": b"*1\r\n" * 1000,
    "no end of a value": b"$3\r\nabcxy",
    "an error in an array": b"*2\r\n-no\r\n:1\r\n",
    "half a value": b"$10\r\nabc",
    "a number for a value": b":5\r\n",
    "bytes at random": bytes(range(256)) * 4,
}


def ask(connection: StoreConnection, way: str) -> None:
    if way == "run":
        connection.run([[b"SMEMBERS", b"key"]])
    else:
        size = connection.open_value(b"key")
        assert size is not None
        connection.fill([memoryview(bytearray(min(size, 1 << 20)))])
        connection.end_value()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("asks", ["run", "value"])
def test_a_server_that_answers_wrongly_is_unreachable(name: str, asks: str, tmp_path: Path) -> None:
    said = HOSTILE[name]

    def answer(client: socket.socket) -> None:
        if callable(said):
            said(client)
        else:
            client.sendall(said)

    with server(tmp_path, answer) as config:
        connection = StoreConnection(config)
        if asks == "run" and name == "a number for a value":
            assert connection.run([[b"EXISTS", b"key"]]) == [5]
            connection.close()
            return
        with pytest.raises(StoreUnreachable):
            ask(connection, asks)
        assert not connection.is_open


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("valkey://host", RemoteConfig("host")),
        ("redis://host:7000/2", RemoteConfig("host", 7000, database=2)),
        (
            "rediss://me:p%40ss@host?ca=/ca.pem",
            RemoteConfig("host", tls=True, ca_file="/ca.pem", user="me", password="p@ss"),
        ),
        ("valkeys://[::1]:1", RemoteConfig("::1", 1, tls=True)),
        ("unix:///run/v.sock?db=3&prefix=a:", RemoteConfig(path="/run/v.sock", database=3, prefix="a:")),
        ("valkey://host?timeout=250ms", RemoteConfig("host", timeout_s=0.25)),
    ],
)
def test_addresses(text: str, config: RemoteConfig) -> None:
    assert RemoteConfig.parse(text) == config
    assert "p@ss" not in str(config) + repr(config)


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "http://host", "valkey://", "unix://", "valkey://host:x", "valkey://host:99999"),
        *("valkey://host/x", "valkey://host?timeout=1", "valkey://host?timeout=0s", "valkey://host?what=1"),
        "valkey://host/-1",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidOption, match="--remote-url") as raised:
        RemoteConfig.parse(text.replace("host", "me:secret@host"))
    assert "secret" not in str(raised.value)
