"""What goes wrong: bad bodies, clients that go away, long steps; whatever it is, all is counted and given back."""

import asyncio
import json
import random
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.server import http as server_http
from kedge.server.anthropic import MessagesBody
from kedge.server.responses import ResponsesBody
from kedge.settings import LimitSettings, ServerSettings
from kedge.types import RequestId
from tests.server.conftest import FLOW, YAML, Served, serving, wait_until

JSON = {"Content-Type": "application/json"}
CHAT, TEXT, RUNS = "/v1/chat/completions", "/v1/completions", "/v1/workflows/pair/runs"
POST = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NINES, BLANKS = b'{"prompt": %s}' % (b"9" * 5000), b" " * 70_000
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"messages": "\xff"}', b"[" * 100_000, b'{"messages": NaN' + BLANKS, b"null" + BLANKS, b"[1]", NINES],
    ids=lambda body: repr(body[:12]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/hints", RUNS])
def test_a_body_that_is_no_json_is_a_bad_request(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON), 400)


def test_unknown_names(http: httpx.Client) -> None:
    for answer in (http.post(CHAT, json={**HELLO, "model": "gpt"}), http.get("/v1/models/gpt/other")):
        assert refused(answer, 404, "model")["code"] == "model_not_found"
    answer = http.post("/v1/responses", json={"input": "?", "previous_response_id": "resp_1"})
    error = refused(answer, 400, "previous_response_id")  # in OpenAI's words, upon which clients send the whole
    assert error["code"] == "previous_response_not_found" and "previous response was not found" in str(error["message"])
    refused(http.get("/v1/nothing"), 404)
    refused(http.get(CHAT), 405)
    body = {"messages": [], "kedge": {"workflow": "none", "agent": "a", "bindings": {}}}
    refused(http.post(CHAT, json=body), 404, "workflow")
    refused(http.post("/v1/workflows/none/runs", json={"inputs": {}}), 404)
    for path in ("/v1/workflows/none", "/v1/runs/none", "/v1/runs/none/events"):
        refused(http.get(path), 404)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_ten_megabytes_is_too_large(http: httpx.Client, served: Served, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (10 << 20) + b'"}'
    content = iter([body[at : at + 65536] for at in range(0, len(body), 65536)]) if chunked else body
    assert refused(http.post(TEXT, content=content, headers=JSON), 413)["code"] == "request_too_large"
    assert any('status="413"' in line and 'tenant="default"' in line for line in metrics(served).splitlines())


@pytest.mark.parametrize(("of_all", "status", "seen"), [(9, 429, 1600), (1, 503, 1000)])
def test_bodies_that_have_not_come_whole_are_bounded_together(of_all: int, status: int, seen: int) -> None:
    sizes = {"limits": LimitSettings(requests_in_flight=1), "max_in_flight": of_all, "max_body_bytes": 1000}
    with serving(EchoEngine(), ServerSettings(**sizes)) as served, served.http() as http:
        [tenant] = served.service.keys.tenants
        sent = f"{POST}Content-Length: 999\r\n\r\n".encode() + 800 * b" "
        first, other = served.connect(sent), served.connect(sent)
        wait_until(lambda: tenant.body_bytes == 1600)
        error = refused(http.post(TEXT, json={"prompt": "a"}), status)
        assert error["message"] == f"body={seen}: at most 1000 bytes at once are read"
        other.close()
        wait_until(lambda: tenant.body_bytes == 800)
        assert http.post(TEXT, json={"prompt": "a"}).is_success
        assert refused(http.post(TEXT, json={"prompt": "a" * 1000}), 413)
        first.close()
        wait_until(lambda: not tenant.body_bytes)
        assert len(served.engine.requests) == 1, "half a body is nobody's call"


HISTORY = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from([
        "message", "function_call", "custom_tool_call", "local_shell_call", "function_call_output", "reasoning", "user",
        "assistant", "text", "input_text", "tool_use", "tool_result", "document", "thinking",
    ]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "text"]), inner),
    max_leaves=8,
)  # fmt: skip
KEYS = ["type", "role", "content", "name", "arguments", "call_id", "input", "output", "source", "text", "id"]


