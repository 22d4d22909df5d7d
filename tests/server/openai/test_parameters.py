"""Parameters of other servers: followed, refused by name, or named in the answer as ignored, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.types import SamplingParams
from tests.server.conftest import serving
from tests.server.talking import MODEL, Talking, talking

ASK = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**ASK, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
REFUSED: dict[str, tuple[Any, Any]] = {
    "allowed_token_ids": ([1], None), "truncate_prompt_tokens": (5, None), "max_new_tokens": (5, None),
    "min_new_tokens": (5, 0), "include_stop_str_in_output": (True, False), "skip_special_tokens": (False, True),
    "chat_template": ("{{ x }}", None), "length_penalty": (2, 1), "logits_processors": (["x"], None),
    "ebnf": ("root", None), "early_stopping": (True, False), "stop_token_ids": ([1], []),
}  # fmt: skip
"""Parameter -> a value that is refused, and one without an effect"""


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    with talking() as running:
        running.text = "Fine."
        yield running


@pytest.fixture(scope="module")
def http(told: Talking) -> Iterator[httpx.Client]:
    with told.served.http() as opened:
        yield opened


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(http: httpx.Client, path: str, name: str) -> None:
    bad, neutral = REFUSED[name]
    answer = http.post(path, json={**BODIES[path], name: bad})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    assert http.post(path, json={**BODIES[path], name: neutral}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_what_is_unknown_is_named_in_the_answer(http: httpx.Client, path: str) -> None:
    many = {f"x{at}": 1 for at in range(100)}
    answer = http.post(path, json={**BODIES[path], "zeal": 1, "enable_thinking": None, "metadata": {}, "user": "u"})
    assert answer.json()["kedge"]["ignored"] == ["zeal", "enable_thinking"]
    assert len(http.post(path, json={**BODIES[path], **many}).json()["kedge"]["ignored"]) == 64
    assert "ignored" not in http.post(path, json={**BODIES[path], "model": MODEL}).json()["kedge"]


def test_a_stream_names_it_too(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**ASK, "zeal": 1, "stream": True})
    assert '"ignored":["zeal"]' in answer.text


def test_variables_of_the_template_are_set(told: Talking, http: httpx.Client) -> None:
    inner = told.served.engine.tokenizer.inner
    kept = inner.chat_template
    inner.chat_template = "{{ messages[0].content }}|{{ mood }}|{{ reasoning_effort }}|{{ documents }}"
    try:
        more = {"chat_template_kwargs": {"mood": "<|eos|>"}, "reasoning_effort": "low", "documents": [{"text": "d"}]}
        assert http.post("/v1/chat/completions", json={**ASK, **more}).status_code == 200
        assert told.prompt() == "hi|<|eos|>|low|[{'text': 'd'}]" and 257 not in told.request().tokens
        asked = {"input": "hi", "reasoning": {"effort": "high"}}
        assert http.post("/v1/responses", json=asked).status_code == 200 and "|high|" in told.prompt()
    finally:
        inner.chat_template = kept


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"output_config": {"format": {"schema": 5}}}, "output_config.format.schema"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_an_error_names_the_field_that_was_sent(http: httpx.Client, path: str, more: Any, param: str) -> None:
    answer = http.post(path, json={**BODIES[path], **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_the_models_own_sampling_is_the_default_and_a_request_may_change_it() -> None:
    class Own(EchoEngine):
        def inspect(self) -> dict[str, Any]:
            config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None, "do_sample": True}
            return {"sampling": SamplingParams.of_model(config)}

    with Own() as engine, serving(engine) as running, running.http() as http:
        for path, body in BODIES.items():
            assert http.post(path, json=body).status_code == 200
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
            more = {"temperature": 0.0, "top_k": -1, "min_p": 0.1, "presence_penalty": 1.5, "repetition_penalty": 1.1}
            assert http.post(path, json={**body, **more}).status_code == 200
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.0, 0, 0.1)
            assert (sampling.presence_penalty, sampling.repetition_penalty, sampling.top_p) == (1.5, 1.1, 0.95)
            assert http.post(path, json={**body, "top_k": -2}).json()["error"]["param"] == "top_k"
