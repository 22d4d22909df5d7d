"""Log-probabilities and echoed prompts in OpenAI's shapes, whole and streamed."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.echo import ByteTokenizer
from kedge.server.openai.writers import TextLogprobs, chat_logprobs, spelled
from kedge.types import TokenLogprob
from tests.server.conftest import Served
from tests.server.openai.test_routes import events, say

MODEL = "kedge-nano"
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
    assert entries[0].model_dump() == {
        "token": "u",
        "bytes": [117],
        "logprob": HALF,
        "top_logprobs": [
            {"token": "u", "bytes": [117], "logprob": HALF},
            {"token": "v", "bytes": [118], "logprob": QUARTER},
        ],
    }
    assert (entries[5].token, entries[5].bytes) == ("\ufffd", [0xC3])


def test_the_end_of_a_chat_is_no_token_of_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("x"), logprobs=True)
    assert answer.choices[0].finish_reason == "stop"
    said = "".join(entry.token for entry in answer.choices[0].logprobs.content)
    assert said == answer.choices[0].message.content
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_where_nothing_is_asked_nothing_is_told(client: openai.OpenAI, served: Served) -> None:
    for asked in ({}, {"logprobs": None}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        answer = client.chat.completions.create(model=MODEL, messages=say("x"), **asked)
        assert answer.choices[0].logprobs is None
        assert served.engine.requests[-1].logprobs is None


@pytest.mark.parametrize("stop", [None, "lo w"])
@pytest.mark.parametrize("echo", [False, True])
def test_streamed_pieces_join_to_the_whole(http: httpx.Client, echo: bool, stop: str | None) -> None:
    body = {"prompt": ["hello wörld", "<|bos|>ok"], "logprobs": 2, "echo": echo, "stop": stop, "max_tokens": 40}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    *chunks, _ = events(http, "/v1/completions", **body)
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


@given(st.text(max_size=12), st.integers(0, 30), st.integers(0, 9))
def test_offsets_lead_to_where_a_tokens_character_begins(text: str, cut: int, start: int) -> None:
    tokens = tuple(text.encode("utf-8", "replace"))
    entries = [TokenLogprob(token, -1.0) for token in tokens]
    writer = TextLogprobs(TOKENIZER, start)
    pieces = [writer.write(tokens[:cut], entries[:cut]), writer.write(tokens[cut:], entries[cut:])]
    offsets = [offset for piece in pieces for offset in piece["text_offset"]]
    assert offsets == [start + at for at, character in enumerate(text) for _ in character.encode("utf-8", "replace")]
    assert spelled(TOKENIZER, tokens) == text.encode("utf-8", "replace").decode()


def test_what_json_has_no_number_for() -> None:
    entry = TokenLogprob(97, -math.inf, ((98, 0.0), (97, -math.inf)))
    chat = chat_logprobs(TOKENIZER, [entry])["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)
    text = TextLogprobs(TOKENIZER).write((97,), [entry])
    assert (text["token_logprobs"], text["top_logprobs"]) == ([-9999.0], [{"b": 0.0, "a": -9999.0}])
    json.dumps([chat, text], allow_nan=False)


def test_the_likelier_of_two_tokens_that_read_the_same_is_told() -> None:
    class Twins(ByteTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return b"same" if token < 2 else super().token_bytes(token)

    written = TextLogprobs(Twins()).write((1,), [TokenLogprob(1, -3.0, ((0, -1.0), (97, -2.0)))])
    assert written["top_logprobs"] == [{"same": -1.0, "a": -2.0}]


def test_a_long_prompt_is_told_whole(http: httpx.Client) -> None:
    body = {"prompt": "x" * 5000, "logprobs": 20, "echo": True, "max_tokens": 1}
    said = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [b - a for a, b in pairwise(said["text_offset"])] == [1] * 5000
    assert {len(top) for top in said["top_logprobs"][1:]} == {20}
