"""Agents whose prompts are computed faster than translated: who is not asked about, and for how long."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.messages import TranslationVerdict
from kedge.integrations.vllm.plugin.translations import SKIPS, DeclinedAgents
from kedge.types import AgentId, GenerateRequest, Miss, Segment

MISSES = (Miss("q", "too dear"),)


def request(tokens: int = 100, agent: str = "a") -> GenerateRequest:
    return GenerateRequest((Segment((5,) * tokens, "q"),), agent=AgentId(agent))


def verdict(*, is_declined: bool = True) -> TranslationVerdict:
    return TranslationVerdict((range(100),), MISSES, is_declined=is_declined)


def test_an_agent_is_passed_over_some_times_then_asked_about_again() -> None:
    declined = DeclinedAgents()
    assert declined.take(request()) is None
    declined.put(request(), verdict())
    assert [declined.take(request()) for _ in range(SKIPS + 2)] == [MISSES] * SKIPS + [None] * 2


def test_other_agents_and_longer_prompts_are_asked_about() -> None:
    declined = DeclinedAgents()
    declined.put(request(), verdict())
    assert declined.take(request(agent="b")) is None
    assert declined.take(request(tokens=126)) is None
    assert declined.take(request(tokens=125)) == MISSES


def test_an_agent_that_is_translated_again_is_asked_about() -> None:
    declined = DeclinedAgents()
    declined.put(request(), verdict())
    declined.put(request(), verdict(is_declined=False))
    assert declined.take(request()) is None


@pytest.mark.parametrize(("one", "other", "both"), [(True, True, True), (True, False, False), (False, False, False)])
def test_an_agent_is_declined_where_all_ranks_decline_it(one: bool, other: bool, both: bool) -> None:
    assert verdict(is_declined=one).merged(verdict(is_declined=other)).is_declined is both
