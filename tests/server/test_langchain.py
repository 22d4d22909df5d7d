"""langchain-openai against a real server: chats and texts, whole, streamed and in batches; tools; what rides along."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("langchain_openai")
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

from kedge.engine.echo import EchoEngine  # noqa: E402
from kedge.settings import ServerSettings  # noqa: E402
from tests.server.conftest import Served, serving  # noqa: E402
from tests.server.openai.test_tool_calls import CALL, Templated  # noqa: E402


def chat(served: Served, **options: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="kedge-nano", max_retries=0, **options)


def text(served: Served, **options: object) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", model="kedge-nano", max_retries=0, **options)


def test_invoke(served: Served) -> None:
    answer = chat(served, temperature=0).invoke([SystemMessage("Be brief."), HumanMessage("hé")])
    assert answer.content == "system\nBe brief.user\nhéassistant\n"
    assert answer.usage_metadata["output_tokens"] == len(answer.content.encode())
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream(served: Served) -> None:
    chunks = list(chat(served, stream_usage=True).stream("wörld"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == "user\nwörldassistant\n"
    assert len(chunks) > len(whole.content), "it came character by character"
    assert whole.usage_metadata["output_tokens"] == len(whole.content.encode())


def test_batch(served: Served) -> None:
    answers = chat(served).batch([f"number {n}" for n in range(8)])
    assert [answer.content for answer in answers] == [f"user\nnumber {n}assistant\n" for n in range(8)]


def test_log_probabilities(served: Served) -> None:
    answer = chat(served, logprobs=True, top_logprobs=2, max_tokens=3).invoke("x")
    entries = answer.response_metadata["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list("use")
    assert entries[0]["top_logprobs"][1]["logprob"] == pytest.approx(math.log(1 / 4))


def test_what_rides_along_reaches_the_engine(served: Served) -> None:
    kedge = {"agent": "judge", "run": "r", "reuse": "off"}
    answer = chat(served, extra_body={"kedge": kedge}).invoke("x")
    assert (served.engine.requests[-1].agent, served.engine.requests[-1].reuse) == ("judge", "off")
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 0


def test_texts(served: Served) -> None:
    assert text(served, max_tokens=64).invoke("hello") == "hello"
    assert "".join(text(served, max_tokens=64).stream("wörld")) == "wörld"
    assert text(served, max_tokens=64).batch(["one", "two"]) == ["one", "two"]
    told = text(served, logprobs=1, max_tokens=2).generate(["abc"]).generations[0][0].generation_info["logprobs"]
    assert told["tokens"] == ["a", "b"]


@tool
def weather(town: str) -> str:
    """Tells the weather."""
    return f"rain in {town}"


@pytest.fixture
def with_tools() -> Iterator[Served]:
    said = iter([CALL, CALL, "It rains."])
    engine = EchoEngine(lambda _: next(said))
    engine.tokenizer = Templated()
    with engine, serving(engine, ServerSettings(tool_call_parser="hermes")) as running:
        yield running


def test_an_agents_loop_over_a_tool(with_tools: Served) -> None:
    model = chat(with_tools).bind_tools([weather])
    streamed = list(model.stream("How is the weather?"))
    assert [call["name"] for chunk in streamed for call in chunk.tool_call_chunks] == ["weather"]
    messages: list[object] = [HumanMessage("How is the weather?")]
    messages.append(model.invoke(messages))
    assert isinstance(messages[1], AIMessage)
    (call,) = messages[1].tool_calls
    assert (call["name"], call["args"]) == ("weather", {"town": "Åbo"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == "rain in Åbo"
    assert model.invoke([*messages, result]).content == "It rains."
    assert "rain in Åbo" in with_tools.engine.tokenizer.decode(with_tools.engine.requests[-1].tokens)
