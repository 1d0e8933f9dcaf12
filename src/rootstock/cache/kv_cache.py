"""The cache's façade: a radix tree of cached prefixes, a pool for each family, and the leases of running requests.

The cycle of a request is `match` → `admit` → (`extend` → a forward → `commit`)* → `release`. Computed tokens stay
findable after the release, for every `ReleaseReason`.

Admission and eviction rest on one invariant: *a lease uses every block of every node on its path*. Unreferenced
nodes therefore form whole subtrees whose unused blocks can all be evicted, leaves first. Window blocks and states are
held by checkpoints alone, and any checkpoint can be dropped. Therefore the equation

    available = free + cached

holds exactly, in rows of each pool and in bytes, and is evaluated without the tree. `check()` recounts it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rootstock.cache.admission import Admission
from rootstock.cache.arguments import (
    require_option,
    require_rows,
    require_share,
)
from rootstock.cache.block_pool import BlockPool
from rootstock.cache.checkpoint_writer import CheckpointWriter
from rootstock.cache.eviction import EvictionPolicy, MostValuableLast
from rootstock.cache.explain import Explanation, FoundRetention, explain_match
from rootstock.cache.families import Family, FullAttention, RecurrentState
from rootstock.cache.integrity import check_cache
from rootstock.cache.keys import Namespace, Scope, prefix_digest
from rootstock.cache.lease import Admitted, Deferred, Lease, LeaseId, Match, ReleaseReason
from rootstock.cache.longest_match import common_prefix, continuation
from rootstock.cache.plan import NOTHING, Plan, StateCopy, Store, together
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Boundary, HitProtection, Node
from rootstock.cache.resumable_blocks import ResumableBlocks, block_groups
from rootstock.cache.resume_point import resume_point
from rootstock.cache.retention.grants import keep_of
from rootstock.cache.retention.hint_decisions import MOST_SHARES, RETAINED_SHARE, Retainer
from rootstock.cache.retention.hint_types import CacheHints, HintOutcome, RetainedLimits, Verdict
from rootstock.cache.retention.pins import PINNED_SHARE, PinId, Pinned, PinRefused, Pins, pin_id
from rootstock.cache.retention.prefix_acts import PrefixActs
from rootstock.cache.retention.sessions import SessionTable
from rootstock.cache.retention.working_set import WorkingSet
from rootstock.cache.shared_budget import BudgetShare
from rootstock.cache.stats import CacheStats, Counters, FamilyStats, PoolUsage
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import NO_SLOT, NO_TOKENS, SlotId, Tokens
from rootstock.cache.volatile import Realignment, VolatileSpans, realignment
from rootstock.cache.write_back import WriteBackQueue
from rootstock.errors import BudgetTooSmall, CacheMisuse, InvalidOption, shown
from rootstock.option_table import in_library_words

_MOST_DIVERGED = 16  # prompts that wait for their comparison


class KVCache:
    """Cache of one model's prefixes. Framework-free and single-threaded: the engine's thread owns it.

    `families` define the model's memory and its cost; `budget_bytes` pays for all of it. `rows` divides the budget
    among the families' pools beforehand, for devices that cannot move memory between them. With `reuse=False`
    no prefix is ever published or found, as in an engine without a prefix cache. `stored` is the index of the tier
    below. With it, plans carry stores of evicted rows; with `through`, or if other servers share the tier
    (`stored_is_shared`), stores of all published rows. `retained_share`
    and `pinned_share` are the parts of the budget that hints and pins may keep, divided among tenants. `share` is the
    cache's part in a budget of several caches, and `budget_bytes` is then the whole budget. `lazy_states`: a state
    takes memory when its slot is written, although `rows` divide the budget. `announces`: the tree keeps the set of
    blocks up to which a request can resume (`ResumableBlocks`). Raises BudgetTooSmall.
    """

    def __init__(
        self,
        families: Sequence[Family],
        budget_bytes: int,
        block_size: int = 32,
        *,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        reuse: bool = True,
        rows: Sequence[int] | None = None,
        stored: StoredIndex | None = None,
        through: bool = False,
        retained_share: float = RETAINED_SHARE,
        pinned_share: float = PINNED_SHARE,
        share: BudgetShare | None = None,
        lazy_states: bool = False,
        stored_is_shared: bool = False,
        announces: bool = False,
    ) -> None:
        self._require_options(families, budget_bytes, block_size, rows)
        require_share("retained_share", retained_share)
        require_share("pinned_share", pinned_share)
        self._lazy_states = lazy_states
        self._announces = announces
        self._retained_share = retained_share
        self._pinned_share = pinned_share
        self.block_size = int(block_size)
        self.stored = stored if reuse else None
        self._through = through
        self._stored_is_shared = stored_is_shared
        self.families = tuple(families)
        self.budget_bytes = int(budget_bytes)
        self.reuse = reuse
        self.counters = Counters()
        self._policy = MostValuableLast() if policy is None else policy
        self._clock = clock
        self._fixed_rows = None if rows is None else [int(each) for each in rows]
        self.share = share
        self._retained_limits = RetainedLimits()
        self._lease_ids = itertools.count()
        try:
            self._start_empty()
        except BudgetTooSmall as error:
            raise in_library_words(error) from None

    @staticmethod
    def _require_options(families: Any, budget_bytes: Any, block_size: Any, rows: Any) -> None:
        """Raises InvalidOption."""
        allowed = "a list of families: one or more, of full attention and of recurrent states at most one"
        if not isinstance(families, Sequence) or not families:
            raise InvalidOption("families", shown(families), allowed)
        kinds = [type(family) for family in families]
        known = all(isinstance(family, Family) for family in families)
        if not known or kinds.count(FullAttention) > 1 or kinds.count(RecurrentState) > 1:
            raise InvalidOption("families", shown(families), allowed)
        require_option("budget_bytes", budget_bytes, 1)
        require_option("block_size", block_size, 1)
        if rows is not None:
            require_rows(rows, families)

    def _start_empty(self) -> None:
        pools = self.pools = Pools(
            self.families,
            self.budget_bytes,
            self.block_size,
            self._fixed_rows,
            self.share,
            lazy_states=self._lazy_states,
        )
        self.write_back = (
            None
            if self.stored is None
            else WriteBackQueue(
                pools, self.stored, through=self._through, shared=self._stored_is_shared, clock=self._clock
            )
        )
        resumable = ResumableBlocks(pools, len(block_groups(self.families))) if self._announces else None
        tree = self.tree = PrefixTree(
            pools, self._policy, self._clock, self.counters, self.write_back, resumable
        )
        self._volatile = VolatileSpans()
        self._diverged: list[tuple[Scope, Tokens, int]] = []  # prompts to compare, and where each diverged
        self._leases: dict[LeaseId, Lease] = {}
        self._sessions = SessionTable()
        retainer = self._retainer = Retainer(
            pools, tree, self.counters, self._clock, self._sessions, self._retained_share
        )
        retainer.limits = self._retained_limits
        if self.share is not None:
            self.share.attach(tree, self, retainer.retained)
        self._checkpoints = CheckpointWriter(
            pools, tree, self.counters, self._clock, self.write_back, retainer
        )
        self._admission = Admission(
            pools, tree, self.counters, self._checkpoints, self._lease_ids, self.reuse, retainer
        )
        self.working_set = WorkingSet(
            retainer, int(self._retained_share * pools.budget_bytes), self.share, self._clock
        )
        self._pins = Pins(int(self._pinned_share * pools.budget_bytes))
        self._acts = PrefixActs(tree, retainer, self.write_back, self._pins, self._pin_of, self.release_pin)

    @property
    def pool(self) -> BlockPool:
        """The full family's pool."""
        return self.pools.full.pool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of each family that has blocks. The newest `block_size` positions of a request take as
        much."""
        return self.pools.full.row_bytes + sum(window.row_bytes for window in self.pools.windows)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each family's pool, in the model's order, for a runtime to allocate."""
        return self.pools.rows

    @property
    def resume_anywhere(self) -> bool:
        """True if a cached prefix can be resumed at any position, so that checkpoints have no use."""
        return self.pools.resume_anywhere

    @property
    def has_requests(self) -> bool:
        """True if there are leases that belong to no pin."""
        return len(self._leases) > len(self._pins)

    @property
    def others_have_requests(self) -> bool:
        """True if requests of other models use memory of a shared budget, which they give back when they end."""
        return self.share is not None and self.share.others_have_requests

    @property
    def capacity_tokens(self) -> int:
        """Positions that one request can have when it is alone."""
        return self.pools.capacity_blocks * self.block_size

    # ----------------------------------------------------------------------------------------- queries

    def match(
        self, tokens: Tokens, namespace: Namespace, at_most: int | None = None, *, public_tokens: int = 0
    ) -> Match:
        """Finds the position at which these tokens can resume. Changes nothing.

        The last token is always left to compute, since the request needs its logits; `at_most` lowers the limit
        further, for requests that need the logits of earlier positions. The first `public_tokens` are shared with all
        salts.
        """
        return self._match(tokens, Scope(namespace, public_tokens), at_most)

    def _match(self, tokens: Tokens, scope: Scope, at_most: int | None = None) -> Match:
        limit = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        reached = self.tree.find(tokens, scope)
        if reached is None:
            return Match(tokens, scope, 0, 0, None, None, self.tree.version, max(limit, 0))
        node, found = reached
        at_most = max(min(found, limit), 0)
        if self.pools.resume_anywhere:
            pending = self.tree.pending(node, found, found, tokens, limit, scope) if self._leases else None
            return Match(tokens, scope, at_most, found, node, pending, self.tree.version, max(limit, 0))
        resume = resume_point(node, at_most, self.pools)
        pending = None
        if self._leases:
            pending = self.tree.pending(node, found, resume.position, tokens, limit, scope)
        return Match(
            tokens,
            scope,
            resume.position,
            found,
            node,
            pending,
            self.tree.version,
            max(limit, 0),
            resume.capped_by,
            resume.checkpoint,
            resume.windows,
        )

    def tier_hit(self, match: Match) -> TierHit | None:
        """Finds how much deeper this match would go with the records of the tier below. Returns None if it would go
        no deeper. Changes nothing."""
        if self.stored is None:
            return None
        return self.stored.tier_hit(match.tokens, match.scope, match.length, match.found, match.limit)

    def following(self, lease: Lease, last: int, most: int) -> Tokens:
        """Finds the tokens that once followed the lease's tokens and then the token `last`: at most `most` of them,
        as a draft of the next tokens. Changes nothing."""
        node = lease.node
        if node is None:
            return NO_TOKENS
        if (
            lease.num_cached_tokens == lease.scope.public_tokens
        ):  # its own tails follow, not a longer public head
            node = self.tree.private_root(node, lease.num_cached_tokens, lease.scope) or node
        if not node.children:
            return NO_TOKENS
        uncached = np.empty(lease.num_tokens - lease.num_cached_tokens + 1, np.int32)
        uncached[:-1] = lease.tokens[lease.num_cached_tokens :]
        uncached[-1] = last
        return continuation(node, uncached, most)

    def explain(self, tokens: Tokens, namespace: Namespace, *, public_tokens: int = 0) -> Explanation:
        """Tells how much of a prompt would hit, and why no more. Changes nothing."""
        return self.explain_hit(self.match(tokens, namespace, public_tokens=public_tokens))

    def explain_hit(self, match: Match) -> Explanation:
        """Tells how much a current match hits, and why no more. Changes nothing."""
        return explain_match(
            match, self.tree.evicted, self.reuse, self._realignment(match), self._retention_of(match)
        )

    def _realignment(self, match: Match) -> Realignment | None:
        """Finds where a prompt that diverges from the cached prefixes agrees with one of them again."""
        if not self._diverges(match):
            return None
        assert match.node is not None
        return realignment(match.node, match.found, match.tokens)

    def _retention_of(self, match: Match) -> FoundRetention | None:
        if match.node is None or not match.found:
            return None
        keep = keep_of(match.node, self._clock())
        is_pinned = any(_lies_above(match.node, pinned.lease.node) for pinned in self._pins.of(None))
        if keep is None:
            return FoundRetention(0.0, 0, True) if is_pinned else None
        return FoundRetention(keep.lasts_s, keep.priority, is_pinned)

    # --------------------------------------------------------------------------- the cycle of a request

    def admit(
        self,
        match: Match,
        watermark_blocks: int = 0,
        boundaries: Sequence[Boundary] = (),
        tier_hit: TierHit | None = None,
        *,
        counted: bool = True,
        is_idle: bool = False,
        comes_back: bool = False,
        hints: CacheHints | None = None,
    ) -> Admitted | Deferred:
        """Reserves the rows of a prompt and references its hit, or changes nothing at all. `Admission.admit` draws
        the layout of a prompt's blocks.

        `watermark_blocks` of every family must remain available afterwards, for running requests. Checkpoints will be
        left at the `boundaries` and where the prompt diverges from the cached prefix. The plan copies the shared part
        of a block that the prompt diverges in, and restores the state.

        `tier_hit` must come from this very match: the rest of the prefix is then loaded from the tier below.
        `comes_back` is True for a request that was admitted before.
        `counted=False` keeps an internal admission out of the hit statistics. The lease has the decisions about the
        `hints` (`Lease.hint_outcomes`). `is_idle` marks work that no request waits for: call `make_idle_room` before.
        Raises CacheMisuse for a tier hit that is out of date.
        """
        if tier_hit is not None:
            if match.version != self.tree.version:
                raise CacheMisuse(
                    "admit", "a tier hit is valid as long as its match, and the cache has changed"
                )
            match = replace(match, length=tier_hit.base, checkpoint=None, windows=())
        else:
            if match.version != self.tree.version:
                match = self._match(match.tokens, match.scope, match.limit)
            match = self._verified(match)
        session = None
        if hints is not None and hints.session is not None:
            session = self._sessions.find(hints.tenant, hints.session)
        # A request that comes back finds its own tokens, so its prompt is not observed again.
        share = self.share if counted and not comes_back else None
        known_tokens = 0 if share is None else self._known_tokens(match)
        answer = self._admission.admit(
            match, watermark_blocks, boundaries, tier_hit, is_idle, 0 if session is None else session.id
        )
        if isinstance(answer, Admitted):
            self._leases[answer.lease.id] = answer.lease
            if hints is not None and (counted or hints.retentions):
                self._retainer.begin(hints, answer.lease, comes_back=comes_back)
            elif counted:
                self._retainer.tenants.note(None, match.scope.namespace.salt, self._clock())
            if share is not None:
                share.observe_prompt(known_tokens, len(match.tokens))
            if counted and tier_hit is None:  # else `loaded` counts it
                self._count_admission(len(match.tokens), answer.lease.hit_tokens)
                self._note_divergence(match)
        return answer

    def make_idle_room(self, match: Match, tier_hit: TierHit | None = None) -> bool:
        """Makes the rows of a prompt free for idle work, without evicting anything of more value than it adds.

        Returns False if that is not possible. The match and the tier hit may be out of date afterwards.
        """
        return self._admission.make_idle_room(match, tier_hit)

    def has_free_rows(self, match: Match, tier_hit: TierHit | None = None) -> bool:
        """Returns whether the rows of a prompt are free without an eviction."""
        return self._admission.has_free_rows(match, tier_hit)

    def has_rows(self, match: Match) -> bool:
        """Returns whether the rows of a prompt are free, or can be evicted."""
        return self._admission.has_rows(match)

    def unasked_tokens(self, namespace: Namespace) -> int:
        """Returns how many tokens of idle work a namespace has that no request has used."""
        return self.tree.unasked_tokens[namespace]

    def _count_admission(self, prompt_tokens: int, hit_tokens: int) -> None:
        counters = self.counters
        counters.admissions += 1
        counters.asked_tokens += prompt_tokens
        counters.hit_tokens += hit_tokens
        counters.inside_block_tokens += hit_tokens % self.block_size
        counters.missed_tokens += prompt_tokens - hit_tokens

    def _known_tokens(self, match: Match) -> int:
        """Counts the leading tokens that are cached, or were before their eviction."""
        node, found = match.node, match.found
        if node is None or found < node.end or found == len(match.tokens):
            return found
        return found + self.tree.evicted.evicted_after(node, match.tokens[found:])

    def _diverges(self, match: Match) -> bool:
        """Returns whether a prompt diverges from the cached prefixes, and not only because of an eviction."""
        node, found = match.node, match.found
        if node is None or found >= len(match.tokens):
            return False
        return found < node.end or not self.tree.evicted.evicted_after(node, match.tokens[found:])

    def _note_divergence(self, match: Match) -> None:
        """Notes an admitted prompt that diverges, to be compared by `compare_diverged`."""
        if self._diverges(match):
            self._diverged.append((match.scope, match.tokens, match.found))
            if len(self._diverged) > _MOST_DIVERGED:
                self.compare_diverged()

    def compare_diverged(self) -> None:
        """Compares the prompts that have diverged since the last call with their siblings, for volatile spans.

        The engine calls it between two steps, so that the first token of a request does not wait for it.
        """
        diverged, self._diverged = self._diverged, []
        for scope, tokens, position in diverged:
            reached = self.tree.find(tokens[:position], scope)
            if reached is None or reached[1] < position:
                continue  # evicted since
            place = realignment(reached[0], position, tokens)
            if place is not None:
                self.counters.volatile_misses += 1
                self.counters.volatile_tokens += place.agreed
                self._volatile.add(scope.namespace, tokens, position, place, self._clock())

    @property
    def volatile(self) -> VolatileSpans:
        """The volatile spans of the prompts that were admitted until now."""
        self.compare_diverged()
        return self._volatile

    def _verified(self, match: Match) -> Match:
        """Drops a matched checkpoint whose digest differs from the prefix's, and matches again. Such a checkpoint is
        a bug in Rootstock, and a miss is better than a wrong answer."""
        while (checkpoint := match.checkpoint) is not None:
            prefix = match.tokens[: checkpoint.position]
            right = checkpoint.position == match.length
            namespace = match.scope.of(checkpoint.position)
            if right and checkpoint.digest == prefix_digest(namespace, prefix):
                break
            self.counters.checkpoints_refused += 1
            self.tree.drop(checkpoint)
            match = self._match(match.tokens, match.scope, match.limit)
        return match

    def loaded(self, lease: Lease, position: int) -> Plan:
        """Publishes loaded and verified rows up to `position`, from which the lease continues. Execute the plan at
        once."""
        if lease.node is None:  # detached: its request is gone, but others find the loaded prefix
            lease.num_cached_tokens = 0
            self.tree.attach(lease, self.tree.ensure_root(lease.scope.first))
        elif not lease.is_idle:
            self._count_admission(lease.prompt_tokens, position)
            self.counters.loaded_tokens += position - lease.num_computed_tokens
            session = self._sessions.get(lease.session)
            if session is not None:
                session.hit_tokens += position - lease.hit_tokens
        plan = self._commit(lease, lease.tokens[lease.num_computed_tokens : position])
        lease.hit_tokens, lease.is_loaded = position, True
        return plan

    def detach(self, lease: Lease) -> None:
        """Takes a lease whose load is under way out of the tree: no request waits for it before it is `loaded`."""
        if lease.hints is not None:
            self._retainer.retain(lease)
        self.tree.detach(lease)

    def request_checkpoint(self, lease: Lease, position: int) -> None:
        """Asks a running lease for a checkpoint at `position`, where a waiting request will diverge from it."""
        self._checkpoints.request(lease, position)

    def extend(
        self, lease: Lease, new_tokens: int, watermark_blocks: int = 0, *, is_least: bool = False
    ) -> Deferred | None:
        """Allocates the blocks of the next `new_tokens` positions, before the forward that computes them.

        If new blocks are needed, `watermark_blocks` of every family must remain available afterwards. Blocks
        behind the windows are released first, for good, also if the answer is Deferred. For one token, or with
        `is_least`, the lease may be detached from the tree: it leaves no more checkpoints.
        """
        return self._admission.extend(lease, new_tokens, watermark_blocks, is_least=is_least)

    def fork_state(self, lease: Lease) -> Plan | None:
        """Copies the working state of a lease into a second one, for a forward with a draft: a state cannot be taken
        back to before a token. `keep_fork` makes the second state the lease's own, after a forward all of whose rows
        count. Returns the plan to execute before the forward. None: there is no row for a second state."""
        states = self.pools.states
        if states is None:
            return NOTHING
        if lease.draft_slot == NO_SLOT:
            row = Rows(0, (0,) * len(self.pools.windows), 1)
            if not self.pools.can_allocate(row):
                return None
            self.tree.make_room(row)
            lease.draft_slot = SlotId(int(states.pool.allocate(1)[0]))
        return Plan(states=(StateCopy(lease.slot, lease.draft_slot),))

    def keep_fork(self, lease: Lease) -> None:
        """Makes the second working state of a lease its own. Call it before `commit`."""
        lease.slot, lease.draft_slot = lease.draft_slot, lease.slot

    def drop_fork(self, lease: Lease) -> bool:
        """Releases the second working state of a lease, since others need memory. Returns False if there is none."""
        if self.pools.states is None or lease.draft_slot == NO_SLOT:
            return False
        self.pools.states.pool.unuse(self.pools.slot_rows(lease.draft_slot))
        lease.draft_slot = NO_SLOT
        return True

    def commit(self, lease: Lease, tokens: Tokens) -> Plan:
        """Records that `tokens`, which follow the lease's computed tokens, are computed and in the pools.

        Prompt chunks can be found at once, generated tokens a block at a time. If another request has
        published the same prefix meanwhile, its blocks replace the lease's own, which are released. The plan
        keeps the state as a checkpoint where one is due. Execute it before the next forward.
        """
        return self._commit(lease, tokens)

    def _commit(self, lease: Lease, tokens: Tokens) -> Plan:
        first = lease.num_cached_tokens
        lease.append(tokens)
        self._release_copy_sources(lease)
        due = lease.take_due_checkpoints()
        fills_block = (
            lease.num_computed_tokens // self.block_size > lease.num_cached_tokens // self.block_size
        )
        is_prompt = lease.num_computed_tokens <= lease.prompt_tokens
        if lease.node is None or not (is_prompt or fills_block or due):
            return NOTHING
        self.tree.publish(lease)
        if self.write_back is not None:
            self.write_back.add_published(lease, first)
        plans = [self._checkpoints.leave(lease, each.position, each.kind) for each in due]
        return self._with_stores(together(plans))

    def take_pending_plan(self) -> Plan:
        """Takes the pending stores of evicted rows, and free rows whose memory must be returned to the system so that
        resident memory stays within the budget. Execute the plan before the next write to newly allocated rows."""
        plan = self._with_stores(NOTHING)
        if self._fixed_rows is not None or self.pools.excess_bytes <= 0:
            return plan
        return replace(plan, returned=tuple(self.pools.return_rows()))

    def return_memory(self, evicted_bytes: int = 0) -> Plan:
        """Plans to return the memory of all free rows to the system, where it is taken row by row. First evicts
        checkpoints with `evicted_bytes` of such memory, the least valuable first. Execute the plan at once."""
        if evicted_bytes > 0:
            self.tree.evict_checkpoints(evicted_bytes)
        plan, returned = self._with_stores(NOTHING), tuple(self.pools.return_free_rows())
        return replace(plan, returned=returned) if returned else plan

    def _with_stores(self, plan: Plan) -> Plan:
        stores = () if self.write_back is None else self.write_back.take()
        return replace(plan, stores=stores) if stores else plan

    def release(self, lease: Lease, reason: ReleaseReason) -> None:
        """Ends a lease: publishes all computed tokens and releases its rows. The working state becomes a checkpoint,
        unless the reason says that it is not the state after these tokens."""
        if reason is ReleaseReason.PREEMPTED:
            self.counters.preemptions += 1
        if self.reuse and lease.node is None and lease.num_computed_tokens > lease.num_cached_tokens:
            # The lease was detached to get blocks; its table still holds every position from 0 on.
            lease.num_cached_tokens = 0
            self.tree.attach(lease, self.tree.ensure_root(lease.scope.first))
        if lease.node is not None:
            first = lease.num_cached_tokens
            if lease.num_cached_tokens < lease.num_computed_tokens:
                self.tree.publish(lease)
            if lease.num_computed_tokens > lease.hit_tokens:
                if self.write_back is not None:
                    self.write_back.add_published(lease, first, at_end=True)
                if not self.pools.resume_anywhere and reason.keeps_state:
                    self._checkpoints.leave_at_end(lease)
        comes_back = reason in (ReleaseReason.PREEMPTED, ReleaseReason.UNUSED)
        if (hints := lease.hints) is not None:
            if hints.ends_session and not comes_back:
                self._acts.end_session(lease)
            self._retainer.retain(lease)
            if hints.acts and reason is ReleaseReason.FINISHED:
                self._acts.apply(lease, lease.prompt_tokens, lease.num_cached_tokens)
            self._retainer.end(lease, comes_back=comes_back)
        self._release_rows(lease)

    def end_turn(self, prompt: Tokens, namespace: Namespace, *, public_tokens: int = 0) -> None:
        """Notes that the answer to a prompt calls no tool: a person has to continue the conversation.

        Its end is evicted before others, until it is used again. Without effect if the prompt has several answers.
        """
        reached = self.tree.find(prompt, Scope(namespace, public_tokens))
        if reached is None or reached[1] < len(prompt):
            return
        leaf = reached[0]
        while len(leaf.children) == 1:
            (leaf,) = leaf.children.values()
        if not leaf.children:
            self._retainer.end_turn(leaf)

    def discard(self, lease: Lease) -> None:
        """Ends a lease whose rows cannot be trusted: publishes nothing, and removes its published tokens and
        checkpoints.

        Prefixes that other requests share already stay, because these requests have computed on top of them.
        """
        node = lease.node
        if node is None and self.reuse:
            # The lease was detached, but the tokens that it had published by then are still in the tree.
            reached = self.tree.find(lease.tokens[: lease.num_cached_tokens], lease.scope)
            node = None if reached is None else reached[0]
        if lease.hints is not None:
            self._retainer.end(lease, comes_back=False)
        self._release_rows(lease)
        if self.write_back is not None:
            self.write_back.distrust(lease.tokens, lease.scope, lease.hit_tokens)
        for checkpoint in lease.checkpoints:
            if checkpoint.node is not None:
                self.tree.drop(checkpoint)
        self.tree.retract(node, lease.hit_tokens)

    def _release_rows(self, lease: Lease) -> None:
        """Detaches the lease and releases every row that it uses."""
        pools = self.pools
        if lease.node is not None:
            self.tree.detach(lease)
        self._release_copy_sources(lease)
        pools.full.pool.unuse(lease.table)
        if lease.windows:
            for window, table in zip(pools.windows, lease.windows, strict=True):
                window.pool.unuse(table.owned)
            self.tree.version += 1  # weak references to them may be void now
        if pools.states is not None:
            pools.states.pool.unuse(pools.slot_rows(lease.slot))
            self.drop_fork(lease)
        lease.ended = True
        del self._leases[lease.id]

    def _release_copy_sources(self, lease: Lease) -> None:
        """Releases the window blocks and the checkpoint that the first plan has copied."""
        if lease.copy_sources:
            for window, source in zip(self.pools.windows, lease.copy_sources, strict=True):
                if source is not None:
                    window.pool.unuse(source.ids)
            self.tree.version += 1  # weak references to them may be void now
            lease.copy_sources = []
        if lease.resumed_from is not None:
            if self.pools.states is not None:
                self.pools.states.pool.unuse(self.pools.slot_rows(lease.resumed_from.slot))
            self.tree.unreference(lease.resumed_from)
            lease.resumed_from = None

    # --------------------------------------------------------------------------------- queued requests

    def protect(self, match: Match) -> HitProtection:
        """Protects the hit of a queued request: until `unprotect`, it is evicted after all unprotected prefixes."""
        return self.tree.protect(match)

    def is_current(self, protection: HitProtection | None) -> bool:
        """Returns True if the protection covers everything that its request would hit now."""
        return self.tree.is_current(protection)

    def unprotect(self, protection: HitProtection) -> None:
        self.tree.unprotect(protection)

    def limit_retained(self, limits: RetainedLimits) -> None:
        """Sets the limits of tenants for later requests and pins. Earlier grants and pins stay."""
        self._retained_limits = self._retainer.limits = limits

    def apply_hints(
        self, tokens: Tokens, namespace: Namespace, hints: CacheHints, *, public_tokens: int = 0
    ) -> tuple[HintOutcome, ...]:
        """Applies hints to the cached part of a prompt, without a request: at once, and within the same bounds.
        Returns the decisions. Execute the pending plan afterwards: rows may have to be stored."""
        match = self._whole_match(tokens, Scope(namespace, public_tokens))
        if not match.length:
            fields = [*(each.field for each in hints.retentions), *(each.field for each in hints.acts)]
            fields += [] if hints.session is None else [hints.session_field]
            return tuple(HintOutcome(one, Verdict.REFUSED, "none of the prefix is cached") for one in fields)
        lease = self._admission.pin(replace(match, tokens=match.tokens[: match.length]))
        self._leases[lease.id] = lease
        wishes = tuple(
            replace(wish, end=None) if (wish.end or 0) > match.length else wish for wish in hints.retentions
        )
        self._retainer.begin_alone(replace(hints, retentions=wishes), lease)
        outcomes = list(lease.hint_outcomes)
        for at, wish in enumerate(hints.retentions):
            asked = len(tokens) if wish.end is None else min(wish.end, len(tokens))
            if asked > match.length and outcomes[at].verdict is not Verdict.REFUSED:
                told = f"{match.length:,} of {asked:,} tokens are cached"
                reasons = "; ".join(filter(None, (told, outcomes[at].reason)))
                outcomes[at] = HintOutcome(wish.field, Verdict.CLIPPED, reasons)
        if hints.ends_session and lease.session:
            self._acts.end_session(lease)
            self._sessions.forget(hints.tenant, hints.session or "")
        self._retainer.retain(lease)
        self._acts.apply(lease, len(tokens), len(tokens))
        self._retainer.end(lease, comes_back=False)
        self._release_rows(lease)
        return (*outcomes, *lease.act_outcomes)

    # -------------------------------------------------------------------------------------------- pins

    def pin(
        self, tokens: Tokens, namespace: Namespace, tenant: str = "", *, public_tokens: int = 0
    ) -> Pinned | PinRefused:
        """Keeps a cached prefix until `release_pin`: as much of these tokens as is cached and can be resumed from. A
        prefix that the tenant has pinned already keeps its pin.

        Pinned rows are in use, and no request can have them. The pins of a tenant, and all together, are bounded.
        """
        if not self.reuse:
            return PinRefused("the prefix cache is switched off")
        match = self._whole_match(tokens, Scope(namespace, public_tokens))
        if not match.length:
            return PinRefused("none of the prefix is cached: send it in a request before, or warm it")
        name = pin_id(tenant, namespace, match.tokens[: match.length])
        if (pinned := self._pins.find(name)) is not None:
            return pinned
        size = match.length * self.tree.token_bytes
        if match.checkpoint is not None:
            size += match.checkpoint.size_bytes
        now = self._clock()
        tenants = min(self._retainer.tenants.count(now), MOST_SHARES)
        refused = self._pins.refusal(tenant, size, tenants, self._retainer.limits, self.share)
        if refused is not None:
            return refused
        lease = self._admission.pin(replace(match, tokens=match.tokens[: match.length]))
        self._leases[lease.id] = lease
        pinned = Pinned(name, tenant, match.length, len(tokens), size, lease)
        self._pins.add(pinned)
        return pinned

    def _whole_match(self, tokens: Tokens, scope: Scope) -> Match:
        # A token more, because a match always leaves the last one: the prefix itself is matched as a whole.
        return self._verified(self._match(np.append(tokens, np.int32(0)), scope, len(tokens)))

    def _pin_of(self, lease: Lease, tokens: int) -> Pinned | PinRefused:
        """Pins the first tokens of a lease for the tenant of its hints."""
        assert lease.hints is not None, "only hints pin"
        scope = lease.scope
        prefix = lease.tokens[:tokens].copy()
        return self.pin(prefix, scope.namespace, lease.hints.tenant, public_tokens=scope.public_tokens)

    def release_pin(self, pin: PinId, tenant: str | None = None) -> bool:
        """Releases a pinned prefix: it stays cached like any other. Returns False if there is no such pin, or if
        it belongs to another tenant than the given one."""
        pinned = self._pins.take(pin, tenant)
        if pinned is None:
            return False
        self._release_rows(pinned.lease)
        return True

    def pins(self, tenant: str | None = None) -> list[Pinned]:
        """Returns the pinned prefixes, of all tenants unless one is given; the oldest first."""
        return self._pins.of(tenant)

    def pinned_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes of one tenant's pins, or of all."""
        return self._pins.bytes_of(tenant)

    def drop_pin(self) -> bool:
        """Releases the newest pin, or else a pin of another cache that shares the budget, for a request that could
        not run otherwise. Returns False if there is no pin."""
        return self.drop_own_pin() or (self.share is not None and self.share.drop_pin_elsewhere())

    def drop_own_pin(self) -> bool:
        """Releases the newest pin of this cache. Returns False if there is none."""
        every = self._pins.of(None)
        if not every:
            return False
        self.counters.dropped_pins += 1
        return self.release_pin(every[-1].id)

    def _release_pins(self, namespace: Namespace | None) -> None:
        for pinned in self._pins.of(None):
            if namespace is None or pinned.lease.scope.has(namespace):
                self.release_pin(pinned.id)

    # ---------------------------------------------------------------------------------- house-keeping

    def forget(self, tokens: Tokens, namespace: Namespace, first: int, *, public_tokens: int = 0) -> None:
        """Removes wrong rows of these tokens from position `first` on, with everything that follows them, in memory
        and in the tier below, as far as no running request uses them. Releases the pins of these rows."""
        scope = Scope(namespace, public_tokens)
        for pinned in self._pins.of(None):
            lease = pinned.lease
            shared = common_prefix(lease.tokens, tokens)
            if lease.scope != scope:
                shared = min(shared, lease.scope.public_tokens, public_tokens)
            if shared > first:
                self.release_pin(pinned.id)
        self.tree.forget(tokens, scope, first)
        if self.write_back is not None:
            self.write_back.distrust(tokens, scope, first, all_that_follows=True)

    def take_all_stores(self) -> tuple[Store, ...]:
        """Takes stores of all rows that the tier below lacks, the last used at the end: for a shutdown."""
        if self.write_back is None:
            return ()
        nodes = sorted(self.tree.nodes(), key=lambda node: (node.last_used, -node.start))
        for node in nodes:
            self.write_back.add_node(node)
        return self.write_back.take()

    def clear(self, namespace: Namespace | None = None) -> int:
        """Drops every cached prefix that no running request uses, of all namespaces unless one is given. Releases
        pins as well. Returns the number of blocks that became free."""
        self._release_pins(namespace)
        before = self.pool.free_blocks
        if namespace is None:
            self.tree.clear()
        else:
            self.tree.clear_namespace(namespace)
        self.volatile.forget(namespace)
        if self.write_back is not None:
            self.write_back.forget(namespace)
        return self.pool.free_blocks - before

    def knows(self, namespace: Namespace) -> bool:
        """Returns True if any prefix of the namespace is cached or in use."""
        return any(not root.is_empty for root in self.tree.roots_of(namespace))

    def reset(self) -> None:
        """Forgets everything, leases included: for an owner whose own state was lost."""
        for lease in self._leases.values():
            lease.ended = True
        version = self.tree.version
        self._start_empty()
        self.tree.version = version + 1  # invalidates earlier matches

    def stats(self) -> CacheStats:
        """Returns counters and sizes, recounted from the structures at each call: O(nodes)."""
        nodes = list(self.tree.nodes())
        checkpoints = [checkpoint for node in nodes for checkpoint in node.checkpoints.values()]
        pools = self.pools
        state_bytes = 0 if pools.states is None else pools.states.row_bytes
        window_bytes = [
            len({int(b) for checkpoint in checkpoints for b in checkpoint.windows[i].ids}) * window.row_bytes
            for i, window in enumerate(pools.windows)
        ]
        return CacheStats(
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            budget_bytes=pools.budget_bytes,
            used_bytes=pools.owned_bytes,
            total_blocks=self.pool.total_blocks,
            free_blocks=self.pool.free_blocks,
            cached_blocks=self.pool.cached_blocks,
            live_blocks=self.pool.live_blocks,
            families=self.usage().families,
            checkpoints=len(checkpoints),
            checkpoint_bytes=len(checkpoints) * state_bytes + sum(window_bytes),
            nodes=len(nodes),
            namespaces=self.tree.namespaces,
            cached_tokens=sum(node.end - node.start for node in nodes),
            leases=len(self._leases) - len(self._pins),
            volatile_spans=len(self.volatile),
            retained_bytes=self.tree.ledger.charged_bytes,
            pinned_bytes=self._pins.bytes_of(None),
            pins=len(self._pins),
            sessions=len(self._sessions),
            **asdict(self.counters),
        )

    def usage(self) -> PoolUsage:
        """Reports the memory of each family's pool: O(1), unlike `stats`."""
        pools = self.pools
        families = tuple(
            FamilyStats(
                pool.family.name,
                pool.row_bytes,
                pool.pool.total_blocks,
                pool.pool.free_blocks,
                pool.pool.cached_blocks,
                pool.pool.live_blocks,
            )
            for pool in pools.every
            if pool.family is not None
        )
        counters = self.counters
        return PoolUsage(
            pools.budget_bytes, pools.owned_bytes, families, counters.hit_tokens, counters.inside_block_tokens
        )

    def check(self) -> None:
        """Asserts every invariant by recounting: O(blocks + nodes + leases). For tests and idle time."""
        check_cache(self.pools, self.tree, list(self._leases.values()))


def _lies_above(node: Node, other: Node | None) -> bool:
    """Returns whether `other` is the node itself or below it."""
    while other is not None and other is not node and other.end >= node.end:
        other = other.parent
    return other is node
