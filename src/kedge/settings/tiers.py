"""The section `[engine.tiers]`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from kedge.errors import ConfigError
from kedge.settings.section import Bytes, BytesOrNone, Seconds, SettingsSection


class TierSettings(SettingsSection):
    """The host tier, the eviction policy of both tiers, and how long a request waits for KV from the host."""

    section = "engine.tiers"

    host_memory: BytesOrNone = 0
    """Bytes of the host tier; with 0 there is none, and what the device evicts is computed again."""
    host_blocks: NonNegativeInt | None = None
    """Blocks of the host tier; None takes as many as `host_memory` holds."""
    disk_path: Path | None = None
    """Folder of the disk tier: what is backed up is written there too, and found again after a restart. Only one engine
    may use it. None: no disk tier."""
    disk_memory: Bytes = 16 << 30
    """Bytes of KV in that folder; what was used longest ago is deleted."""
    policy: Literal["sessions", "steps", "lru"] = "sessions"
    """What is evicted first: `lru` is the least recently used, `steps` the KV of the agent that runs last by the
    forecast (and without a forecast the same as `lru`), `sessions` what returns last, by the forecast or else by when
    such sessions tend to return."""
    prefetch_window: Annotated[float, Field(allow_inf_nan=False)] = 2.0
    """Fixed prompts and histories of sessions needed within this many steps are prefetched; below 0 none are."""
    prefetch_jobs: NonNegativeInt = 4
    """Prefetches that may be queued or under way."""
    copy_jobs: PositiveInt = 2
    """Copies that may be under way in each direction."""
    copy_bytes: Bytes = 256 << 20
    """Bytes that may be under way in each direction; a single copy may always be."""
    backup_hits: NonNegativeInt | None = 1
    """Hits after which KV outside fixed prompts is backed up: 0 at once, None never. Fixed prompts always are."""
    decode_reserve: NonNegativeInt = 0
    """Device blocks that a prefetch leaves free or evictable for running requests."""
    virtual_step: Seconds = 8.0
    """The step at which traffic without a forecast competes under the policy `steps`."""
    status_aware: bool = True
    """Whether a request that waits for KV from the host lets those behind it go first."""
    max_skips: NonNegativeInt = 32
    """Requests that may go before one that waits for KV from the host; then it computes what it lacks."""
    max_wait: Seconds = 10.0
    """Seconds that a request waits for KV from the host; then it computes what it lacks."""
    throttle: Seconds = 0.0
    """Least seconds per copied block. For benchmarks: it gives a CPU the copy costs of a GPU."""

    @model_validator(mode="after")
    def _disk_needs_host(self) -> Self:
        if self.disk_path is not None and not (self.host_memory if self.host_blocks is None else self.host_blocks):
            why = "the disk is behind the host tier: set host_memory too"
            raise ConfigError(f"{self.section}.disk_path", str(self.disk_path), why)
        return self

    @property
    def unlabelled_step(self) -> float:
        """Steps until KV is needed of which nothing is expected: under `sessions` it goes first."""
        return math.inf if self.policy == "sessions" else self.virtual_step

    def host_pool_size(self, block_bytes: int) -> int:
        """Return the number of blocks in the host tier, with blocks of `block_bytes` bytes.

        Raises `ConfigError` where `host_memory` does not hold a single one.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        blocks = self.host_memory // block_bytes
        if self.host_memory and not blocks:
            why = f"too small: a block has {block_bytes} bytes"
            raise ConfigError(f"{self.section}.host_memory", self.host_memory, why)
        return blocks
