"""Hints without a prompt before vLLM's own server: who may send them, what is refused, and how answers are joined."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.hints import ActionOutcome
from kedge.hints.actions import ActionResult
from kedge.integrations.vllm import middleware as hint_route
from kedge.integrations.vllm.middleware import KedgeMiddleware
from kedge.types import Namespace

KEY = "secret"


class VLLM:
    """vLLM's application as far as the route needs it: it checks the key, and knows no such route."""

    def __init__(self, connector: str | None = "KedgeConnector") -> None:
        transfer = connector and SimpleNamespace(kv_connector=connector)
        config = SimpleNamespace(kv_transfer_config=transfer)
        self.state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config, engine_core=object()))
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        status = 404 if (b"authorization", f"Bearer {KEY}".encode()) in scope["headers"] else 401
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-by", b"vllm")]})
        await send({"type": "http.response.body", "body": b"{}"})


def asked(vllm: VLLM, body: bytes, key: str = KEY, pieces: int = 1) -> tuple[int, Any]:
    """The status and the answer to a call."""
    sent: list[Any] = []
    size = -(-len(body) // pieces) or 1
    chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    left = iter([{"type": "http.request", "body": one, "more_body": one is not chunks[-1]} for one in chunks])

    async def receive() -> Any:
        return next(left)

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/hints", "headers": headers, "app": vllm}
    asyncio.run(KedgeMiddleware(vllm)(scope, receive, keep))
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent))


def test_vllm_refuses_a_caller_without_its_key_before_the_body_is_read() -> None:
    vllm = VLLM()
    assert asked(vllm, b'{"kedge": {"session": "s", "keep_for": 5}}', key="wrong") == (401, {})
    assert vllm.bodies == [b""]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"[" * 100_000, "body"),
        (b"\xff", "body"),
        (b'"' + b"x" * (1 << 20) + b'"', "body"),
        (b'{"kedge": {"reuse": "fast"}}', "kedge.reuse"),
        (b'{"kedge": {"bindings": 5}}', "kedge.bindings"),
    ],
)
def test_a_body_that_cannot_be_read_is_named(body: bytes, param: str) -> None:
    status, data = asked(VLLM(), body, pieces=3)
    assert (status, data["error"]["param"], data["error"]["type"]) == (400, param, "RequestError")


@pytest.mark.parametrize("connector", [None, "OtherConnector"])
def test_without_the_plugin_nothing_is_promised(connector: str | None) -> None:
    status, data = asked(VLLM(connector), b"{}")
    assert (status, data["error"]["param"]) == (501, "kv_connector")


class Engines:
    """vLLM's client for so many engines, which answers what is sent with what `outcomes` says, by engine."""

    def __init__(self, *outcomes: list[ActionOutcome] | None) -> None:
        from kedge.integrations.vllm.plugin.metrics import AdviceCalls

        self.core_engines, self.outcomes, self.calls = list(outcomes), outcomes, AdviceCalls()
        self.sent: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)
        found = self.outcomes[request.data_parallel_rank or 0]
        if found is not None:
            self.calls.answered({request.request_id: [one.to_dict() for one in found], "stranger": [{}]})

    def ask(self, hints: Mapping[str, Any]) -> list[ActionOutcome] | None:
        return asyncio.run(self.calls.ask(self, Namespace.parse("a/b"), hints, timeout=0.05))


def test_of_several_engines_the_one_that_knows_the_session_counts() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    unknown, known = (
        ActionOutcome("expects", "x", session="s"),
        ActionOutcome("expects", "y", ActionResult.APPLIED, "s"),
    )
    other = ActionOutcome("keep_for", "z", ActionResult.DEFERRED)
    engines = Engines([unknown, other], [other, known], None)
    found = engines.ask({"session": "s"})
    assert found is not None and sorted(found) == sorted([known, other])
    assert [one.data_parallel_rank for one in engines.sent] == [0, 1, 2] and len(engines.calls) == 0
    for one in engines.sent:
        assert one.cache_salt == "a/b" and one.abort_immediately
        assert one.sampling_params.extra_args["kv_transfer_params"]["kedge"] == {"session": "s", "advice": True}


def test_an_engine_that_does_not_answer_leaves_nothing_behind() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    engines = Engines(None)
    assert engines.ask({"session": "s"}) is None
    assert len(engines.calls) == 0 and [one.data_parallel_rank for one in engines.sent] == [None]
    engines.calls.answered({engines.sent[0].request_id: []})


def test_calls_that_wait_for_vllm_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr(hint_route, "ENTRIES", 0)
    status, data = asked(VLLM(), b'{"kedge": {"session": "s", "keep_for": 5}}')
    assert (status, data["error"]["type"]) == (503, "Overloaded")
