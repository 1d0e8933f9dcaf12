"""The cache: one radix tree over refcounted, copy-on-write blocks. Python and NumPy, no tensor framework.

It knows tokens and block ids and moves no bytes: it plans, a runtime executes. docs/embedding.md shows how to use it
in an engine of your own, by the names that are exported here.
"""

from rootstock.cache.checked import CheckedKVCache as KVCache
from rootstock.cache.explain import Explanation
from rootstock.cache.families import ChunkedAttention, Family, FullAttention, RecurrentState, SlidingWindow
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted, Deferred, Lease, Match, ReleaseReason
from rootstock.cache.plan import BlockCopy, Plan, StateCopy
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.stats import CacheStats
from rootstock.cache.types import NO_BLOCK

__all__ = [
    "NO_BLOCK",
    "Admitted",
    "BlockCopy",
    "Boundary",
    "CacheStats",
    "CheckpointKind",
    "ChunkedAttention",
    "Deferred",
    "Explanation",
    "Family",
    "FullAttention",
    "KVCache",
    "Lease",
    "Match",
    "Namespace",
    "Plan",
    "RecurrentState",
    "ReleaseReason",
    "SlidingWindow",
    "StateCopy",
]
