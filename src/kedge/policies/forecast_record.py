"""How often forecasts come true, so that those that do not are not loaded for.

A forecast names the agents that are expected next. Where others call, time after time, what was loaded for the
expected ones has delayed what was needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, AgentKey, Namespace, RunKey

NEAR = 1.0
"""Steps up to which an agent is expected next."""
MEMORY = 10
"""Calls of a client after which old ones count for a third."""
MIN_SKILL = 0.3
"""Skill of forecasts below which they are not believed: 0 is that of guessing, 1 is always right."""
MAX_CLIENTS, MAX_RUNS = 1024, 4096
"""Clients and runs that are remembered; the one that was used longest ago is forgotten first."""
Client = tuple[Namespace, str]
NextRuns = Mapping[AgentKey, tuple[float, float] | None]
"""Agents whose next run has changed, with steps and probability; None: it is not known any more."""
_Expected = dict[AgentId, tuple[float, float]]


class _Skill(NamedTuple):
    """By how many more calls the expected agents made than if any agent were as likely, of how many at most."""

    gained: float = 1.0
    possible: float = 1.0

    def after(self, gained: float, possible: float) -> _Skill:
        keep = 1 - 1 / MEMORY
        return _Skill(keep * self.gained + gained / MEMORY, keep * self.possible + possible / MEMORY)

    @property
    def value(self) -> float:
        return max(0.0, self.gained / self.possible)


class ForecastRecord:
    """Compares what each client's forecasts expected with the agents that called. One thread owns it."""

    def __init__(self) -> None:
        self._now: BoundedDict[RunKey, _Expected] = BoundedDict(MAX_RUNS, self._forget)
        self._before: dict[RunKey, _Expected] = {}
        """What was expected before the last change: a call begins with a forecast of what follows it"""
        self._skills: BoundedDict[Client, _Skill] = BoundedDict(MAX_CLIENTS)

    def __len__(self) -> int:
        """Return the number of clients that are remembered."""
        return len(self._skills)

    def skill(self, agent: AgentKey) -> float:
        """Return the skill of the forecasts of an agent's client, from 0 to 1; 1 before its first call."""
        return self._skills.get(_client(agent), _Skill()).value

    def on_forecast(self, changes: NextRuns) -> NextRuns:
        """Take the changes of the forecast. Returns them with less probable runs where forecasts do not come true."""
        for run in {key.run for key in changes}:
            self._update(run, {key.agent: next_run for key, next_run in changes.items() if key.run == run})
        return {key: next_run and self._believed(key, next_run) for key, next_run in changes.items()}

    def _update(self, run: RunKey, changed: Mapping[AgentId, tuple[float, float] | None]) -> None:
        before = self._now.pop(run, None) or {}
        now = {agent: next_run for agent, next_run in {**before, **changed}.items() if next_run is not None}
        self._before.pop(run, None)
        if now:
            self._now[run], self._before[run] = now, before

    def _forget(self, run: RunKey, _: _Expected) -> None:
        self._before.pop(run, None)

    def _believed(self, key: AgentKey, next_run: tuple[float, float]) -> tuple[float, float]:
        skill = self.skill(key)
        return next_run if skill >= MIN_SKILL else (next_run[0], next_run[1] * skill)

    def called(self, agent: AgentKey) -> None:
        """Take an agent's call, before or after the forecast that begins with it."""
        now, name = self._now.get(agent.run), agent.agent
        if now is None:
            return
        before = self._before.get(agent.run, now)
        expected = before if _has_begun(before.get(name), now.get(name)) else now
        self._before[agent.run] = now
        if name in expected:
            near = [one for one, (steps, _) in expected.items() if steps <= NEAR]
            self._count(_client(agent), name in near, len(near) / len(expected))

    def _count(self, client: Client, was_near: bool, chance: float) -> None:
        skill = self._skills.pop(client, _Skill())
        self._skills[client] = skill.after(was_near - chance, 1 - chance)


def _client(agent: AgentKey) -> Client:
    return agent.namespace, agent.client_id


def _has_begun(before: tuple[float, float] | None, now: tuple[float, float] | None) -> bool:
    """Return whether a forecast already counts an agent's call as running, or as done, by its runs before and now."""
    if now is None or before is None:
        return now is None or now[0] == 0
    return now[0] == 0 < before[0] or now[0] > before[0]
