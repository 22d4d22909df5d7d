"""Schemathesis over the whole OpenAPI document of a server around the echo engine, and a look at what is left after it.

    python scripts/fuzz_api.py --cases 10000

It fails on a 5xx, an answer that the document does not tell of, one that takes longer than ten seconds, and on
anything that is left in the engine. Schemathesis loads this file for its hooks.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import schemathesis
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.engine.echo import EchoEngine
from kedge.server.app import create_app
from kedge.server.config import ServerConfig

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
FLOW = """
name: pair
agents:
  - {id: first, system: You begin., user: "Q: {user_question}"}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current}"}
"""
PATIENCE = 10.0
SPARE = 1.05
"""Some operations have fewer different cases than their share."""
KNOWN = {"name": "KEDGE_FUZZ_WORKFLOW", "run": "KEDGE_FUZZ_RUN"}
"""Parameters of paths, and the variables that hold a value which leads somewhere."""
MOST = {"n": 9, "max_tokens": 100, "max_completion_tokens": 100, "logprobs": 21, "top_logprobs": 21}


@schemathesis.hook
def map_path_parameters(context: Any, parameters: Any) -> Any:  # noqa: ARG001
    """Half of the names are those of something that is there."""
    if not isinstance(parameters, dict) or len(str(parameters)) % 2:
        return parameters
    return {**parameters, **{name: os.environ[KNOWN[name]] for name in parameters if KNOWN[name] in os.environ}}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:  # noqa: ARG001
    """Most bodies are mended where a number or a name that nobody could guess would end the call at once."""
    if not isinstance(body, dict) or len(str(body)) % 4 == 0:
        return body
    mended = {name: value for name, value in body.items() if name != "model"}
    prompt = mended.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        mended["prompt"] = [token % 259 for token in prompt]
    for name, most in MOST.items():
        if type(mended.get(name)) is int:
            mended[name] %= most
    return mended


class Counting:
    """Counts calls by the status of their answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.statuses = app, dict[int, int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] = self.statuses.get(message["status"], 0) + 1
            await send(message)

        await self._app(scope, receive, tell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="at least so many, over all operations")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with EchoEngine(capacity=2048) as engine:
        app = create_app(engine, ServerConfig())
        counting = Counting(app)
        server = uvicorn.Server(uvicorn.Config(counting, port=0, log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()
        url = address(server)
        os.environ.update(known_names(url))
        operations = sum("requestBody" in one or "parameters" in one for one in all_operations(app.openapi()))
        failed = fuzz(url, math.ceil(SPARE * options.cases / operations), options.seed)
        left = leftovers(app, engine)
        server.should_exit = True
    print(f"{sum(counting.statuses.values())} calls by status: {dict(sorted(counting.statuses.items()))}")
    print(f"left behind: {left or 'nothing'}")
    return int(bool(failed or left))


def known_names(url: str) -> dict[str, str]:
    """Registers a workflow and runs it; what their names are, for the hook."""
    yaml = {"Content-Type": "application/yaml"}
    httpx.post(f"{url}/v1/workflows", content=FLOW, headers=yaml).raise_for_status()
    run = httpx.post(f"{url}/v1/workflows/pair/runs", json={"inputs": {"user_question": "Who?"}}).json()["id"]
    return dict(zip(KNOWN.values(), ("pair", run), strict=True))


def address(server: uvicorn.Server) -> str:
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def all_operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for operations in document["paths"].values() for one in operations.values()]


def fuzz(url: str, cases: int, seed: int) -> int:
    """Runs Schemathesis's own command; its exit status."""
    place = Path(__file__).resolve()
    path = os.pathsep.join(filter(None, [str(place.parent), os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", CHECKS, "--max-examples", str(cases), "--seed", str(seed), "--phases", "coverage,fuzzing"),
        *("--max-response-time", str(PATIENCE), "--request-timeout", str(PATIENCE), "--suppress-health-check", "all"),
    ]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "SCHEMATHESIS_HOOKS": place.stem}, check=False
    ).returncode


def leftovers(app: Any, engine: EchoEngine) -> str:
    """What is still held once everything has ended; empty where it is nothing."""
    service, deadline = app.state.service, time.monotonic() + PATIENCE
    held = ""
    while time.monotonic() < deadline:
        engine.cache.check_integrity()
        leased, jobs = engine.cache.stats().leased_blocks, len(engine._jobs)
        in_flight = sum(meter.in_flight for meter in service._meters.values())
        held = f"{leased} blocks, {jobs} jobs, {in_flight} in flight" if leased or jobs or in_flight else ""
        if not held:
            break
        time.sleep(0.1)
    return held


if __name__ == "__main__":
    raise SystemExit(main())
