"""Look-ups of submitted prompts in the shared tier, on a thread of their own.

Which records a shared server has is not kept in memory: there may be many more than this server will ever use. A
prompt is looked up before its request is scheduled, in one exchange for some hundred blocks. The records that are
found become known to the cache's index, and the request is then matched as if they were on a disk.

A namespace without any record is asked for once in some seconds. Blocks that were found before are not asked for
again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from rootstock.cache.families import Family
from rootstock.cache.keys import Identity, Scope
from rootstock.cache.types import Tokens
from rootstock.tiers.base import Off
from rootstock.tiers.remote.connection import Reply, StoreRefused, StoreUnreachable
from rootstock.tiers.remote.place import Places, RecordStart, record_starts
from rootstock.tiers.remote.tier import RemoteTier

_log = logging.getLogger(__name__)

# Parts of the tier's time limit: of an exchange, after which the server counts as unreachable, and of a look-up
# before its last two exchanges. A look-up that ends early has found the beginning of a prompt.
EXCHANGE_SHARE = BEGIN_SHARE = 0.1
LOOKUP_SHARE = BEGIN_SHARE + 2 * EXCHANGE_SHARE  # a load may take the rest
AT_ONCE = 128  # boundaries of one exchange
ABSENT_S = 2.0  # for which a namespace without records is not asked for again
MOST_ABSENT = 10_000
MOST_WAITING = 4096  # prompts; further ones are not looked up


@dataclass(frozen=True, slots=True, eq=False)
class _PendingLookup:
    tokens: Tokens
    scope: Scope
    ended: Callable[[Sequence[Identity]], None]


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
        self._queue: queue.SimpleQueue[_PendingLookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rootstock-lookups", daemon=True)
        self._thread.start()

    def look_up(self, tokens: Tokens, scope: Scope, ended: Callable[[Sequence[Identity]], None]) -> None:
        """Looks a prompt up, or ends at once if the tier cannot be asked. The look-up's thread calls `ended`."""
        skips = len(tokens) <= 1 or scope.namespace.is_private or isinstance(self._tier.state, Off)
        if skips or self._queue.qsize() >= MOST_WAITING or not self._thread.is_alive():
            ended(())
        else:
            self._queue.put(_PendingLookup(tokens, scope, ended))

    def close(self) -> None:
        """Ends the thread. Prompts that wait are not looked up."""
        self._queue.put(None)
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            found: Sequence[Identity] = ()
            try:
                found = self._records(asked.tokens, asked.scope)
            except StoreUnreachable as error:
                self._tier.turn_off(error)
            except StoreRefused as error:
                _log.warning("The shared tier refuses to look prompts up: %s", error)
            except Exception:
                _log.exception("Looking a prompt up failed. Its request goes on without the shared tier.")
            asked.ended(found)

    def _records(self, tokens: Tokens, scope: Scope) -> list[Identity]:
        """Returns the stored records of a prompt, up to a long gap."""
        if isinstance(self._tier.state, Off) or self._is_absent(scope):
            return []
        found: list[Identity] = []
        until = self._clock() + BEGIN_SHARE * self._tier.timeout_s
        left = record_starts(tokens[:-1], scope, self._block_size)  # the last token is always computed
        while here := list(islice(left, AT_ONCE)):
            more = self._at(here)
            if not more:
                break  # deeper blocks are of no use without these, unless hundreds are in memory
            found += more
            if self._clock() > until:
                break
        self._tier.found(each.key for each in found)
        return found

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

    def _at(self, here: Sequence[RecordStart]) -> list[Identity]:
        """Returns the stored records at some boundaries."""
        replies = self._ask([[b"SMEMBERS", self._tier.name(b"at:", each.parent)] for each in here])
        candidates: list[Identity] = []
        for boundary, reply in zip(here, replies, strict=True):
            raw = [each for each in reply if isinstance(each, bytes)] if isinstance(reply, list) else []
            for each in raw:
                place = self._places.decode(each, len(boundary.tokens))
                if place is not None:
                    candidates.append(boundary.identity(place))
        unknown = [identity for identity in candidates if identity.key not in self._tier]
        there = self._ask([[b"EXISTS", self._tier.name(b"r:", each.key)] for each in unknown])
        absent = {each.key for each, is_there in zip(unknown, there, strict=True) if not is_there}
        return [each for each in candidates if each.key not in absent]
