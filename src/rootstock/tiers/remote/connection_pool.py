"""Connections to a shared server that are lent to one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rootstock.fleet_config import RemoteConfig
from rootstock.tiers.remote.connection import StoreConnection, StoreRefused

IDLE_S = 20.0  # after which a connection is not used again: servers and networks end idle ones
_MOST_IDLE = 4
Connect = Callable[[RemoteConfig], StoreConnection]


class ConnectionPool:
    """Pool that owns its connections. Thread-safe."""

    def __init__(self, config: RemoteConfig, connect: Connect) -> None:
        self._config = config
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[StoreConnection] = []
        self._ahead: StoreConnection | None = None  # was asked for the value that is loaded next
        self._clearings = 0
        self._closed = False

    def connect(self) -> None:
        """Opens a connection. Raises StoreUnreachable."""
        self._give_back(self._connect(self._config), self._clearings)

    @contextmanager
    def lend(self, asked: bytes | None = None) -> Iterator[StoreConnection]:
        """Lends a connection: the one that was asked for this value, if there is one. Raises StoreUnreachable."""
        clearings = self._clearings
        connection = self._taken(asked)
        if connection is not None and time.monotonic() - connection.used_at >= IDLE_S:
            connection.close()
            connection = None
        connection = connection or self._connect(self._config)
        try:
            yield connection
        except StoreRefused:
            raise
        except BaseException:  # a part of a reply may be unread
            connection.close()
            raise
        finally:
            self._give_back(connection, clearings)

    def clear(self) -> None:
        """Closes all connections. One that is lent is closed when it comes back."""
        with self._lock:
            self._clearings += 1
            closing, self._idle = self._idle, []
            if self._ahead is not None:
                closing.append(self._ahead)
                self._ahead = None
        for connection in closing:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self.clear()

    def _taken(self, asked: bytes | None) -> StoreConnection | None:
        with self._lock:
            ahead = self._ahead
            if asked is None or ahead is None:
                return self._idle.pop() if self._idle else None
            self._ahead = None
            if ahead.asked == asked:
                return ahead
        ahead.close()  # its job has ended, and a reply is unread
        return None

    def _give_back(self, connection: StoreConnection, clearings: int) -> None:
        with self._lock:
            if connection.is_open and not self._closed and clearings == self._clearings:
                if connection.asked is None and len(self._idle) < _MOST_IDLE:
                    self._idle.append(connection)
                    return
                if connection.asked is not None and self._ahead is None:
                    self._ahead = connection
                    return
        connection.close()