@pytest.mark.parametrize(
    "read",
    [
        lambda items: ResponsesBody(input=items),
        lambda items: MessagesBody.model_validate({"messages": [{"role": "assistant", "content": items}]}),
    ],
    ids=["responses", "messages"],
)
@settings(max_examples=200, deadline=None)
@given(items=st.lists(st.dictionaries(st.sampled_from(KEYS), HISTORY), max_size=4))
def test_no_history_raises_anything_but_a_request_error(read: Any, items: list[dict[str, Any]]) -> None:
    try:
        read(items).chat()
    except RequestError as error:
        assert error.key


# clients that go away -------------------------------------------------------------------------------------------------


def gauges(served: Served) -> tuple[float, float, float]:
    """Requests that wait, requests that run, runs."""
    text = metrics(served)
    names = ("num_requests_waiting", "num_requests_running", "num_runs_running")
    return tuple(sum(map(float, re.findall(rf"^kedge:{name}{{.*}} (\S+)$", text, re.M))) for name in names)  # type: ignore[return-value]


def check_rest(running: Served, engine: EchoEngine) -> None:
    running.wait_quiet()
    wait_until(lambda: gauges(running) == (0, 0, 0))
    assert not engine.in_flight
    assert engine.cache.stats().leased_blocks == 0
    engine.cache.check_integrity()


@pytest.fixture
def slow() -> Iterator[Served]:
    """An engine that needs a minute for a long answer, and has room for two of them."""
    with EchoEngine(delay_s=0.01, capacity=13_000) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        yield running
        check_rest(running, engine)


