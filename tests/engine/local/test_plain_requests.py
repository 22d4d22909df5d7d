"""Plain requests on the embedded engine: what agents share is found and translated, without a word of the client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kedge.engine.local.engine import LocalEngine
from kedge.settings import AnchorSettings, DiscoveryMode, DiscoverySettings, PlannerSettings
from kedge.types import Completion, GenerateRequest, ReuseMode, Tokens
from tests.discovery.teams import judge, solver, words
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_engine import greedy, request

OPEN = AnchorSettings(min_anchors=2, max_error=1e9, weak_error=1e9)
"""Random weights have no meaning that translation could lose."""
VOCABULARY, ANSWER = 256, 24
"""The model's tokens, and those of an answer."""


def engine(mode: DiscoveryMode) -> LocalEngine:
    planner = PlannerSettings(by_cost=False)
    return engine_of(tiny_model("llama"), anchors=OPEN, planner=planner, discovery=DiscoverySettings(mode=mode))


def plain(tokens: Tokens, tenant: str = "default") -> GenerateRequest:
    return replace(request(tokens, max_tokens=ANSWER), tenant=tenant, is_plain=True)


def team(engine: LocalEngine, number: int, tenant: str = "default") -> tuple[Completion, Completion]:
    question = words(("q", number), 60, VOCABULARY)
    solved = engine.submit(plain(solver(question, vocab=VOCABULARY), tenant)).result()
    return solved, engine.submit(plain(judge(question, solved.tokens, vocab=VOCABULARY), tenant)).result()


def test_shared_text_is_translated_once_a_team_is_known() -> None:
    with engine(DiscoveryMode.TRANSLATE) as found:
        for number in range(10):
            found.wait_idle()
            judged = team(found, number)[1]
        assert judged.receipt.translated >= 60 + ANSWER
        assert judged.receipt.mode is ReuseMode.TRANSLATE
        stranger = team(found, 3, tenant="other")[1]
        assert stranger.receipt.translated == 0
        figures: Any = found.inspect()["discovery"]
        assert figures["shared_tokens"] > 0 and figures["failures"] == 0
        assert figures["translated_tokens"] >= 60 + ANSWER and figures["exact_tokens"] >= 16


def test_by_default_it_is_found_and_nothing_changes() -> None:
    with engine(DiscoveryMode.OBSERVE) as found:
        for number in range(7):
            solved, judged = team(found, number)
            prompt = judge(words(("q", number), 60, VOCABULARY), solved.tokens, vocab=VOCABULARY)
            assert judged.tokens == greedy(tiny_model("llama"), prompt, ANSWER)
            assert judged.receipt.translated == 0 and judged.receipt.mode is ReuseMode.EXACT
        figures: Any = found.inspect()["discovery"]
        assert figures["known_agents"] > 0 and figures["shared_tokens"] > 0


@pytest.mark.parametrize("clients", [32])
def test_teams_at_once_with_aborts_are_served_and_nothing_is_lost(clients: int) -> None:
    with engine(DiscoveryMode.TRANSLATE) as found:

        def client(number: int) -> int:
            if number % 5 == 4:
                stream = found.submit(plain(solver(words(("q", number), 60, VOCABULARY), vocab=VOCABULARY)))
                return int(found.cancel(stream.request_id))
            return sum(len(one.tokens) for one in team(found, number))

        with ThreadPoolExecutor(clients) as pool:
            answered = list(pool.map(client, range(2 * clients)))
        assert all(one == 2 * ANSWER for number, one in enumerate(answered) if number % 5 != 4)
        found.wait_idle()
        found.query(lambda parts: parts.check_integrity())
        figures: Any = found.inspect()["discovery"]
        assert figures["failures"] == 0
