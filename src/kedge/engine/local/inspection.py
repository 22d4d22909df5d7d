"""Looking into an engine: figures as plain data, taken between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from kedge.cache import CacheManager
from kedge.engine.local.costs import EngineCosts
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.learning import Learning
from kedge.engine.local.preassembly import Preassembly
from kedge.engine.local.scheduler import Scheduler
from kedge.reuse.runtime import Runtime
from kedge.types import Namespace, Tokens


@dataclass(frozen=True, slots=True)
class Inspection:
    """What can be asked of an engine's parts. Called by its owner thread only."""

    scheduler: Scheduler
    cache: CacheManager
    loading: Loading
    preassembly: Preassembly
    learning: Learning
    costs: EngineCosts
    runtime: Runtime

    def stats(self) -> dict[str, object]:
        """Return figures of the queue, the cache, waiting for loads, learning, costs, and the anchors."""
        return {
            "scheduler": {"running": len(self.scheduler.running), "waiting": len(self.scheduler.unadmitted)},
            "learning": self.learning.stats(),
            "costs": self.costs.stats(),
            "cache": asdict(self.cache.stats()),
            "loading": self.loading.stats(),
            "preassembly": self.preassembly.stats(),
            **self.runtime.stats(),
        }

    def tenant_stats(
        self, owns: Callable[[Namespace], bool], prompts: Iterable[tuple[Namespace, Tokens]]
    ) -> dict[str, object]:
        """Return the anchor pools of some tenants, and how much of the given beginnings of prompts is in which tier."""
        found = (self.cache.status(namespace, tokens) for namespace, tokens in prompts)
        cached = [{"device": one.device_tokens, "host": one.host_tokens} for one in found]
        return {"prompts": cached, "pools": self.runtime.pool_stats(owns)}
