"""O3: real traces of coding agents, replayed through the real cache at 1 to 20 % of the memory that keeps everything.

A trace is an `.npz` file. Each request has a time (`t_ms`), the last block of its prompt in a trie of blocks of 64
tokens (`leaf`; `pgap` is the distance of each block to its parent), its conversation (`conv`), the number of its
sub-agent (`sub`) and whether it brings a tool's result (`kind`); `meta` is JSON with `block_tokens`. Requests are
served one after the other, at their recorded times. Each prompt is looked up, admitted, committed and released in a
`KVCache` without a model. A block of the trace is UNIT tokens of the cache, so that distances shrink and
proportions stay.

    full        attention alone, 24 KiB a token
    state_20    the same beside a recurrent state of 20 MB, as hybrid models have it
    state_60    … of 60 MB
    state_120   … of 120 MB

A budget is a part of the bytes of all blocks of the trace; states take their room from it as well. Hits are the part
of prompt tokens that need not be computed.

    lru          ranks by the last use alone; positions that a conversation has passed go first
    plain        the default policy
    agents       the same with what Claude Code sends: the name of the session, and five minutes for each prompt
    clairvoyant  evicts what is used last: no bound, since states and blocks differ in size, but what knowledge of the
                 future is worth
"""

from __future__ import annotations

import bisect
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, conclude
from h2_hints import Clock

from rootstock.cache import FullAttention, Namespace, RecurrentState
from rootstock.cache.eviction import Evictable, EvictionPolicy, LeastRecentlyUsedFirst
from rootstock.cache.families import Family
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.cache.radix_node import Boundary, Checkpoint, CheckpointKind, Node
from rootstock.cache.retention.hint_types import CacheHints, RetentionWish
from rootstock.cache.types import Tokens

SHOW = "O3"
UNIT = 8  # tokens of the cache for a block of the trace
TOKEN_BYTES = 24 * 1024
NAMESPACE = Namespace("weights", "bfloat16")
PARTS = (0.01, 0.02, 0.05, 0.1, 0.2)
STATES = {"full": 0, "state_20": 20, "state_60": 60, "state_120": 120}  # MB
NEVER = float("inf")


@dataclass(frozen=True)
class Turn:
    """A request of the trace."""

    at_s: float
    path: Tokens  # blocks of its prompt, by their numbers in the trie
    session: str
    system_blocks: int  # of the prompt, that other conversations begin with, too
    user_blocks: int  # of the prompt, up to the end of the last turn of a user
    ends: bool  # its answer calls no tool


class Trace:
    """The requests of a trace, and when each block is used next."""

    def __init__(self, path: Path, most: int | None) -> None:
        with np.load(path) as stored:
            self.block = int(json.loads(bytes(stored["meta"]).decode())["block_tokens"])
            gaps = stored["pgap"].astype(np.int64)
            parent = np.where(gaps == 0, -1, np.arange(len(gaps)) - gaps)
            columns = {name: stored[name][:most] for name in ("t_ms", "leaf", "conv", "sub", "kind", "stop")}
        paths = [_path(parent, int(leaf)) for leaf in columns["leaf"]]
        self.turns: list[Turn] = []
        self.blocks = len(set(np.concatenate(paths).tolist()))
        self.used: dict[int, list[float]] = {}
        heads = _shared(paths, columns["conv"], len(gaps))
        ends_of_users: dict[tuple[int, int], int] = {}
        for i, blocks in enumerate(paths):
            thread = int(columns["conv"][i]), int(columns["sub"][i])
            if not columns["kind"][i]:
                ends_of_users[thread] = int(columns["leaf"][i])
            end = ends_of_users.get(thread, -1)
            user = int(np.searchsorted(blocks, end)) + 1  # numbers rise along a path
            if user > len(blocks) or blocks[user - 1] != end:
                user = 0
            at_s = columns["t_ms"][i] / 1000 + i * 1e-6
            system = int(heads[blocks].sum())
            ends = bool(columns["stop"][i] == 2)
            self.turns.append(Turn(at_s, blocks, "{}/{}".format(*thread), system, user, ends))
            for block in blocks.tolist():
                self.used.setdefault(block, []).append(at_s)

    def next_use(self, block: int, now: float) -> float:
        times = self.used.get(block, [])
        after = bisect.bisect_right(times, now)
        return times[after] if after < len(times) else NEVER


