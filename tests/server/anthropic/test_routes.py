"""Anthropic's Messages API with Anthropic's own client, and as Claude Code calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.errors import RequestError
from kedge.server.anthropic import MessagesBody
from kedge.server.tenancy import KeyRing, Tenant, hashed
from kedge.settings import LimitSettings
from kedge.types import TenantId
from tests.server.talking import CALL, MODEL, PARAMETERS, Talking, talking

WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
ASK: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    with talking() as running:
        yield running


def client_of(told: Talking, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=told.served.url, api_key=key, max_retries=0)


@pytest.fixture
def client(told: Talking) -> anthropic.Anthropic:
    return client_of(told)


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


def test_an_answer_that_is_cut_off_says_so(told: Talking, client: anthropic.Anthropic) -> None:
    told.text = "It rains and rains."
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=ASK)
    assert (answer.content[0].text, answer.stop_reason) == ("It r", "max_tokens")


def test_a_stream_ends_as_the_whole_answer(told: Talking, client: anthropic.Anthropic) -> None:
    told.text = f"Let me see.{CALL}"
    with client.messages.stream(model=MODEL, max_tokens=500, messages=ASK, tools=[WEATHER]) as stream:
        kinds = [one.type for one in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    text, use = final.content
    assert (text.text, use.input, final.stop_reason) == ("Let me see.", {"town": "Åbo"}, "tool_use")
    assert final.usage.output_tokens > 0


def test_a_key_in_anthropics_header_is_a_key() -> None:
    tenant = Tenant(TenantId("t"), LimitSettings())
    with talking(KeyRing({hashed("secret"): tenant}, LimitSettings())) as told:
        told.text = "Yes."
        assert (
            client_of(told, "secret").messages.create(model=MODEL, max_tokens=9, messages=ASK).content[0].text == "Yes."
        )
        assert told.request().tenant == "t"
        with pytest.raises(anthropic.AuthenticationError):
            client_of(told, "wrong").messages.create(model=MODEL, max_tokens=9, messages=ASK)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": 5}]}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
        {"messages": [{"role": "robot", "content": ""}]},
        {"messages": []},
        {"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]},
        {"max_tokens": 0},
        {"temperature": "hot"},
        {"top_k": -5},
        {"n": 2},
    ],
)
def test_what_cannot_be_served_is_refused_in_anthropics_form(
    client: anthropic.Anthropic, fields: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.post("/v1/messages", body={"model": MODEL, "max_tokens": 5, "messages": ASK, **fields}, cast_to=object)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "content"]), inner),
    max_leaves=8,
)
BLOCKS = st.dictionaries(st.sampled_from(["type", "text", "content", "name", "input", "id", "tool_use_id"]), JSON)


@settings(max_examples=200)
@given(st.lists(BLOCKS, max_size=4))
def test_no_content_raises_anything_but_a_request_error(blocks: list[dict[str, Any]]) -> None:
    try:
        MessagesBody.model_validate({"messages": [{"role": "user", "content": blocks}]}).chat()
    except RequestError as error:
        assert error.key
