"""The server around a real model: tiny random weights, conversations of any length, exact reuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.server.openai import prompts
from kedge.server.openai.protocol import ChatBody
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import PATIENCE, Served, serving

MODEL = "kedge-nano"
TEMPLATE = (
    "{% for m in messages %}"
    "<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with engine_of(tiny_model("llama")) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        with serving(engine) as running:
            yield running


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


def directly(engine: LocalEngine, tokens: tuple[int, ...], max_tokens: int) -> str:
    request = GenerateRequest((Segment(tokens, "p0"),), SamplingParams(max_tokens), ReuseMode.OFF)
    return engine.submit(request).result(60).text


@pytest.mark.parametrize("reuse", list(ReuseMode))
def test_over_http_the_model_says_what_it_says(client: openai.OpenAI, served: Served, reuse: ReuseMode) -> None:
    tokens = tuple(b"The quick brown fox jumps over the lazy dog.")
    extra = {"kedge": {"reuse": reuse}}
    answer = client.completions.create(model=MODEL, prompt=list(tokens), max_tokens=12, temperature=0, extra_body=extra)
    assert answer.choices[0].text == directly(served.engine, tokens, 12)


def test_a_conversation_goes_on_where_its_kv_is(client: openai.OpenAI, served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief. " * 5}, {"role": "user", "content": "Hi </s> there"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    messages += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 16 * 16 - 16 > 0
    segments = prompts.of_chat(served.engine.tokenizer, ChatBody(messages=messages))
    tokens = tuple(token for segment in segments for token in segment.tokens)
    assert second.choices[0].message.content == directly(served.engine, tokens, 8)
    template, eos = served.engine.tokenizer.inner, served.engine.tokenizer.eos_token_id
    assert template.decode(tokens) == template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokens.count(eos) == len(messages), "the end of a turn that a user spells out ends none"


def test_a_closed_engine_is_not_ready() -> None:
    with engine_of(tiny_model("llama")) as engine, serving(engine) as running:
        assert running.http().get("/ready").status_code == 200
        engine.close()
        assert running.http().get("/ready").status_code == 503
        assert running.http().get("/health").status_code == 200


def test_while_an_engine_is_asked_again_its_last_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a probe would find an engine closed whenever another one has just asked it."""
    asked, answer = threading.Event(), threading.Event()
    with EchoEngine() as engine, serving(engine) as running:
        service = running.service
        assert running.http().get("/ready").status_code == 200

        def cancel(_: object) -> bool:
            asked.set()
            return answer.wait(PATIENCE)

        monkeypatch.setattr(service.engine, "cancel", cancel)
        with ThreadPoolExecutor(1) as pool:
            probing = pool.submit(running.http().get, "/ready")
            assert asked.wait(PATIENCE) and not service._is_closed
            answer.set()
            assert probing.result().status_code == 200
