"""Acts: changes that hints ask for once, beside retention: demotion, release, and pins.

Nothing that others use or retain loses its place. A node belongs to a request if no other request uses it, if only
the request's session has used it (or only requests without a session), if one branch at most goes on below it, and if
no other party retains it. The nodes above one that belongs to others belong to others, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rootstock.cache.lease import Lease
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Checkpoint, Node, Root, walk
from rootstock.cache.retention.hint_decisions import Retainer, entries_of
from rootstock.cache.retention.hint_types import (
    MAX_ACTS,
    MAX_TOLD,
    ActKind,
    CacheHints,
    HintOutcome,
    PrefixAct,
    Verdict,
)
from rootstock.cache.retention.pins import PinId, Pinned, PinRefused, Pins
from rootstock.cache.write_back import WriteBackQueue

_OF_OTHERS = "other requests, sessions or tenants use or retain it"


class PrefixActs:
    """Executes the acts of hints on the path of a lease, before the lease leaves the tree."""

    def __init__(
        self,
        tree: PrefixTree,
        retainer: Retainer,
        write_back: WriteBackQueue | None,
        pins: Pins,
        pin: Callable[[Lease, int], Pinned | PinRefused],
        release_pin: Callable[[PinId], object],
    ) -> None:
        """`pin` pins the first tokens of a lease for the tenant of its hints."""
        self._tree = tree
        self._retainer = retainer
        self._write_back = write_back
        self._pins = pins
        self._pin = pin
        self._release_pin = release_pin

    def end_session(self, lease: Lease) -> None:
        """Demotes the private part of the lease's session: the nodes that no other request has used."""
        if lease.session:
            part = self._part_of_session(lease, lease.session)
            self._demote([node for node in part if self._may_end(node, lease.session, lease)])

    def apply(self, lease: Lease, prompt_tokens: int, asked_tokens: int) -> None:
        """Executes the acts of a lease's hints, and adds their outcomes to the lease. `asked_tokens` is the length of
        the prompt with its answer. The lease of hints without a request may hold less: the cached part."""
        hints = _hints_of(lease)
        outcomes = list[HintOutcome]()
        done: dict[tuple[ActKind, str], HintOutcome] = {}  # of sessions: a session may have many nodes
        for number, act in enumerate(hints.acts[:MAX_TOLD]):
            if number >= MAX_ACTS:
                outcome = _refused(act, f"a request can have {MAX_ACTS} such hints")
            elif lease.node is None:
                outcome = _refused(act, "the prefix of this request is not kept in the cache")
            elif act.kind is ActKind.PIN:
                outcome = self._on_pin(act, lease, prompt_tokens)
            elif act.session is None:
                outcome = self._on_range(act, lease, prompt_tokens, asked_tokens)
            elif (act.kind, act.session) in done:
                outcome = replace(done[act.kind, act.session], field=act.field)
            else:
                outcome = done[act.kind, act.session] = self._on_session(act, act.session, lease)
            outcomes.append(outcome)
        self._retainer.count(outcomes)
        lease.act_outcomes = tuple(outcomes)

    def _on_range(self, act: PrefixAct, lease: Lease, prompt_tokens: int, asked_tokens: int) -> HintOutcome:
        start = prompt_tokens if act.start is None else act.start
        asked_end = asked_tokens if act.end is None else min(act.end, asked_tokens)
        if start >= asked_end:
            return _refused(act, "the hint is for no token of the prompt")
        end, asked = min(asked_end, lease.num_cached_tokens), asked_end - start
        if start >= end:
            return _refused(act, "none of it is cached")
        if act.kind is ActKind.RELEASE:
            is_whole = self._release(lease, start, end, goes_on=act.end is None)
            return _outcome(act, "" if is_whole else f"in part: {_OF_OTHERS}")
        moved = self._demote(self._own_part(lease, start, end, goes_on=act.end is None))
        if not moved:
            return _refused(act, _OF_OTHERS)
        told = f"{moved:,} of {asked:,} tokens: the rest is not cached, or {_OF_OTHERS}"
        return _outcome(act, "" if moved >= asked else told)

    def _on_session(self, act: PrefixAct, name: str, lease: Lease) -> HintOutcome:
        session = self._retainer.sessions.find(_hints_of(lease).tenant, name)
        part = [] if session is None else self._part_of_session(lease, session.id)
        if session is None or not part:
            return _refused(act, "this prompt has no prefix that only that session has used")
        if act.kind is ActKind.DEMOTE:
            part = [node for node in part if self._may_end(node, session.id, lease)]
            return _outcome(act, "") if self._demote(part) else _refused(act, _OF_OTHERS)
        self._release_pins(lease, 0, lease.num_cached_tokens)
        kept = [self._end(entry, session.id, lease) for node in part for entry in entries_of(node)]
        return _outcome(act, "" if all(kept) else _OF_OTHERS)

    def _on_pin(self, act: PrefixAct, lease: Lease, prompt_tokens: int) -> HintOutcome:
        if not _hints_of(lease).may_pin:
            return _refused(act, "the server knows no tenant to whom the pin would belong")
        asked = prompt_tokens if act.end is None else min(act.end, prompt_tokens)
        found = self._pin(lease, asked)
        if isinstance(found, PinRefused):
            return _refused(act, found.reason)
        return _outcome(
            act, "" if found.tokens >= asked else f"{found.tokens:,} of {asked:,} tokens are pinned"
        )

    # ------------------------------------------------------------------------------------------- nodes

    def _own_part(self, lease: Lease, start: int, end: int, *, goes_on: bool) -> list[Node]:
        """Returns the nodes of a range of the lease's path that belong to it, split at the ends of the range. With
        `goes_on`, the range has no end: nodes below the path follow, such as an answer to the prompt."""
        below = _only_branch(lease)
        if below and (below[0].children or not all(self._is_own(node, 0, lease) for node in below)):
            return []
        found = below if goes_on else []
        for node in _path(lease):
            if node.end <= start or not self._is_own(node, 1, lease):
                break
            if node.start < end:
                found.append(self._part(node, start, end))
        return found

    def _is_own(self, node: Node, references: int, lease: Lease) -> bool:
        """Returns True if only the lease's session has used a node, and no other party retains it."""
        is_unused = node.session == lease.session and node.ref_count <= references and len(node.children) <= 1
        return is_unused and self._may_end(node, lease.session, lease)

    def _part_of_session(self, lease: Lease, session: int) -> list[Node]:
        """Returns the nodes on and below the lease's path that only this session has used, and that no other request
        uses."""
        own = {node for node in _path(lease) if node.session == session}
        top = min(own, key=lambda node: node.start, default=None)
        if top is None:
            return []
        nodes = (top, *walk(top))
        return [node for node in nodes if node.session == session and node.ref_count <= (node in own)]

    def _part(self, node: Node, start: int, end: int) -> Node:
        """Splits a node at the ends of a range. Returns the part within."""
        part = self._tree.split(node, end) if end < node.end else node
        if part.start < start:
            self._tree.split(part, start)
        return part

    def _may_end(self, entry: Node | Checkpoint, session: int, lease: Lease) -> bool:
        """Returns True if the lease's tenant alone, and this session, retains a node with its checkpoints, or a
        checkpoint."""
        tenant = _hints_of(lease).tenant
        grants = [one.grant for one in _entries(entry) if one.grant is not None and one.grant.is_charged]
        return all(
            grant.tenant == tenant and grant.session in (0, session) and not grant.is_joint
            for grant in grants
        )

    # ----------------------------------------------------------------------------------------- effects

    def _demote(self, nodes: list[Node]) -> int:
        """Makes nodes go first, after the tier below has got them. Returns their tokens."""
        for node in nodes:
            if self._write_back is not None and self._write_back.is_open:
                self._write_back.add_node(node)
            self._retainer.demote(node)
        return sum(node.end - node.start for node in nodes)

    def _release(self, lease: Lease, start: int, end: int, *, goes_on: bool) -> bool:
        """Ends pins and retention of a range. Returns False if others retain a part of it."""
        self._release_pins(lease, start, end)
        is_whole = True
        for entry in (entry for node in _only_branch(lease) if goes_on for entry in entries_of(node)):
            self._end(entry, lease.session, lease)
        for node in _path(lease):
            if node.end <= start or node.start >= end:
                continue
            for checkpoint in node.checkpoints.values():
                if start < checkpoint.position <= end:
                    is_whole &= self._end(checkpoint, lease.session, lease)
            if node.grant is not None and node.grant.is_charged:
                is_whole &= self._end(self._part(node, start, end), lease.session, lease)
        return is_whole

    def _end(self, entry: Node | Checkpoint, session: int, lease: Lease) -> bool:
        """Ends the retention of an entry. Returns False if it is others' as well."""
        if entry.grant is None or not entry.grant.is_charged:
            return True
        is_own = self._may_end(entry, session, lease)
        if is_own:
            self._tree.ungrant(entry)
        return is_own

    def _release_pins(self, lease: Lease, start: int, end: int) -> None:
        hints, path = _hints_of(lease), set(_path(lease))
        for pinned in self._pins.of(hints.tenant) if hints.may_pin else ():
            if pinned.lease.node in path and start < pinned.tokens <= end:
                self._release_pin(pinned.id)


def _path(lease: Lease) -> list[Node]:
    """Returns the nodes of a lease's path that lie behind a public head, the deepest first."""
    steps = () if lease.node is None else lease.node.path()
    return [node for node in steps if not isinstance(node, Root) and node.end > lease.scope.public_tokens]


def _only_branch(lease: Lease) -> list[Node]:
    """Returns the nodes below a lease's path up to where the branch divides or ends, the deepest first."""
    found, node = list[Node](), lease.node
    while node is not None and len(node.children) == 1:
        (node,) = node.children.values()
        found.append(node)
    return found[::-1]


def _entries(entry: Node | Checkpoint) -> list[Node | Checkpoint]:
    return entries_of(entry) if isinstance(entry, Node) else [entry]


def _hints_of(lease: Lease) -> CacheHints:
    assert lease.hints is not None, "only hints have acts"
    return lease.hints


def _refused(act: PrefixAct, reason: str) -> HintOutcome:
    return HintOutcome(act.field, Verdict.REFUSED, reason)


def _outcome(act: PrefixAct, clipped: str) -> HintOutcome:
    return HintOutcome(act.field, Verdict.CLIPPED if clipped else Verdict.ACCEPTED, clipped)
