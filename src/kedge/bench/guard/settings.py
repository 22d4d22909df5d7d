"""The sizes of `kedge bench guard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kedge.settings import EngineSettings, GuardSettings, PlannerSettings

Move = Literal["always", "unlearned", "never"]
LEARNED_MOVE: Move = "never"
"""All values are translated by anchors, so that faults of anchors show: offsets of what is moved without are zero"""
DEFAULT_MOVE: Move = PlannerSettings().move
PARTS = ("faults", "clean", "clean_default", "overhead")
"""What can be measured, by the names of the figures"""


@dataclass(frozen=True)
class GuardBenchSettings:
    """What all parts share. A question is one call of every agent of the team."""

    task: str = "code"
    """Of the bundled tasks; `code` depends most on what is translated"""
    parts: tuple[str, ...] = PARTS
    """What is measured"""
    faults: tuple[str, ...] = ()
    """Names of the faults to inject; none: all"""
    learned: int = 24
    """Questions that fill the pools before a fault"""
    before: int = 6
    """Questions after those, for the distributions without the fault"""
    limit: int = 50
    """Questions after which a fault counts as not found"""
    calls: int = 1000
    """Calls without a fault"""
    idle: bool = False
    """Whether checks are carried out after every question, as in a pause of the traffic; else only within their
    budget"""
    seconds: float = 20.0
    """Of each window that is timed"""
    pairs: int = 3
    """Windows with and without the guard, one after the other"""
    clients: int = 4
    seed: int = 0
    device: str = "auto"

    def engine(
        self, anchors: dict[str, object], guard: GuardSettings | None = None, move: Move = LEARNED_MOVE
    ) -> EngineSettings:
        """Return the settings of an engine that translates whatever the anchors, or `move`, allow."""
        given = {"device": self.device, "anchors": anchors, "planner": {"by_cost": False, "move": move}}
        return EngineSettings.model_validate({**given, "guard": (guard or GuardSettings()).model_dump()})


QUICK = GuardBenchSettings(learned=8, before=2, limit=20, calls=100, seconds=4.0, pairs=1)
