"""Agents that take turns are found however many there are."""

from __future__ import annotations

from kedge.discovery.discovery import Discovery
from kedge.types import RequestId


def test_eighty_agents_that_take_turns() -> None:
    discovery, clock = Discovery(), 0
    for turn in range(5):
        for agent in range(80):
            clock += 1
            prompt = (*(1000 * (agent + 1) + at for at in range(512)), *range(clock * 40, clock * 40 + 32))
            discovery.arrive(RequestId(f"{turn}.{agent}"), prompt, float(clock))
    assert len(discovery.agents) == 80
