"""L6: a fleet's router at 64 replicas and 1.3 million blocks, while 40,000 blocks a second are stored and removed.

A process of its own publishes the events of all replicas through ZeroMQ, as engines do: batches of 16 blocks
stored, with their token ids, and 16 removed. This process has the index, the listener and the policy, and decides
where prompts of 64 to 256 blocks go: half of each is cached on every replica, a part of the rest on one.

    decided     a decision from the moment that it is due, so that waiting for the interpreter's lock counts
    computed    the processor's time of it
    idle        with a sign of life of each replica only: what the machine allows
    dumps       while a replica a second is read anew: all of its blocks are dropped, and come in one batch
    cpu         of the whole process, with decisions and without
    grown       memory of the process, with index, listener and policy
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from common import argument_parser, at_least, at_most, conclude

from rootstock.fleet.event_listener import SWITCH_S, EventListener
from rootstock.fleet.policy import RoutingPolicy
from rootstock.fleet.prefix_index import Keys, PrefixIndex
from waiting import wait_until

SHOW = "L6"
BLOCK, PART = 32, 16  # tokens, and blocks stored or removed at once
SHARED = 128  # blocks that all replicas have
VOCABULARY = 128_000


@dataclass(frozen=True)
class Scale:
    folder: str
    replicas: int
    blocks: int  # of each replica, beside those that all have
    blocks_per_s: int  # stored or removed, in the whole fleet
    seconds: float


def blocks_of(replica: int, count: int) -> Keys:
    return np.random.default_rng(replica + 1).integers(1, 2**64, count, np.uint64)


def shared_blocks() -> Keys:
    return np.random.default_rng(0).integers(1, 2**64, SHARED, np.uint64)


# ----------------------------------------------------------------------------------- the fleet's process


class Publishers:
    """The engines' side of all replicas. Each removes what it stored first, so that its size stays."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.context: zmq.Context[Any] = zmq.Context()
        self.encode = msgspec.msgpack.Encoder().encode
        self.live, self.replay = [], []
        self.poller = zmq.Poller()
        rng = random.Random(0)
        self.tokens = [[rng.randrange(VOCABULARY) for _ in range(PART * BLOCK)] for _ in range(64)]
        self.blocks = [blocks_of(n, scale.blocks).tolist() for n in range(scale.replicas)]
        self.oldest = [0] * scale.replicas
        self.numbers = [0] * scale.replicas
        self.rng = np.random.default_rng(99)
        for number in range(scale.replicas):
            live: Any = self.context.socket(zmq.PUB)
            live.set_hwm(0)
            live.bind(f"ipc://{scale.folder}/{number}")
            replay: Any = self.context.socket(zmq.ROUTER)
            replay.bind(f"ipc://{scale.folder}/{number}-replay")
            self.live.append(live)
            self.replay.append(replay)
            self.poller.register(replay, zmq.POLLIN)

    def stored(self, keys: list[int]) -> dict[str, Any]:
        tokens = random.choice(self.tokens)
        whole = [*tokens] * (len(keys) // PART) + tokens[: len(keys) % PART * BLOCK]
        return {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": keys[0],
            "token_ids": whole,
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "kv_cache_spec_sliding_window": None,
        }

    def step(self, replica: int) -> None:
        """Publishes a batch in which blocks come and as many go."""
        new: list[int] = self.rng.integers(1, 2**64, PART, np.uint64).tolist()
        own, at = self.blocks[replica], self.oldest[replica]
        gone, own[at : at + PART] = own[at : at + PART], new
        self.oldest[replica] = (at + PART) % (self.scale.blocks // PART * PART)
        removed = {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0}
        self.send(replica, self.stored(new), removed)

    def send(self, replica: int, *events: dict[str, Any]) -> None:
        batch = self.encode([time.time(), events, 0])
        self.live[replica].send_multipart([b"", self.numbers[replica].to_bytes(8, "big"), batch])
        self.numbers[replica] += 1

    def answer(self, wait_ms: float) -> None:
        for socket, _ in self.poller.poll(wait_ms):
            client, empty, _ = socket.recv_multipart()
            replica = self.replay.index(socket)
            own = [*shared_blocks().tolist(), *self.blocks[replica]]
            parts = [self.stored(own[at : at + PART]) for at in range(0, len(own), PART)]
            dump = self.encode([time.time(), [{"type": "AllBlocksCleared"}, *parts], 0])
            number = max(0, self.numbers[replica] - 1).to_bytes(8, "big")
            socket.send_multipart([client, empty, number, dump])
            socket.send_multipart([client, empty, (2**64 - 1).to_bytes(8, "big"), b""])


def publish(scale: Scale, ready: Event, begin: Event, lose: Event, end: Event) -> None:
    fleet = Publishers(scale)
    alive = 0
    for replica in range(scale.replicas):
        fleet.send(replica)
    ready.set()
    while not begin.is_set():
        fleet.answer(500)
        for replica in range(scale.replicas):
            fleet.send(replica)  # a sign of life
    began, sent = time.monotonic(), 0
    while not end.is_set():
        now = time.monotonic() - began
        while sent < now * scale.blocks_per_s:
            fleet.step(random.randrange(scale.replicas))
            sent += 2 * PART
        if now > alive:
            for replica in range(scale.replicas):
                fleet.send(replica)
            alive += 1
            if lose.is_set():
                fleet.numbers[alive % scale.replicas] += 10**6  # a gap, to be filled by a dump
        fleet.answer(1)


# ------------------------------------------------------------------------------------------- this process


class Decisions:
    """Prompts that arrive at a steady rate, and the time from then to each decision."""

    def __init__(self, index: PrefixIndex, slots: list[int], scale: Scale) -> None:
        self.policy = RoutingPolicy(index, BLOCK)
        for slot in slots:
            self.policy.add(slot, f"replica {slot}", 10_000.0)
        self.slots = slots
        shared, rng = shared_blocks(), np.random.default_rng(7)
        self.prompts = []
        for _ in range(500):
            blocks = int(rng.integers(64, 257))
            replica = int(rng.integers(scale.replicas))
            own = blocks_of(replica, scale.blocks)[-(blocks // 4) :]  # the last to be replaced
            new = rng.integers(1, 2**64, blocks, np.uint64)
            self.prompts.append(np.concatenate((shared[: blocks // 2], own, new))[:blocks])
        self.cached = 0

    def run(self, seconds: float, per_s: float) -> tuple[list[float], list[float]]:
        """Returns the thread's CPU seconds of each decision, and the seconds from the moment that it was due."""
        computed, whole = list[float](), list[float]()
        due = time.monotonic()
        end = due + seconds
        while due < end:
            due = max(due + 1 / per_s, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
            began = time.thread_time()
            prompt = self.prompts[len(whole) % len(self.prompts)]
            best = self.policy.ranked(prompt, len(prompt) * BLOCK, self.slots, due)[0]
            self.policy.assigned(best, prompt, due)
            computed.append(time.thread_time() - began)
            whole.append(time.monotonic() - due)
            self.cached += best.cached_tokens >= SHARED // 4 * BLOCK
        return computed, whole


def percentile(seconds: list[float], share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 3)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure(scale: Scale, per_s: float) -> dict[str, Any]:
    forked = multiprocessing.get_context("spawn")
    ready, begin, lose, end = (forked.Event() for _ in range(4))
    fleet = forked.Process(target=publish, args=(scale, ready, begin, lose, end))
    fleet.start()
    try:
        ready.wait()
        before_mb = resident_mb()
        index = PrefixIndex()
        listener = EventListener(index)
        slots = [index.join() for _ in range(scale.replicas)]
        began = time.monotonic()
        for slot in slots:
            address = f"ipc://{scale.folder}/{slot}"
            listener.follow(slot, address, f"{address}-replay")
        wait_until(lambda: all(listener.is_known(slot) for slot in slots))
        figures: dict[str, Any] = {"read_all_s": round(time.monotonic() - began, 1)}
        decisions = Decisions(index, slots, scale)
        for phase in ("idle", "events", "dumps"):
            if phase == "events":
                begin.set()
                time.sleep(2.0)
            if phase == "dumps":
                lose.set()
            decisions.cached, heard, began, used = 0, listener.stats, time.monotonic(), cpu_s()
            computed, whole = decisions.run(scale.seconds, per_s)
            took, now = time.monotonic() - began, listener.stats
            figures |= {
                f"{phase}_cpu_share": round((cpu_s() - used) / took, 3),
                f"{phase}_blocks_per_s": round((now.blocks - heard.blocks) / took),
                f"{phase}_replays": now.replays - heard.replays,
                f"{phase}_decisions": len(whole),
                f"{phase}_found": round(decisions.cached / len(whole), 3),
                f"{phase}_computed_p50_ms": percentile(computed, 0.5),
                f"{phase}_computed_p99_ms": percentile(computed, 0.99),
                f"{phase}_decided_p50_ms": percentile(whole, 0.5),
                f"{phase}_decided_p99_ms": percentile(whole, 0.99),
            }
            if phase == "events":
                used, began = cpu_s(), time.monotonic()
                time.sleep(scale.seconds / 2)
                share = (cpu_s() - used) / (time.monotonic() - began)
                figures["events_cpu_share_without_decisions"] = round(share, 3)
        wait_until(lambda: all(listener.is_known(slot) for slot in slots))
        return figures | {
            "keys": len(index),
            "index_mb": round(index.nbytes / 1e6, 1),
            "process_mb": round(resident_mb()),
            "grown_mb": round(resident_mb() - before_mb),
            "losses": listener.stats.losses,
        }
    finally:
        end.set()
        fleet.join()


def main() -> None:
    sys.setswitchinterval(SWITCH_S)  # as the router's process has it
    options = argument_parser(__doc__)
    options.add_argument("--replicas", type=int, default=64)
    options.add_argument("--blocks", type=int, default=1_300_000, help="of all replicas together")
    options.add_argument("--blocks-per-s", type=int, default=40_000)
    options.add_argument("--decisions-per-s", type=float, default=200.0)
    options.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = given.blocks // given.replicas
        scale = Scale(folder, given.replicas, own, given.blocks_per_s, given.seconds)
        figures = measure(scale, given.decisions_per_s)
    bars = {
        "events_decided_p99_ms": at_most(5.0),
        "dumps_decided_p99_ms": at_most(20.0),  # a dump is decoded at once
        "events_blocks_per_s": at_least(0.95 * given.blocks_per_s),
        "events_found": at_least(0.99),
        "events_cpu_share": at_most(0.5),
        "grown_mb": at_most(250.0),
        "losses": at_most(0),
    }
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
