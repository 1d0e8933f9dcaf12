"""The cache: one radix tree over refcounted, copy-on-write blocks. Python and NumPy, no tensor framework.

It knows tokens and block ids and moves no bytes: it plans, a runtime executes.
"""

from rootstock.cache.families import Family, FullAttention
from rootstock.cache.keys import Namespace
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.plan import BlockCopy, Plan

__all__ = ["BlockCopy", "Family", "FullAttention", "KVCache", "Namespace", "Plan"]
