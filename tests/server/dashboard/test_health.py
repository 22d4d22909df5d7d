"""The state of the engine, as the header shows it."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.dashboard.routes import OVERLOAD_SECONDS, health
from kedge.settings import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.dashboard.test_routes import state, states


def test_the_engines_state_is_sent_when_it_changes_and_says_why() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http, states(http) as coming:
        assert next(coming)["health"] == {"state": "healthy", "reason": "", "silent_s": 0.0}
        engine.fail(RuntimeError("boom"))
        failed = next(one["health"] for one in coming if one["health"]["state"] != "healthy")
        assert (failed["state"], failed["reason"]) == ("failed", "boom")


def test_a_server_that_ends_says_so_in_a_last_state() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http, states(http) as coming:
        next(coming)
        running.service.is_ending = True
        *_, last = coming
    assert last["health"]["state"] == "shutting down"


def test_a_server_without_room_is_overloaded() -> None:
    config = ServerSettings(max_in_flight=1)
    with EchoEngine(lambda _: "a" * 500, delay_s=0.02) as engine, serving(engine, config) as running:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        with running.http() as http, http.stream("POST", "/v1/completions", json=body):
            full = state(running.http())["health"]
            refused = running.http().post("/v1/completions", json={"prompt": "y"})
        running.wait_quiet()
        after = state(running.http())
    assert refused.status_code == 503
    assert (full["state"], full["reason"]) == ("overloaded", "all 1 places for generations and runs are taken")
    assert (after["health"]["state"], after["failures"]["refused"]) == ("overloaded", 1)
    assert after["health"]["reason"] == "calls were refused for want of room"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, "healthy"),
        ({"silent_s": OVERLOAD_SECONDS + 1}, "overloaded"),
        ({"overload_age_s": OVERLOAD_SECONDS + 1}, "healthy"),
        ({"is_closed": True, "silent_s": OVERLOAD_SECONDS + 1}, "closed"),
    ],
)
def test_what_makes_an_engine_overloaded_or_closed(served: Served, known: dict[str, Any], expected: str) -> None:
    told = health(served.service, **{"is_closed": False, "silent_s": 0.0, "overload_age_s": None, **known})
    assert told[0] == expected
