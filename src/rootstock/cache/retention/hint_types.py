"""Hints: wishes of a client about how long, and how firmly, the cache keeps a prefix.

Wire formats translate their dialects to `CacheHints`. A hint never changes an answer, and it is no part of a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_TTL_S = 24 * 3600.0
LEAST_PRIORITY, GREATEST_PRIORITY = -100, 100  # 0: the cache's own order
MAX_RETENTIONS = 32  # of one request: further ones are refused
MAX_ACTS = 32  # of one request: further ones are refused
MAX_TOLD = 256  # decisions of a kind that are told


@dataclass(frozen=True, slots=True)
class RetentionWish:
    """A wish for the prefix of a prompt: its blocks, window blocks and states, in memory and on disk."""

    field: str  # of the client's body: answers name it
    end: int | None = None  # tokens of the prefix; None: the prompt and its answer
    ttl_s: float | None = None  # keep it so long after its last use; None: no wish
    priority: int = 0  # LEAST_PRIORITY to GREATEST_PRIORITY: higher ones are evicted later


class ActKind(StrEnum):
    DEMOTE = "demote"  # it goes first until it is used again
    RELEASE = "release"  # its retention and its pin end
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class PrefixAct:
    """A change to a part of a prompt that is done once: when the request has finished, or at once without one."""

    field: str  # of the client's body: answers name it
    kind: ActKind
    start: int | None = 0  # None: the end of the prompt
    end: int | None = None  # None: the end of the prompt and its answer; of a pin, of the prompt
    session: str | None = None  # the private part of this session, in place of the range


@dataclass(frozen=True, slots=True)
class CacheHints:
    """The hints of one request."""

    tenant: str = ""  # whose share of the cache bounds them
    session: str | None = None  # requests of one session follow each other
    session_field: str = ""  # of the client's body: answers name it
    ends_session: bool = False  # no request of the session follows: its private part is evicted first
    retentions: tuple[RetentionWish, ...] = ()
    acts: tuple[PrefixAct, ...] = ()
    parent: str | None = None  # the session that began this one
    may_pin: bool = False  # the tenant is known, or the client is the operator

    @property
    def longest_prefix_ttl_s(self) -> float:
        """The time to live for the longest prefix that has one; 0: none has one."""
        _, ttl_s = max(
            (
                (math.inf if each.end is None else each.end, min(each.ttl_s, MAX_TTL_S))
                for each in self.retentions[:MAX_RETENTIONS]
                if each.ttl_s is not None and each.ttl_s > 0
            ),
            default=(0, 0.0),
        )
        return ttl_s


@dataclass(frozen=True, slots=True)
class Keep:
    """A granted retention as a tier below needs it. Times are relative: each tier has a clock of its own."""

    tenant: str
    lasts_s: float  # from the time when the tier gets it
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RetainedLimits:
    """The operator's limits of the bytes that a tenant's hints retain, and of the bytes that its pins keep."""

    by_tenant: Mapping[str, int] = field(default_factory=dict)
    others: int | None = None  # of every other tenant; None: no limit

    def of(self, tenant: str, most: int) -> int:
        """Returns the limit of a tenant; `most` if it has none."""
        limit = self.by_tenant.get(tenant, self.others)
        return most if limit is None else limit


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # granted in part
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """The cache's decision about one hint."""

    field: str
    verdict: Verdict
    reason: str = ""  # why it was clipped or refused
