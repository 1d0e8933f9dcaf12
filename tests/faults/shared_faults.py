"""Faults of a shared server, one to a case, while replicas answer: no wrong token, no failed request, no long wait.

A case is drawn from a seed: a model, prompts that share beginnings, and when the fault comes. One replica computes
the prompts and stores them. Another one asks the server through a proxy, and answers them again while the fault is
there."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.helpers import Bench, Client
from engine.tiered import KINDS as FAMILIES
from rootstock.config import TierConfig
from rootstock.fleet_config import RemoteConfig
from rootstock.tiers.base import Record
from rootstock.tiers.record import decode_header
from rootstock.tiers.remote.connection import StoreConnection
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.record_stream import PREFIX, RECORD_KIND, outgoing
from shared_store import SharedStore
from waiting import join, wait_for, wait_until

TIMEOUT_S = 0.4
SIZE = 4
PROMPTS = 4
Rng = np.random.Generator


class FaultyProxy:
    """A Unix socket in front of the server's. `fault` happens to connections from now on."""

    def __init__(self, folder: Path, target: str) -> None:
        self.path = str(folder / "proxy.sock")
        self.fault = "none"
        self._target = target
        self._rng = np.random.default_rng(0)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        join(self._threads[0])
        _end(*self._open)
        join(*self._threads)
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.fault == "refuse":
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._target)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for source, sink, is_answer in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(
                        target=self._pass_on, args=(source, sink, is_answer), daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        """Passes bytes on, as the fault allows."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                fault = self.fault if is_answer else "none"
                if fault == "hole":
                    continue
                if fault == "cut":
                    sink.sendall(data[: int(self._rng.integers(len(data)))])
                    break
                if fault == "garble":
                    wrong = bytearray(data)
                    wrong[int(self._rng.integers(len(data)))] ^= 1 << int(self._rng.integers(8))
                    data = bytes(wrong)
                if fault == "drip":
                    for at in range(0, len(data), 64):
                        sink.sendall(data[at : at + 64])
                        time.sleep(0.01)
                    continue
                sink.sendall(data)
        _end(source, sink)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@dataclass
class Case:
    wrong: int = 0
    failed: int = 0
    loaded_tokens: int = 0
    worst_wait_s: float = 0.0  # of a request, computing included
    remarks: list[str] = field(default_factory=list)


@dataclass
class Scene:
    """All that a fault can touch."""

    rng: Rng
    store: SharedStore
    proxy: FaultyProxy
    victim: Bench

    def client(self) -> StoreConnection:
        return self.store.client()

    def names(self, kind: bytes) -> list[bytes]:
        (found,) = self.client().run([[b"KEYS", b"*" + kind + b"*"]])
        assert isinstance(found, list)
        return sorted(each for each in found if isinstance(each, bytes))

    def some(self, kind: bytes, share: float = 0.4) -> list[bytes]:
        return [name for name in self.names(kind) if self.rng.random() < share]

    def change(self, change: Callable[[bytes], bytes]) -> None:
        """Changes some records."""
        client = self.client()
        for name in self.some(RECORD_KIND):
            (value,) = client.run([[b"GET", name]])
            if isinstance(value, bytes):
                client.run([[b"SET", name, change(value)]])


def _damaged(scene: Scene) -> None:
    def change(value: bytes) -> bytes:
        at = int(scene.rng.integers(len(value)))
        return value[:at] + bytes([value[at] ^ (1 << int(scene.rng.integers(8)))]) + value[at + 1 :]

    scene.change(change)


def _cut_off(scene: Scene) -> None:
    scene.change(lambda value: value[: int(scene.rng.integers(len(value)))])


def _swapped(scene: Scene) -> None:
    client, names = scene.client(), scene.names(RECORD_KIND)
    values = [client.run([[b"GET", name]])[0] for name in names]
    for name, number in zip(names, scene.rng.permutation(len(names)), strict=True):
        value = values[number]
        assert isinstance(value, bytes)
        client.run([[b"SET", name, value]])


def _evicted(scene: Scene) -> None:
    for name in scene.some(RECORD_KIND, 0.5):
        scene.client().run([[b"DEL", name]])


def _forged(scene: Scene) -> None:
    """Plants records with other payloads and codes of another secret, as a writer without the secret can."""
    client = scene.client()
    for name in scene.names(RECORD_KIND):
        (value,) = client.run([[b"GET", name]])
        assert isinstance(value, bytes)
        header_bytes, payload_bytes = PREFIX.unpack_from(value)[1:]
        decoded = decode_header(memoryview(value)[PREFIX.size : PREFIX.size + header_bytes], payload_bytes)
        assert decoded is not None
        payload = scene.rng.integers(0, 256, payload_bytes, np.uint8)
        proof = RecordCodes(scene.rng.bytes(32)).begin()
        forged = outgoing(Record(decoded[0], [payload]), proof)
        client.run([[b"SET", name, b"".join(itertools.chain(*forged.pieces()))]])


def _lies(scene: Scene) -> None:
    client = scene.client()
    for name in scene.names(b"at:"):
        lies = [f"full 1 1 {n}".encode() for n in scene.rng.integers(0, 9, 3)]
        lies += [f"state 1 2 {n}".encode() for n in scene.rng.integers(0, 9, 3)]
        client.run([[b"SADD", name, lie] for lie in [*lies, scene.rng.bytes(20)]])
    for name in scene.some(b"at:", 0.2):
        client.run([[b"DEL", name], [b"SET", name, b"no set"]])


def _emptied(scene: Scene) -> None:
    scene.client().run([[b"FLUSHALL"]])


def _full(scene: Scene) -> None:
    scene.client().run([[b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction"]])
    scene.client().run([[b"CONFIG", b"SET", b"maxmemory", b"1"]])


def _restarted(scene: Scene) -> None:
    scene.store.kill()
    scene.store.start()


def _killed(scene: Scene) -> None:
    scene.store.kill()


def _hung(scene: Scene) -> None:
    scene.store.hold()


def _proxied(fault: str) -> Callable[[Scene], None]:
    def set_fault(scene: Scene) -> None:
        scene.proxy.fault = fault

    return set_fault


def _nothing(scene: Scene) -> None:
    """The victim itself is other than the replica that has stored."""


FAULTS: dict[str, Callable[[Scene], None]] = {
    "damaged": _damaged,
    "cut off": _cut_off,
    "swapped": _swapped,
    "evicted": _evicted,
    "forged": _forged,
    "lies": _lies,
    "emptied": _emptied,
    "full": _full,
    "restarted": _restarted,
    "killed": _killed,
    "hung": _hung,
    "partition": _proxied("hole"),
    "connections cut": _proxied("cut"),
    "connections refused": _proxied("refuse"),
    "garbled": _proxied("garble"),
    "slow": _proxied("drip"),
    "other weights": _nothing,
    "other secret": _nothing,
}


@contextlib.contextmanager
def scene_of(kind: str, rng: Rng, folder: Path, store: SharedStore) -> Iterator[tuple[Scene, Bench]]:
    """Opens the replica that stores and the victim."""
    families = FAMILIES[int(rng.integers(len(FAMILIES)))]
    secrets = [folder / "secret", folder / "other"]
    for number, path in enumerate(secrets):
        path.write_bytes(bytes([65 + number]) * 40)
    proxy = FaultyProxy(folder, store.config.path)
    has_codes = kind in ("forged", "other secret") or rng.random() < 0.3

    def replica(path: str, secret: Path, weights: str = "fake") -> Bench:
        remote = RemoteConfig(path=path, timeout_s=TIMEOUT_S)
        tier = TierConfig(remote=remote, remote_key_file=secret if has_codes else None)
        return Bench(300, SIZE, families=families, tier=tier, weights=weights, idle_work=False)

    first = replica(store.config.path, secrets[0])
    weights = "other" if kind == "other weights" else "fake"
    victim = replica(proxy.path, secrets[kind == "other secret"], weights)
    try:
        with first.engine, victim.engine:
            yield Scene(rng, store, proxy, victim), first
    finally:
        proxy.close()


def run(kind: str, seed: int, folder: Path, store: SharedStore) -> Case:
    """Runs a case on a server that is empty."""
    rng = np.random.default_rng([seed, sorted(FAULTS).index(kind)])
    case = Case()
    with scene_of(kind, rng, folder, store) as (scene, first):
        base = rng.integers(0, 97, 60).tolist()
        prompts = [
            [*base[: int(rng.integers(8, 61))], *rng.integers(0, 97, int(rng.integers(1, 30))).tolist()]
            for _ in range(PROMPTS)
        ]
        for prompt in prompts:
            _answer(first, prompt)
        first.engine.stop()  # everything is stored
        comes_after = int(rng.integers(0, PROMPTS))
        asked = [*prompts, *[[*prompt, 5, 6] for prompt in prompts]]
        try:
            for number, prompt in enumerate(asked):
                if number == comes_after:
                    FAULTS[kind](scene)
                _judge(scene.victim, prompt, case, kind)
                if number == comes_after + 3:
                    _end_fault(scene)
        finally:
            _end_fault(scene)
        case.loaded_tokens = scene.victim.cache.stats().loaded_tokens
    return case


def _end_fault(scene: Scene) -> None:
    scene.proxy.fault = "none"
    with contextlib.suppress(AssertionError):
        scene.store.go_on()


def _answer(of: Bench, prompt: list[int]) -> Client:
    client = of.ask(prompt, 4)
    wait_for(client.ended)
    return client


def _judge(victim: Bench, prompt: list[int], case: Case, kind: str) -> None:
    began = time.perf_counter()
    client = _answer(victim, prompt)
    case.worst_wait_s = max(case.worst_wait_s, time.perf_counter() - began)
    weights = "other" if kind == "other weights" else "fake"
    cold = Bench(300, SIZE, families=victim.cache.families, weights=weights)
    if len(client.tokens) != 4:
        case.failed += 1
        case.remarks.append(f"{client.terminals}")
    elif client.tokens != cold.answer(prompt, 4).tokens:
        case.wrong += 1
    if kind in ("other weights", "other secret") and victim.cache.counters.loaded_tokens:
        case.wrong += 1  # it has used records of others


def reset(store: SharedStore) -> None:
    """Makes the server as it was at its start."""
    store.kill()
    store.start()
    wait_until(lambda: store.client().run([[b"DBSIZE"]]) == [0])
