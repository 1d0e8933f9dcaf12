"""Retainer: decides about the hints of each admitted request, within its tenant's share, and applies them.

A lease keeps its whole path while it runs. The grants of its nodes are therefore made when it leaves the tree, and
cover its answer as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rootstock.cache.active_tenants import Tenants
from rootstock.cache.lease import Lease
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Checkpoint, Node, Root
from rootstock.cache.retention.grants import (
    ANSWERED_PRIORITY,
    ENDED_PRIORITY,
    OVERDRAWN_PRIORITY,
    OVERDUE,
    Claim,
    Grant,
    Level,
    nearness,
    strongest,
)
from rootstock.cache.retention.hint_types import (
    GREATEST_PRIORITY,
    LEAST_PRIORITY,
    MAX_RETENTIONS,
    MAX_TOLD,
    MAX_TTL_S,
    CacheHints,
    HintOutcome,
    RetainedLimits,
    RetentionWish,
    Verdict,
)
from rootstock.cache.retention.retained_entries import Retained, RetainedOfBudget
from rootstock.cache.retention.sessions import ExpectedPause, SessionTable
from rootstock.cache.stats import Counters

RETAINED_SHARE = 0.9  # of the budget: the rest is for requests without hints
MOST_SHARES = 8  # of the retainable bytes: of more tenants, each may still have an eighth
NEARLY_FULL = 0.9  # part of its share from which on a tenant counts as overdrawn
EXPECTED_USE_S = 60.0  # retention without a session ranks as if the next use were expected after this time


def entries_of(node: Node) -> list[Node | Checkpoint]:
    """Returns a node and its checkpoints: each may have a grant."""
    return [node, *node.checkpoints.values()]


class Retainer:
    """Decides about hints and applies them to the tree. `share` is the part of the budget that can be retained.

    Of several caches on one budget, the bounds hold for all of them together.
    """

    def __init__(
        self,
        pools: Pools,
        tree: PrefixTree,
        counters: Counters,
        clock: Callable[[], float],
        sessions: SessionTable,
        share: float,
    ) -> None:
        shared = pools.share
        self.tenants = Tenants() if shared is None else shared.budget.tenants
        self.limits = RetainedLimits()
        self.sessions = sessions
        self.retained = Retained(tree, counters)
        self._every = RetainedOfBudget(self.retained, shared)
        self._tree = tree
        self._counters = counters
        self._clock = clock
        self._block_size = pools.block_size
        self._retainable_bytes = int(share * pools.budget_bytes)
        # Estimate: a prefix needs one checkpoint where a model cannot resume anywhere.
        windows = tuple(window.most_blocks(pools.block_size) for window in pools.windows)
        self._checkpoint_bytes = (
            0 if pools.resume_anywhere else pools.bytes_of(Rows(0, windows, int(pools.states is not None)))
        )

    def share_bytes(self, tenant: str, now: float) -> int:
        """Returns the bytes that a tenant may retain: an equal part, and no more than its own limit."""
        share = self._retainable_bytes // min(self.tenants.count(now), MOST_SHARES)
        return min(share, self.limits.of(tenant, share))

    # ------------------------------------------------------------------------------------ at admission

    def begin(self, hints: CacheHints, lease: Lease, *, comes_back: bool = False) -> None:
        """Decides about the hints of an admitted request; its lease gets the claims and the outcomes."""
        now = self._clock()
        pause: ExpectedPause | None = None
        if hints.session is not None:
            session = self.sessions.begin(hints.tenant, hints.session, now, hints.longest_prefix_ttl_s)
            lease.session, pause = session.id, session.pause
            missed_bytes = self.prompt_bytes(lease.prompt_tokens - lease.hit_tokens)
            session.size_bytes = max(session.size_bytes, missed_bytes)
            if not comes_back:
                session.requests += 1
                session.prompt_tokens += lease.prompt_tokens
                session.hit_tokens += lease.hit_tokens
                lease.lost_tokens = max(0, min(session.tokens, lease.prompt_tokens) - lease.hit_tokens)
                session.lost_tokens += lease.lost_tokens
        self._decide(hints, lease, pause, now)

    def begin_alone(self, hints: CacheHints, lease: Lease) -> None:
        """Decides about hints without a request: no pause of the session ends or begins."""
        session = None if hints.session is None else self.sessions.find(hints.tenant, hints.session)
        lease.session = 0 if session is None else session.id
        self._decide(replace(hints, session=None), lease, None, self._clock())
        if hints.session is not None:
            outcome = HintOutcome(hints.session_field, Verdict.ACCEPTED)
            if session is None:
                outcome = HintOutcome(
                    hints.session_field, Verdict.REFUSED, "no request has named the session"
                )
            self.count([outcome])
            lease.hint_outcomes += (outcome,)

    def _decide(self, hints: CacheHints, lease: Lease, pause: ExpectedPause | None, now: float) -> None:
        self.tenants.note(hints.tenant, lease.namespace.salt, now)
        self._every.expire()
        lease.hints = hints
        decisions = _Decisions(self, lease, hints.tenant, pause, now)
        outcomes = [decisions.decide(wish) for wish in hints.retentions[:MAX_RETENTIONS]]
        outcomes += [
            HintOutcome(wish.field, Verdict.REFUSED, f"a request can have {MAX_RETENTIONS} retention hints")
            for wish in hints.retentions[MAX_RETENTIONS:MAX_TOLD]
        ]
        if pause is not None:
            ttl_s = None if hints.ends_session else pause.ttl_s
            outcomes.append(decisions.decide(RetentionWish(hints.session_field, None, ttl_s)))
        lease.claims, lease.hint_outcomes = tuple(decisions.claims), tuple(outcomes)
        if decisions.promised_bytes:
            self.retained.promised[lease.id] = (hints.tenant, decisions.promised_bytes)
        self.count(outcomes)

    def count(self, outcomes: Iterable[HintOutcome]) -> None:
        for outcome in outcomes:
            match outcome.verdict:
                case Verdict.ACCEPTED:
                    self._counters.accepted_hints += 1
                case Verdict.CLIPPED:
                    self._counters.clipped_hints += 1
                case Verdict.REFUSED:
                    self._counters.refused_hints += 1

    def prompt_bytes(self, tokens: int) -> int:
        """Estimates the bytes of so many tokens at the end of a prompt."""
        return tokens * self._tree.token_bytes + self._checkpoint_bytes

    def room_bytes(self, tenant: str, level: Level, now: float) -> int:
        """Returns the bytes that the tenant can still retain at a level, at the cost of entries that yield."""
        return max(0, self.share_bytes(tenant, now) - self._every.firm_bytes(tenant, level, now))

    def offer(self, lease: Lease, position: int, size_bytes: int, now: float) -> Grant | None:
        """Returns the grant of a checkpoint that the lease is about to leave; None: it is not retained."""
        claims = [claim for claim in lease.claims if claim.covers(position)]
        if not claims:
            return None
        grant = strongest(claims, now)
        room = min(
            self.share_bytes(grant.tenant, now) - self._every.bytes_of(grant.tenant),
            self._retainable_bytes - self._every.bytes_of(None),
        )
        return grant if size_bytes <= room or not grant.is_charged else None

    # ----------------------------------------------------------------------------- when a lease leaves

    def retain(self, lease: Lease) -> None:
        """Gives the nodes and checkpoints on the lease's path their grants. Call it before the lease is detached."""
        assert lease.hints is not None, "only hints retain"
        if lease.node is None:
            return
        now = self._clock()
        self._every.expire()
        path = [node for node in reversed(list(lease.node.path())) if not isinstance(node, Root)]
        if lease.session and lease.num_computed_tokens > lease.hit_tokens:
            self._measure_session(lease, path)
        is_whole = _Application(self, lease, path, now).run() if lease.claims else True
        self._demote_if_overdrawn(lease, is_whole, now)

    def _measure_session(self, lease: Lease, path: Sequence[Node]) -> None:
        """Notes the part of the cache that the lease's session alone uses."""
        session = self.sessions.get(lease.session)
        if session is None:  # dropped meanwhile
            return
        if lease.costs is not None:
            session.add_costs(lease.costs, lease.lost_tokens / (lease.prompt_tokens - lease.hit_tokens))
        if 2 * lease.num_computed_tokens < session.tokens:
            return  # a short request beside the conversation, such as one for a title
        session.tokens = lease.num_computed_tokens
        own = (node for node in path if node.session == session.id)
        session.size_bytes = sum(self._tree.size_bytes(entry) for node in own for entry in entries_of(node))

    def _demote_if_overdrawn(self, lease: Lease, is_whole: bool, now: float) -> None:
        """Ranks the unretained prefixes of a tenant whose share is full below the prefixes of others. Its retained
        prefixes then take room from its own part of the cache, not from the others' parts."""
        assert lease.node is not None
        assert lease.hints is not None
        if self.tenants.count(now) < 2:
            return
        tenant = lease.hints.tenant
        if is_whole and self._every.bytes_of(tenant) < NEARLY_FULL * self.share_bytes(tenant, now):
            return
        for node in lease.node.path():
            if (
                isinstance(node, Root)
                or node.ref_count > 1
                or (node.grant is not None and node.grant.is_charged)
            ):
                break
            self._demote(node, OVERDRAWN_PRIORITY, replaces=False)

    def demote(self, node: Node) -> None:
        """Makes a node go first until it is used again, in place of its retention."""
        self._demote(node, ENDED_PRIORITY, replaces=True)

    def end_turn(self, leaf: Node) -> None:
        """Ranks the end of a conversation behind others: its last answer calls no tool, and a person has to go on.

        What hints retain of it counts as overdue. Its session gives its place to sessions that wait for one.
        """
        if leaf.session:
            session = self.sessions.get(leaf.session)
            if session is not None:
                session.yields_its_place = True
        for node in leaf.path():
            if isinstance(node, Root) or node.session != leaf.session or node.ref_count:
                return
            for entry in entries_of(node):
                grant = entry.grant
                if grant is None and node is leaf:
                    self._tree.grant(entry, Grant.demotion(ANSWERED_PRIORITY))
                elif grant is not None and grant.is_charged and grant.nearness > OVERDUE:
                    self._tree.grant(entry, grant.overdue)

    def _demote(self, node: Node, priority: int, *, replaces: bool) -> None:
        for entry in entries_of(node):
            if entry.grant is None or replaces:
                self._tree.grant(entry, Grant.demotion(priority))

    def end(self, lease: Lease, *, comes_back: bool) -> None:
        """Ends the lease's part in the accounts. Call it when the lease ends."""
        self.retained.promised.pop(lease.id, None)
        hints = lease.hints
        assert hints is not None, "only hints have accounts"
        if hints.session is None:
            return
        self.sessions.end(lease.session, self._clock(), comes_back=comes_back)
        if hints.ends_session and not comes_back:
            self.sessions.forget(hints.tenant, hints.session)

    # -------------------------------------------------------------------------------------------- room

    def make_room(self, tenant: str, level: Level, needed_bytes: int, kept: set[Node], now: float) -> int:
        """Takes the grants of lower entries away until the tenant can retain so many more bytes. Returns how many it
        can. Entries in `kept` stay."""
        every, share = self._every, self.share_bytes(tenant, now)
        while every.bytes_of(tenant) + needed_bytes > share:
            if not every.displace(tenant, kept, now, level):
                return max(0, share - every.bytes_of(tenant))
        while every.bytes_of(None) + needed_bytes > self._retainable_bytes:
            richest = max(every.tenants, key=every.bytes_of)
            is_richer = every.bytes_of(richest) > every.bytes_of(tenant) + needed_bytes
            if not is_richer or not every.displace(richest, kept, now):
                return max(0, self._retainable_bytes - every.bytes_of(None))
        return needed_bytes

    def grant(self, entry: Node | Checkpoint, claims: Sequence[Claim], kept: set[Node], now: float) -> int:
        """Gives an entry the strongest of the claims. Returns the bytes that its tenant could not pay for, in which
        case nothing has changed."""
        grant = strongest(claims, now)
        old = entry.grant
        if old is not None and old.is_charged:
            grant = old.merged(grant)
        size = self._tree.size_bytes(entry)
        is_paid = old is not None and old.is_charged and old.tenant == grant.tenant
        if grant.is_charged and not is_paid:
            missing = size - self.make_room(grant.tenant, grant.level, size, kept, now)
            if missing > 0:
                return missing
        self._tree.grant(entry, grant)
        return 0

    def take_back(self, entry: Node | Checkpoint, tenant: str) -> None:
        """Takes away the grant of an entry that its tenant no longer needs to retain."""
        if entry.grant is not None and entry.grant.is_charged and entry.grant.tenant == tenant:
            self._tree.ungrant(entry)

    def split_affordable(self, node: Node, missing_bytes: int) -> Node | None:
        """Splits off the part of a node that the share still pays for, in whole blocks; None: there is none."""
        if not self._tree.token_bytes:
            return None
        affordable = self._tree.size_bytes(node) - missing_bytes
        end = (node.start + affordable // self._tree.token_bytes) // self._block_size * self._block_size
        return self._tree.split(node, end) if node.start < end < node.end else None

    def needed_bytes(self, lease: Lease, tenant: str, start: int, end: int) -> int:
        """Returns the bytes that tokens start … end-1 of the lease add to the tenant's account."""
        tokens = end - start
        steps = () if lease.node is None else lease.node.path()
        for node in steps:
            if node.grant is not None and node.grant.is_charged and node.grant.tenant == tenant:
                tokens -= max(0, min(end, node.end) - max(start, node.start))
        return tokens * self._tree.token_bytes + (self._checkpoint_bytes if tokens else 0)

    @property
    def token_bytes(self) -> int:
        return self._tree.token_bytes

    def split(self, node: Node, position: int) -> Node:
        return self._tree.split(node, position)


class _Decisions:
    """Decisions about the hints of one request, in order."""

    def __init__(
        self, retainer: Retainer, lease: Lease, tenant: str, pause: ExpectedPause | None, now: float
    ) -> None:
        """`pause` is to be expected of the request's session; None: it has none."""
        self._retainer = retainer
        self._lease = lease
        self._tenant = tenant
        self._pause = pause
        self._now = now
        self._covered = 0  # tokens that earlier claims of the request retain
        self.claims: list[Claim] = []
        self.promised_bytes = 0

    def decide(self, wish: RetentionWish) -> HintOutcome:
        def refused(reason: str) -> HintOutcome:
            return HintOutcome(wish.field, Verdict.REFUSED, reason)

        lease, pause, ttl_s, end = self._lease, self._pause, wish.ttl_s, wish.end
        if lease.node is None:
            return refused("the prefix of this request is not kept in the cache")
        if ttl_s is not None and not ttl_s > 0:
            return refused("a time to live is more than 0 seconds")
        if end is not None and end < 1:
            return refused("the hint is for no token of the prompt")
        clipped: list[str] = []
        if ttl_s is not None and ttl_s > MAX_TTL_S:
            ttl_s = MAX_TTL_S
            clipped.append(f"a prefix is retained for {MAX_TTL_S / 3600:g} hours at most")
        priority = min(max(wish.priority, LEAST_PRIORITY), GREATEST_PRIORITY)
        if priority != wish.priority:
            clipped.append(f"priorities go from {LEAST_PRIORITY} to {GREATEST_PRIORITY}")
        if end is not None and end > lease.prompt_tokens:
            end = lease.prompt_tokens
            clipped.append(f"the prompt has {end:,} tokens")
        claim = Claim(
            self._tenant,
            lease.session,
            end,
            ttl_s or 0.0,
            ttl_s or MAX_TTL_S,
            priority,
            nearness(EXPECTED_USE_S if pause is None else pause.mean_s),
            (ttl_s or MAX_TTL_S) / 2 if pause is None else pause.mean_s,
            math.inf if pause is None else pause.near_s,
        )
        if claim.ttl_s or priority > 0:
            kept = self._kept_tokens(claim)
            asked = lease.prompt_tokens if end is None else end
            if kept < asked:
                share = f"the tenant's share of retained prefixes has {self._room(claim):,} bytes left for it"
                if not kept:
                    return refused(share)
                claim = replace(claim, end=kept)
                clipped.append(f"{share}: {kept:,} of {asked:,} tokens are retained")
            self._covered = max(self._covered, kept)
        if claim.ttl_s or priority:
            self.claims.append(claim)
        verdict = Verdict.CLIPPED if clipped else Verdict.ACCEPTED
        return HintOutcome(wish.field, verdict, "; ".join(clipped))

    def _kept_tokens(self, claim: Claim) -> int:
        """Returns how many tokens of the prompt the tenant's share pays for, and promises their bytes."""
        asked = self._lease.prompt_tokens if claim.end is None else claim.end
        if asked <= self._covered:
            return asked
        needed = self._retainer.needed_bytes(self._lease, self._tenant, self._covered, asked)
        room = self._room(claim)
        if needed > room:
            short = -(-(needed - room) // max(1, self._retainer.token_bytes))
            asked = max(self._covered, asked - short)
            needed = min(needed, room)
        if asked > self._covered:
            self.promised_bytes += needed
        return asked

    def _room(self, claim: Claim) -> int:
        level = (claim.ttl_s > 0, claim.priority, claim.nearness if claim.ttl_s else 0)
        room = self._retainer.room_bytes(self._tenant, level, self._now)
        return max(0, room - self.promised_bytes)


class _Application:
    """Application of a lease's claims to its path."""

    def __init__(self, retainer: Retainer, lease: Lease, path: list[Node], now: float) -> None:
        self._retainer = retainer
        self._claims = lease.claims
        self._path = path
        self._kept = set(path)
        self._now = now

    def run(self) -> bool:
        """Grants retention from the root on, as far as the share pays. Returns False if it does not pay for all."""
        return all(self._apply(node) for node in self._path)

    def _apply(self, node: Node) -> bool:
        """Grants one node, in parts where claims end inside it: the splits leave `node` as the last part."""
        while claims := [claim for claim in self._claims if claim.end is None or claim.end > node.start]:
            ends = [claim.end for claim in claims if claim.end is not None and claim.end < node.end]
            part = self._retainer.split(node, min(ends)) if ends else node
            self._kept.add(part)
            if not self._grant(part, claims):
                return False
            if part is node:
                break
        return True

    def _grant(self, part: Node, claims: Sequence[Claim]) -> bool:
        spent = [at for at in part.checkpoints.values() if at.is_spent]
        for each in spent:  # of earlier requests: this one retains the points where the conversation resumes
            self._retainer.take_back(each, claims[0].tenant)
        missing = self._retainer.grant(part, claims, self._kept, self._now)
        if missing:
            affordable = self._retainer.split_affordable(part, missing)
            if affordable is not None:
                self._kept.add(affordable)
                self._retainer.grant(affordable, claims, self._kept, self._now)
            return False
        checkpoints = [at for at in part.checkpoints.values() if at not in spent]
        missed = [self._retainer.grant(each, claims, self._kept, self._now) for each in reversed(checkpoints)]
        return not any(missed)
