"""Inspection of an engine: figures as plain data, taken between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.cache import CacheManager
from kedge.discovery import PlainRequests
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.learning import Learning
from kedge.engine.local.preassembly import PromptPreassembler
from kedge.engine.local.scheduler import Scheduler
from kedge.engine.local.shared_writes import SharedWrites
from kedge.engine.local.state_snapshots import StateSnapshots
from kedge.kv.storage import PagedStorage
from kedge.reuse.costs import EngineCosts
from kedge.reuse.runtime import Runtime
from kedge.types import Namespace, Tokens


@dataclass(frozen=True, slots=True)
class Inspection:
    """The parts of an engine, and figures of them as plain data. For the engine's owner thread only."""

    scheduler: Scheduler
    cache: CacheManager
    loading: Loading
    preassembly: PromptPreassembler
    learning: Learning
    costs: EngineCosts
    runtime: Runtime
    storage: PagedStorage
    plain: PlainRequests
    snapshots: StateSnapshots
    shared: SharedWrites

    @property
    def learned(self) -> tuple[AnchorStore, BaseStore]:
        """The anchors and the base KV."""
        anchors, bases = self.runtime.learned
        assert isinstance(anchors, AnchorStore) and isinstance(bases, BaseStore)
        return anchors, bases

    def check_integrity(self) -> None:
        """Raise `PlanError` if a block does not have exactly one owner."""
        self.cache.check_integrity()

    def stats(self) -> dict[str, object]:
        """Return figures of the queue, the cache, waiting for loads, learning, costs, and the anchors."""
        return {
            "scheduler": {"running": len(self.scheduler.running), "waiting": len(self.scheduler.unadmitted)},
            "learning": self.learning.stats(),
            "costs": self.costs.stats(),
            "cache": asdict(self.cache.stats()),
            "loading": self.loading.stats(),
            "copied_tokens": self.shared.copied_tokens,
            "borrowed_tokens": self.shared.borrowed_tokens,
            "preassembly": self.preassembly.stats(),
            "discovery": self.plain.stats(),
            "states": asdict(self.snapshots.stats()),
            **self.runtime.stats(),
        }

    def tenant_stats(
        self, owns: Callable[[Namespace], bool], prompts: Iterable[tuple[Namespace, Tokens]]
    ) -> dict[str, object]:
        """Return the anchor pools of some tenants, how many tokens of the given prompts are in each tier, and what was
        found in their plain requests.
        """
        found = (self.cache.status(namespace, tokens) for namespace, tokens in prompts)
        cached = [{"device": one.device_tokens, "host": one.host_tokens} for one in found]
        return {"prompts": cached, "pools": self.runtime.pool_stats(owns), "traffic": self.plain.report(owns)}
