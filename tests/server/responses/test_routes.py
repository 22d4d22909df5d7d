"""OpenAI's Responses API with OpenAI's own client, and with the Agents SDK as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.server.responses import ResponsesBody
from kedge.types import TurnHints
from tests.server.conftest import serving
from tests.server.talking import CALL, MODEL, PARAMETERS, Talking, talking

WEATHER: Any = {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    with talking() as running:
        yield running


@pytest.fixture
def client(told: Talking) -> openai.OpenAI:
    return told.served.client()


def test_a_text_is_answered(told: Talking, client: openai.OpenAI) -> None:
    told.text = "It rains."
    answer = client.responses.create(model=MODEL, input="How is the weather?", instructions="Be brief.")
    assert (answer.output_text, answer.status, answer.object) == ("It rains.", "completed", "response")
    assert told.prompt() == "system\nBe brief.user\nHow is the weather?assistant:"
    assert answer.usage.output_tokens == len("It rains.") and answer.usage.total_tokens > answer.usage.output_tokens
    again = client.responses.create(model=MODEL, input="How is the weather?", instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens > 0 and again.id != answer.id


def test_an_answer_that_is_cut_off_is_incomplete(told: Talking, client: openai.OpenAI) -> None:
    told.text = "It rains and rains."
    answer = client.responses.create(model=MODEL, input="?", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "It r"


def test_a_conversation_with_calls_goes_on(told: Talking, client: openai.OpenAI) -> None:
    told.text = f"Let me see.{CALL}"
    first = client.responses.create(model=MODEL, input="How is the weather?", tools=[WEATHER])
    message, call = first.output
    assert (message.content[0].text, call.name, call.arguments) == ("Let me see.", "weather", '{"town": "Åbo"}')
    told.text = "It rains."
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is the weather?"}]},
        *(one.model_dump(exclude_none=True) for one in first.output),
        {"type": "reasoning", "summary": []},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = client.responses.create(model=MODEL, input=items, tools=[WEATHER])
    assert answer.output_text == "It rains."
    assert told.prompt().endswith(
        'Let me see.<tool_call>{"name": "weather", "arguments": {"town": "Åbo"}}</tool_call>tool\nrainassistant:'
    )


def test_a_stream_has_all_events_in_order_and_ends_as_the_whole_answer(told: Talking, client: openai.OpenAI) -> None:
    told.text = f"Let me see.{CALL}"
    with client.responses.stream(model=MODEL, input="?", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [one.sequence_number for one in events if hasattr(one, "sequence_number")] == list(range(len(events)))
    kinds = [one.type for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "Let me see."
    assert [one.type for one in final.output] == ["message", "function_call"]
    assert final.output_text == "Let me see." and final.usage.output_tokens > 0
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


def test_items_end_in_the_order_in_which_they_began(told: Talking, client: openai.OpenAI) -> None:
    told.text = f"I look.\n{CALL}\nThere it is.\n{CALL}"
    with client.responses.stream(model=MODEL, input="Weather?", tools=[WEATHER]) as stream:
        done = [one.item for one in stream if one.type == "response.output_item.done"]
        answer = stream.get_final_response()
    kinds = ["message", "function_call", "message", "function_call"]
    assert [one.type for one in done] == [one.type for one in answer.output] == kinds
    assert [one.content[0].text.strip() for one in done[::2]] == ["I look.", "There it is."]
    assert [one.id for one in done] == [one.id for one in answer.output]


def test_a_stream_that_fails_says_so_in_its_last_event(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="x" * 9000) as stream:
        events = list(stream)
    assert [one.type for one in events[-2:]] == ["error", "response.failed"]
    error = events[-1].response.error
    assert (error.code, events[-1].response.status) == ("context_length_exceeded", "failed")
    assert error.message == "input='9017 tokens': this model's maximum context length is 8192 tokens"
    engine = EchoEngine(delay_s=0.001)
    with engine, serving(engine) as running:
        stream = running.client().responses.create(model=MODEL, input="x" * 4000, stream=True)
        kinds = [next(stream).type for _ in range(5)]
        engine.fail(RuntimeError("boom"))
        *_, failed, last = stream
    assert kinds[0] == "response.created" and (failed.type, last.type) == ("error", "response.failed")
    assert last.response.error.code == "engine_closed"


def test_hints_and_sampling_reach_the_engine(told: Talking, client: openai.OpenAI) -> None:
    told.text = "Yes."
    client.responses.create(
        model=MODEL,
        input="?",
        temperature=0.25,
        top_p=0.5,
        extra_headers={"thread-id": "t", "x-codex-parent-thread-id": "p"},
    )
    request = told.request()
    assert request.turn == TurnHints("t", "p") and request.is_plain
    assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools.name"),
        ({"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom"}]}]}, "tools.name"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content"),
        ({"input": [{"role": "robot", "content": ""}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": []}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
        ({"model": "another"}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/responses", body={"model": MODEL, "input": "?", **fields}, cast_to=object)
    assert refused.value.status_code in (400, 404) and refused.value.param == named


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "text"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "name", "arguments", "call_id"]), JSON)))
def test_no_input_raises_anything_but_a_request_error(items: list[dict[str, Any]]) -> None:
    try:
        ResponsesBody(input=items).chat()
    except RequestError as error:
        assert error.key


def test_the_agents_sdk_runs_with_its_default_protocol(told: Talking) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{told.served.url}/v1", api_key="none")
    calls = []

    @agents.function_tool
    def weather(town: str) -> str:
        """Tell the weather."""
        calls.append(town)
        told.text = "It rains."
        return "rain"

    told.text = CALL
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
    result = asyncio.run(agents.Runner.run(agent, "How is the weather in Åbo?"))
    assert result.final_output == "It rains." and calls == ["Åbo"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("place", ["tools", "metadata", "text"])
def test_a_number_that_json_cannot_write_is_said_again_as_null(told: Talking, place: str, is_streamed: bool) -> None:
    told.text = "Yes."
    fields = {"tools": '[{"type": "x", "n": 1e400}]', "metadata": '{"n": -1e400}', "text": '{"n": [1e400]}'}
    body = f'{{"model": "{MODEL}", "input": "?", "stream": {str(is_streamed).lower()}, "{place}": {fields[place]}}}'
    answer = told.served.http().post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and '"n":null' in answer.text.replace("[null]", "null")
