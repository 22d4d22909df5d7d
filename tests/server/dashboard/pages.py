"""Reading the dashboard's events as a page does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

EVENTS = "/v1/dashboard/events"
SLOW = {
    "name": "slow",
    "agents": [{"id": "first", "user": "Q: {user_question}"}, {"id": "last", "user": "A: {agent_first_current}"}],
}


@contextmanager
def states(http: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    """The states that one open page gets."""
    with http.stream("GET", EVENTS) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def state(http: httpx.Client) -> dict[str, Any]:
    with states(http) as coming:
        return next(coming)


def seen(http: httpx.Client) -> dict[str, Any]:
    """The first state in which the engine has answered: a busy one is not waited for."""
    with states(http) as coming:
        return next(one for one in coming if one["engine"])


def chat(http: httpx.Client, text: str = "hello", **fields: Any) -> None:
    body = {"model": "kedge-nano", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    http.post("/v1/chat/completions", json=body).raise_for_status()
