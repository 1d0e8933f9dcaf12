"""Checkpoint writer: chooses the positions at which a lease leaves checkpoints, and makes the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rootstock.cache.keys import prefix_digest
from rootstock.cache.lease import Lease, Match
from rootstock.cache.plan import NOTHING, Plan, StateCopy
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import LIKELIEST, NEAR_TOKENS, Boundary, Checkpoint, CheckpointKind, Node
from rootstock.cache.resume_point import needed_blocks
from rootstock.cache.retention.hint_decisions import Retainer
from rootstock.cache.stats import Counters
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import NO_BLOCK, NO_SLOT, SlotId
from rootstock.cache.write_back import WriteBackQueue


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
        """Sets the positions at which the prefill leaves a checkpoint: where the same prompt resumes, its boundaries,
        and the point of divergence from the cached prefix, since other requests have diverged there before.

        The last token of a prompt is always computed. The same prompt therefore resumes before it, and so does a
        request that goes on from the prompt's end: a second checkpoint would save it one token.
        """
        if lease.node is None:
            return
        end = lease.num_tokens - 1
        wanted = {end: CheckpointKind.PROMPT, min(match.found, end): CheckpointKind.DIVERGENCE}
        for boundary in boundaries:
            if boundary.position <= lease.num_tokens:
                wanted[min(boundary.position, end)] = boundary.kind
        if match.scope.public_tokens:  # all tenants diverge there
            wanted[min(match.scope.public_tokens, end)] = CheckpointKind.SYSTEM
        last = lease.hit_tokens
        for position in sorted(wanted):
            if position - last >= NEAR_TOKENS:
                lease.checkpoint_positions[position] = wanted[position]
                last = position
            elif last in lease.checkpoint_positions:  # that one serves both
                kinds = lease.checkpoint_positions[last], wanted[position]
                lease.checkpoint_positions[last] = min(kinds, key=LIKELIEST.index)
        if boundaries and not lease.is_idle:
            self._tree.note_boundaries(lease.node, [boundary.position for boundary in boundaries])

    def plan_loaded_positions(self, lease: Lease, tier_hit: TierHit) -> None:
        """Adds the position of a tier hit, which other requests will pass as well, and the point where the prompt
        diverges from the stored prefix."""
        if lease.node is None:
            return
        lease.checkpoint_positions.setdefault(tier_hit.position, CheckpointKind.DIVERGENCE)
        diverges_at = min(tier_hit.found, lease.num_tokens - 1)
        if diverges_at - tier_hit.position >= NEAR_TOKENS:
            lease.checkpoint_positions.setdefault(diverges_at, CheckpointKind.DIVERGENCE)

    def request(self, lease: Lease, position: int) -> None:
        """Adds a position, not computed yet, at which another request waits to diverge from this one."""
        if not self._pools.resume_anywhere and lease.num_computed_tokens < position <= lease.num_tokens:
            lease.checkpoint_positions.setdefault(position, CheckpointKind.DIVERGENCE)
            lease.awaited_positions.add(position)

    # ---------------------------------------------------------------------------------------- checkpoints

    def leave(self, lease: Lease, position: int, kind: CheckpointKind) -> Plan:
        """Leaves a checkpoint at a computed position, unless its state would evict an entry of higher rank. The plan
        copies the working state into it."""
        node = self._node_at(lease, position)
        if self._refresh_existing(node, position):
            return NOTHING
        states = self._pools.states
        checkpoint = self._checkpoint(lease, node, position, kind, NO_SLOT)
        if states is None:
            if all((held.ids != NO_BLOCK).all() for held in checkpoint.windows):  # else the prefix was loaded
                self._keep(lease, checkpoint)
            return NOTHING
        row = Rows(0, (0,) * len(self._pools.windows), 1)
        # A new checkpoint has no hit protection yet. If a request waits for it, it is ranked as if it had.
        is_awaited = position in lease.awaited_positions
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
        """Turns the working state of a lease that ends into a checkpoint, without a copy, unless the lease has left
        one right before."""
        node, position = lease.node, lease.num_computed_tokens
        assert node is not None
        assert node.end == position
        earlier = node.checkpoint_up_to(position)
        if earlier is not None and position - earlier.position < NEAR_TOKENS:
            earlier.last_used = self._clock()
            return
        is_prompt = position <= lease.prompt_tokens
        kind = CheckpointKind.PROMPT if is_prompt else CheckpointKind.ANSWER
        self._keep(lease, self._checkpoint(lease, node, position, kind, lease.slot))

    def _node_at(self, lease: Lease, position: int) -> Node:
        """Returns the node of the lease's path that has a published position."""
        assert lease.node is not None
        return next(node for node in lease.node.path() if node.start < position)

    def _refresh_existing(self, node: Node, position: int) -> bool:
        """Marks the checkpoint at a position of a node as used now. Returns False if there is none."""
        existing = node.checkpoints.get(position)
        if existing is None:
            return False
        existing.last_used = self._clock()
        return True

    def _keep(self, lease: Lease, checkpoint: Checkpoint) -> None:
        self._tree.keep(checkpoint)
        lease.checkpoints.append(checkpoint)
        if self._write_back is not None:
            self._write_back.add_new_checkpoint(checkpoint, lease)

    def _checkpoint(
        self, lease: Lease, node: Node, position: int, kind: CheckpointKind, slot: SlotId
    ) -> Checkpoint:
        """Makes a checkpoint at a computed position, with the window blocks that a resumption there reads."""
        pools, size = self._pools, self._pools.block_size
        windows = tuple(
            needed_blocks(window.family, table.ids, position, size)
            for window, table in zip(pools.windows, lease.windows, strict=True)
        )
        assert position < lease.num_computed_tokens or all(
            (held.ids != NO_BLOCK).all() for held in windows
        ), "a window lost a block that it still needs"
        size_bytes = pools.bytes_of(Rows(0, tuple(len(held.ids) for held in windows), 1))
        token_bytes = max(1, pools.full.row_bytes // size)
        now = self._clock()
        made = Checkpoint(
            node,
            position,
            prefix_digest(lease.scope.of(position), lease.tokens[:position]),
            kind,
            windows,
            slot,
            max(size_bytes, 1) / token_bytes,
            size_bytes,
            now,
        )
        made.grant = self._retainer.offer(lease, position, size_bytes, now)
        return made
