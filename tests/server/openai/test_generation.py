"""OpenAI's own client against a real server, whole and streamed, the events byte by byte, and log-probabilities."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.server.openai import prompts
from kedge.server.openai.protocol import ChatBody
from kedge.server.openai.tool_calls import ParsedText
from kedge.server.openai.writers import TextChoice, chat_logprobs, spelled
from kedge.settings import ServerSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment, TokenDelta, TokenLogprob
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import MODEL, TEMPLATE, Served, serving


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


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_several_prompts_with_several_choices(client: openai.OpenAI, served: Served, prompt: object) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=5)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
    assert [request.sampling.seed for request in served.engine.requests[-4:]] == [5, 6, 5, 6]


def test_sampling_reaches_the_engine_and_what_is_not_said_is_as_openai_has_it(
    client: openai.OpenAI, served: Served
) -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "stop": ["q", "z"], "seed": 3}
    client.chat.completions.create(model=MODEL, messages=say("x"), **said)
    client.chat.completions.create(model=MODEL, messages=say("x"))
    client.completions.create(model=MODEL, prompt="a text of more than sixteen letters")
    first, plain, text = served.engine.requests[-3:]
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.max_tokens) == (0.5, 0.9, 7)
    assert (first.sampling.stop, first.sampling.seed) == (("q", "z"), 3)
    assert (plain.sampling.temperature, plain.sampling.max_tokens) == (1.0, ServerSettings().default_max_tokens)
    assert (plain.reuse, text.sampling.max_tokens) == (ReuseMode.EXACT, 16)


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
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "u"}, {"content": "s"}, {}]
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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


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


HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)


def test_a_text_with_its_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="ab", logprobs=2)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs.model_dump() == {
        "tokens": ["a", "b", "<|eos|>"],
        "token_logprobs": [HALF, HALF, HALF],
        "top_logprobs": [{"a": HALF, "b": QUARTER}, {"b": HALF, "c": QUARTER}, {"<|eos|>": HALF, "<|turn|>": QUARTER}],
        "text_offset": [0, 1, 2],
    }


def test_an_echoed_prompt_with_its_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="ab", logprobs=1, echo=True, max_tokens=1)
    assert answer.choices[0].text == "aba"
    assert answer.choices[0].logprobs.model_dump() == {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [None, HALF, HALF],
        "top_logprobs": [None, {"b": HALF}, {"a": HALF}],
        "text_offset": [0, 1, 2],
    }
    miss = answer.model_extra["kedge"]["receipts"][0]["misses"][0]
    assert miss == {"segment": "*", "reason": "the log-probabilities of the prompt need all of it to be computed"}


def test_a_prompt_that_is_only_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[256, 104, 105], logprobs=0, echo=True, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("<|bos|>hi", "length")
    assert choice.logprobs.tokens == ["<|bos|>", "h", "i"]
    assert choice.logprobs.top_logprobs == [None, {"h": HALF}, {"i": HALF}]
    assert choice.logprobs.text_offset == [0, 7, 8]
    assert answer.usage.completion_tokens == 0


def test_echo_alone_costs_no_prefill(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=["once", "twice"], echo=True, max_tokens=2, n=2)
    assert [choice.text for choice in answer.choices] == ["onceon", "onceon", "twicetw", "twicetw"]
    assert [choice.logprobs for choice in answer.choices] == [None] * 4
    assert answer.usage.prompt_tokens_details.cached_tokens == len("onc" + "twic")


def test_parts_of_characters_are_bytes_and_tokens_keep_apart(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="é!", logprobs=1)
    said = answer.choices[0].logprobs
    assert said.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|eos|>"]
    assert [list(top) for top in said.top_logprobs] == [[token] for token in said.tokens]
    assert said.text_offset == [0, 0, 1, 2]


def test_a_chat_with_its_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("é"), max_tokens=7, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.refusal is None
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
    first = {"token": "u", "bytes": [117], "logprob": HALF}
    next_best = {"token": "v", "bytes": [118], "logprob": QUARTER}
    assert entries[0].model_dump() == {**first, "top_logprobs": [first, next_best]}
    assert (entries[5].token, entries[5].bytes) == ("\ufffd", [0xC3])


@pytest.mark.parametrize("stop", [None, "lo w"])
@pytest.mark.parametrize("echo", [False, True])
def test_streamed_pieces_join_to_the_whole(http: httpx.Client, echo: bool, stop: str | None) -> None:
    body = {"prompt": ["hello wörld", "<|bos|>ok"], "n": 2, "logprobs": 2, "echo": echo, "stop": stop, "max_tokens": 40}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    *chunks, _ = events(http, "/v1/completions", **body)
    assert ["kedge" in chunk for chunk in chunks].index(True) == len(chunks) - 1
    assert len(chunks[-1]["kedge"]["receipts"]) == len(whole) == 4
    for at, expected in enumerate(whole):
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == at]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        for name, values in expected["logprobs"].items():
            told = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
            assert [value for some in told for value in some] == values
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]


def test_a_streamed_chat_tells_every_token_once(http: httpx.Client) -> None:
    body = {"messages": say("wörld"), "logprobs": True, "top_logprobs": 1}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(http, "/v1/chat/completions", **body)
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for one in told for entry in one["content"]] == whole
    assert all(one["refusal"] is None for one in told)


TOKENIZER = ByteTokenizer()


def writer_of(tokenizer: ByteTokenizer) -> Callable[[list[TokenLogprob]], dict[str, Any]]:
    """Return what writes the `logprobs` of the next tokens of a text completion."""
    choice = TextChoice(0, tokenizer, GenerateRequest((Segment((1,), "p0"),)), echo=False)
    return lambda entries: choice.whole(ParsedText(), TokenDelta("", (), logprobs=tuple(entries)))["logprobs"] or {}


@given(st.text(max_size=12), st.integers(0, 30))
def test_offsets_lead_to_where_a_tokens_character_begins(text: str, cut: int) -> None:
    tokens = tuple(text.encode("utf-8", "replace"))
    entries = [TokenLogprob(token, -1.0) for token in tokens]
    write = writer_of(TOKENIZER)
    pieces = [write(entries[:cut]), write(entries[cut:])]
    offsets = [offset for piece in pieces for offset in piece.get("text_offset", [])]
    assert offsets == [at for at, character in enumerate(text) for _ in character.encode("utf-8", "replace")]
    assert spelled(TOKENIZER, tokens) == text.encode("utf-8", "replace").decode()


def test_what_json_has_no_number_for() -> None:
    entry = TokenLogprob(97, -math.inf, ((98, 0.0), (97, -math.inf)))
    chat = chat_logprobs(TOKENIZER, [entry])["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)
    text = writer_of(TOKENIZER)([entry])
    assert (text["token_logprobs"], text["top_logprobs"]) == ([-9999.0], [{"b": 0.0, "a": -9999.0}])
    json.dumps([chat, text], allow_nan=False)


def test_the_likelier_of_two_tokens_that_read_the_same_is_told() -> None:
    class Twins(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return b"same" if token < 2 else super().token_bytes(token)

    written = writer_of(Twins())([TokenLogprob(1, -3.0, ((0, -1.0), (97, -2.0)))])
    assert written["top_logprobs"] == [{"same": -1.0, "a": -2.0}]


def test_a_long_prompt_is_told_whole(http: httpx.Client) -> None:
    body = {"prompt": "x" * 5000, "logprobs": 20, "echo": True, "max_tokens": 1}
    said = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [b - a for a, b in pairwise(said["text_offset"])] == [1] * 5000
    assert {len(top) for top in said["top_logprobs"][1:]} == {20}


def test_a_conversation_of_a_real_model_goes_on_where_its_kv_is() -> None:
    with engine_of(tiny_model("llama")) as engine, serving(engine) as running:
        template, ask = engine.tokenizer.inner, running.client().chat.completions.create
        template.chat_template = TEMPLATE
        messages = [{"role": "system", "content": "Be brief. " * 5}, *say("Hi </s> there")]
        first = ask(model=MODEL, messages=messages, max_tokens=8, temperature=0)
        messages += [{"role": "assistant", "content": "well"}, *say("go on")]
        second = ask(model=MODEL, messages=messages, max_tokens=8, temperature=0)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= first.usage.prompt_tokens // 16 * 16 - 16 > 0
        segments = prompts.of_chat(engine.tokenizer, ChatBody(messages=messages))
        alone = GenerateRequest(segments, SamplingParams(8), ReuseMode.OFF)
        assert second.choices[0].message.content == engine.submit(alone).result(60).text
        assert template.decode(alone.tokens) == template.apply_chat_template(messages, tokenize=False)
        assert engine.tokenizer.eos_token_id not in alone.tokens, "a user spells it out"
