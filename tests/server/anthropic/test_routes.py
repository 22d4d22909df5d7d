"""Anthropic's Messages API with Anthropic's own client, and as Claude Code calls it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from kedge.server.tenancy import KeyRing, Tenant, hashed
from kedge.settings import LimitSettings
from kedge.types import TenantId
from tests.server.talking import MODEL, PARAMETERS, Talking, talking

TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def client(told: Talking) -> anthropic.Anthropic:
    return told.claude()


def test_a_message_is_answered(told: Talking, client: anthropic.Anthropic) -> None:
    told.text = "It rains."
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=ASK, system=system)
    assert (answer.content[0].text, answer.stop_reason, answer.role) == ("It rains.", "end_turn", "assistant")
    assert told.prompt() == "system\nBe brief.user\nHow is the weather?assistant:"
    again = client.messages.create(model=MODEL, max_tokens=50, messages=ASK, system=system)
    assert again.usage.cache_read_input_tokens > 0
    whole = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == whole
    assert client.messages.count_tokens(model=MODEL, messages=ASK, system=system).input_tokens == whole


def test_a_key_in_anthropics_header_is_a_key() -> None:
    tenant = Tenant(TenantId("t"), LimitSettings())
    with talking(KeyRing({hashed("secret"): tenant}, LimitSettings())) as told:
        told.text = "Yes."
        assert told.claude("secret").messages.create(model=MODEL, max_tokens=9, messages=ASK).content[0].text == "Yes."
        assert told.request().tenant == "t"
        with pytest.raises(anthropic.AuthenticationError):
            told.claude("wrong").messages.create(model=MODEL, max_tokens=9, messages=ASK)
