"""Handoffs of the OpenAI Agents SDK on `kedge serve`: a grammar writes the call, and discovery links the agents."""

from __future__ import annotations

from collections.abc import Iterator

import agents
import httpx
import pytest

from kedge import LocalEngine
from kedge.settings import EngineSettings, ServerSettings
from tests.handoffs import answers, assert_linked
from tests.server.conftest import Served, serving
from tests.server.talking import TEMPLATE


@pytest.fixture
def served() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings(device="cpu")) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        settings = ServerSettings(tool_call_parser="hermes", model_name=agents.models.get_default_model())
        with serving(engine, settings) as running:
            yield running


def test_an_unchanged_team_hands_over_and_its_agents_are_linked(served: Served) -> None:
    first = answers(served.url)
    found = httpx.get(f"{served.url}/kedge/report").json()
    assert_linked(found, found["agents"])
    for by_chat, is_streamed in ((False, True), (True, False), (True, True)):
        assert answers(served.url, by_chat=by_chat, is_streamed=is_streamed) == first, "whatever it speaks"
