"""An engine without its thread, with replaced components, so that a test can read the KV of a running request."""

from __future__ import annotations

from kedge.engine.local import build
from kedge.engine.local.components import EngineComponents
from kedge.engine.local.core import EngineCore
from kedge.engine.local.model.loading import checked_runner
from kedge.settings import AnchorSettings, EngineSettings, PlannerConstants
from tests.engine.local.conftest import tiny_model
from tests.engine.local.test_translation import OPEN, Driver


class ComponentsDriver(Driver):
    def __init__(self, components: EngineComponents, family: str = "llama", **settings: object) -> None:
        self.runner = checked_runner(tiny_model(family))
        planner = PlannerConstants(by_cost=False, recompute_head=0, min_translated=0, move="never")
        fixed = {"kv_memory": "256 blocks", "device": "cpu", "anchors": AnchorSettings(**OPEN), "planner": planner}
        wanted = {**fixed, **settings}
        self.core = EngineCore(build.EngineParts(self.runner, EngineSettings(**wanted), components=components))
