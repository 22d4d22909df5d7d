"""Helpers for vLLM's block pools, which find blocks by hash and evict them in the order of their free queue.

vLLM keeps layers of different kinds in groups with block tables of their own, over one pool of blocks. A prompt is
found up to where every group has what is needed there: full attention all blocks before that place, a sliding window
the blocks that it reaches over, linear attention the state at that place alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

from kedge.cache.owners import Owner, Owners
from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.policies.eviction import EvictionPolicy
from kedge.structures.prefixes import leading_count


class CacheGroup(NamedTuple):
    """One of vLLM's KV cache groups."""

    number: int
    key_end: bytes
    """What vLLM appends to a block's hash to make the key of this group's block in a pool"""
    hashes: int = 1
    """Number of hashes of one block: a prompt is hashed by the smallest blocks of all groups"""
    window: int | None = None
    """How many of its last blocks a hit needs; None: all"""
    behind: int = 0
    """How many hashes before its end a hit ends here: beside a head, where vLLM computes again"""

    @classmethod
    def of(cls, number: int, hashes: int = 1, window: int | None = None, behind: int = 0) -> CacheGroup:
        """Return the group with vLLM's number."""
        return cls(number, make_block_hash_with_group_id(BlockHash(b""), number), hashes, window, behind)

    def places(self, length: int) -> range:
        """Return the indices of the hashes of the blocks that a hit of `length` hashes needs."""
        stop = max(0, length - self.behind) // self.hashes
        start = 0 if self.window is None else max(0, stop - self.window)
        return range((start + 1) * self.hashes - 1, stop * self.hashes, self.hashes)


class NeededBlocks(NamedTuple):
    """Blocks that a hit needs, by key, each with the index of its hash in the prompt."""

    keys: Sequence[bytes]
    places: Sequence[int]

    def chosen(self, indices: Sequence[int]) -> NeededBlocks:
        """Return some of them."""
        return NeededBlocks([self.keys[at] for at in indices], [self.places[at] for at in indices])


