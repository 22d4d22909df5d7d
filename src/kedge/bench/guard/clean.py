"""Traffic without a fault: how often the guard suspects an agent all the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kedge.bench.guard.faulty import texts
from kedge.bench.guard.lane import GuardLane, guard_records
from kedge.bench.guard.settings import GuardBenchSettings, Move
from kedge.bench.lab.methods import Loaded
from kedge.workloads.miniature import TASKS, workflow

ROUND = 20
"""Questions between two looks at the guard"""


@dataclass(frozen=True, slots=True)
class CleanResult:
    """The guard's record of traffic without a fault."""

    calls: int
    translated: int
    """Of these, calls that were answered with translated KV"""
    checks: int
    false_alarms: int
    """Times that an agent became suspect"""
    ever_off: bool
    """Whether an agent was switched off on evidence: too many changed answers"""

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "calls": self.calls,
            "translated": self.translated,
            "checks": self.checks,
            "false_alarms": self.false_alarms,
            "ever_off": self.ever_off,
        }


def measure_clean(
    loaded: Loaded, settings: GuardBenchSettings, move: Move, progress: Callable[[str], None] = lambda _: None
) -> CleanResult:
    """Ask a team of clients until there have been `settings.calls` calls."""
    task, calls, translated = TASKS[settings.task], 0, 0
    questions = texts(task, settings.seed)
    flow = workflow(task)
    with GuardLane(loaded, flow, settings.engine({}, move=move)) as lane, ThreadPoolExecutor(settings.clients) as pool:
        while calls < settings.calls:
            wanted = min(ROUND, -(-(settings.calls - calls) // len(flow.agents)))
            for _, answered in pool.map(lane.ask, list(islice(questions, wanted))):
                calls += len(answered)
                translated += sum(call.completion.receipt.translated > 0 for call in answered)
            progress(f"clean, move {move}: {calls} of {settings.calls} calls")
        figures: Any = lane.engine.inspect()["guard"]
        records = guard_records(lane.engine)
    suspicions, breaches = (_by_agent(records, name) for name in ("suspicions", "breaches"))
    return CleanResult(calls, translated, figures["checks_done"], suspicions, breaches > 0)


def _by_agent(records: list[dict[str, Any]], name: str) -> int:
    """Return a count summed over agents: one alarm concerns several placeholders of an agent at once."""
    most: dict[str, int] = {}
    for record in records:
        most[record["agent"]] = max(most.get(record["agent"], 0), record[name])
    return sum(most.values())
