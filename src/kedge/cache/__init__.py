"""Where KV lives: block pool, radix tree, eviction, `CacheManager`. Stdlib only; blocks are integers."""

from __future__ import annotations

from kedge.cache.block_pool import BlockPool
from kedge.cache.eviction import EvictionPolicy, Namespace, NodeView, lru
from kedge.cache.manager import CacheManager, CacheStats, Hit, Lease
from kedge.cache.radix_tree import RadixTree

__all__ = [
    "BlockPool",
    "CacheManager",
    "CacheStats",
    "EvictionPolicy",
    "Hit",
    "Lease",
    "Namespace",
    "NodeView",
    "RadixTree",
    "lru",
]
