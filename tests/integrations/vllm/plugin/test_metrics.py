"""The plug-in's statistics: what is reported when, and over several of vLLM's steps."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.integrations.vllm.plugin import scheduler_side
from kedge.integrations.vllm.plugin.metrics import REPORT_SECONDS, KedgeStats
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.settings import GuardSettings


def test_stats_of_several_steps_are_merged() -> None:
    first = KedgeStats(data={"host_evictions": 1})
    second = KedgeStats(data={"host_evictions": 2, "blocks_loaded": 5})
    both = first.aggregate(second)
    assert both.reduce() == {"host_evictions": 3, "blocks_loaded": 5}
    assert both.aggregate(KedgeStats(data={})).data["host_evictions"] == 3
    both.reset()
    assert both.is_empty()


def test_each_count_is_reported_once_and_now_and_then_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counts = [100.0], Counter[str]()
    monkeypatch.setattr(scheduler_side, "time", SimpleNamespace(monotonic=lambda: now[0]))
    side: Any = SchedulerSide(PluginSettings(), 16, 1, Translations(None, 1, GuardSettings()))
    monkeypatch.setattr(side, "totals", lambda: counts)

    def taken(after: float = 0.0, **more: int) -> dict[str, Any]:
        now[0] += after
        counts.update(more)
        found = side.take_stats()
        return found.data if found else {}

    assert taken(a=2, b=1) == {"a": 2, "b": 1} and taken() == {}
    assert taken(a=3) == {"a": 3}, "copies may go on when no request is left"
    side.requests["r"] = object()
    assert taken(a=1) == {} and taken(REPORT_SECONDS, a=1) == {"a": 2}
    assert taken(a=1) == {}
    del side.requests["r"]
    assert taken() == {"a": 1}, "an idle engine takes no more steps"
