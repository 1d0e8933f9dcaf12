"""Settings of several servers: where KV events are published, the store that they share, and the size of a fleet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from rootstock.errors import InvalidOption
from rootstock.options import ValueForm, parse_seconds

_ADDRESS = r"tcp://[^?#]+:\d{1,5}|ipc://[^?#]+"
_MOST_PORT = 65_535  # ZeroMQ itself takes larger ones, and leaves out their upper bits
MOST_REPLICAS = 64  # of a fleet, which is as many as a router follows: larger ones are several fleets
_OWN_HOSTS = ("*", "0.0.0.0", "[::]", "[::1]", "localhost")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Publication of KV events, from an address such as tcp://*:5557?replay=5558&topic=kv.

    The query may have `replay`, an address or a port of the same interface; `topic`; and `format`, map or array.
    """

    endpoint: str  # without its query
    replay_endpoint: str | None  # on the same interface; None: no replay
    topic: str
    as_arrays: bool  # events are arrays instead of maps

    @property
    def binds(self) -> bool:
        """True if the address is the publisher's own; else it connects to a listener there."""
        host = self.endpoint.removeprefix("tcp://").rpartition(":")[0]
        return not self.endpoint.startswith("tcp://") or host in _OWN_HOSTS or host.startswith("127.")

    def reached_at(self, host: str) -> KVEventsConfig:
        """Returns the addresses for listeners, of a publisher that waits for them at every address of a host."""
        shown = f"[{host}]" if ":" in host else host

        def reached(address: str) -> str:
            return address.replace("tcp://*:", f"tcp://{shown}:")

        replay = self.replay_endpoint
        return replace(
            self, endpoint=reached(self.endpoint), replay_endpoint=None if replay is None else reached(replay)
        )

    @classmethod
    def parse(cls, text: str, option: str = "--kv-events") -> KVEventsConfig:
        """Parses the address. Raises InvalidOption."""
        endpoint, _, query = text.partition("?")
        allowed = "an address such as tcp://*:5557 or tcp://127.0.0.1:5557?replay=5558&topic=kv&format=array"
        given = dict(parse_qsl(query, keep_blank_values=True))
        replay, topic = given.pop("replay", None), given.pop("topic", "")
        form = given.pop("format", "map")
        if given or form not in ("map", "array") or not _is_address(endpoint):
            raise InvalidOption(option, text, allowed)
        found = cls(endpoint, replay, topic, form == "array")
        if replay is None or _is_address(replay):
            return found
        if not (endpoint.startswith("tcp://") and _is_port(replay)):
            raise InvalidOption(option, text, allowed)
        host = endpoint.rpartition(":")[0] if found.binds else "tcp://*"
        return replace(found, replay_endpoint=f"{host}:{replay}")

    def __str__(self) -> str:
        query = {"format": "array"} if self.as_arrays else {}
        if self.topic:
            query["topic"] = self.topic
        if self.replay_endpoint is not None:
            query["replay"] = self.replay_endpoint
        return self.endpoint + (f"?{urlencode(query, safe='@:/*')}" if query else "")


def _is_address(text: str) -> bool:
    is_tcp = text.startswith("tcp://")
    return bool(re.fullmatch(_ADDRESS, text)) and (not is_tcp or _is_port(text.rpartition(":")[2]))


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and int(text) <= _MOST_PORT


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A Valkey or Redis server that several servers share, from an address such as valkey://host:6379/0?timeout=2s."""

    host: str = ""
    port: int = 6379
    path: str = ""  # of a Unix socket, instead of host and port
    tls: bool = False
    ca_file: str = ""  # of the authority that signed its certificate; "": one that the system knows
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    timeout_s: float = 2.0  # the longest that a request waits for the server
    prefix: str = "rootstock:"  # of all keys

    @classmethod
    def parse(cls, text: str, option: str = "--remote-url") -> RemoteConfig:
        """Parses the address. Raises InvalidOption, which does not show the password."""
        allowed = "an address such as valkey://host:6379, rediss://user:password@host:6379/0 or unix:///run/valkey.sock"
        try:
            url = urlsplit(text)
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            found = cls(
                url.hostname or "",
                url.port or 6379,
                unquote(url.path) if url.scheme == "unix" else "",
                url.scheme in ("rediss", "valkeys"),
                query.pop("ca", ""),
                unquote(url.username or ""),
                unquote(url.password or ""),
                int(url.path.strip("/") or 0) if url.scheme != "unix" else int(query.pop("db", "0")),
                parse_seconds(query.pop("timeout", "2s"), option),
                query.pop("prefix", "rootstock:"),
            )
        except (ValueError, InvalidOption):
            raise InvalidOption(option, "***", allowed) from None
        known = url.scheme in ("valkey", "valkeys", "redis", "rediss", "unix")
        if not known or query or not (found.path if url.scheme == "unix" else found.host):
            raise InvalidOption(option, "***", allowed)
        if not (0.01 <= found.timeout_s <= 60 and 0 <= found.database < 2**16):
            raise InvalidOption(option, "***", f"{allowed}, with a timeout from 10ms to 60s")
        return found

    def __str__(self) -> str:
        """Returns the address without its password, for people."""
        return f"{'TLS to ' if self.tls else ''}{self.path or f'{self.host}:{self.port}'}"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The size and the place of a fleet."""

    least: int = 2  # replicas
    most: int = 2
    routers: int = 1
    per_machine: int | None = None  # replicas; None: all on one machine, one on each of a cluster
    ray_address: str | None = None  # of a running cluster, or "auto"; None: Ray is started on this machine

    def check(self, host: str) -> None:
        """Refuses an address at which HAProxy does not reach the replicas. Raises InvalidOption."""
        allowed: tuple[str, ...] = ("0.0.0.0", "::")
        if self.ray_address is None:  # HAProxy asks replicas of its own machine at its local address
            allowed = ("127.0.0.1", "localhost", *allowed)
        if host not in allowed:
            where = "a fleet on one machine" if self.ray_address is None else "--ray-address"
            raise InvalidOption("--host", host, f"{' or '.join(allowed)} with {where}")

    @staticmethod
    def parse_replicas(text: str, option: str = "--replicas") -> tuple[int, int]:
        """Parses a number, or a range such as 2-8. Raises InvalidOption."""
        found = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MOST_REPLICAS:
            allowed = f"a number from 1 to {MOST_REPLICAS}, or a range such as 2-8"
            raise InvalidOption(option, text, allowed)
        return least, most


KV_EVENTS = ValueForm(str, KVEventsConfig.parse, str)
REMOTE = ValueForm(str, RemoteConfig.parse, str)
