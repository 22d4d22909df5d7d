"""What goes wrong: bad bodies, wrong values, clients that go away, an engine that ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.server import middleware
from kedge.server.anthropic import MessagesBody
from kedge.server.responses import ResponsesBody
from kedge.settings import ServerSettings
from kedge.types import RequestId
from tests.server.conftest import PATIENCE, Served, serving, wait_until

JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POST = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NINES = b'{"prompt": %s}' % (b"9" * 5000)
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"messages": [}',
        b'{"messages": "\xff"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b'"text"',
        NINES,
    ],
    ids=lambda body: repr(body[:12]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/hints", "/v1/workflows/pair/runs"])
def test_a_body_that_is_no_json_is_a_bad_request(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none(http: httpx.Client, number: str) -> None:
    refused(http.post(TEXT, content=f'{{"prompt": "x", "temperature": {number}}}', headers=JSON), 400, "temperature")


def test_unknown_names(http: httpx.Client, client: openai.OpenAI) -> None:
    assert refused(http.post(CHAT, json={**HELLO, "model": "gpt"}), 404, "model")["code"] == "model_not_found"
    refused(http.get("/v1/nothing"), 404)
    refused(http.get(CHAT), 405)
    body = {"messages": [], "kedge": {"workflow": "none", "agent": "a", "bindings": {}}}
    refused(http.post(CHAT, json=body), 404, "workflow")
    for path in ("/v1/workflows/none", "/v1/workflows/none/graph", "/v1/runs/none", "/v1/runs/none/events"):
        refused(http.get(path), 404)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_ten_megabytes_is_too_large(http: httpx.Client, served: Served, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (10 << 20) + b'"}'
    content = iter([body[at : at + 65536] for at in range(0, len(body), 65536)]) if chunked else body
    assert refused(http.post(TEXT, content=content, headers=JSON), 413)["code"] == "request_too_large"
    assert any('status="413"' in line and 'tenant="default"' in line for line in metrics(served).splitlines())


@settings(max_examples=150, deadline=None)
@given(
    body=st.dictionaries(
        st.sampled_from(
            ["prompt", "messages", "n", "stop", "stream", "kedge", "nvext", "kv_hints", "priority", "seed"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=6,
        ),
    )
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/hints"])
def test_no_body_is_the_servers_fault(http: httpx.Client, path: str, body: object) -> None:
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    assert http.post(path, content=content, headers=JSON).status_code in (200, 400, 404, 429)


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


@pytest.fixture
def slow():  # noqa: ANN201
    """An engine that would talk for a minute."""
    with EchoEngine(delay_s=0.01) as engine, serving(engine) as running:
        yield running


def raw_call(served: Served, **body: object) -> socket.socket:
    content = json.dumps({"prompt": "x", "max_tokens": 6000, "ignore_eos": True, **body}).encode()
    head = f"{POST}Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    connection.sendall(head.encode() + content)
    return connection


def test_a_reader_that_goes_away_ends_its_generations(slow: Served) -> None:
    connection = raw_call(slow, stream=True, n=2)
    assert b"200 OK" in connection.recv(4096)
    wait_until(lambda: len(slow.engine.in_flight) == 2)
    connection.close()
    wait_until(lambda: not slow.engine.in_flight)
    slow.wait_quiet()


def test_a_client_that_goes_away_before_the_answer_ends_its_generation(slow: Served) -> None:
    connection = raw_call(slow)
    wait_until(lambda: len(slow.engine.in_flight) == 1)
    connection.close()
    wait_until(lambda: not slow.engine.in_flight)
    slow.wait_quiet()
    slow.engine.cache.check_integrity()


def said_to_the_end(connection: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        piece = connection.recv(4096)
        assert piece, said[-200:]
        said += piece
    return said


def test_streams_that_are_dropped_leave_nothing_behind(slow: Served) -> None:
    connections = [raw_call(slow, stream=True, prompt="abc" * n, logprobs=2, echo=n % 2 == 1) for n in range(1, 13)]
    for connection in connections[::2]:
        connection.recv(64)
    for connection in connections:
        connection.close()
    wait_until(lambda: len(slow.engine.requests) == 12 and not slow.engine.in_flight)
    slow.wait_quiet()
    slow.engine.cache.check_integrity()
    assert slow.engine.cache.stats().leased_blocks == 0
    wait_until(lambda: 'kedge:num_requests_running{model_name="kedge-nano",tenant="default"} 0.0' in metrics(slow))
    assert 'kedge:num_requests_waiting{model_name="kedge-nano",tenant="default"} 0.0' in metrics(slow)


def metrics(served: Served) -> str:
    return served.http().get("/metrics").text


def test_a_reader_that_takes_its_time_gets_everything_and_holds_nobody_up(http: httpx.Client, served: Served) -> None:
    connection = raw_call(served, stream=True, max_tokens=1005, prompt="0123456789", logprobs=20)
    wait_until(lambda: any(one.sampling.max_tokens == 1005 for one in served.engine.requests))
    wait_until(lambda: not served.engine.in_flight)
    assert http.post(TEXT, json={"prompt": "quick"}).json()["choices"][0]["text"] == "quick"
    chunks = [json.loads(line[6:]) for line in said_to_the_end(connection).split(b"\n") if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "0123456789" * 91 + "0123"
    connection.close()


def raw_answer(served: Served, length: int, pieces: Iterable[bytes]) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a body that is told to have `length` bytes and comes in `pieces`."""
    head = f"{POST}Content-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), PATIENCE) as connection:
        for piece in (head.encode(), *pieces):
            connection.sendall(piece)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read())


def test_a_body_that_comes_byte_by_byte_is_read(served: Served) -> None:
    content = b'{"prompt": "slowly"}'
    status, body = raw_answer(served, len(content), (bytes([byte]) for byte in content))
    assert (status, body["choices"][0]["text"]) == (200, "slowly")


def test_a_body_that_never_comes_is_waited_for_only_so_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    status, body = raw_answer(served, 100, [b"{"])
    assert (status, body["error"]["code"]) == (408, "request_timeout")


def test_half_a_body_is_nobodys_call(slow: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", int(slow.url.rpartition(":")[2])))
    connection.sendall(f"{POST}Content-Length: 100\r\n\r\n{{".encode())
    connection.close()
    assert slow.http().get("/health").status_code == 200
    assert not slow.engine.requests


def test_an_engine_that_is_closed_is_not_ready_to_generate() -> None:
    engine = EchoEngine()
    with serving(engine) as running:
        engine.close()
        answer = running.http().post(TEXT, json={"prompt": "x"})
        assert refused(answer, 503)["code"] == "engine_closed"
        assert answer.headers["retry-after"] == "1"
        running.wait_quiet()


def test_a_server_without_room_says_so() -> None:
    with EchoEngine(delay_s=0.01) as engine, serving(engine, ServerSettings(max_in_flight=1)) as running:
        connection = raw_call(running)
        wait_until(lambda: bool(engine.in_flight))
        assert refused(running.http().post(TEXT, json={"prompt": "x"}), 503)["code"] == "overloaded"
        connection.close()
        running.wait_quiet()
        assert running.http().post(TEXT, json={"prompt": "x"}).status_code == 200


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
                for _ in range(20):  # by then the server has heard all of them
                    assert http.get("/health").status_code == 200
                answer = http.post("/v1/completions", json={"prompt": "x" * 70_000, "max_tokens": 1})
                assert answer.status_code == 400
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            finally:
                engine.step_is_over.set()
        if stranger != "hangs up":
            assert {one.result().status_code for one in asking} == {200}
