"""The thread that hears the KV events of all replicas and keeps the index of their blocks.

Each replica's batches are numbered. A replica is read from its first batch on, or from a dump, when it is followed;
where a number is missing, the batches since the last one are asked for again. The replica's address for this is a
socket in the same poller, so that no replica waits for another. While one is asked, its live batches stay in
ZeroMQ's queue, which is bounded; those that were lost there are asked for next.

A replica's blocks are dropped, and it is read anew, when it has been silent, when its batches make no sense, when it
does not answer, and when another publisher is at its address: its numbers begin again, or the batch with the last
number is another one now. A batch that begins with `AllBlocksCleared` needs none before it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import zmq

from rootstock.fleet.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

SWITCH_S = 0.0002  # for a process that also decides: a decision waits so long for the interpreter's lock
SILENCE_S = 5.0  # five heartbeats, after which nothing is known about a replica
ANSWER_S = 5.0  # a dump waits for a step of the engine
RETRY_S = 1.0  # between two attempts to read a replica
TICK_S = 0.05  # between two looks at the clock and at commands
PAUSE_S = 0.002  # between two turns, so that a turn finds several batches
YIELD_S = 0.0005  # after so many blocks, half a millisecond of work, others get the interpreter's lock
TURN_BLOCKS = 500
TURN_BATCHES = 50  # of one replica
MOST_ASKED = 8  # replicas that are read from their beginning at once: a dump has megabytes
QUEUED_BATCHES = 10_000  # of one replica, in ZeroMQ
MOST_BYTES = 256 * 1024**2  # of a batch: ZeroMQ closes the connection on a larger one
_PREFIXES = 0  # the group of the blocks up to which a request can resume
_END = (2**64 - 1).to_bytes(8, "big")  # of an answer
_Key = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[_Key]
    group_idx: int = _PREFIXES


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[_Key]
    group_idx: int = _PREFIXES


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _EventBatch(msgspec.Struct, array_like=True):
    """The part of a batch that the index needs: token ids, most of its bytes, are skipped."""

    at_s: float  # seconds since the Unix epoch
    events: list[_Stored | _Removed | _Cleared]

    @property
    def is_whole(self) -> bool:
        """True if earlier batches have no effect after it."""
        return bool(self.events) and isinstance(self.events[0], _Cleared)


class _Lost(Exception):
    """Reason for which nothing is known about a replica any more."""


@dataclass(slots=True, eq=False)
class _Followed:
    """A replica, its sockets and how far it was read."""

    slot: int
    replay_endpoint: str
    live: zmq.Socket[bytes]
    heard_s: float  # when it last gave a sign of life
    next_ask_s: float  # before that, an unknown replica is not asked
    asked: zmq.Socket[bytes] | None = None  # while an answer is awaited
    answer_due_s: float = math.inf
    is_confirmed: bool = False  # the answer is of the publisher that was heard before
    is_known: bool = False
    next: int = 0  # number of the next batch
    at_s: float = -math.inf  # time of the last batch


@dataclass(frozen=True, slots=True)
class ListenerStats:
    batches: int
    blocks: int  # stored or removed
    replays: int  # requests for earlier batches
    losses: int  # replicas about which nothing was known any more


class EventListener:
    """Listener to up to as many replicas as the index has slots. Its methods may be called from any thread, and
    do not wait, but for `close`."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._commands: queue.SimpleQueue[tuple[int, str, str] | int | None] = queue.SimpleQueue()
        self._followed: dict[int, _Followed] = {}  # by slot
        self._of_socket: dict[zmq.Socket[bytes], _Followed] = {}
        self._known = set[int]()
        self._decoder = msgspec.msgpack.Decoder(_EventBatch)
        self._batches = self._blocks = self._replays = self._losses = 0
        self._since_yield = 0  # blocks
        self._thread = threading.Thread(target=self._run, name="rootstock-event-listener", daemon=True)
        self._thread.start()

    def follow(self, slot: int, endpoint: str, replay_endpoint: str) -> None:
        """Reads a replica that has joined the index, and keeps its blocks there from now on."""
        self._commands.put((slot, endpoint, replay_endpoint))

    def forget(self, slot: int) -> None:
        """Lets a replica leave the index."""
        self._commands.put(slot)

    def is_known(self, slot: int) -> bool:
        """Returns whether the index has all blocks that the replica has announced."""
        return slot in self._known

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    @property
    def stats(self) -> ListenerStats:
        return ListenerStats(self._batches, self._blocks, self._replays, self._losses)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        look_s = -math.inf
        try:
            while self._obey():
                ready = self._poller.poll(round(TICK_S * 1000))
                for socket, _ in ready:
                    self._guarded(self._of_socket[socket], self._read)
                if (now := time.monotonic()) >= look_s:
                    look_s = now + TICK_S
                    for replica in self._followed.values():
                        self._guarded(replica, self._look)
                if ready:
                    self._yield(PAUSE_S)
        except Exception:
            log.exception("KV events are heard no more.")
        finally:
            for slot in self._followed:
                self._known.discard(slot)
                self._index.cleared(slot)
            self._context.destroy(linger=0)

    def _obey(self) -> bool:
        """Carries out the commands. Returns False if the listener is closed."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            if isinstance(command, tuple):
                self._begin(*command)
            else:
                self._end(command)
        return True

    def _begin(self, slot: int, endpoint: str, replay_endpoint: str) -> None:
        assert slot not in self._followed
        now_s = time.monotonic()
        live = self._socket(zmq.SUB, endpoint)
        live.subscribe(b"")
        replica = _Followed(slot, replay_endpoint, live, heard_s=now_s, next_ask_s=now_s)
        self._followed[slot] = replica
        self._await(replica, live)

        def connect(replica: _Followed, now_s: float) -> None:
            live.connect(endpoint)

        self._guarded(replica, connect)

    def _end(self, slot: int) -> None:
        replica = self._followed.pop(slot)
        self._stop_asking(replica)
        self._await_no_more(replica.live)
        replica.live.close()
        self._known.discard(slot)
        self._index.leave(slot)

    def _guarded(self, replica: _Followed, act: Callable[[_Followed, float], None]) -> None:
        """Acts on one replica. A fault of it does not reach the others."""
        now_s = time.monotonic()
        try:
            act(replica, now_s)
        except Exception as error:
            log.warning("The blocks of replica %d are not known: %s", replica.slot, error)
            self._lose(replica, now_s)

    def _look(self, replica: _Followed, now_s: float) -> None:
        silent_s = now_s - replica.heard_s
        # Batches that have arrived and were not read yet are no silence.
        if replica.asked is not None:
            if now_s > replica.answer_due_s and not replica.asked.poll(0):
                raise _Lost("it does not answer")
        elif replica.is_known:
            if silent_s > SILENCE_S and not replica.live.poll(0):
                raise _Lost(f"it has been silent for {silent_s:.1f} s")
        elif now_s >= replica.next_ask_s and silent_s <= SILENCE_S and self._asked < MOST_ASKED:
            self._ask(replica, now_s)

    @property
    def _asked(self) -> int:
        """Number of replicas that are asked."""
        return sum(replica.asked is not None for replica in self._followed.values())

    def _read(self, replica: _Followed, now_s: float) -> None:
        if replica.asked is None:
            self._hear(replica, now_s)
        else:
            self._read_answer(replica, replica.asked, now_s)

    def _hear(self, replica: _Followed, now_s: float) -> None:
        """Takes live batches."""
        for frames in _present(replica.live):
            if not replica.is_known:
                replica.heard_s = now_s
                continue
            number, batch = self._decoded(frames)
            is_newer = batch.at_s > replica.at_s
            if number == replica.next or (batch.is_whole and is_newer):
                self._take(replica, number, batch, now_s)
            elif number > replica.next:
                return self._ask(replica, now_s)
            elif is_newer:  # or else it was in an answer
                return self._read_anew(replica, now_s)
        return None

    def _read_answer(self, replica: _Followed, asked: zmq.Socket[bytes], now_s: float) -> None:
        """Takes batches that were asked for."""
        for frames in _present(asked):
            replica.answer_due_s = now_s + ANSWER_S
            if len(frames) == 3 and frames[1] == _END:
                if not replica.is_confirmed:
                    return self._read_anew(replica, now_s)
                self._stop_asking(replica)
                replica.is_known = True
                self._known.add(replica.slot)
                return None
            number, batch = self._decoded(frames)
            if batch.is_whole or (replica.is_confirmed and number == replica.next):
                replica.is_confirmed = True
                self._take(replica, number, batch, now_s)
            elif replica.is_confirmed:
                raise _Lost(f"batch {number} came in place of batch {replica.next}")
            elif number == replica.next - 1 and batch.at_s <= replica.at_s:
                replica.is_confirmed = True  # a new publisher's batches are newer
            else:
                return self._read_anew(replica, now_s)
        return None

    def _decoded(self, frames: Sequence[bytes]) -> tuple[int, _EventBatch]:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise _Lost(f"a message of {len(frames)} parts is none of KV events")
        return int.from_bytes(frames[1], "big"), self._decoder.decode(frames[2])

    def _take(self, replica: _Followed, number: int, batch: _EventBatch, now_s: float) -> None:
        for event in batch.events:
            if isinstance(event, _Cleared):
                self._index.cleared(replica.slot)
            elif event.group_idx == _PREFIXES:
                change = self._index.stored if isinstance(event, _Stored) else self._index.removed
                for start in range(0, len(event.block_hashes), TURN_BLOCKS):
                    part = np.array(event.block_hashes[start : start + TURN_BLOCKS], np.uint64)
                    change(replica.slot, part)
                    self._blocks += len(part)
                    self._since_yield += len(part)
                    if self._since_yield >= TURN_BLOCKS:
                        self._yield(YIELD_S)
        self._batches += 1
        replica.next, replica.at_s, replica.heard_s = number + 1, batch.at_s, now_s

    def _yield(self, for_s: float) -> None:
        time.sleep(for_s)
        self._since_yield = 0

    def _ask(self, replica: _Followed, now_s: float) -> None:
        """Asks for the last batch again, which shows whether it is the same publisher, and for all after it."""
        asked = self._socket(zmq.DEALER, replica.replay_endpoint)
        self._await_no_more(replica.live)
        self._await(replica, asked)
        replica.asked, replica.answer_due_s = asked, now_s + ANSWER_S
        replica.is_confirmed = not replica.next
        self._replays += 1
        asked.connect(replica.replay_endpoint)
        asked.send_multipart((b"", max(0, replica.next - 1).to_bytes(8, "big")), zmq.NOBLOCK)

    def _stop_asking(self, replica: _Followed) -> None:
        if replica.asked is not None:
            self._await_no_more(replica.asked)
            replica.asked.close()
            replica.asked = None
            self._await(replica, replica.live)

    def _read_anew(self, replica: _Followed, now_s: float) -> None:
        """Begins again with a publisher that is another one than before."""
        self._lose(replica, now_s)
        self._ask(replica, now_s)

    def _lose(self, replica: _Followed, now_s: float) -> None:
        self._stop_asking(replica)
        self._losses += replica.is_known
        self._known.discard(replica.slot)
        self._index.cleared(replica.slot)
        replica.is_known, replica.next, replica.at_s = False, 0, -math.inf
        replica.next_ask_s = now_s + RETRY_S

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _await(self, replica: _Followed, socket: zmq.Socket[bytes]) -> None:
        self._of_socket[socket] = replica
        self._poller.register(socket, zmq.POLLIN)

    def _await_no_more(self, socket: zmq.Socket[bytes]) -> None:
        del self._of_socket[socket]
        self._poller.unregister(socket)


def _present(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yields the messages that have arrived, as many as fit in a turn."""
    for _ in range(TURN_BATCHES):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
