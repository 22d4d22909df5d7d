"""Kedge's server before vLLM: OpenAI's API, a team whose later questions are translated, and the end of vLLM."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kedge.errors import EngineClosed
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.settings import EngineSettings, ServerSettings
from kedge.types import GenerateRequest, SamplingParams, Segment
from tests.server.conftest import TEMPLATE, Served, serving
from tests.server.test_structured_output import ASK, Order, Part, form

MODEL = "kedge-nano"
TEAM = Path(__file__).parents[3] / "examples" / "math_team.yaml"
QUESTION = (
    "{name} starts the day with {count} apples. {name} finds 5 more. {name} loses 2. "
    "How many apples does {name} have at the end?"
)
PATIENCE = 240.0
OWN = {"max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = EngineSettings(backend="vllm", anchors={"max_error": 50.0}, planner={"by_cost": False}, vllm=OWN)
    asked = ServerSettings(tools=True, tool_call_parser="hermes")
    with VLLMEngine(config=config) as engine, serving(engine, asked) as running:
        yield running


@pytest.fixture
def templated(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template that shows tools and calls."""
    monkeypatch.setattr(served.engine.tokenizer.inner, "chat_template", TEMPLATE)


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client(timeout=PATIENCE)


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as opened:
        yield opened


def test_a_team_is_translated_from_its_first_questions_on(http: httpx.Client, served: Served) -> None:
    """The first agent computes the question, and its KV is moved to the others."""
    team = TEAM.read_bytes().replace(b"id: final", b"id: final\n    reuse: exact")
    assert http.post("/v1/workflows", content=team, headers={"content-type": "application/yaml"}).is_success
    deadline, answered = time.monotonic() + PATIENCE, 0
    while time.monotonic() < deadline:
        agents = run(http, f"Tim{answered}", 3 + answered)
        answered += 1
        assert [one["agent"] for one in agents] == ["solver", "analyst", "programmer", "inspector", "final"]
        for one in agents:
            counts = one["receipt"]["tokens"]
            assert sum(counts.values()) > 0 and counts["computed"] > 0
        translated = [one["receipt"]["tokens"]["translated"] > 0 for one in agents]
        assert not translated[0], "it reads the question where its KV is computed"
        if sum(translated[1:-1]) == 3:
            assert agents[-1]["receipt"]["tokens"]["translated"] == 0, "it is not to be translated"
            later = [one for number in range(3) for one in run(http, f"Ann{number}", 20 + number)]
            assert any(one["receipt"]["preassembled"] for one in later), "prompts are prepared while others answer"
            return
        while served.engine.inspect()["requests"]["base_prefills"]:
            time.sleep(0.05)
    raise AssertionError(f"nothing was translated in {answered} questions")


def run(http: httpx.Client, name: str, count: int) -> list[dict[str, Any]]:
    """The agents' answers to one question."""
    asked = {"inputs": {"user_question": QUESTION.format(name=name, count=count)}, "stream": True}
    last = http.post("/v1/workflows/math team/runs", json=asked).text.strip().split("\n\n")[-1]
    event = dict(line.split(": ", 1) for line in last.split("\n"))
    assert event["event"] == "finished", last
    return json.loads(event["data"])["agents"]


def test_the_dashboard_is_served_with_no_other_figures_of_the_engine_than_its_guards(http: httpx.Client) -> None:
    assert "Kedge" in http.get("/").text
    assert http.get("/v1/dashboard").json()["health"]["state"] == "healthy"
    assert http.get("/v1/dashboard/engine").json() == {"guard": http.get("/v1/guard").json()["agents"]}


@pytest.mark.usefixtures("templated")
def test_answers_conform_also_many_at_once_and_beside_free_ones(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        more: Any = {"response_format": form((Part, Order)[number % 2].model_json_schema())} if number % 3 else {}
        asked: Any = {"model": MODEL, "messages": ASK, "temperature": 0.9, "seed": number, "max_tokens": 200}
        return client.chat.completions.create(**asked, **more).choices[0].message.content or ""

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    for number, answer in enumerate(answers):
        if number % 3:
            (Part, Order)[number % 2].model_validate_json(answer)


@pytest.mark.usefixtures("templated")
def test_a_schema_that_cannot_be_followed_is_refused_and_the_server_goes_on(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 20}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(**asked, response_format=form({"type": "string", "pattern": "(?=x)"}))
    assert client.chat.completions.create(**asked).choices


def test_the_page_of_plain_traffic_is_shown(http: httpx.Client, client: openai.OpenAI) -> None:
    for number in range(4):
        said = f"Question {number * 7919}. " + "What is the sum of all of these small numbers, and why is that so? " * 2
        messages: Any = [
            {"role": "system", "content": "You are a careful solver. " * 8},
            {"role": "user", "content": said},
        ]
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    report = http.get("/kedge/report").json()
    assert report["mode"] == "observe" and report["namespaces"] == ["default"] and report["requests"] >= 4


def test_every_wait_ends_when_vllm_dies(served: Served, http: httpx.Client) -> None:
    """The last test: its process is killed while it answers."""
    request = GenerateRequest((Segment((5, 6, 7), "p0"),), SamplingParams(1500, ignore_eos=True))
    stream = served.engine.submit(request)
    next(iter(stream))
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(EngineClosed):
        stream.result(PATIENCE)
    with pytest.raises(EngineClosed, match="died"):
        served.engine.submit(GenerateRequest((Segment((5, 6, 7), "p0"),)))
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 503, "nothing would start it again"
    served.engine.close()
    served.engine.forecast({})
