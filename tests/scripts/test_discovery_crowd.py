"""The crowd that measures discovery: it is as described, and memory does not follow the number of requests."""

from __future__ import annotations

import tracemalloc

import pytest

from kedge.discovery import discovery, known_texts, runs
from kedge.policies.fixed_prompts import SharedHeads
from scripts import discovery_crowd
from scripts.discovery_crowd import crowd


@pytest.mark.slow
def test_memory_does_not_grow_with_the_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small bounds, so that a small crowd fills them."""
    for module, name, limit in (
        (discovery, "MAX_AGENTS", 32),
        (discovery, "MAX_VALUES", 64),
        (discovery, "MAX_BLOCKS", 64),
        (runs, "MAX_AGENTS", 32),
        (runs, "MAX_VALUES", 64),
        (known_texts, "MAX_TEXTS", 32),
        (discovery_crowd, "HEADS", 10),
    ):
        monkeypatch.setattr(module, name, limit)
    monkeypatch.setattr(SharedHeads.__init__, "__defaults__", (256,))
    sizes = []
    tracemalloc.start()
    try:
        for figures in crowd(6000, 160, 1000):
            sizes.append(tracemalloc.get_traced_memory()[0])
            assert figures.us_per_request > 0 and figures.resident_mb > 0
    finally:
        tracemalloc.stop()
    assert figures.requests == 6000 and figures.sessions == 600
    assert (sizes[-1] - sizes[-3]) / 2000 < 160, "bytes for a request; its prompt alone has 640"
