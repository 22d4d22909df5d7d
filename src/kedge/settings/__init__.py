"""The settings: one class per section, filled from a TOML file, then `KEDGE_*` variables, then flags; the later win.

    # kedge.toml                            # the same as a variable
    [engine]
    model = "models/llama"                  # KEDGE_ENGINE__MODEL=models/llama
    kv_memory = "2GiB"                      # KEDGE_ENGINE__KV_MEMORY=2GiB
    [engine.anchors]
    capacity = 20                           # KEDGE_ENGINE__ANCHORS__CAPACITY=20
    [engine.tiers]
    host_memory = "8GiB"                    # KEDGE_ENGINE__TIERS__HOST_MEMORY=8GiB
    [engine.vllm]
    max_model_len = 8192                    # KEDGE_ENGINE__VLLM__MAX_MODEL_LEN=8192
    [server]
    port = 8000                             # KEDGE_SERVER__PORT=8000
    [server.limits]
    anchor_bytes = "256MiB"                 # KEDGE_SERVER__LIMITS__ANCHOR_BYTES=256MiB

Every bad value raises a `ConfigError` that names its key and the value.
"""

from kedge.settings.loading import Settings as Settings
from kedge.settings.sections import AnchorSettings as AnchorSettings
from kedge.settings.sections import DiscoveryMode as DiscoveryMode
from kedge.settings.sections import DiscoverySettings as DiscoverySettings
from kedge.settings.sections import EngineSettings as EngineSettings
from kedge.settings.sections import GuardSettings as GuardSettings
from kedge.settings.sections import LimitSettings as LimitSettings
from kedge.settings.sections import PlannerConstants as PlannerConstants
from kedge.settings.sections import PlannerSettings as PlannerSettings
from kedge.settings.sections import QuotaSettings as QuotaSettings
from kedge.settings.sections import ServerSettings as ServerSettings
from kedge.settings.sections import SettingsSection as SettingsSection
from kedge.settings.sections import ThrottledTiers as ThrottledTiers
from kedge.settings.sections import TierSettings as TierSettings
