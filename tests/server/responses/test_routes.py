"""OpenAI's Responses API with OpenAI's own client, and with the Agents SDK as it comes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kedge.engine.echo import EchoEngine
from tests.server.conftest import serving
from tests.server.talking import CALL, MODEL, WEATHER, Talking

TOOL: Any = {"type": "function", **WEATHER}


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


def test_a_stream_has_all_events_in_order_and_ends_as_the_whole_answer(told: Talking, client: openai.OpenAI) -> None:
    told.text = f"Let me see.{CALL}"
    with client.responses.stream(model=MODEL, input="?", tools=[TOOL]) as stream:
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
    with client.responses.stream(model=MODEL, input="Weather?", tools=[TOOL]) as stream:
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


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("place", ["tools", "metadata", "text"])
def test_a_number_that_json_cannot_write_is_said_again_as_null(told: Talking, place: str, is_streamed: bool) -> None:
    told.text = "Yes."
    fields = {"tools": '[{"type": "x", "n": 1e400}]', "metadata": '{"n": -1e400}', "text": '{"n": [1e400]}'}
    body = f'{{"model": "{MODEL}", "input": "?", "stream": {str(is_streamed).lower()}, "{place}": {fields[place]}}}'
    answer = told.served.http().post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and '"n":null' in answer.text.replace("[null]", "null")