@dataclass(frozen=True)
class CacheGroups:
    """The groups of a model, one of which needs all blocks of a prompt, one for every hash."""

    main: CacheGroup
    others: tuple[CacheGroup, ...] = ()
    align: int = 1
    """A hit is a multiple of so many hashes long"""

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter((self.main, *self.others))

    def needed(self, hashes: Sequence[BlockHash], start: int = 0) -> NeededBlocks:
        """Return what a hit of all `hashes` needs: blocks of the main group from `start` on, then those of others."""
        length, end = len(hashes), self.main.key_end
        keys = [one + end for one in hashes[start:]]
        if not self.others:
            return NeededBlocks(keys, range(start, length))
        places = list(range(start, length))
        for group in self.others:
            found = group.places(length)
            keys += [hashes[at] + group.key_end for at in found]
            places += found
        return NeededBlocks(keys, places)

    def fitted(self, hashes: Sequence[BlockHash], length: int, has: Callable[[bytes], bool]) -> int:
        """Return the longest hit of at most `length` hashes for which the other groups have what it needs, where the
        main group has all. `has` returns whether the block with a key is there.
        """
        length -= length % self.align
        while length:
            wanted = ((group, at) for group in self.others for at in reversed(group.places(length)))
            missing = (at + group.behind for group, at in wanted if not has(hashes[at] + group.key_end))
            if (shorter := next(missing, None)) is None:
                break
            length = shorter - shorter % self.align  # all longer hits need a block that is missing
        return length

    def reach(self, hashes: Sequence[BlockHash], has: Callable[[bytes], bool]) -> int:
        """Return the longest hit of `hashes`. O(its length)."""
        end, length = self.main.key_end, 0
        for one in hashes:
            if not has(one + end):
                break
            length += 1
        return self.fitted(hashes, length, has)

    def held_blocks(self, blocks: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Return what a request holds, by vLLM's groups, as the blocks of the main group and those of the others."""
        if not blocks:
            return [], []
        return blocks[self.main.number], [block for group in self.others for block in blocks[group.number] if block]


def hash_size_of(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Return by how many tokens prompts are hashed."""
    given = getattr(config.cache_config, "hash_block_size", None)
    return given or math.gcd(*(group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups))


ONE_GROUP = CacheGroups(CacheGroup.of(0))
"""The groups of a model that has one"""


def groups_of(config: VllmConfig, kv_cache: KVCacheConfig) -> CacheGroups:
    """Return the groups of a model. Raises `LayoutUnknown` for kinds of groups that are not known."""
    hash_size = hash_size_of(config, kv_cache)
    drafts: Any = config.speculative_config  # vLLM drops the last block of a hit, which a drafting head needs computed
    drops = drafts is not None and drafts.use_eagle() and not getattr(drafts, "disable_eagle_block_drop", False)
    dropping = _dropping(kv_cache.kv_cache_groups) if drops else None
    found = [_group(number, one, hash_size, dropping) for number, one in enumerate(kv_cache.kv_cache_groups)]
    main = next((one for one in found if one.window is None and one.hashes == 1), None)
    if main is None:
        raise LayoutUnknown("groups", len(found), f"none has full attention in blocks of {hash_size} tokens")
    others = tuple(one for one in found if one is not main)
    if len({one.hashes for one in others} | {1}) > 2:
        raise LayoutUnknown("groups", len(found), "blocks have more than two sizes")
    return CacheGroups(main, others, max(one.hashes for one in found))


def _dropping(groups: Sequence[Any]) -> set[int]:
    """Return of which groups vLLM finds one block more than a hit has: those with a head's layers and others of their
    kind, or all where vLLM has not marked any (before 0.33, it marks those of some methods only).
    """
    heads = [one.kv_cache_spec for one in groups if one.is_eagle_group]
    return {number for number, one in enumerate(groups) if not heads or one.kv_cache_spec in heads}


def _group(number: int, group: Any, hash_size: int, dropping: set[int] | None) -> CacheGroup:
    """Return a group. `dropping`: see `_dropping`; None without a head."""
    spec = group.kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    drops = dropping is not None and number in dropping
    windows = {_window(one, int(drops)) for one in specs}
    if len(windows) > 1:
        raise LayoutUnknown("groups", number, "its layers reach over different windows")
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise LayoutUnknown("groups", number, "its blocks are in a pool of their own")
    if spec.block_size % hash_size or (isinstance(spec, MambaSpec) and spec.block_size != hash_size):
        raise LayoutUnknown("groups", number, f"blocks of {spec.block_size} tokens are hashed by {hash_size}")
    window, ends_before = windows.pop(), dropping is not None and (isinstance(specs[0], MambaSpec) or not drops)
    return CacheGroup.of(number, spec.block_size // hash_size, window, int(ends_before and window is not None))


def _window(spec: Any, extra: int) -> int | None:
    """Return how many of the last blocks a hit needs of a layer; None: all. Unknown kinds raise `LayoutUnknown`."""
    if not getattr(spec, "prefix_cacheable", True):
        raise LayoutUnknown("groups", type(spec).__name__, "is not in the prefix cache")
    if isinstance(spec, SlidingWindowSpec):
        return -(-(spec.sliding_window - 1) // spec.block_size) + extra
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise LayoutUnknown("mamba_cache_mode", spec.mamba_cache_mode, "must be align")
        return 1
    if isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window"):
        return None
    raise LayoutUnknown("groups", type(spec).__name__, "is of no kind that is known")


def replace_queue(
    pool: BlockPool, policy: EvictionPolicy, groups: CacheGroups = ONE_GROUP, owners: Owners | None = None
) -> StepFreeQueue:
    """Give a pool of blocks of `groups` a queue with this policy. It has handed out its null block alone."""
    queue = StepFreeQueue(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks), policy, owners)
    pool.free_block_queue = queue
    queue.groups = groups
    return queue


def groups_in(pool: BlockPool) -> CacheGroups:
    """Return the KV cache groups whose blocks are in a pool."""
    return getattr(pool.free_block_queue, "groups", ONE_GROUP)


# look-ups -----------------------------------------------------------------------------------------------------


def known_blocks(pool: BlockPool) -> dict[bytes, Any]:
    """Return the blocks of `pool` by key, which is a hash and the end of a group: each a block, or several by id."""
    return cast("dict[bytes, Any]", pool.cached_block_hash_to_block._cache)


def any_of(known: Any) -> KVCacheBlock:
    """Return a block, or the first of several, that a pool knows by one key."""
    return next(iter(known.values())) if known.__class__ is dict else known


def cached_block(pool: BlockPool, block_hash: BlockHash) -> KVCacheBlock | None:
    """Return a block of `pool` with this hash in the main group, if there is one."""
    return pool.cached_block_hash_to_block.get_one_block(block_hash + groups_in(pool).main.key_end)


def has_end(pool: BlockPool, hashes: Sequence[BlockHash]) -> bool:
    """Return whether `pool` has the last block of a prompt in every group."""
    known, groups = known_blocks(pool), groups_in(pool)
    ends = ((group, group.places(len(hashes))) for group in groups)
    return all(hashes[places[-1]] + group.key_end in known for group, places in ends if places)


def leading_blocks(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """Return the blocks in the main group of the longest prefix of `hashes` that `pool` has."""
    known, end, blocks = known_blocks(pool), groups_in(pool).main.key_end, list[KVCacheBlock]()
    for one in hashes:
        block = known.get(one + end)
        if block is None:
            break
        blocks.append(any_of(block))
    return blocks


def hit_blocks(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """Return what `pool` has of a prompt in all groups: its longest prefix, and what else the longest hit needs."""
    blocks, known, groups = leading_blocks(pool, hashes), known_blocks(pool), groups_in(pool)
    if groups.others:
        hit = groups.fitted(hashes, len(blocks), known.__contains__)
        blocks += [any_of(known[key]) for key in groups.needed(hashes[:hit], hit).keys]
    return blocks


def cached_prefix(
    pool: BlockPool,
    hashes: Sequence[BlockHash],
    others: Container[bytes] = (),
    start: int = 0,
    guess: int = -1,
) -> int:
    """Return how many leading blocks of a prompt are in `pool`, or among `others` by their keys: `start` at least.

    O(log n) look-ups, since prompts are evicted from their ends, and two where the answer is `guess`. Where there are
    several groups, those that a hit needs of the others have to be there as well.
    """
    known, groups = known_blocks(pool), groups_in(pool)
    end = groups.main.key_end

    def is_cached(at: int) -> bool:
        key = hashes[at] + end
        return key in known or key in others

    length = leading_count(is_cached, len(hashes), start, guess)
    if not groups.others:
        return length
    return groups.fitted(hashes, length, lambda key: key in known or key in others)


# blocks with their keys and owners ------------------------------------------------------------------------------


def name_blocks(pool: BlockPool, needed: NeededBlocks, blocks: Sequence[KVCacheBlock]) -> int:
    """Make blocks without a key known by theirs, but where the pool has a block with it. Returns how many are known
    now.
    """
    known, size, named = known_blocks(pool), pool.hash_block_size, 0
    for key, place, block in zip(needed.keys, needed.places, blocks, strict=True):
        if key not in known:
            pool._insert_block_hash(BlockHashWithGroupId(key), block, num_tokens=(place + 1) * size)
            named += 1
    return named


def own_prefix(pool: BlockPool, hashes: Sequence[BlockHash], owner: Owner) -> None:
    """Mark what `pool` has of a prompt, in all groups, as owned by `owner`."""
    own_blocks(pool, hit_blocks(pool, hashes), owner)


def own_known(pool: BlockPool, keys: Sequence[bytes], owner: Owner) -> None:
    """Mark the blocks with these keys that `pool` has as owned by `owner`."""
    known = known_blocks(pool)
    own_blocks(pool, [any_of(known[one]) for one in keys if one in known], owner)


def own_blocks(pool: BlockPool, blocks: Sequence[KVCacheBlock], owner: Owner) -> None:
    """Mark different blocks of one prompt as owned by `owner`, which uses them."""
    pool.touch(blocks)
    pool.free_block_queue.own([block.block_id for block in blocks], owner)
    pool.free_blocks(reversed(blocks))
