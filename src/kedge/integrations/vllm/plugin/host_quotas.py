"""What each tenant holds of the host tier, and how much that may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.settings import OTHERS
from kedge.settings import QuotaSettings
from kedge.types import TenantId


class HostQuotas:
    """The tenants of all host blocks with KV, or that KV is being copied to. Owned by the scheduler."""

    def __init__(self, limits: Mapping[str, int], num_blocks: int) -> None:
        """`limits` are the most blocks by tenant, `OTHERS` for each that is not named; ids are below `num_blocks`."""
        self._limits = dict(limits)
        self._tenants: list[TenantId | None] = [None] * num_blocks
        self.held: Counter[TenantId] = Counter()
        """Blocks of each tenant"""

    @classmethod
    def of(cls, quotas: Mapping[str, QuotaSettings], block_bytes: int, num_blocks: int) -> HostQuotas | None:
        """Return the quotas in whole blocks, None where no tenant has one."""
        limits = {one: quota.host_memory // block_bytes for one, quota in quotas.items() if quota.host_memory}
        return cls(limits, num_blocks) if limits else None

    def excess(self, tenant: TenantId, blocks: int) -> int:
        """Return how many blocks a tenant would have too many with `blocks` more."""
        limit = self._limits.get(tenant, self._limits.get(OTHERS))
        return 0 if limit is None else max(0, self.held[tenant] + blocks - limit)

    def is_of(self, block_id: int, tenant: TenantId) -> bool:
        """Return whether a block is a tenant's."""
        return self._tenants[block_id] == tenant

    def take(self, block_ids: Iterable[int], tenant: TenantId | None) -> None:
        """Give blocks to a tenant, or to none, whoever they were of."""
        for block_id in block_ids:
            before, self._tenants[block_id] = self._tenants[block_id], tenant
            if before is not None:
                self.held[before] -= 1
                if not self.held[before]:
                    del self.held[before]
            if tenant is not None:
                self.held[tenant] += 1

    def clear(self) -> None:
        """Give all blocks to none."""
        self._tenants = [None] * len(self._tenants)
        self.held.clear()

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the sums are those over all blocks, and within the limits."""
        found = Counter(tenant for tenant in self._tenants if tenant is not None)
        if found != self.held:
            raise PlanError("held", self.held, f"the blocks sum to {found}")
        over = [tenant for tenant in found if self.excess(tenant, 0)]
        if over:
            raise PlanError("held", self.held, f"{over} have more than they may")
