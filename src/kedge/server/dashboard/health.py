"""The state of the engine, as the dashboard's header shows it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kedge.server.service import Service

OVERLOAD_SECONDS = 10.0
"""How long a refusal for want of room counts as overload."""
SILENT_SECONDS = 6.0
"""After so long without an answer, an engine counts as overloaded."""


class HealthState(StrEnum):
    """What can be expected of the engine."""

    HEALTHY = "healthy"
    OVERLOADED = "overloaded"
    ENDING = "shutting down"
    CLOSED = "closed"
    FAILED = "failed"


class Health(NamedTuple):
    """The state of the engine, and why where it is not healthy."""

    state: HealthState
    reason: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether the engine answers nothing any more."""
        return self.state in (HealthState.CLOSED, HealthState.FAILED)


HEALTHY = Health(HealthState.HEALTHY)


def health(service: Service, *, is_closed: bool, silent_s: float, overload_age_s: float | None) -> Health:
    """Return the engine's state.

    `is_closed`: it refused to be inspected. `silent_s`: for how long it has owed an answer. `overload_age_s`: how long
    ago one of the viewer's calls was refused for want of room, None for never.
    """
    failure = service.engine.failure
    if failure is not None:
        return Health(HealthState.FAILED, str(failure) or type(failure).__name__)
    if is_closed:
        return Health(HealthState.CLOSED, "the engine was closed")
    if service.is_ending:
        return Health(HealthState.ENDING, "the server takes no new work")
    return _load(service, silent_s, overload_age_s)


def _load(service: Service, silent_s: float, overload_age_s: float | None) -> Health:
    most = service.settings.max_in_flight
    if service.in_flight >= most:
        return Health(HealthState.OVERLOADED, f"all {most} places for generations and runs are taken")
    if silent_s > SILENT_SECONDS:
        return Health(HealthState.OVERLOADED, f"the engine has not answered for {silent_s:.0f} s")
    if overload_age_s is not None and overload_age_s < OVERLOAD_SECONDS:
        return Health(HealthState.OVERLOADED, "calls were refused for want of room")
    return HEALTHY
