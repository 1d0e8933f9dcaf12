"""The thread that publishes KV events over ZeroMQ, with sequence numbers, replay and a whole dump for late listeners.

As vLLM's publisher: a PUB socket sends [topic, sequence number (8 bytes, big-endian), batch]. A listener that
missed batches asks the ROUTER socket with [empty, first sequence number], and gets [empty, sequence number, batch]
for each, with the sequence number -1 at the end. Where the batches that it asks for are not kept any more, it gets
one batch with the whole set instead: everything is cleared, then all blocks are stored. It has the number of the
newest batch."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from rootstock.cache.resumable_blocks import BlockChange
from rootstock.engine.kv_events.wire import EventEncoder
from rootstock.engine.stats import KVEventStats
from rootstock.errors import InvalidOption
from rootstock.fleet_config import KVEventsConfig

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # after which an empty batch is sent: a late listener sees that the replica is there
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 1024**2  # for replay
QUEUED_MESSAGES = 100_000  # for each listener, before messages to it are lost
_END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publisher of one engine's changes. `publish` may be called from any thread, and never waits."""

    def __init__(
        self,
        config: KVEventsConfig,
        encoder: EventEncoder,
        refresh: Callable[[], None],
        dump: Callable[[Callable[[Sequence[BlockChange]], None]], None],
    ) -> None:
        """Opens the sockets. `refresh` has changes published that were made while no step ran, `dump` passes on the
        whole set. Raises InvalidOption if an address cannot be used."""
        self._encoder = encoder
        self._refresh = refresh
        self._dump = dump
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._wake_address = f"inproc://wake-{id(self)}"
        try:
            self._events = self._socket(zmq.PUB, config.endpoint, binds=config.binds)
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, config.replay_endpoint, binds=True)
            self._woken = self._socket(zmq.PULL, self._wake_address, binds=True)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidOption(
                "--kv-events", config.endpoint, f"an address that can be used ({error})"
            ) from None
        self._waking = threading.Lock()  # sockets belong to one thread at a time
        self._wake_socket = self._socket(zmq.PUSH, self._wake_address, binds=False)
        self._changes: queue.SimpleQueue[tuple[Sequence[BlockChange], bool] | None] = queue.SimpleQueue()
        self._awaiting: list[
            list[bytes]
        ] = []  # requests for a dump that is being made: it is for all of them
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0  # sequence number
        self._events_sent = self._bytes_sent = 0
        self._sent_at = time.monotonic()  # the last batch
        self._thread = threading.Thread(target=self._run, name="rootstock-kv-events", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> KVEventStats:
        return KVEventStats(self._next, self._events_sent, self._bytes_sent)

    def publish(self, changes: Sequence[BlockChange]) -> None:
        self._put((changes, False))

    def close(self) -> None:
        """Publishes all earlier changes, and closes the sockets."""
        self._put(None)
        self._thread.join()

    def _socket(self, kind: int, address: str, *, binds: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        socket.set_hwm(QUEUED_MESSAGES)
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket

    def _put(self, item: tuple[Sequence[BlockChange], bool] | None) -> None:
        with self._waking:
            if not self._wake_socket.closed:  # or else the item would stay in the queue
                self._changes.put(item)
                self._wake_socket.send(b"")

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in filter(None, (self._woken, self._replay)):
            poller.register(socket, zmq.POLLIN)
        open_ = True
        try:
            while open_:
                quiet_s = time.monotonic() - self._sent_at
                ready = dict(poller.poll(round(max(0.0, HEARTBEAT_S - quiet_s) * 1000)))
                if (
                    time.monotonic() - self._sent_at >= HEARTBEAT_S
                ):  # also while listeners ask for batches again
                    self._send([])
                    self._refresh()
                if self._woken in ready:
                    self._woken.recv()
                    open_ = self._take()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay.recv_multipart())
        except Exception:
            log.exception("KV events are published no more.")
        finally:
            with self._waking:
                self._context.destroy(linger=100)

    def _take(self) -> bool:
        """Sends one item of the queue. Returns False if the publisher is closed."""
        item = self._changes.get()
        if item is None:
            return False
        changes, is_dump = item
        if is_dump:
            self._send_dump(changes)
        else:
            self._send(changes)
        return True

    def _send(self, changes: Sequence[BlockChange]) -> None:
        batch = self._encoder.batch(changes, time.time())
        number = self._next
        self._next += 1
        self._events_sent += len(changes)
        self._bytes_sent += len(batch)
        self._events.send_multipart((self._topic, _sequence(number), batch))
        self._sent_at = time.monotonic()
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Answers a request for replay: [client, …, first sequence number]."""
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("A request for replay of KV events has %d frames; 3 are expected.", len(frames))
            return
        client, first = [frames[0], frames[1]], int.from_bytes(frames[2], "big")
        oldest = self._kept[0][0] if self._kept else self._next
        if first < oldest:
            self._awaiting.append(client)
            if len(self._awaiting) == 1:
                self._dump(lambda changes: self._put((changes, True)))
            return
        assert self._replay is not None
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((*client, _sequence(number), batch))
        self._replay.send_multipart((*client, _END, b""))

    def _send_dump(self, changes: Sequence[BlockChange]) -> None:
        """Sends the whole set, as it is after the newest batch."""
        assert self._replay is not None
        clients, self._awaiting = self._awaiting, []
        batch = self._encoder.batch(changes, time.time())
        for client in clients:
            self._replay.send_multipart((*client, _sequence(max(0, self._next - 1)), batch))
            self._replay.send_multipart((*client, _END, b""))


def _sequence(number: int) -> bytes:
    return number.to_bytes(8, "big")
