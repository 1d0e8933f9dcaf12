"""Records whose payload follows from their identity, so that every wrong byte is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from rootstock.cache.keys import Identity, Namespace, RecordKey, RecordKind, identify
from rootstock.tiers.base import Loaded, LoadResult, Miss, MissKind, Record
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.host import HostTier, charge

NAMESPACE = Namespace("weights", "float32")
CAP_BYTES = 2**20  # the least that is allowed, so that tests are quick


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def open_tier(
    folder: Path, cap_bytes: int = CAP_BYTES, segment_bytes: int = 64 * 1024, **options: object
) -> DiskTier:
    if "clock" in options:
        options.setdefault("wall_clock", options["clock"])
    tier = DiskTier.open(folder, cap_bytes, segment_bytes=segment_bytes, **options)  # type: ignore[arg-type]
    assert isinstance(tier, DiskTier), tier
    return tier


def prefix(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def identity_of(
    seed: int,
    start: int = 16,
    end: int = 29,
    namespace: Namespace = NAMESPACE,
    kind: RecordKind = RecordKind.BLOCKS,
    layers: int = 4,
    dtype: str = "float32",
) -> Identity:
    return identify(namespace, "full", layers, dtype, kind, prefix(seed, end), start)


def payload_of(identity: Identity, payload_bytes: int, buffers: int = 3) -> list[np.ndarray]:
    """Random bytes that only this identity has, in buffers of unequal lengths."""
    seed = xxhash.xxh3_64_intdigest(identity.key)
    content = np.random.default_rng(seed).integers(0, 256, payload_bytes, np.uint8)
    cuts = sorted(int(cut) for cut in np.random.default_rng(seed).integers(0, payload_bytes + 1, buffers - 1))
    return [np.ascontiguousarray(part) for part in np.split(content, cuts)]


def record_of(identity: Identity, payload_bytes: int = 3000) -> Record:
    return Record(identity, payload_of(identity, payload_bytes))


def records(count: int, payload_bytes: int = 3000, first: int = 0) -> list[Record]:
    return [record_of(identity_of(seed), payload_bytes) for seed in range(first, first + count)]


EACH = charge(records(1)[0])  # of a host tier's cap, for a record of the usual size


def keys_of(of: Sequence[Record]) -> list[RecordKey]:
    return [record.identity.key for record in of]


def damage(tier: HostTier, key: RecordKey) -> None:
    """Changes a byte of a record in host RAM."""
    content = tier._held[key].content
    content.flags.writeable = True
    content[len(content) // 2] ^= 1


def kind_of_miss(result: LoadResult) -> MissKind:
    assert isinstance(result, Miss)
    return result.kind


def joined(buffers: Sequence[memoryview | np.ndarray]) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


def is_right(result: LoadResult, record: Record) -> bool:
    return isinstance(result, Loaded) and joined(result.payload) == joined(record.payload)


def directory_bytes(folder: Path) -> int:
    return sum(size for _, size in Files().sizes(folder))


def segment_files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob("*.segment")))