class Clairvoyant:
    """Evicts first what is used last."""

    def __init__(self, trace: Trace, clock: Clock) -> None:
        self._trace, self._clock = trace, clock

    def rank(self, entry: Evictable) -> float:
        if isinstance(entry, Checkpoint):
            assert entry.node is not None
            token = int(entry.node.tokens[entry.position - 1 - entry.node.start])
        else:
            assert isinstance(entry, Node)
            token = int(entry.tokens[-1])
        return -self._trace.next_use(token // UNIT, self._clock.now)

    def observe_reuse(self, idle_s: float) -> bool:
        return False

    def log_value(self, rank: float, now: float) -> float:
        return rank


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--trace", default=os.environ.get("ROOTSTOCK_TRACE"), help=".npz file")
    options.add_argument("--parts", default=",".join(map(str, PARTS)), help="of the bytes, comma-separated")
    options.add_argument("--families", default=",".join(STATES), help="comma-separated")
    options.add_argument("--policies", default="lru,plain,agents,clairvoyant", help="comma-separated")
    options.add_argument("--requests", type=int, help="only the first ones")
    given = options.parse_args()
    if given.trace is None:
        options.error("name a trace by --trace or ROOTSTOCK_TRACE")
    trace = Trace(Path(given.trace), given.requests)
    figures: dict[str, Any] = {"requests": len(trace.turns), "blocks": trace.blocks}
    bars = {}
    for name in given.families.split(","):
        for part in map(float, given.parts.split(",")):
            hits = {}
            for policy in given.policies.split(","):
                began = time.perf_counter()
                hits[policy] = replay(trace, STATES[name], part, policy)
                seconds = time.perf_counter() - began
                print(f"{name} {part:.0%} {policy}: {hits[policy]} in {seconds:.0f} s", flush=True)
            figures[f"{name}_{part:.0%}"] = hits
            for policy in ("plain", "agents"):
                if policy in hits and "lru" in hits:
                    over = f"{name}_{part:.0%}_{policy}_over_lru"
                    figures[over] = round(hits[policy][0] - hits["lru"][0], 2)
                    bars[over] = at_least(-0.3)
    for name, least in {"state_20_5%": 84.0, "state_120_5%": 81.0}.items():
        if "agents" in figures.get(name, {}):
            figures[f"{name}_agents"] = figures[name]["agents"][0]
            bars[f"{name}_agents"] = at_least(least)
    conclude(SHOW, figures, bars)


def replay(trace: Trace, state_mb: int, part: float, policy: str) -> tuple[float, int]:
    """Returns the hits in percent of prompt tokens, and the prompt tokens that were computed."""
    clock = Clock()
    block_bytes = trace.block * TOKEN_BYTES
    families: list[Family] = [FullAttention(1, block_bytes // UNIT)]
    if state_mb:
        families.append(RecurrentState(1, state_mb * 10**6))
    policies: dict[str, EvictionPolicy] = {
        "lru": LeastRecentlyUsedFirst(),
        "clairvoyant": Clairvoyant(trace, clock),
    }
    cache = KVCache(
        families, int(part * trace.blocks * block_bytes), UNIT, policy=policies.get(policy), clock=clock
    )
    asked = hit = 0
    for turn in trace.turns:
        clock.now = turn.at_s
        tokens = _tokens(turn.path)
        boundaries = [
            Boundary(blocks * UNIT, kind)
            for blocks, kind in (
                (turn.system_blocks, CheckpointKind.SYSTEM),
                (turn.user_blocks, CheckpointKind.USER),
            )
            if blocks
        ]
        hints = None
        if policy == "agents":
            kept = (RetentionWish("mark", ttl_s=300.0),)
            hints = CacheHints(session=turn.session, session_field="session", retentions=kept)
        admitted = cache.admit(cache.match(tokens, NAMESPACE), boundaries=boundaries, hints=hints)
        asked += len(tokens)
        if not isinstance(admitted, Admitted):  # longer than the cache
            continue
        lease = admitted.lease
        hit += lease.hit_tokens
        while lease.num_computed_tokens < len(tokens):
            end = lease.next_checkpoint_position or len(tokens)
            cache.commit(lease, tokens[lease.num_computed_tokens : end])
        cache.release(lease, ReleaseReason.FINISHED)
        if turn.ends and policy in ("plain", "agents"):
            cache.end_turn(tokens, NAMESPACE)
        cache.compare_diverged()
    return round(100 * hit / asked, 2), (asked - hit) * trace.block // UNIT


def _shared(paths: list[Tokens], conversations: Any, blocks: int) -> Any:
    """Returns which blocks several conversations have."""
    first, shared = np.full(blocks, -1), np.zeros(blocks, bool)
    for path, conversation in zip(paths, conversations, strict=True):
        shared[path[(first[path] >= 0) & (first[path] != conversation)]] = True
        first[path] = conversation
    return shared


def _tokens(blocks: Tokens) -> Tokens:
    return (blocks[:, None] * UNIT + np.arange(UNIT, dtype=np.int32)).ravel()


def _path(parent: Any, leaf: int) -> Tokens:
    found = []
    while leaf >= 0:
        found.append(leaf)
        leaf = int(parent[leaf])
    return np.array(found[::-1], np.int32)


if __name__ == "__main__":
    main()
