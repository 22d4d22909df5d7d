"""A world with files behind its host tier, which tests hold in their hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kedge.cache import CacheManager
from kedge.cache.copies import FileDone, FileRead, FileWrite
from kedge.policies.eviction import lru
from kedge.settings import TierSettings
from kedge.types import RequestId
from tests.cache.helpers import World


@dataclass
class FakeFiles:
    """Ends orders when told to, well or badly. Files hold what the host's blocks held when they were written."""

    host: dict[int, object]
    files: dict[str, tuple[FileWrite, list[object]]] = field(default_factory=dict)
    reads: list[FileRead] = field(default_factory=list)
    writes: list[tuple[FileWrite, list[object]] | Sequence[str]] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    _done: list[FileDone] = field(default_factory=list)

    def stored(self) -> list[FileWrite]:
        return [order for order, _ in self.files.values()]

    def write(self, order: FileWrite) -> None:
        self.writes.append((order, [self.host.get(block) for block in order.blocks]))

    def read(self, order: FileRead) -> None:
        self.reads.append(order)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self.writes.append(names)

    def drain(self) -> list[FileDone]:
        done, self._done = self._done, []
        return done

    def end_write(self, ok: bool = True) -> None:
        """Carries out the next write or deletion. A write whose blocks have changed is none."""
        order = self.writes.pop(0)
        if not isinstance(order, tuple) or not isinstance(order[0], FileWrite):
            for name in order:
                self.files.pop(str(name), None)
            return
        write, contents = order
        is_same = [self.host.get(block) for block in write.blocks] == contents
        if ok and is_same:
            self.files[write.name] = (write, contents)
        self._done.append(FileDone(write, len(write.blocks) if ok and is_same else 0))

    def end_read(self, at: int = 0, ok: bool = True) -> None:
        """Carries out a read, up to the first file that is gone, or the first block of a damaged one."""
        order, done = self.reads.pop(at), 0
        for name, start, stop in order.parts:
            stored = self.files.get(name)
            if stored is None or not ok or name in self.damaged:
                self._done.append(FileDone(order, done, name, is_damage=name in self.damaged, seconds=0.001))
                return
            for content in stored[1][start:stop]:
                self.host[order.targets[done]] = content
                done += 1
        self._done.append(FileDone(order, done, seconds=0.001))


class DiskWorld(World):
    """A world with a disk tier of `disk_blocks`; another one may begin with the `files` of this one."""

    def __init__(
        self,
        num_blocks: int = 12,
        host_blocks: int = 12,
        disk_blocks: int = 100,
        files: FakeFiles | None = None,
        **settings: object,
    ) -> None:
        settings = {"backup_hits": 0, "disk_path": "nowhere", "disk_memory": disk_blocks, **settings}
        policy = settings.pop("policy", lru)
        super().__init__(num_blocks, host_blocks, policy=policy, **settings)
        self.files = FakeFiles(self.copier.host)
        if files:
            self.files.files = files.files
        tiers = TierSettings(host_blocks=host_blocks, **settings)
        self.cache = CacheManager(num_blocks, 1, policy, tiers, self.copier, 1, self.files)
        self.tree = self.cache._tree

    @property
    def disk(self):
        return self.cache.tiers.disk

    def settle(self, ok: bool = True) -> None:
        """Ends copies, writes and reads until nothing moves."""
        super().settle(ok)
        while self.files.writes or self.files.reads:
            if self.files.reads:
                self.files.end_read(ok=ok)
            else:
                self.files.end_write(ok)
            self.cache.pump()
            super().settle(ok)

    def ask(self, text: str, request: str = "waiting") -> int:
        """Waits for what any tier has of a prompt, and serves it; returns how many tokens were hits."""
        for _ in range(10):
            if self.demand(text, request) == "ready":
                break
            self.settle()
        lease = self.admit(text, request=RequestId(request))
        self.cache.finish(lease.request_id, text.encode())
        self.settle()
        return lease.exact_tokens

    def forget_memory(self) -> None:
        """Evicts all of both tiers but the disk."""
        for tier in (0, 1):
            share = self.tree.shares[tier]
            self.cache.tiers.pools.release(self.tree.evict(share.tier, share.evictable))
        self.check()
