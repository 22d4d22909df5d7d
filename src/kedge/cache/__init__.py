"""Where KV lives: pools, radix tree, tiers, eviction, prefetch, `CacheManager`. No tensors: blocks are integers."""

from kedge.cache.copies import Copied as Copied
from kedge.cache.copies import Copier as Copier
from kedge.cache.copies import Copy as Copy
from kedge.cache.copies import Direction as Direction
from kedge.cache.loads import Readiness as Readiness
from kedge.cache.manager import CacheManager as CacheManager
from kedge.cache.manager import Lease as Lease
