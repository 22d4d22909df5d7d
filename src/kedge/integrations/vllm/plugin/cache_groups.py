"""Models with several KV cache groups: which blocks of each group a hit of a prompt needs.

vLLM keeps layers of different kinds in groups with block tables of their own, over one pool of blocks. A prompt is
found up to where every group has what is needed there: full attention all blocks before that place, a sliding window
the blocks that it reaches over, linear attention the state at that place alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

from kedge.errors import LayoutUnknown

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        """Return what a hit of all `hashes` needs: blocks of the main group from `start` on, then those of the others.

        A start behind the last block of the main group leaves out as many of the others.
        """
        length, end = len(hashes), self.main.key_end
        keys = [one + end for one in hashes[start:]]
        if not self.others:
            return NeededBlocks(keys, range(min(start, length), length))
        places, skipped = list(range(start, length)), max(0, start - length)
        for group in self.others:
            found = group.places(length)
            keys += [hashes[at] + group.key_end for at in found]
            places += found
        return NeededBlocks(keys[skipped:], places[skipped:])

    def count(self, length: int) -> int:
        """Return how many blocks a hit of `length` hashes needs."""
        return length + sum(len(group.places(length)) for group in self.others)

    def fitted(self, hashes: Sequence[BlockHash], length: int, has: Callable[[bytes], bool]) -> int:
        """Return the longest hit of at most `length` hashes for which the other groups have what it needs, where the
        main group has all. `has` returns whether the block with a key is there.
        """
        length -= length % self.align
        while length and (missing := self._missing(hashes, length, has)) is not None:
            length = missing - missing % self.align
        return length

    def _missing(self, hashes: Sequence[BlockHash], length: int, has: Callable[[bytes], bool]) -> int | None:
        """Return a length such that all hits up to `length` that are longer need a block which is missing."""
        for group in self.others:
            for at in reversed(group.places(length)):
                if not has(hashes[at] + group.key_end):
                    return at + group.behind
        return None

    def reach(self, hashes: Sequence[BlockHash], stop: int | None, has: Callable[[bytes], bool]) -> int:
        """Return the longest hit of the first `stop` hashes. O(its length)."""
        end, length = self.main.key_end, 0
        for one in hashes[:stop]:
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
    given = getattr(config.cache_config, "hash_block_size", None)  # since 0.30
    return given or math.gcd(*(group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups))


ONE_GROUP = CacheGroups(CacheGroup.of(0))
"""The groups of a model that has one"""


def groups_of(config: VllmConfig, kv_cache: KVCacheConfig) -> CacheGroups:
    """Return the groups of a model. Raises `LayoutUnknown` for kinds of groups that are not known."""
    hash_size = hash_size_of(config, kv_cache)
    dropping = _dropping(kv_cache.kv_cache_groups) if _computes_last_block_again(config.speculative_config) else None
    found = [_group(number, one, hash_size, dropping) for number, one in enumerate(kv_cache.kv_cache_groups)]
    main = next((one for one in found if one.window is None and one.hashes == 1), None)
    if main is None:
        raise LayoutUnknown("groups", len(found), f"none has full attention in blocks of {hash_size} tokens")
    others = tuple(one for one in found if one is not main)
    if len({one.hashes for one in others} | {1}) > 2:
        raise LayoutUnknown("groups", len(found), "blocks have more than two sizes")
    return CacheGroups(main, others, max(one.hashes for one in found))


def _computes_last_block_again(drafts: Any) -> bool:
    """Return whether vLLM drops the last block of a hit, which a drafting head needs computed."""
    return drafts is not None and drafts.use_eagle() and not getattr(drafts, "disable_eagle_block_drop", False)


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
