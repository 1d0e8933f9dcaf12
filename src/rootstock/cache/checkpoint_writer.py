"""Checkpoint writer: chooses the positions at which a lease leaves checkpoints, and makes the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rootstock.cache.keys import prefix_digest
from rootstock.cache.lease import Lease, Match
from rootstock.cache.plan import NOTHING, Plan, StateCopy
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Boundary, Checkpoint, CheckpointKind
from rootstock.cache.resume_point import needed_blocks
from rootstock.cache.retainer import Retainer
from rootstock.cache.stats import Counters
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import NO_BLOCK, NO_SLOT, SlotId
from rootstock.cache.write_back import WriteBackQueue

# A checkpoint at a prompt's end that saves fewer tokens is dropped once the answer has left its own.
CLOSE_TOKENS = 32


class CheckpointWriter:
    """Writer of checkpoints for models that cannot resume anywhere. For other models `request` does nothing."""

    def __init__(
        self,
        pools: Pools,
        tree: PrefixTree,
        counters: Counters,
        clock: Callable[[], float],
        write_back: WriteBackQueue | None,
        retainer: Retainer,
    ) -> None:
        self._retainer = retainer
        self._pools = pools
        self._tree = tree
        self._counters = counters
        self._clock = clock
        self._write_back = write_back

    # ------------------------------------------------------------------------------------------ positions

    def plan_positions(self, lease: Lease, match: Match, boundaries: Sequence[Boundary]) -> None:
        """Sets the positions at which the prefill pauses to leave a checkpoint: the prompt's end, its boundaries, and
        the point of divergence from the cached prefix, since other requests have diverged there before."""
        if lease.node is None:
            return
        lease.checkpoint_positions[lease.num_tokens] = CheckpointKind.PROMPT
        diverges_at = min(match.found, match.limit)
        if diverges_at > lease.hit_tokens:
            lease.checkpoint_positions[diverges_at] = CheckpointKind.DIVERGENCE
        for boundary in boundaries:
            if lease.hit_tokens < boundary.position <= lease.num_tokens:
                lease.checkpoint_positions[boundary.position] = boundary.kind
        if lease.hit_tokens < match.scope.public_tokens:  # all tenants diverge there
            lease.checkpoint_positions[match.scope.public_tokens] = CheckpointKind.SYSTEM

    def plan_loaded_positions(self, lease: Lease, tier_hit: TierHit) -> None:
        """Adds the position of a tier hit, which other requests will pass as well, and the point where the prompt
        diverges from the stored prefix."""
        if lease.node is None:
            return
        lease.checkpoint_positions.setdefault(tier_hit.position, CheckpointKind.DIVERGENCE)
        if tier_hit.position < tier_hit.found <= lease.num_tokens:
            lease.checkpoint_positions.setdefault(tier_hit.found, CheckpointKind.DIVERGENCE)

    def request(self, lease: Lease, position: int) -> None:
        """Adds a position, not computed yet, at which another request waits to diverge from this one."""
        if not self._pools.resume_anywhere and lease.num_computed_tokens < position <= lease.num_tokens:
            lease.checkpoint_positions.setdefault(position, CheckpointKind.DIVERGENCE)
            lease.awaited_positions.add(position)

    # ---------------------------------------------------------------------------------------- checkpoints

    def leave(self, lease: Lease, kind: CheckpointKind) -> Plan:
        """Leaves a checkpoint at the lease's position, unless its state would evict an entry of higher rank. The plan
        copies the working state into it."""
        if self._refresh_existing(lease):
            return NOTHING
        states = self._pools.states
        if states is None:
            self._keep(lease, self._checkpoint(lease, kind, NO_SLOT))
            return NOTHING
        checkpoint = self._checkpoint(lease, kind, NO_SLOT)
        row = Rows(0, (0,) * len(self._pools.windows), 1)
        # A new checkpoint has no hit protection yet. If a request waits for it, it is ranked as if it had.
        is_awaited = lease.num_computed_tokens in lease.awaited_positions
        rank = (is_awaited, *self._tree.rank(checkpoint)[1:])
        if not self._pools.can_allocate(row) or not self._tree.make_room_below(row, rank):
            self._counters.checkpoints_skipped += 1
            return NOTHING
        ids = states.pool.allocate(1)
        checkpoint.slot = SlotId(int(ids[0]))
        self._keep(lease, checkpoint)
        states.pool.unuse(ids)  # the tree holds it now
        return Plan(states=(StateCopy(lease.slot, checkpoint.slot),))

    def leave_at_end(self, lease: Lease) -> None:
        """Turns the working state of a lease that ends into a checkpoint, without a copy. Drops the one at the end of
        its prompt if that is close to an earlier one: the conversation continues from the answer's end."""
        if not self._refresh_existing(lease):
            is_prompt = lease.num_computed_tokens <= lease.prompt_tokens
            kind = CheckpointKind.PROMPT if is_prompt else CheckpointKind.ANSWER
            self._keep(lease, self._checkpoint(lease, kind, lease.slot))
        for earlier in lease.checkpoints:
            if (
                earlier.node is not None
                and earlier.kind is CheckpointKind.PROMPT
                and earlier.position < lease.num_computed_tokens
                and earlier.is_unused
                and earlier.start
                and earlier.position - earlier.start < CLOSE_TOKENS
            ):
                self._tree.drop(earlier)

    def _refresh_existing(self, lease: Lease) -> bool:
        """Marks the checkpoint at the lease's position as used now. Returns False if there is none."""
        assert lease.node is not None
        assert lease.node.end == lease.num_computed_tokens
        existing = lease.node.checkpoints.get(lease.num_computed_tokens)
        if existing is None:
            return False
        existing.last_used = self._clock()
        return True

    def _keep(self, lease: Lease, checkpoint: Checkpoint) -> None:
        self._tree.keep(checkpoint)
        lease.checkpoints.append(checkpoint)
        if self._write_back is not None:
            self._write_back.add_new_checkpoint(checkpoint, lease)

    def _checkpoint(self, lease: Lease, kind: CheckpointKind, slot: SlotId) -> Checkpoint:
        """Makes a checkpoint at the lease's position, with the window blocks that a resumption there reads."""
        assert lease.node is not None
        pools, position, size = self._pools, lease.num_computed_tokens, self._pools.block_size
        windows = tuple(
            needed_blocks(window.family, table.ids, position, size)
            for window, table in zip(pools.windows, lease.windows, strict=True)
        )
        assert all((held.ids != NO_BLOCK).all() for held in windows), (
            "a window lost a block that it still needs"
        )
        size_bytes = pools.bytes_of(Rows(0, tuple(len(held.ids) for held in windows), 1))
        token_bytes = max(1, pools.full.row_bytes // size)
        now = self._clock()
        made = Checkpoint(
            lease.node,
            position,
            prefix_digest(lease.scope.of(position), lease.computed_tokens),
            kind,
            windows,
            slot,
            max(size_bytes, 1) / token_bytes,
            size_bytes,
            now,
        )
        made.grant = self._retainer.offer(lease, position, size_bytes, now)
        return made
