"""Transfer of a cached prefix between servers: its records as a stream, and a bundle's records into the cache.

An export reads memory and tiers. An import verifies every record, and publishes them as loads from a tier are
published. Both work in pieces between the engine's steps, and hold no rows in between: a request never waits for more
than one piece, or finds memory taken that a transfer needs later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import numpy as np
import xxhash

from rootstock.cache import KVCache
from rootstock.cache.families import FullAttention, RecurrentState
from rootstock.cache.keys import Identity, Kind, Namespace, RecordKey, Scope, identify
from rootstock.cache.lease import Deferred, Match, ReleaseReason
from rootstock.cache.plan import HostBytes, Load, Plan, Store
from rootstock.cache.radix_node import common_prefix
from rootstock.cache.tier_index import StoredIndex, TierHit
from rootstock.cache.types import Tokens
from rootstock.cache.write_back import WriteBackQueue
from rootstock.engine.tiers.connector import TierConnector
from rootstock.errors import BundleRefused
from rootstock.runtime.base import Runtime
from rootstock.tiers.base import Miss, Record
from rootstock.tiers.disk.archive import ArchiveStream, BundledPrefix, Manifest, Unreadable, read_manifest
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.record import Place, encode, read_head, read_payload, verify
from rootstock.units import MIB

PIECE_BYTES = 4 * MIB  # copied between two steps; a larger record is a piece of its own
MAX_MANIFEST_BYTES = 32 * MIB
MAX_POSITIONS = 256  # of a bundle: at which its prefix can be resumed
_MOST_RETRIES = 64  # of a piece, while requests evict what the earlier ones brought


class Call(Protocol):
    """Function that runs another one on the engine's thread between two steps."""

    def __call__(self, function: Callable[[], Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """The parts of an engine that a transfer uses, and the scope of its prefix."""

    call: Call
    runtime: Runtime
    cache: KVCache  # on the engine's thread
    apply: Callable[[Plan], None]
    tier_connector: TierConnector | None
    scope: Scope

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    def match(self, tokens: Tokens, position: int) -> Match:
        """Matches the first `position` tokens as a whole: a match leaves the last token of a prompt."""
        longer = np.append(tokens[:position], np.int32(0))
        scope = self.scope
        return self.cache.match(longer, scope.namespace, public_tokens=scope.public_tokens)

    def piece_blocks(self, family: FullAttention) -> int:
        return max(1, PIECE_BYTES // (family.bytes_per_token * self.block_size))


def _full(cache: KVCache) -> FullAttention | None:
    return next((family for family in cache.families if isinstance(family, FullAttention)), None)


# -- export --------------------------------------------------------------------------------------------------------


class _Ended(Exception):
    """The export cannot go on: the prefix was evicted meanwhile, or the bundle is as large as it may be."""


class PrefixExport:
    """An export of the cached part of a prompt. For one thread at a time, which is not the engine's."""

    def __init__(self, transfer: Transfer, tokens: Tokens, most_bytes: int) -> None:
        self._transfer = transfer
        self._cache = transfer.cache
        self._tokens = tokens
        self._most_bytes = most_bytes
        self._stream = ArchiveStream()
        self._block = 0  # full attention is written up to here
        self._written: set[RecordKey] = set()
        self._positions: list[int] = []  # at which the written records allow a resumption
        self._end = 0  # of the written records

    @property
    def cached_tokens(self) -> int:
        """Returns the position up to which memory or a tier holds the prompt so that it can be stored and resumed."""

        def found() -> int:
            hit = self._cache.tier_hit(self._whole())
            return max(self._positions_in_memory(), default=0) if hit is None else hit.position

        position: int = self._transfer.call(found)
        return position

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes of the bundle, without a signature."""
        yield self._stream.begin()
        try:
            for record in self._records():
                encoded = encode(record)
                if self._stream.written_bytes + encoded.stored_bytes > self._most_bytes:
                    break
                self._end = max(self._end, record.identity.end)
                yield from self._stream.record(encoded)
        except _Ended:
            pass
        yield from self._stream.end(self._prefix())

    def _prefix(self) -> BundledPrefix:
        scope, positions = self._transfer.scope, self._positions
        if self._cache.resume_anywhere:
            positions = [self._end] if self._end else []
        end = max(self._end, scope.public_tokens)
        names = scope.namespace
        return BundledPrefix(
            self._tokens[:end],
            tuple(positions),
            scope.public_tokens,
            names.weights,
            names.kv_dtype,
            names.rope_regime,
            names.adapter,
        )

    def _records(self) -> Iterator[Record]:
        positions: list[int] = self._transfer.call(self._positions_in_memory)
        for position in positions:
            yield from self._blocks_before(position)
            if not self._cache.resume_anywhere:
                yield from self._resume_point(position)
        hit: TierHit | None = self._transfer.call(lambda: self._cache.tier_hit(self._whole()))
        connector = self._transfer.tier_connector
        if hit is None or connector is None:
            return
        yield from self._blocks_before(hit.base)
        for identity in hit.identities:
            if identity.key not in self._written:
                loaded = connector.read(identity)
                if isinstance(loaded, Miss):
                    raise _Ended
                record = self._cut(Record(identity, loaded.payload))
                if record.identity.key not in self._written:
                    self._written.update((identity.key, record.identity.key))
                    yield record
        self._positions.append(hit.position)

    def _cut(self, record: Record) -> Record:
        """Cuts a stored block that goes on with other tokens than the prompt, such as those of an answer."""
        identity, size = record.identity, len(record.identity.tokens)
        agreed = common_prefix(identity.tokens, self._tokens[identity.start :])
        if agreed == size:
            return record
        views = record.views()
        if identity.kind is Kind.STATE or any(view.nbytes % size for view in views):
            raise _Ended
        prefix, scope = self._tokens[: identity.start + agreed], self._transfer.scope
        shorter = identify(
            scope.of(len(prefix)),
            identity.family,
            identity.layers,
            identity.dtype,
            Kind.BLOCKS,
            prefix,
            identity.start,
        )
        # Each buffer of a block has its positions in order.
        return Record(shorter, [view[: view.nbytes // size * agreed] for view in views])

    def _whole(self) -> Match:
        return self._transfer.match(self._tokens, len(self._tokens))

    def _positions_in_memory(self) -> list[int]:
        """Returns where the prompt can be resumed from memory, shallow first, if records can hold what that reads."""
        match, queue = self._whole(), self._queue()
        if not match.length or match.node is None:
            return []
        if self._cache.resume_anywhere:
            return [match.length]
        kept = {at for node in match.node.path() for at in node.checkpoints if at < match.length}
        # The same prompt again computes its last token.
        before = self._transfer.match(self._tokens, len(self._tokens) - 1).length
        positions = sorted({*kept, before, match.length} - {0})[-MAX_POSITIONS:]
        return [at for at in positions if queue.can_store(self._transfer.match(self._tokens, at))]

    def _blocks_before(self, position: int) -> Iterator[Record]:
        """Yields full attention up to `position`, a piece for each step of the engine."""
        family, size = _full(self._cache), self._transfer.block_size
        if family is None:
            return
        while self._block * size < position:
            end = min(self._block + self._transfer.piece_blocks(family), -(-position // size))
            yield from self._copied(partial(self._blocks, position, end))
            self._block = end
        self._block = position // size  # a later piece has more of a partly filled block

    def _resume_point(self, position: int) -> Iterator[Record]:
        """Yields windows and a state, unless they were evicted meanwhile: an earlier position may do."""

        is_kept = False

        def rows() -> Sequence[Store]:
            nonlocal is_kept
            match, queue = self._transfer.match(self._tokens, position), self._queue()
            is_kept = match.length == position and queue.add_resume_point(match)
            return queue.take() if is_kept else ()

        yield from self._copied(rows)
        if is_kept:  # also without records: where chunked attention begins a chunk, a resumption reads none
            self._positions.append(position)

    def _blocks(self, position: int, end: int) -> Sequence[Store]:
        match, queue = self._transfer.match(self._tokens, position), self._queue()
        if match.found < position:
            raise _Ended
        queue.add_found(match, self._block, end)
        return queue.take()

    def _queue(self) -> WriteBackQueue:
        index = StoredIndex(self._cache.families, self._transfer.block_size)
        return WriteBackQueue(self._cache.pools, index)

    def _copied(self, rows: Callable[[], Sequence[Store]]) -> Iterator[Record]:
        runtime = self._transfer.runtime

        def copied() -> list[Record]:
            return [
                Record(store.identity, runtime.read(store.part))
                for store in rows()
                if store.identity.key not in self._written
            ]

        for record in self._transfer.call(copied):
            self._written.add(record.identity.key)
            yield record


# -- import --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imported:
    """End of an import."""

    tokens: int  # that the bundle allows to resume from
    cached_tokens: int  # of them, that are in memory now
    records: int  # of the bundle
    stored_bytes: int  # of them
    is_complete: bool  # False: all other entries are worth more than the rest


class _Step(Enum):
    """Outcome of a piece."""

    LOADED = auto()
    AGAIN = auto()  # the cache has changed: other records are needed
    NO_MEMORY = auto()


class BundleImport:
    """An import of a bundle from a file. For one thread, which is not the engine's. Raises BundleRefused and OSError.

    `verify_all` comes first and changes nothing.
    """

    def __init__(
        self,
        transfer_in: Callable[[Scope], Transfer],
        fd: int,
        file_bytes: int,
        namespace: Namespace,
        scope_of: Callable[[Tokens], Scope],
        context_limit: int,
        vocab_size: int,
    ) -> None:
        """`scope_of` returns the scope of tokens for the importer's salt and adapter, `transfer_in` its transfer."""
        self._transfer_in = transfer_in
        self._namespace = namespace
        transfer = self._transfer = transfer_in(Scope(namespace))
        self._cache = transfer.cache
        self._files = Files()
        self._fd = fd
        self._file_bytes = file_bytes
        self._scope_of = scope_of
        self._context_limit = context_limit
        self._vocab_size = vocab_size
        self._places: dict[RecordKey, Place] = {}
        families = self._cache.families
        self._index = StoredIndex(families, transfer.block_size)
        self._family = _full(self._cache)
        # Of full attention alone, which is loaded a piece at a time.
        self._full_index = StoredIndex((self._family,) if self._family else (), transfer.block_size)

    def run(self) -> Imported:
        prefix = self.verify_all()
        tokens = prefix.tokens
        positions = prefix.positions[-1:] if self._cache.resume_anywhere else prefix.positions
        is_complete = all(self._load(tokens, position) for position in positions)
        reached: int = self._transfer.call(lambda: self._transfer.match(tokens, positions[-1]).length)
        stored_bytes = sum(place.stored_bytes for place in self._places.values())
        return Imported(positions[-1], reached, len(self._places), stored_bytes, is_complete)

    # ---------------------------------------------------------------------------------------- verification

    def verify_all(self) -> BundledPrefix:
        """Verifies the manifest and every record: its bytes, its identity and its size."""
        manifest = read_manifest(self._files, self._fd, self._file_bytes, MAX_MANIFEST_BYTES)
        if isinstance(manifest, Unreadable):
            raise BundleRefused(manifest.reason)
        prefix = manifest.prefix
        if prefix is None:
            raise BundleRefused(
                "it is an archive of a directory, not of one prefix; import it into a directory of the disk tier"
            )
        self._refuse_other_model(prefix)
        tokens = prefix.tokens
        if len(tokens) > self._context_limit:
            raise BundleRefused(
                f"it has {len(tokens):,} tokens, and this server's context limit is {self._context_limit:,}"
            )
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise BundleRefused("it has tokens that are not in the model's vocabulary")
        if len(prefix.positions) > MAX_POSITIONS:
            raise BundleRefused(f"it has more than {MAX_POSITIONS:,} positions to resume from")
        scope = self._scope_of(tokens)
        if scope.public_tokens != prefix.public_tokens:
            raise BundleRefused(
                f"its first {prefix.public_tokens:,} tokens are a public head, and {scope.public_tokens:,} are here: "
                "give both servers the same --public-prompts, and a salt of the same kind"
            )
        self._transfer = self._transfer_in(scope)
        self._verify_records(manifest, tokens)
        reached = 0
        for position in prefix.positions:
            # Full attention up to the one before is there.
            hit = self._index.tier_hit(np.append(tokens, np.int32(0)), scope, reached, reached, position)
            if hit is None or hit.position != position:
                raise BundleRefused(f"it lacks records to resume after {position:,} tokens")
            reached = position
        return prefix

    def _refuse_other_model(self, prefix: BundledPrefix) -> None:
        own = self._namespace
        if prefix.weights != own.weights:
            raise BundleRefused(
                "it is of another model, or of other weights, quantization or versions of the software: "
                f"{prefix.weights!r:.80} there, {own.weights!r:.80} here"
            )
        for name, there, here in (
            ("dtypes of model and KV cache", prefix.kv_dtype, own.kv_dtype),
            ("RoPE regime", prefix.rope_regime, own.rope_regime),
            ("LoRA adapter", prefix.adapter, own.adapter),
        ):
            if there != here:
                raise BundleRefused(f"its {name}: {there!r:.80} there, {here!r:.80} here")

    def _verify_records(self, manifest: Manifest, tokens: Tokens) -> None:
        found: list[Identity] = []
        for number, place in enumerate(manifest.places, 1):
            head = verify(self._files, self._fd, place)
            if isinstance(head, Miss):
                raise BundleRefused(f"record {number:,} is damaged: {head.detail or head.kind}")
            identity = head.identity
            if (wrong := self._why_wrong(identity, place, tokens)) is not None:
                raise BundleRefused(f"record {number:,} {wrong}")
            self._places[identity.key] = place
            found.append(identity)
        self._verify_digests(found, tokens)
        for identity in found:
            self._index.add(identity)
            if self._family is not None and identity.family == self._family.name:
                self._full_index.add(identity)

    def _why_wrong(self, identity: Identity, place: Place, tokens: Tokens) -> str | None:
        """Returns what is wrong with a record's identity, but for its digests; None: nothing is."""
        scope, size = self._transfer.scope, self._transfer.block_size
        if identity.namespace != scope.of(identity.end).digest():
            return (
                "is of another salt than this request's: the tenant and the cache_salt must be the exporter's"
            )
        families = {(family.name, family.layers): family for family in self._cache.families}
        family = families.get((identity.family, identity.layers))
        if family is None or (identity.kind is Kind.STATE) != isinstance(family, RecurrentState):
            return f"is of layers that the model does not have ({identity.family!r:.40}, {identity.layers})"
        if identity.dtype != scope.namespace.kv_dtype:
            return f"has another dtype: {identity.dtype!r:.40}"
        if identity.start % size or not 0 < len(identity.tokens) <= size:
            return f"is of blocks of another size than --block-size {size}"
        if not np.array_equal(tokens[identity.start : identity.end], identity.tokens):
            return "has other tokens than the prefix"
        if place.payload_bytes != self._index.payload_bytes(identity):
            return f"has {place.payload_bytes:,} bytes, not {self._index.payload_bytes(identity):,}"
        return "is there twice" if identity.key in self._places else None

    def _verify_digests(self, found: Sequence[Identity], tokens: Tokens) -> None:
        """Compares both digests of each record with those of the tokens. O(tokens + records)."""
        raw = np.ascontiguousarray(tokens, "<i4").data.cast("B")
        hashes: dict[bytes, tuple[int, xxhash.xxh3_128]] = {}
        for identity in sorted(found, key=lambda each: each.start):
            at, h = hashes.get(identity.namespace, (0, xxhash.xxh3_128(identity.namespace)))
            h.update(raw[at * 4 : identity.start * 4])
            hashes[identity.namespace] = identity.start, h
            whole = h.copy()
            whole.update(raw[identity.start * 4 : identity.end * 4])
            if (identity.parent, identity.own) != (h.digest(), whole.digest()):
                raise BundleRefused("a record has another prefix than the bundle")

    # ---------------------------------------------------------------------------------------------- loading

    def _load(self, tokens: Tokens, position: int) -> bool:
        """Loads the records up to `position`, a piece for each step. Returns False if there is no memory for them."""
        for _ in range(_MOST_RETRIES + -(-position // self._transfer.block_size)):
            hit: TierHit | None = self._transfer.call(lambda: self._next(tokens, position)[1])
            if hit is None:
                return True
            payloads = {identity.key: self._payload(identity) for identity in hit.identities}
            step: _Step = self._transfer.call(partial(self._publish, tokens, position, payloads))
            if step is _Step.NO_MEMORY:
                return False
        return False

    def _payload(self, identity: Identity) -> memoryview:
        place = self._places[identity.key]
        head = read_head(self._files, self._fd, place)
        payload = memoryview(bytearray(place.payload_bytes))
        if isinstance(head, Miss) or read_payload(self._files, self._fd, place, head, [payload]) is not None:
            raise BundleRefused("its file has changed meanwhile")
        return payload

    def _next(self, tokens: Tokens, position: int) -> tuple[Match, TierHit | None]:
        """Finds the next records to load. None: all are in memory."""
        match = self._transfer.match(tokens, position)
        if self._family is not None and match.found < position:
            size = self._transfer.block_size
            end = match.found // size + self._transfer.piece_blocks(self._family)
            hit = self._full_index.tier_hit(
                match.tokens, match.scope, match.found, match.found, min(position, end * size)
            )
            if hit is not None:
                family = self._index.full
                blocks = tuple(replace(block, family=family) for block in hit.blocks)
                return match, replace(hit, blocks=blocks, is_resumable=False)
        if match.length >= position:
            return match, None
        return match, self._index.tier_hit(match.tokens, match.scope, match.length, match.found, position)

    def _publish(self, tokens: Tokens, position: int, payloads: Mapping[RecordKey, memoryview]) -> _Step:
        """Publishes verified records, as a load from a tier does. On the engine's thread."""
        cache, apply = self._cache, self._transfer.apply
        match, hit = self._next(tokens, position)
        if hit is not None:
            has_room = cache.make_idle_room(match, hit)
            apply(cache.take_pending_plan())
            if not has_room:
                return _Step.NO_MEMORY
            match, hit = self._next(tokens, position)  # the evictions made the first one void
        if hit is None or not all(identity.key in payloads for identity in hit.identities):
            return _Step.AGAIN
        admitted = cache.admit(match, tier_hit=hit, counted=False, is_idle=True)
        if isinstance(admitted, Deferred):
            return _Step.NO_MEMORY
        lease = admitted.lease
        try:
            apply(admitted.plan)
            for load in admitted.loads:
                self._place(load, payloads[load.identity.key])
            apply(cache.loaded(lease, hit.position))
        except BaseException:
            cache.release(lease, ReleaseReason.UNUSED)
            raise
        cache.release(lease, ReleaseReason.FINISHED)
        apply(cache.take_pending_plan())
        return _Step.LOADED

    def _place(self, load: Load, payload: memoryview) -> None:
        runtime, at = self._transfer.runtime, 0
        buffers: list[HostBytes] = runtime.buffers(load.part)
        for buffer in buffers:
            buffer[:] = np.frombuffer(payload[at : at + buffer.nbytes], np.uint8)
            at += buffer.nbytes
        runtime.place(load.part, buffers)
