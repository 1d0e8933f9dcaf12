"""Prefixes in a tier, for users: chains of records, each of which continues another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rootstock.cache.keys import RecordKind
from rootstock.tiers.base import Entry


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Prefix of one namespace that ends here. Records of several families may end at it."""

    own: bytes  # `Identity.own`
    content: NamespaceContent
    position: int
    start: int = 0  # of the last record that ends here
    parent: PrefixNode | None = None
    begins: bool = False  # the path reaches position 0
    followed: bool = False  # another node continues it
    leaves: int = 0  # at or below it
    records: int = 0
    stored_bytes: int = 0
    last_use_s: float = 0.0
    uses: int = 0
    families: int = 0  # bit set, in the namespace's order of families

    def path(self) -> Iterator[PrefixNode]:
        """Yields this node and its ancestors, upwards."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class NamespaceContent:
    """Content of one namespace: a model, dtype and tenant."""

    namespace: bytes
    families: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)  # families with states
    dtypes: set[str] = field(default_factory=set)
    records: int = 0
    stored_bytes: int = 0

    def bits(self, kind: RecordKind) -> int:
        """Returns the bits of `PrefixNode.families` for states, or for windows and chunks."""
        return sum(
            1 << bit
            for bit, name in enumerate(self.families)
            if name != "full" and (name in self.states) == (kind is RecordKind.STATE)
        )

    @property
    def needs_chains(self) -> bool:
        """Returns whether resuming needs all records before a position: with full attention, not with windows and
        states alone."""
        return "full" in self.families


@dataclass(slots=True, eq=False)
class Prefix:
    """Description of the path to a leaf."""

    leaf: PrefixNode
    families: list[str]
    checkpoints: int  # positions with a state, or with a window's blocks
    own_bytes: int
    shared_bytes: int  # shared with other prefixes
    last_use_s: float  # of the bytes that are not shared
    uses: int
    text: str = ""

    @property
    def key(self) -> str:
        return self.leaf.own.hex()

    @property
    def namespace(self) -> str:
        return self.leaf.content.namespace.hex()

    @property
    def tokens(self) -> int:
        return self.leaf.position


class Prefixes:
    """Prefixes of a directory's records, as trees. A few hundred bytes are kept for each position where records end,
    and none of the tokens."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}
        self.namespaces: dict[bytes, NamespaceContent] = {}
        self.orphans = 0  # records
        self.orphan_bytes = 0
        self.oldest_use_s = float("inf")
        self.newest_use_s = 0.0
        # Records that begin at the current position: parent, tokens, and the node where they end.
        self._start = 0
        self._siblings: dict[bytes, dict[bytes, PrefixNode]] = {}

    @staticmethod
    def of(entries: Iterable[Entry]) -> Prefixes:
        """Builds the trees from `entries`, ordered by first position as `Tier.entries` yields them."""
        prefixes = Prefixes()
        for entry in entries:
            prefixes._add(entry)
        prefixes._connect()
        prefixes._count_leaves()
        return prefixes

    @property
    def records(self) -> int:
        return sum(content.records for content in self.namespaces.values())

    @property
    def stored_bytes(self) -> int:
        return sum(content.stored_bytes for content in self.namespaces.values())

    def leaves(self) -> list[PrefixNode]:
        """Returns the leaves that can be resumed, the last used first."""
        found = [node for node in self.nodes.values() if not node.followed and not _is_orphan(node)]
        return sorted(found, key=lambda node: (-node.last_use_s, -node.position, node.own))

    def described(self, leaf: PrefixNode) -> Prefix:
        families = checkpoints = own_bytes = shared_bytes = 0
        last_use_s, uses = leaf.last_use_s, leaf.uses
        names = leaf.content.families
        states = leaf.content.bits(RecordKind.STATE)
        windows = leaf.content.bits(RecordKind.BLOCKS)
        after: PrefixNode | None = None
        for node in leaf.path():
            families |= node.families
            if states:
                checkpoints += bool(node.families & states)
            elif node.families & windows:
                # Window blocks end where their record ends, or within a block that others have filled.
                ends = after is None or not after.families & windows or after.start < node.position
                checkpoints += ends
            after = node
            if node.leaves == 1:
                own_bytes += node.stored_bytes
                last_use_s, uses = max(last_use_s, node.last_use_s), max(uses, node.uses)
            else:
                shared_bytes += node.stored_bytes
        present = [name for bit, name in enumerate(names) if families >> bit & 1]
        return Prefix(leaf, present, checkpoints, own_bytes, shared_bytes, last_use_s, uses)

    # -- inside --------------------------------------------------------------------------------------------------

    def _add(self, entry: Entry) -> None:
        identity = entry.identity
        if identity.start != self._start:
            self._connect()
            self._start = identity.start
        content = self.namespaces.get(identity.namespace)
        if content is None:
            content = self.namespaces[identity.namespace] = NamespaceContent(identity.namespace)
        if identity.family not in content.families:
            content.families.append(identity.family)
        if identity.kind is RecordKind.STATE:
            content.states.add(identity.family)
        content.dtypes.add(identity.dtype)
        content.records += 1
        content.stored_bytes += entry.stored_bytes
        self.oldest_use_s = min(self.oldest_use_s, entry.last_use_s)
        self.newest_use_s = max(self.newest_use_s, entry.last_use_s)

        node = self.nodes.get(identity.own)
        if node is None:
            node = self.nodes[identity.own] = PrefixNode(identity.own, content, identity.end)
        node.start = identity.start
        node.records += 1
        node.stored_bytes += entry.stored_bytes
        node.last_use_s = max(node.last_use_s, entry.last_use_s)
        node.uses = max(node.uses, entry.uses)
        node.families |= 1 << content.families.index(identity.family)
        if len(identity.tokens):
            self._siblings.setdefault(identity.parent, {})[identity.tokens.tobytes()] = node

    def _connect(self) -> None:
        """Sets the parents of the records that begin at one position: the node that ends there, or the longest of
        these records that is a prefix, such as a block that was stored before it was full."""
        for parent, siblings in self._siblings.items():
            above = self.nodes.get(parent)
            nested: list[tuple[bytes, PrefixNode]] = []
            for tokens, node in sorted(siblings.items()):
                while nested and not tokens.startswith(nested[-1][0]):
                    nested.pop()
                found = nested[-1][1] if nested else above
                if found is not None and (node.parent is None or found.position > node.parent.position):
                    node.parent = found
                node.begins |= self._start == 0 or (found is not None and found.begins)
                nested.append((tokens, node))
        self._siblings.clear()

    def _count_leaves(self) -> None:
        for node in reversed(self._by_position()):
            node.leaves = node.leaves or 1
            if node.parent is not None:
                node.parent.followed = True
                node.parent.leaves += node.leaves
            if _is_orphan(node):
                self.orphans += node.records
                self.orphan_bytes += node.stored_bytes

    def _by_position(self) -> list[PrefixNode]:
        """Returns all nodes, each after its parent."""
        return sorted(self.nodes.values(), key=lambda node: node.position)


def _is_orphan(node: PrefixNode) -> bool:
    return node.content.needs_chains and not node.begins
