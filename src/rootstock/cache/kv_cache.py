"""The cache's façade: one radix tree, a pool for each family, and who owns what while requests run.

The cycle of a request is `match` → `admit` → (`extend` → a forward → `commit`)* → `finish`. `preempt` and
`abort` end it early; what was computed stays findable in all three cases.

Invariant on which eviction and admission rest: *a lease uses every block of every node on its path*. Unpinned
nodes therefore form whole subtrees whose unused blocks can all be evicted, leaves first. Blocks of windows and states
are held by checkpoints alone, any of which can be dropped. So

    what can be had = what is free + what is cached

exactly, in rows of each pool and in bytes, known without looking at the tree. `check()` recounts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool
from rootstock.cache.checkpoints import Boundary, Checkpoint, CheckpointKind, TailBlocks
from rootstock.cache.eviction import EvictionPolicy, MostValuableLast
from rootstock.cache.explain import Explanation, explain_match
from rootstock.cache.families import Family
from rootstock.cache.integrity import check_cache
from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.lease import Admitted, BlockTable, Deferred, Extended, Lease, LeaseId, Match
from rootstock.cache.plan import NOTHING, BlockCopy, Load, Plan, RowPart, StateCopy, Store
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree, Want
from rootstock.cache.radix_node import NO_TOKENS, block_table, continuation, replaced_blocks
from rootstock.cache.resume_point import needed_tail, resume_point
from rootstock.cache.stats import CacheStats, Counters, FamilyStats
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockId, BlockIds, SlotId, Tokens
from rootstock.cache.write_back import WriteBackQueue

# A checkpoint at the end of a prompt that has another so few tokens before it goes when the answer has left its own.
CLOSE_TOKENS = 32


class KVCache:
    """Framework-free and single-threaded: the engine's thread owns it.

    `families` say what must be kept and what it costs; `budget_bytes` pays for all of it. `rows` divides the budget
    among the families' pools beforehand, for devices that cannot move memory between them. With `reuse=False`
    nothing is ever published or found: the same engine without a prefix cache. `stored` tells what a tier below
    holds; then plans carry stores, `through`: of all that is published. Raises BudgetTooSmall.
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
    ) -> None:
        self.block_size = block_size
        self.stored = stored if reuse else None
        self._through = through
        self.families = tuple(families)
        self.budget_bytes = budget_bytes
        self.reuse = reuse
        self.counters = Counters()
        self._policy = MostValuableLast() if policy is None else policy
        self._clock = clock
        self._fixed_rows = rows
        self._next_lease = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.pools = Pools(self.families, self.budget_bytes, self.block_size, self._fixed_rows)
        self.spill = (
            None if self.stored is None else WriteBackQueue(self.pools, self.stored, through=self._through)
        )
        self.tree = PrefixTree(self.pools, self._policy, self._clock, self.counters, self.spill)
        self._leases: dict[LeaseId, Lease] = {}
        order = {tail.table: i for i, tail in enumerate(self.pools.tails)}
        self._no_tails = tuple(TailBlocks(0, NO_BLOCKS) for _ in self.pools.tails)
        self._order = tuple(order.get(table, -1) for table in range(self.pools.tables))

    @property
    def pool(self) -> BlockPool:
        """The full family's."""
        return self.pools.full.pool

    @property
    def block_bytes(self) -> int:
        """Of a block in every family that has blocks: what the newest block_size positions of a request take."""
        return self.pools.full.row_bytes + sum(tail.row_bytes for tail in self.pools.tails)

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each family's pool, in the model's order: what a runtime allocates."""
        return self.pools.rows

    @property
    def resume_anywhere(self) -> bool:
        """Whether a prefix can be resumed wherever it was found, so that checkpoints have no use."""
        return self.pools.resume_anywhere

    @property
    def capacity_tokens(self) -> int:
        """Positions that one request can have when it is alone."""
        fits, too_many = 0, self.pool.total_blocks + 1
        while too_many - fits > 1:
            blocks = (fits + too_many) // 2
            if self.pools.can_ever_have(self._rows_alone(blocks)):
                fits = blocks
            else:
                too_many = blocks
        return fits * self.block_size

    def _rows_alone(self, blocks: int) -> Rows:
        """Rows of each pool that a request of so many blocks uses, computed in small steps."""
        tails = (min(blocks, self._most_tail_rows(i)) for i in range(len(self.pools.tails)))
        return [blocks, *tails, *(() if self.pools.states is None else (1,))]

    def _most_tail_rows(self, i: int) -> int:
        """Blocks that hold the longest tail of a family wherever it begins, and one to copy a shared one from."""
        return -(-(self.pools.tails[i].family.longest_tail + 1) // self.block_size) + 2

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ------------------------------------------------------------------------------------------ asking

    def match(self, tokens: Tokens, namespace: Namespace, at_most: int | None = None) -> Match:
        """Where these tokens can resume. Changes nothing.

        The last token is always left to compute, since its logits are what a request is for; `at_most` lowers
        the limit further, for requests that need the logits of earlier positions.
        """
        limit = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        reached = self.tree.find(tokens, namespace)
        if reached is None:
            return Match(tokens, namespace, 0, 0, None, None, self.tree.version, max(limit, 0))
        node, found = reached
        if self.pools.resume_anywhere:
            pending = self.tree.pending(node, found, found, tokens, limit) if self._leases else None
            length = max(min(found, limit), 0)
            return Match(tokens, namespace, length, found, node, pending, self.tree.version, max(limit, 0))
        resume = resume_point(node, max(min(found, limit), 0), self.pools)
        pending = self.tree.pending(node, found, resume.position, tokens, limit) if self._leases else None
        return Match(
            tokens,
            namespace,
            resume.position,
            found,
            node,
            pending,
            self.tree.version,
            max(limit, 0),
            resume.capped_by,
            resume.checkpoint,
            resume.tails,
        )

    def reach(self, match: Match) -> TierHit | None:
        """How much deeper this match would go with what the tier below holds; None: no deeper. Changes nothing."""
        if self.stored is None:
            return None
        return self.stored.reach(match.tokens, match.namespace, match.length, match.found, match.limit)

    def following(self, lease: Lease, last: int, most: int) -> Tokens:
        """What came once after all that this lease has, and the token `last`: at most `most` tokens, a guess at what
        comes now. Changes nothing."""
        if lease.tip is None or not lease.tip.children:
            return NO_TOKENS
        unpublished = np.empty(lease.known - lease.published + 1, np.int32)
        unpublished[:-1] = lease.tokens[lease.published :]
        unpublished[-1] = last
        return continuation(lease.tip, unpublished, most)

    def explain(self, tokens: Tokens, namespace: Namespace) -> Explanation:
        """Why a request with these tokens hits what it hits, and what stopped it there. Changes nothing."""
        return explain_match(self.match(tokens, namespace), self.reuse)

    # --------------------------------------------------------------------------- the cycle of a request

    def admit(
        self,
        match: Match,
        headroom_blocks: int = 0,
        boundaries: Sequence[Boundary] = (),
        reach: TierHit | None = None,
        *,
        counted: bool = True,
    ) -> Admitted | Deferred:
        """Reserves what the prompt needs and pins what it hits, or changes nothing at all.

        With `reach`, made of this very match, it hits what memory has below it, and is to be loaded the rest. What is
        not `counted` is nobody's request.

        `headroom_blocks` of every family must remain available afterwards, for requests that are running already.
        Checkpoints will be left at the `boundaries` and where the prompt parts from what is cached. The plan copies
        the shared part of a block that the prompt diverges in, and restores the state.
        """
        assert len(match.tokens) > 0
        if reach is not None:
            assert match.version == self.tree.version, "a reach stands as long as its match"
            match = replace(match, length=reach.base, checkpoint=None, tails=())
        else:
            if match.version != self.tree.version:
                match = self.match(match.tokens, match.namespace, match.limit)
            match = self._verified(match)
        size, pool, pools = self.block_size, self.pool, self.pools
        hit, node = match.length, match.node
        while node is not None and hit <= node.start and not node.is_root:
            node = node.parent  # the cap moved the position to an ancestor's end
        attached, resumed_from = (node, match.checkpoint) if hit else (None, None)
        path_table, replaced = NO_BLOCKS, []
        if attached is not None:
            path_table = block_table(attached, hit, size)
            replaced = replaced_blocks(attached, path_table, size)
        owned = np.concatenate((path_table, np.array(replaced, np.int32))) if replaced else path_table
        shared = path_table
        if hit % size:  # the last block of the path will be replaced by a copy
            shared = path_table[:-1]
            replaced.append(int(path_table[-1]))
        tails = match.tails or self._no_tails
        rows = self._rows_to_admit(match.tokens, hit, tails, headroom_blocks)
        to_load = [0] * len(pools.tails) if reach is None else self._tail_rows_to_load(reach)
        for i, loaded in enumerate(to_load, 1):
            rows[i] = max(rows[i], loaded + headroom_blocks)
        # What the hit would use is counted exactly only where it matters.
        if not pools.can_have(rows, self._most_rows_of(owned, tails, resumed_from)):
            kept = self._cached_rows_of(owned, tails, resumed_from)
            if reach is None and not pools.can_have(rows, kept) and (replaced or kept[1:]):
                # Without pinning the path its replaced tails can go; without copying, so can the shared tail. What
                # can be resumed at one position only is given up.
                if pools.resume_anywhere:
                    hit -= hit % size
                else:
                    hit, shared, tails, resumed_from = 0, NO_BLOCKS, self._no_tails, None
                attached, replaced, owned = None, [], shared
                rows = self._rows_to_admit(match.tokens, hit, tails, headroom_blocks)
                kept = self._cached_rows_of(owned, tails, resumed_from)
            if not pools.can_have(rows, kept):
                return Deferred(pools.cost(rows), pools.available_bytes - pools.cost(kept))

        # Nothing can fail from here on. The hit is pinned before room is made for the rest.
        pool.use(owned)
        lease = self._lease(match, hit, shared, tails, resumed_from)
        if attached is not None:
            if hit < attached.end:
                attached = self.tree.split(attached, hit)
            lease.replaced = replaced
            self.tree.attach(lease, attached)
        elif self.reuse and hit == 0:
            self.tree.attach(lease, self.tree.root_of(match.namespace))
        fresh_blocks = self.blocks_for(len(match.tokens)) - hit // size
        fresh = [n + (source is not None) for n, source in zip(to_load, lease.sources, strict=True)]
        self.tree.make_room([fresh_blocks, *fresh, *(() if pools.states is None else (1,))])
        plan = self._first_plan(lease, path_table, fresh_blocks)
        self._plan_cuts(lease, match, boundaries)
        if reach is not None:
            return Admitted(lease, plan, self._loads(lease, reach))
        if counted:
            self.counters.admitted(len(match.tokens), hit)
        return Admitted(lease, plan)

    def _tail_rows_to_load(self, reach: TierHit) -> Rows:
        return [sum(block.family == tail.index for block in reach.blocks) for tail in self.pools.tails]

    def _loads(self, lease: Lease, reach: TierHit) -> tuple[Load, ...]:
        """Gives the lease the rows of windows that are to be loaded, and says what belongs into which row."""
        tables = {self.pools.full.index: lease._full}
        for tail, table in zip(self.pools.tails, lease._tails, strict=True):
            tables[tail.index] = table
            wanted = [block.index for block in reach.blocks if block.family == tail.index]
            table.begin_at(min(wanted, default=reach.position // self.block_size))
            table.grow(tail.pool.allocate(len(wanted)))
        loads = [
            Load(
                block.identity,
                RowPart(block.family, int(tables[block.family].ids[block.index]), len(block.identity.tokens)),
            )
            for block in reach.blocks
        ]
        if reach.state is not None:
            assert self.pools.states is not None
            loads.append(Load(reach.state, RowPart(self.pools.states.index, lease.slot, 0)))
        if not self.pools.resume_anywhere and lease.tip is not None:
            # Others come by as well; and where what is stored goes on, this prompt parts from it.
            lease.cuts.setdefault(reach.position, CheckpointKind.DIVERGENCE)
            if reach.position < reach.found <= lease.known:
                lease.cuts.setdefault(reach.found, CheckpointKind.DIVERGENCE)
        return tuple(loads)

    def loaded(self, lease: Lease, position: int) -> Plan:
        """Everything that was to be loaded is in its rows, verified: the lease goes on from `position`, and others
        find what it loaded. Execute the plan at once."""
        assert not lease.ended
        if lease.tip is None:  # it let go of its path: nobody asks for it any more, but others will find it
            lease.published = 0
            self.tree.attach(lease, self.tree.root_of(lease.namespace))
        else:
            self.counters.admitted(lease.prompt_tokens, position)
            self.counters.loaded_tokens += position - lease.computed
        plan = self.commit(lease, lease.tokens[lease.computed : position])
        lease.hit_tokens, lease.is_loaded = position, True
        return plan

    def let_go(self, lease: Lease) -> None:
        """Nobody finds what is being loaded for this lease, or waits for it, before it is there."""
        self.tree.detach(lease)

    def _verified(self, match: Match) -> Match:
        """Refuses a checkpoint that is not of exactly this prefix. It cannot happen; if it does, it is a miss."""
        while (checkpoint := match.checkpoint) is not None:
            prefix = match.tokens[: checkpoint.position]
            right = checkpoint.position == match.length
            if right and checkpoint.digest == prefix_digest(match.namespace, prefix):
                break
            self.counters.checkpoints_refused += 1
            self.tree.drop(checkpoint)
            match = self.match(match.tokens, match.namespace, match.limit)
        return match

    def _rows_to_admit(
        self, tokens: Tokens, hit: int, tails: Sequence[TailBlocks], headroom_blocks: int
    ) -> Rows:
        """Rows of each pool that must be had: the prompt's, those of its first chunk's tails, a working state."""
        rows = [self.blocks_for(len(tokens)) - hit // self.block_size + headroom_blocks]
        for i in range(len(self.pools.tails)):
            shared = _whole(tails[i], hit, self.block_size)
            needed = self.blocks_for(len(tokens)) - hit // self.block_size
            rows.append(max(0, min(needed, self._most_tail_rows(i) - len(shared))) + headroom_blocks)
        if self.pools.states is not None:
            rows.append(1)
        return rows

    def _most_rows_of(
        self, owned: BlockIds, tails: Sequence[TailBlocks], checkpoint: Checkpoint | None
    ) -> Rows:
        """As `_cached_rows_of`, if nobody uses any of them: at least as many, for less."""
        kept = [len(owned), *(len(tail.ids) for tail in tails)]
        return kept if self.pools.states is None else [*kept, int(checkpoint is not None)]

    def _cached_rows_of(
        self, owned: BlockIds, tails: Sequence[TailBlocks], checkpoint: Checkpoint | None
    ) -> Rows:
        """Rows that nobody uses yet and that the hit would use: they cannot be evicted for it."""
        kept = [self.pool.unused_among(owned)]
        for i, tail in enumerate(self.pools.tails):
            kept.append(tail.pool.unused_among(tails[i].ids))
        if self.pools.states is not None:
            slot = NO_SLOT if checkpoint is None else checkpoint.slot
            kept.append(self.pools.states.pool.unused_among(self.pools.slot_rows(slot)))
        return kept

    def _lease(
        self,
        match: Match,
        hit: int,
        shared: BlockIds,
        tails: Sequence[TailBlocks],
        resumed_from: Checkpoint | None,
    ) -> Lease:
        """Uses the tail blocks and the state that the hit reads."""
        tables = []
        sources: list[TailBlocks | None] = []
        for i, tail in enumerate(self.pools.tails):
            whole = _whole(tails[i], hit, self.block_size)
            ids = np.full(hit // self.block_size, NO_BLOCK, np.int32)
            ids[len(ids) - len(whole) :] = whole
            tables.append(BlockTable(ids, len(ids) - len(whole)))
            partly = tails[i].ids[len(whole) :]  # at most one, filled in part
            sources.append(TailBlocks(hit // self.block_size, partly) if len(partly) else None)
            tail.pool.use(tails[i].ids)
        lease = Lease(
            LeaseId(self._next_lease),
            match.namespace,
            match.tokens,
            hit,
            BlockTable(shared),
            tables,
            self._order,
        )
        lease.sources = sources
        self._next_lease += 1
        self._leases[lease.id] = lease
        if resumed_from is not None:
            lease.resumed_from = resumed_from
            self.tree.pin(resumed_from)
            if self.pools.states is not None:
                self.pools.states.pool.use(self.pools.slot_rows(resumed_from.slot))
        return lease

    def _first_plan(self, lease: Lease, path_table: BlockIds, fresh_blocks: int) -> Plan:
        """Gives the lease its prompt's blocks and its working state; copies what it shares in part."""
        size, hit = self.block_size, lease.hit_tokens
        fresh = self.pool.allocate(fresh_blocks, lease._full.last)
        lease._full.grow(fresh)
        copies = []
        if hit % size and self.pools.full.table >= 0:
            source, target = BlockId(int(path_table[-1])), BlockId(int(fresh[0]))
            copies.append(BlockCopy(source, target, hit % size, self.pools.full.table))
        for tail, table, partly in zip(self.pools.tails, lease._tails, lease.sources, strict=True):
            if partly is not None:
                target_ids = tail.pool.allocate(1, table.last)
                table.grow(target_ids)
                source, target = BlockId(int(partly.ids[0])), BlockId(int(target_ids[0]))
                copies.append(BlockCopy(source, target, hit % size, tail.table))
        self.counters.copied_blocks += len(copies)
        states: tuple[StateCopy, ...] = ()
        if self.pools.states is not None:
            lease.slot = SlotId(int(self.pools.states.pool.allocate(1)[0]))
            if lease.resumed_from is not None:
                states = (StateCopy(lease.resumed_from.slot, lease.slot),)
        return Plan(copies=tuple(copies), states=states) if copies or states else NOTHING

    def _plan_cuts(self, lease: Lease, match: Match, boundaries: Sequence[Boundary]) -> None:
        """Where the prefill is cut to leave a checkpoint: at the prompt's end, at its boundaries, and where it parts
        from what is cached already, since that is where others were seen to part."""
        if self.pools.resume_anywhere or lease.tip is None:
            return
        lease.cuts[lease.known] = CheckpointKind.PROMPT
        parts_at = min(match.found, match.limit)
        if parts_at > lease.hit_tokens:
            lease.cuts[parts_at] = CheckpointKind.DIVERGENCE
        for boundary in boundaries:
            if lease.hit_tokens < boundary.position <= lease.known:
                lease.cuts[boundary.position] = boundary.kind

    def ask_for_checkpoint(self, lease: Lease, position: int) -> None:
        """Another request waits for this one and will part from it at `position`, which is not computed yet."""
        if not self.pools.resume_anywhere and lease.computed < position <= lease.known:
            lease.cuts.setdefault(position, CheckpointKind.DIVERGENCE)
            lease.waited_for.add(position)

    def extend(self, lease: Lease, new_tokens: int, headroom_blocks: int = 0) -> Extended | Deferred:
        """Reserves what the next `new_tokens` positions need, before the forward that computes them.

        If blocks must be had for them, `headroom_blocks` of every family must remain available afterwards. Blocks
        behind the windows are released first, for good, also if the answer is Deferred.
        """
        if lease._tails:
            self._release_behind(lease)
        blocks = self.blocks_for(lease.computed + new_tokens)
        missing = [max(0, blocks - lease.table_blocks), *(max(0, blocks - t.length) for t in lease._tails)]
        if not any(missing):
            return _EXTENDED
        pools = self.pools
        rows = [*missing, *(() if pools.states is None else (0,))]
        if headroom_blocks:
            spare = [headroom_blocks] * len(missing)
            wanted = [*(a + b for a, b in zip(missing, spare, strict=True)), *rows[len(missing) :]]
            if not pools.can_have(wanted):
                return Deferred(pools.cost(wanted), pools.available_bytes)
        if not pools.can_have(rows):
            # Without its path's pins, the replaced tails that only this lease uses can be evicted, too.
            gained = pools.full.pool.used_once_among(np.array(lease.replaced, np.int32))
            besides = [-gained, *([0] * (len(rows) - 1))]
            # Else its first plan has yet to read them.
            started = lease.is_loaded or lease.computed > lease.hit_tokens
            # Who lets go can leave no checkpoint on the way: a shorter chunk is better, while there is one.
            may_let_go = lease.tip is not None and started and new_tokens == 1
            if not may_let_go or not gained or not pools.can_have(rows, besides):
                return Deferred(pools.cost(rows), pools.available_bytes)
            self.tree.detach(lease)
        self.tree.make_room(rows)
        if missing[0]:
            lease._full.grow(self.pool.allocate(missing[0], lease._full.last))
        for tail, table, count in zip(pools.tails, lease._tails, missing[1:], strict=True):
            if count:
                table.grow(tail.pool.allocate(count, table.last))
        return _EXTENDED

    def _release_behind(self, lease: Lease) -> None:
        for tail, table in zip(self.pools.tails, lease._tails, strict=True):
            released = table.release_before(tail.family.tail_start(lease.computed) // self.block_size)
            if len(released):
                tail.pool.unuse(released)
                self.tree.version += 1

    def commit(self, lease: Lease, tokens: Tokens) -> Plan:
        """What is kept of `tokens`, which follow what was computed, is in the pools now.

        Prompt chunks can be found at once, generated tokens a block at a time. Where another request has
        published the same prefix meanwhile, its blocks replace ours and ours are released. The plan keeps the state
        as a checkpoint where one is due; execute it before the next forward.
        """
        assert not lease.ended
        assert self.blocks_for(lease.computed + len(tokens)) <= lease.table_blocks, "computed without blocks"
        first = lease.published
        lease._append(tokens)
        self._release_sources(lease)
        kind = lease.cuts.pop(lease.computed, None)
        if lease.cuts and lease.next_cut is not None and lease.next_cut < lease.computed:
            lease.cuts = {at: k for at, k in lease.cuts.items() if at > lease.computed}
        if lease.tip is not None and (
            kind is not None
            or lease.computed <= lease.prompt_tokens
            or lease.computed // self.block_size > lease.published // self.block_size
        ):
            self.tree.publish(lease)
            if self.spill is not None:
                self.spill.published(lease, first)
            if kind is not None:
                return self._with_stores(self._leave_copy(lease, kind))
            return self._with_stores(NOTHING)
        return NOTHING

    def _with_stores(self, plan: Plan) -> Plan:
        stores = () if self.spill is None else self.spill.take()
        return replace(plan, stores=stores) if stores else plan

    def _release_sources(self, lease: Lease) -> None:
        """What the first plan read is not needed any more."""
        if lease.sources:
            for tail, source in zip(self.pools.tails, lease.sources, strict=True):
                if source is not None:
                    tail.pool.unuse(source.ids)
            self.tree.version += 1  # references to them may be void now
            lease.sources = []
        if lease.resumed_from is not None:
            if self.pools.states is not None:
                self.pools.states.pool.unuse(self.pools.slot_rows(lease.resumed_from.slot))
            self.tree.unpin(lease.resumed_from)
            lease.resumed_from = None

    def make_way(self) -> Plan:
        """What must happen before anything is written to rows that were reserved since: what was evicted from them
        goes to the tier below, and free rows give memory back, so that the budget holds for what is really taken."""
        plan = self._with_stores(NOTHING)
        if self.pools.backed_bytes <= self.pools.budget_bytes or self._fixed_rows is not None:
            return plan
        return replace(plan, returned=tuple(self.pools.give_back()))

    # ------------------------------------------------------------------------------------- checkpoints

    def _leave_copy(self, lease: Lease, kind: CheckpointKind) -> Plan:
        """A checkpoint where the lease is now, if that does not cost anything that is worth more."""
        if self._there_already(lease, kind):
            return NOTHING
        states = self.pools.states
        if states is None:
            self._keep(lease, kind, NO_SLOT)
            return NOTHING
        checkpoint = self._checkpoint(lease, kind, NO_SLOT)
        rows = [0] * (len(self.pools.every) - 1) + [1]
        # Nobody's claim hangs on a new checkpoint yet, but whoever waits for it must not wait in vain.
        rank = (lease.computed in lease.waited_for, self._policy(checkpoint))
        if not self.pools.can_have(rows) or not self.tree.make_room_below(rows, rank):
            self.counters.checkpoints_skipped += 1
            return NOTHING
        ids = states.pool.allocate(1)
        checkpoint.slot = SlotId(int(ids[0]))
        self.tree.keep(checkpoint)
        states.pool.unuse(ids)
        lease.left.append(checkpoint)
        if self.spill is not None:
            self.spill.left(checkpoint, lease)
        return Plan(states=(StateCopy(lease.slot, checkpoint.slot),))

    def _leave_own(self, lease: Lease) -> None:
        """The lease ends: its working state becomes a checkpoint as it is."""
        kind = CheckpointKind.PROMPT if lease.computed <= lease.prompt_tokens else CheckpointKind.ANSWER
        if not self._there_already(lease, kind):
            self._keep(lease, kind, lease.slot)
        for earlier in lease.left:
            # Superseded: the answer's end is where the conversation goes on, and a closer one is near enough.
            if (
                earlier.node is not None
                and earlier.kind is CheckpointKind.PROMPT
                and earlier.position < lease.computed
                and earlier.is_idle
                and earlier.start
                and earlier.position - earlier.start < CLOSE_TOKENS
            ):
                self.tree.drop(earlier)

    def _there_already(self, lease: Lease, kind: CheckpointKind) -> bool:
        assert lease.tip is not None
        assert lease.tip.end == lease.computed
        there = lease.tip.checkpoints.get(lease.computed)
        if there is None:
            return False
        there.last_used = self._clock()
        return True

    def _keep(self, lease: Lease, kind: CheckpointKind, slot: SlotId) -> None:
        checkpoint = self._checkpoint(lease, kind, slot)
        self.tree.keep(checkpoint)
        lease.left.append(checkpoint)
        if self.spill is not None:
            self.spill.left(checkpoint, lease)

    def _checkpoint(self, lease: Lease, kind: CheckpointKind, slot: SlotId) -> Checkpoint:
        assert lease.tip is not None
        position, size = lease.computed, self.block_size
        tails = tuple(
            needed_tail(tail.family, table.ids, position, size)
            for tail, table in zip(self.pools.tails, lease._tails, strict=True)
        )
        assert all((held.ids != NO_BLOCK).all() for held in tails), (
            "a window lost a block that it still needs"
        )
        size_bytes = sum(
            len(held.ids) * tail.row_bytes for held, tail in zip(tails, self.pools.tails, strict=True)
        )
        size_bytes += 0 if self.pools.states is None else self.pools.states.row_bytes
        token_bytes = max(1, self.pools.full.row_bytes // size)
        return Checkpoint(
            lease.tip,
            position,
            prefix_digest(lease.namespace, lease.tokens[:position]),
            kind,
            tails,
            slot,
            max(size_bytes, 1) / token_bytes,
            self._clock(),
        )

    # ------------------------------------------------------------------------------------------- ends

    def finish(self, lease: Lease) -> None:
        """The request is complete: what it computed stays findable, what it owned is released."""
        self._end(lease)

    def unload(self, lease: Lease) -> None:
        """What was to be loaded for it was not: it ends as if it had never been admitted."""
        self._end(lease, state_is_right=False)

    def preempt(self, lease: Lease) -> None:
        """The request makes room for others and will be admitted again."""
        self.counters.preemptions += 1
        self._end(lease)

    def discard(self, lease: Lease) -> None:
        """What the request computed may be wrong: none of it is published, and what can be is taken back.

        What others share already stays with them; they computed upon it.
        """
        tip = lease.tip
        if tip is None and self.reuse:
            # It let go of its path, but what it had published by then is there still.
            reached = self.tree.find(lease.tokens[: lease.published], lease.namespace)
            tip = None if reached is None else reached[0]
        lease.computed = lease.published
        self._end(lease, state_is_right=False)
        if self.spill is not None:
            self.spill.distrust(lease.tokens, lease.namespace, lease.hit_tokens)
        for checkpoint in lease.left:
            if checkpoint.node is not None:
                self.tree.drop(checkpoint)
        self.tree.retract(tip, lease.hit_tokens)

    def abort(self, lease: Lease) -> None:
        """The request is not wanted any more. What it has computed is as good as any."""
        self._end(lease)

    def fail(self, lease: Lease) -> None:
        """Its forward raised: what was computed before stays, the working state may be half advanced and goes."""
        self._end(lease, state_is_right=False)

    def _end(self, lease: Lease, state_is_right: bool = True) -> None:
        assert not lease.ended, "a lease was ended twice"
        pools = self.pools
        if self.reuse and lease.tip is None and lease.computed > lease.published:
            # It let go of its path to get blocks; its table still holds every position from 0 on.
            lease.published = 0
            self.tree.attach(lease, self.tree.root_of(lease.namespace))
        if lease.tip is not None:
            first = lease.published
            if lease.published < lease.computed:
                self.tree.publish(lease)
            if self.spill is not None and lease.computed > lease.hit_tokens:
                self.spill.published(lease, first, at_end=True)
            if state_is_right and lease.computed > lease.hit_tokens and not pools.resume_anywhere:
                self._leave_own(lease)
            self.tree.detach(lease)
        self._release_sources(lease)
        self.pool.unuse(lease.table)
        if lease._tails:
            for tail, table in zip(pools.tails, lease._tails, strict=True):
                tail.pool.unuse(table.owned)
            self.tree.version += 1  # references to them may be void now
        if pools.states is not None:
            pools.states.pool.unuse(pools.slot_rows(lease.slot))
        lease.ended = True
        del self._leases[lease.id]

    # ------------------------------------------------------------------------------- queued requests

    def want(self, match: Match) -> Want:
        """Until `unwant`, what this match found is evicted after everything that nobody waits for."""
        return self.tree.want(match)

    def is_current(self, want: Want | None) -> bool:
        """Whether the claim covers all that its request would hit now."""
        return self.tree.is_current(want)

    def unwant(self, want: Want) -> None:
        self.tree.unwant(want)

    # ---------------------------------------------------------------------------------- house-keeping

    def forget(self, tokens: Tokens, namespace: Namespace, first: int) -> None:
        """What is kept of these tokens from position `first` on is wrong: it goes, here and below, with all that
        follows it, as far as no running request uses it."""
        self.tree.forget(tokens, namespace, first)
        if self.spill is not None:
            self.spill.distrust(tokens, namespace, first, all_that_follows=True)

    def everything(self) -> tuple[Store, ...]:
        """What memory holds and the tier below lacks, what was used last comes last: for when memory is to go."""
        if self.spill is None:
            return ()
        nodes = sorted(self.tree.nodes(), key=lambda node: (node.last_used, -node.start))
        for node in nodes:
            self.spill.node(node)
        return self.spill.take()

    def clear(self, namespace: Namespace | None = None) -> int:
        """Drops every cached prefix that no running request uses, of all namespaces unless one is given; returns how
        many blocks that freed."""
        before = self.pool.free_blocks
        if namespace is None:
            self.tree.clear()
        else:
            self.tree.clear_namespace(namespace)
        if self.spill is not None:
            self.spill.forget(namespace)
        return self.pool.free_blocks - before

    def knows(self, namespace: Namespace) -> bool:
        """Whether anything of it is in memory, or in use."""
        root = self.tree.roots.get(namespace)
        return root is not None and not root.is_empty

    def reset(self) -> None:
        """Forgets everything, leases included: for an owner whose own state was lost."""
        for lease in self._leases.values():
            lease.ended = True
        version = self.tree.version
        self._start_empty()
        self.tree.version = version + 1  # no match of before stands

    def stats(self) -> CacheStats:
        """Recounted from the structures at each call: O(nodes)."""
        nodes = list(self.tree.nodes())
        checkpoints = [checkpoint for node in nodes for checkpoint in node.checkpoints.values()]
        pools = self.pools
        state_bytes = 0 if pools.states is None else pools.states.row_bytes
        tail_blocks = [
            len({int(b) for checkpoint in checkpoints for b in checkpoint.tails[i].ids}) * tail.row_bytes
            for i, tail in enumerate(pools.tails)
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
            families=tuple(
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
            ),
            checkpoints=len(checkpoints),
            checkpoint_bytes=len(checkpoints) * state_bytes + sum(tail_blocks),
            nodes=len(nodes),
            namespaces=len(self.tree.roots),
            cached_tokens=sum(node.end - node.start for node in nodes),
            leases=len(self._leases),
            **self.counters.as_dict(),
        )

    def check(self) -> None:
        """Asserts every invariant by recounting: O(blocks + nodes + leases). For tests and idle time."""
        check_cache(self.pools, self.tree, list(self._leases.values()))


def _whole(tail: TailBlocks, position: int, block_size: int) -> BlockIds:
    """Those of the tail's blocks that are full up to `position`, and therefore shared rather than copied."""
    return tail.ids[: max(0, position // block_size - tail.first)]


_EXTENDED = Extended()
