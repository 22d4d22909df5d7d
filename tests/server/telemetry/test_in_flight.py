"""Gauges count what is in the engine, whoever asked for it, and all of it is given back however it ends."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, YAML, Served, serving, wait_until

TEXT, RUNS = "/v1/completions", "/v1/workflows/pair/runs"
LONG = {"inputs": {"user_question": "x" * 3000}}
WIDE = """
name: wide
agents:
  - {id: a, user: "{user_question}", max_tokens: 5000}
  - {id: b, user: "{user_question}", max_tokens: 5000}
  - {id: c, user: "{user_question} {agent_a_current} {agent_b_current}"}
"""


def gauges(served: Served) -> tuple[float, float, float]:
    """Requests that wait, requests that run, runs."""
    with served.http() as http:
        text = http.get("/metrics").text
    names = ("num_requests_waiting", "num_requests_running", "num_runs_running")
    return tuple(sum(map(float, re.findall(rf"^kedge:{name}{{.*}} (\S+)$", text, re.M))) for name in names)  # type: ignore[return-value]


@pytest.fixture
def slow() -> Iterator[Served]:
    """An engine that needs a minute for a long answer, and has room for two of them."""
    with EchoEngine(delay_s=0.01, capacity=13_000) as engine, serving(engine) as running, running.http() as http:
        for flow in (FLOW, WIDE):
            http.post("/v1/workflows", content=flow, headers=YAML).raise_for_status()
        yield running
        running.wait_quiet()
        wait_until(lambda: gauges(running) == (0, 0, 0))
        assert not engine.in_flight
        assert engine.cache.stats().leased_blocks == 0
        engine.cache.check_integrity()


def start(served: Served, flow: str = "wide") -> str:
    started = served.http().post(f"/v1/workflows/{flow}/runs", json=LONG)
    assert started.status_code == 201, started.text
    return f"/v1/runs/{started.json()['id']}"


def test_the_calls_of_runs_are_counted_as_they_wait_and_run(slow: Served) -> None:
    runs = [start(slow) for _ in range(3)]
    wait_until(lambda: gauges(slow) == (5, 1, 3))
    for run in runs:
        slow.http().post(f"{run}/cancel")


def test_an_engine_that_ends_leaves_the_gauges_at_nothing() -> None:
    with EchoEngine(delay_s=0.01) as engine, serving(engine) as running:
        running.http().post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        start(running, "pair")
        wait_until(lambda: gauges(running) == (0, 1, 1))
        engine.fail(RuntimeError("boom"))
        wait_until(lambda: gauges(running) == (0, 0, 0))


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
        wait_until(lambda: not running.workflows.server_runs.any_running)
        running.wait_quiet()
        wait_until(lambda: gauges(running) == (0, 0, 0))
        assert not engine.in_flight
        assert engine.cache.stats().leased_blocks == 0
        engine.cache.check_integrity()
        assert len(engine.requests) > CLIENTS
        assert (
            running.http().post(TEXT, json={"prompt": "hello", "temperature": 0}).json()["choices"][0]["text"]
            == "hello"
        )