def raw_call(served: Served, **body: object) -> socket.socket:
    content = json.dumps({"prompt": "x", "max_tokens": 6000, "ignore_eos": True, **body}).encode()
    return served.connect(f"{POST}Content-Length: {len(content)}\r\n\r\n".encode() + content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_generations(slow: Served, stream: bool) -> None:
    connection = raw_call(slow, stream=stream, n=2)
    assert not stream or b"200 OK" in connection.recv(4096)
    wait_until(lambda: len(slow.engine.in_flight) == 2)
    connection.close()
    wait_until(lambda: not slow.engine.in_flight)


def test_a_run_whose_client_goes_away_is_counted(slow: Served) -> None:
    body = {"inputs": {"user_question": "x" * 3000}, "stream": True}
    with slow.http() as http, http.stream("POST", RUNS, json=body) as run:
        next(line for line in run.iter_lines() if line == "event: text")
    slow.wait_quiet()
    assert 'request_success_total{finished_reason="cancelled"' in metrics(slow)


def metrics(served: Served) -> str:
    return served.http().get("/metrics").text


def test_a_reader_that_takes_its_time_gets_everything_and_holds_nobody_up(http: httpx.Client, served: Served) -> None:
    body = {"prompt": "0123456789", "max_tokens": 1005, "ignore_eos": True, "stream": True, "logprobs": 20}
    with served.http() as other, other.stream("POST", TEXT, json=body) as answer:
        wait_until(lambda: not served.engine.in_flight)
        assert http.post(TEXT, json={"prompt": "quick"}).json()["choices"][0]["text"] == "quick"
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "0123456789" * 91 + "0123"


def raw_answer(served: Served, length: int, pieces: Iterable[bytes]) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a body that is told to have `length` bytes and comes in `pieces`."""
    with served.connect(f"{POST}Content-Length: {length}\r\n\r\n".encode()) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read())


def test_a_body_that_comes_byte_by_byte_is_read(served: Served) -> None:
    content = b'{"prompt": "slowly"}'
    status, body = raw_answer(served, len(content), (bytes([byte]) for byte in content))
    assert (status, body["choices"][0]["text"]) == (200, "slowly")


def test_a_body_that_never_comes_is_waited_for_only_so_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "BODY_SECONDS", 0.05)
    status, body = raw_answer(served, 100, [b"{"])
    assert (status, body["error"]["code"]) == (408, "request_timeout")


# an engine in a long step ---------------------------------------------------------------------------------------------


class Stepping(EchoEngine):
    """An engine that answers questions once its step is over, as the embedded one does."""

    def __init__(self) -> None:
        self.step_is_over, self.asked = threading.Event(), 0
        super().__init__(lambda request: "a" * 4000 if b"long" in bytes(request.tokens) else "a", delay_s=0.001)

    def cancel(self, request_id: RequestId) -> bool:
        self.asked += 1
        return self.step_is_over.wait() and super().cancel(request_id)

    def inspect_tenants(self, *_: Any) -> dict[str, Any]:
        self.asked += 1
        self.step_is_over.wait()
        return {}


@pytest.mark.parametrize("stranger", ["hangs up", "/ready", "/v1/guard"])
def test_who_waits_for_a_long_step_keeps_nobody_from_being_answered(stranger: str) -> None:
    with Stepping() as engine, serving(engine, ServerSettings()) as running:
        with running.http() as http, ThreadPoolExecutor(8) as pool:
            try:
                if stranger == "hangs up":
                    for _ in range(8):
                        body = {"prompt": "long", "max_tokens": 4000, "stream": True}
                        with http.stream("POST", "/v1/completions", json=body) as answer:
                            next(answer.iter_lines())
                else:
                    asking = [pool.submit(http.get, stranger) for _ in range(8)]
                wait_until(lambda: engine.asked)
                assert not running.service.is_closed, "while it is asked, its last answer holds"
                for _ in range(20):  # by then the server has heard all of them
                    assert http.get("/health").status_code == 200
                answer = http.post("/v1/completions", json={"prompt": "x" * 70_000, "max_tokens": 1})
                assert answer.status_code == 400
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            finally:
                engine.step_is_over.set()
        if stranger != "hangs up":
            assert {one.result().status_code for one in asking} == {200}


def test_calls_are_counted_as_they_wait_and_run(slow: Served) -> None:
    connection = raw_call(slow, stream=True, n=3)
    with slow.http() as http:
        run = http.post(RUNS, json={"inputs": {"user_question": "x" * 3000}}).json()["id"]
        wait_until(lambda: gauges(slow) == (2, 2, 1))
        connection.close()
        http.post(f"/v1/runs/{run}/cancel").raise_for_status()


# under load -----------------------------------------------------------------------------------------------------------

CLIENTS, ROUNDS = 32, 3


async def hammer(url: str, seed: int) -> None:
    """A client that calls in every way there is and mostly goes away in the middle."""
    choose = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for _ in range(ROUNDS):
            kind, patience = choose.randrange(4), choose.choice((0.0, 0.01, 0.05, 0.2, None))
            body: dict[str, Any] = {"prompt": "abc" * choose.randrange(1, 9), "n": choose.randrange(1, 4)}
            size = {"max_tokens": choose.choice((1, 20, 2000)), "ignore_eos": True}
            calls = {
                0: (TEXT, {**body, **size, "stream": True}),
                1: (TEXT, {**body, **size}),
                2: (RUNS, {"inputs": {"user_question": "x" * choose.randrange(1, 200)}, "stream": True}),
                3: (RUNS, {"inputs": {"user_question": "x" * choose.randrange(1, 200)}}),
            }
            await leave(http, *calls[kind], patience)


async def leave(http: httpx.AsyncClient, path: str, body: dict[str, Any], patience: float | None) -> None:
    """Send a call and drop its connection after so many seconds; None: once a little has been read."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience), http.stream("POST", path, json=body) as answer:
            assert answer.status_code in (200, 201, 429, 503)
            async for _ in answer.aiter_bytes():
                if patience is None:
                    break


async def hammer_all(url: str) -> None:
    await asyncio.gather(*(hammer(url, seed) for seed in range(CLIENTS)))


def test_clients_that_come_and_go_by_the_dozen_leave_nothing_behind() -> None:
    config = ServerSettings(max_in_flight=48)
    with EchoEngine(delay_s=0.002, capacity=20_000) as engine, serving(engine, config) as running:
        running.http().post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        asyncio.run(hammer_all(running.url))
        check_rest(running, engine)
        assert len(engine.requests) > CLIENTS
        (choice,) = running.http().post(TEXT, json={"prompt": "hello", "temperature": 0}).json()["choices"]
        assert choice["text"] == "hello"
