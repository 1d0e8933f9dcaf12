"""Look-ups of submitted prompts in the shared tier, on a thread of their own.

Which records a shared server has is not kept in memory: there may be many more than this server will ever use. A
prompt is looked up before its request is scheduled, in one exchange for some hundred blocks. The records that are
found become known to the cache's index, and the request is then matched as if they were on a disk.

A namespace without any record is asked for once in some seconds, and a block with records once in some minutes,
because the index knows the records that were found. The next turn of a conversation therefore asks for its new
blocks only.

A look-up ends when its time is over, with the records that it has found. Only a server that is late with one
exchange counts as unreachable: a long prompt, or many at once, must not turn the tier off for all."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rootstock.cache.families import Family
from rootstock.cache.keys import Identity, RecordKey, Scope
from rootstock.cache.types import Tokens
from rootstock.tiers.base import Off
from rootstock.tiers.remote.connection import Reply, StoreRefused, StoreUnreachable
from rootstock.tiers.remote.place import Places, RecordStart, record_starts
from rootstock.tiers.remote.record_stream import RECORD_KIND
from rootstock.tiers.remote.tier import RemoteTier

_log = logging.getLogger(__name__)

# Parts of the tier's time limit: for which a prompt waits for the look-ups before its own; of an exchange, after
# which the server counts as unreachable; and of a look-up before its last two exchanges. A look-up that ends early
# has found the beginning of a prompt.
WAIT_SHARE = 0.2
EXCHANGE_SHARE = BEGIN_SHARE = 0.1
LOOKUP_SHARE = WAIT_SHARE + BEGIN_SHARE + 2 * EXCHANGE_SHARE  # a load may take the rest
AT_ONCE = 128  # boundaries of one exchange
ABSENT_S = 2.0  # for which a namespace without records is not asked for again
MOST_ABSENT = 10_000
FOUND_S = 300.0  # for which a block with records is not asked for again
MOST_FOUND = 100_000
MOST_WAITING = 4096  # prompts; further ones are not looked up

Found = Mapping[RecordKey, Identity]


@dataclass(frozen=True, slots=True, eq=False)
class _PendingLookup:
    tokens: Tokens
    scope: Scope
    ended: Callable[[Found], None]
    waits_until: float  # by the look-ups' clock: is not looked up later


class PromptLookups:
    """Thread that looks prompts up. `ended` gets the records that may help, and is called exactly once."""

    def __init__(
        self,
        tier: RemoteTier,
        families: Sequence[Family],
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._places = Places(families, block_size)
        self._block_size = block_size
        self._clock = clock
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # namespaces, and when they were asked for
        # Blocks with records, by the digest at their end, and when they were asked for.
        self._found: OrderedDict[bytes, float] = OrderedDict()
        self._outages = tier.counts.outages  # after one, the index has forgotten these records
        self._closing = False
        self._queue: queue.SimpleQueue[_PendingLookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rootstock-lookups", daemon=True)
        self._thread.start()

    def look_up(self, tokens: Tokens, scope: Scope, ended: Callable[[Found], None]) -> None:
        """Looks a prompt up, or ends at once if the tier cannot be asked. The look-up's thread calls `ended`."""
        skips = len(tokens) <= 1 or scope.namespace.is_private or isinstance(self._tier.state, Off)
        if skips or self._queue.qsize() >= MOST_WAITING or not self._thread.is_alive():
            ended({})
        else:
            waits_until = self._clock() + WAIT_SHARE * self._tier.timeout_s
            self._queue.put(_PendingLookup(tokens, scope, ended, waits_until))

    def close(self) -> None:
        """Ends the thread. Prompts that wait are not looked up."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            found: Found = {}
            try:
                found = self._records(asked)
            except StoreUnreachable as error:
                self._tier.turn_off(error)
            except StoreRefused as error:
                _log.warning("The shared tier refuses to look prompts up: %s", error)
            except Exception:
                _log.exception("Looking a prompt up failed. Its request goes on without the shared tier.")
            asked.ended(found)

    def _records(self, asked: _PendingLookup) -> Found:
        """Returns the stored records of a prompt, up to a long gap or the end of its time."""
        began = self._clock()
        is_late = began > asked.waits_until
        if is_late or self._closing or isinstance(self._tier.state, Off) or self._is_absent(asked.scope):
            return {}
        found: dict[RecordKey, Identity] = {}
        # With the last token, which is always computed: a record that ends with it has the ones before it.
        left = record_starts(asked.tokens, asked.scope, self._block_size)
        until = began + BEGIN_SHARE * self._tier.timeout_s
        while some := list(islice(left, AT_ONCE)):
            here = [each for each in some if not self._was_found(each, began)]
            more = self._at(here) if here else {}
            self._note_found(here, more, began)
            if not more and len(here) == len(some):
                break  # deeper blocks are of no use without these, unless hundreds are in memory
            found.update(more)
            if self._closing or self._clock() > until:
                break
        self._tier.found(found)
        return found

    def _was_found(self, start: RecordStart, now: float) -> bool:
        if self._outages != self._tier.counts.outages:
            self._outages = self._tier.counts.outages
            self._found.clear()
        return bool(self._found) and now - self._found.get(start.end, now - FOUND_S) < FOUND_S

    def _note_found(self, here: Sequence[RecordStart], found: Found, now: float) -> None:
        """Remembers whole blocks with records. Where a prompt ends inside a block, a longer one may find more."""
        parents = {identity.parent for identity in found.values()}
        for each in here:
            if each.parent in parents and len(each.tokens) == self._block_size:
                self._found[each.end] = now
                self._found.move_to_end(each.end)
        while len(self._found) > MOST_FOUND:
            self._found.popitem(last=False)

    def _ask(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        return self._tier.run(commands, EXCHANGE_SHARE * self._tier.timeout_s)

    def _is_absent(self, scope: Scope) -> bool:
        """Returns whether none of the scope's namespaces has records."""
        now = self._clock()
        spaces = {scope.namespace.digest(), *([scope.public.digest()] if scope.public_tokens else [])}
        if all(now - self._absent.get(space, -ABSENT_S) < ABSENT_S for space in spaces):
            return True
        # A use, unlike EXISTS: a server does not evict the marks of namespaces that are looked up.
        marks = self._ask([[b"TOUCH", self._tier.name(b"ns:", space)] for space in spaces])
        for space, mark in zip(spaces, marks, strict=True):
            if mark:
                self._absent.pop(space, None)
            else:
                self._absent[space] = now
                self._absent.move_to_end(space)
        while len(self._absent) > MOST_ABSENT:
            self._absent.popitem(last=False)
        return not any(marks)

    def _at(self, here: Sequence[RecordStart]) -> Found:
        """Returns the stored records at some boundaries."""
        replies = self._ask([[b"SMEMBERS", self._tier.name(b"at:", each.parent)] for each in here])
        candidates: dict[RecordKey, Identity] = {}
        for boundary, reply in zip(here, replies, strict=True):
            raw = [each for each in reply if isinstance(each, bytes)] if isinstance(reply, list) else []
            for each in raw:
                place = self._places.decode(each, len(boundary.tokens))
                if place is not None:
                    identity = boundary.identity(place)
                    candidates[identity.key] = identity
        unknown = [key for key in candidates if key not in self._tier]
        there = self._ask([[b"EXISTS", self._tier.name(RECORD_KIND, key)] for key in unknown])
        for key, is_there in zip(unknown, there, strict=True):
            if not is_there:
                del candidates[key]
        return candidates
