"""The guard's records of `VLLMEngine`, in a folder beside those of the ranks, which are other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge.engine.common.state.snapshot import GuardFolder
from kedge.errors import ConfigError
from kedge.integrations.vllm.engine.options import KeepingOptions
from kedge.reuse.guard.guard import QualityGuard
from kedge.settings import AnchorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kedge.integrations.vllm.plugin.rank_state import RankState

FOLDER = "guard"


def keep_guard(
    guard: QualityGuard, config: VllmConfig, anchors: AnchorSettings, keeping: KeepingOptions
) -> RankState | None:
    """Load what a guard knew before, and begin to save what it learns; None where nothing is kept.

    Damaged records and those of another model or of other settings of the anchors are left out, with a line in the log.
    Raises `ConfigError` where the folder cannot be used.
    """
    if keeping.state is None:
        return None
    from kedge.integrations.vllm.plugin.model_identity import guard_identity
    from kedge.integrations.vllm.plugin.rank_state import RankState

    folder = keeping.state.absolute() / FOLDER
    try:
        state = GuardFolder(folder, guard_identity(config, anchors), guard)
    except OSError as error:
        raise ConfigError("state", str(folder), f"cannot be used: {error}") from error
    kept = RankState(state, keeping.snapshot_interval, lambda: True)
    kept.load()
    kept.start()
    return kept
