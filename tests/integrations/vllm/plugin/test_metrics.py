"""The plug-in's statistics over several of vLLM's steps."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kedge.integrations.vllm.plugin.metrics import RECEIPTS, KedgeStats


def test_stats_of_several_steps_are_merged() -> None:
    first = KedgeStats(data={"host_evictions": 1, RECEIPTS: {"a": {}}})
    second = KedgeStats(data={"host_evictions": 2, "blocks_loaded": 5, RECEIPTS: {"b": {}}})
    both = first.aggregate(second)
    assert both.reduce() == {"host_evictions": 3, "blocks_loaded": 5}
    assert both.data[RECEIPTS] == {"a": {}, "b": {}}


def test_empty_stats_add_nothing() -> None:
    both = KedgeStats(data={"host_evictions": 1}).aggregate(KedgeStats(data={}))
    assert both.data == {"host_evictions": 1} and not both.is_empty()
    both.reset()
    assert both.is_empty()
