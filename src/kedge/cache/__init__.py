"""Where KV lives: pools, radix tree, tiers, eviction, prefetch, `CacheManager`. No tensors: blocks are integers."""

from kedge.cache.block_pool import BlockPool
from kedge.cache.copies import Copied, Copier, Copy, Direction
from kedge.cache.loads import Readiness
from kedge.cache.manager import CacheManager, Lease
from kedge.cache.owners import Changes
from kedge.cache.tiers import CacheStats
from kedge.policies.eviction import EvictionPolicy, belady, lru, steps_to_execution

__all__ = [
    "BlockPool",
    "CacheManager",
    "CacheStats",
    "Changes",
    "Copied",
    "Copier",
    "Copy",
    "Direction",
    "EvictionPolicy",
    "Lease",
    "Readiness",
    "belady",
    "lru",
    "steps_to_execution",
]
