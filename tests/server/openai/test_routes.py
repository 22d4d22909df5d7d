"""OpenAI's own client against a real server: sync, async, streaming; and the events byte by byte."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.settings import ServerSettings
from kedge.types import ReuseMode
from tests.server.conftest import Served, serving

MODEL = "kedge-nano"


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_with_usage_and_receipt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("hé"), temperature=0)
    assert answer.choices[0].message.content == "user\nhéassistant\n"
    assert answer.choices[0].finish_reason == "stop"
    prompt = len("user\nhéassistant\n".encode()) + 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, prompt - 3)
    receipt = answer.model_extra["kedge"]["receipts"][0]
    assert sum(receipt["tokens"].values()) == prompt
    assert receipt["mode"] == "exact"


def test_cached_tokens_are_the_exact_ones(client: openai.OpenAI) -> None:
    first, second = (client.chat.completions.create(model=MODEL, messages=say("again and again")) for _ in range(2))
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    off = client.chat.completions.create(
        model=MODEL, messages=say("again and again"), extra_body={"kedge": {"reuse": "off"}}
    )
    assert off.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
def test_a_text_and_its_token_ids_are_the_same_prompt(client: openai.OpenAI, prompt: object) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
    assert answer.choices[0].text == "hello"
    assert (answer.object, answer.usage.prompt_tokens) == ("text_completion", 5)


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_several_prompts_with_several_choices(client: openai.OpenAI, served: Served, prompt: object) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=5)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
    assert [request.sampling.seed for request in served.engine.requests[-4:]] == [5, 6, 5, 6]


def test_sampling_reaches_the_engine(client: openai.OpenAI, served: Served) -> None:
    client.chat.completions.create(
        model=MODEL, messages=say("x"), temperature=0.5, top_p=0.9, max_completion_tokens=7, stop=["q", "z"], seed=3
    )
    sampling = served.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.stop, sampling.seed) == (("q", "z"), 3)


def test_what_is_not_said_is_as_openai_has_it(client: openai.OpenAI, served: Served) -> None:
    client.chat.completions.create(model=MODEL, messages=say("x"))
    assert served.engine.requests[-1].sampling.temperature == 1.0
    assert served.engine.requests[-1].sampling.max_tokens == ServerSettings().default_max_tokens
    assert served.engine.requests[-1].reuse is ReuseMode.EXACT
    client.completions.create(model=MODEL, prompt="a text of more than sixteen letters")
    assert served.engine.requests[-1].sampling.max_tokens == 16


def events(http: httpx.Client, path: str, **body: object) -> list[object]:
    answer = http.post(path, json={"model": MODEL, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(data) if (data := block[6:]) != "[DONE]" else data for block in blocks]


def test_events_of_a_chat_are_as_openai_writes_them(http: httpx.Client) -> None:
    *chunks, done = events(http, "/v1/chat/completions", messages=say("x"), max_tokens=2)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "u"},
        {"content": "s"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert ["kedge" in chunk for chunk in chunks] == [False, False, False, True]
    assert "usage" not in chunks[0]


def test_usage_comes_last_and_only_when_asked_for(http: httpx.Client) -> None:
    *chunks, usage, _ = events(http, "/v1/completions", prompt="abc", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (3, 3)
    assert sum(usage["kedge"]["receipts"][0]["tokens"].values()) == 3
    assert not any("kedge" in chunk for chunk in chunks)


def test_streamed_choices_keep_apart(http: httpx.Client) -> None:
    *chunks, _ = events(http, "/v1/completions", prompt=["abc", "xyz"], n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "abc", 1: "abc", 2: "xyz", 3: "xyz"}
    assert sum("kedge" in chunk for chunk in chunks) == 1
    assert len(chunks[-1]["kedge"]["receipts"]) == 4


def test_many_async_clients_at_once(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(model=MODEL, prompt=f"number {number}", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(all_of_them()) == [f"number {number}" for number in range(32)]
    served.wait_quiet()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/other")
    assert caught.value.code == "model_not_found"


def test_operation_pages(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready", "model": MODEL}
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/workflows"} <= document["paths"].keys()
    assert [http.get(page).status_code for page in ("/docs", "/redoc")] == [404, 404], "they load foreign scripts"
    ids = {http.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, "exact"), (ReuseMode.OFF, "off"), (ReuseMode.TRANSLATE, "translate")]
)
def test_the_server_has_a_mode_for_plain_requests(mode: ReuseMode | None, expected: str) -> None:
    with EchoEngine() as engine, serving(engine, ServerSettings(reuse=mode)) as running:
        running.client().completions.create(model=MODEL, prompt="x")
        running.client().completions.create(model=MODEL, prompt="x", extra_body={"kedge": {"reuse": "exact"}})
        assert [request.reuse for request in engine.requests] == [expected, "exact"]
