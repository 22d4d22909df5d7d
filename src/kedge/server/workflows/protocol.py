"""Bodies of the workflow routes."""

from __future__ import annotations

from typing import Annotated, Literal

from kedge.guard import GuardMode
from kedge.server.http.bodies import Body, accepted
from kedge.types import ReuseMode

ReuseChoice = Literal["off", "exact", "translate"]
GuardChoice = Literal["off", "shadow", "on"]
RunReuse = Annotated[
    ReuseChoice | dict[str, ReuseChoice],
    accepted("'off', 'exact' or 'translate', or an object with one of these for each agent that it names"),
]


class RunBody(Body):
    """Request to start a run of a registered workflow."""

    inputs: dict[str, str]
    reuse: RunReuse | None = None
    """One mode for all agents without a mode of their own, or modes by agent, which override everything else."""
    guard: GuardChoice | None = None
    """Mode of the quality guard for all agents without one of their own."""
    stream: bool = False

    @property
    def mode(self) -> ReuseMode | None:
        """The mode for all agents, if the body gives one."""
        return ReuseMode(self.reuse) if isinstance(self.reuse, str) else None

    @property
    def guard_mode(self) -> GuardMode | None:
        """The guard's mode, if the body gives one."""
        return GuardMode(self.guard) if self.guard else None

    @property
    def modes(self) -> dict[str, ReuseMode]:
        """The modes by agent."""
        return {name: ReuseMode(mode) for name, mode in self.reuse.items()} if isinstance(self.reuse, dict) else {}
