"""Hostile calls to a server, and a look at what they have changed or left behind.

    python scripts/fuzz_api.py --cases 10000 --engine nano

Half of the cases are Schemathesis's, over the whole OpenAPI document; the other half are sound bodies with hostile
numbers in them, written as JSON that no client library would write. It fails on a 5xx, an answer that the document does
not know, one that takes longer than ten seconds, on anything that is left in the engine, and where a fixed greedy
request is answered otherwise than before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.engine.base import Engine
from kedge.engine.echo import EchoEngine
from kedge.server.app import create_app
from kedge.settings import ServerSettings

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
FLOW = """
name: pair
agents:
  - {id: first, system: You begin., user: "Q: {user_question}"}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current}"}
"""
PATIENCE = 10.0
"""Seconds in which every call must be answered."""
EVERY = 25
"""Hostile numbers between two checks of the reference."""
PAUSE = 5.0
"""Seconds between two checks of the reference while Schemathesis runs."""
SPARE = 1.05
"""Factor on the number of cases, since some operations have fewer different cases than their share."""
LONGEST = 64
"""Tokens of a chat's answer where a case sets no limit, so that thousands of cases end in time."""
CAPACITY = 512
"""Tokens of nano's cache, which ends an answer of a million tokens in time."""
REFERENCE = {"prompt": "The tide turns at nine, and seven ships", "temperature": 0, "max_tokens": 12}
JSON = {"Content-Type": "application/json"}

NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e309", "1e308", "-1e308", "1e-320", "5e-324", "-5e-324"),
    *("1e-46", "1e-40", "-1e-40", "1e-7", "0", "-0", "0.0", "-0.0", "1", "-1", "2", "0.5", "1.0", "1.5", "1e2"),
    *("2147483647", "2147483648", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "-1" + "0" * 400, "9" * 4301, "1e999999999"),
    *("true", "false", "null", '"1"', '"NaN"', '""', "[]", "{}", "[1]"),
)
"""The literals that replace numbers."""
SAMPLING = {"temperature": 1, "top_p": 1, "n": 1, "seed": 1, "max_tokens": 2}
HINTS = {
    "kedge": {"run": "r", "agent": "a", "seq": 1, "fixed_tokens": 2, "fixed_messages": 1, "steps": {"a": 0, "b": 1.5}},
    "nvext": {"agent_hints": {"priority": 1, "osl": 5}},
    "priority": 0,
}
UNSUPPORTED = dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "top_k"), 0)
CHAT = {"messages": [{"role": "user", "content": "How many ships?"}], "logprobs": True, "top_logprobs": 1}
AGENT = {"id": "first", "user": "Q: {user_question}", "max_tokens": 2, "temperature": 0, "top_p": 1, "seed": 1}
RUN = {"inputs": {"user_question": "Who?"}, "stream": True}
DRAWN = {"name": "drawn", "agents": [{"id": name, "max_tokens": 2} for name in ("first", "last")]}
TEMPLATES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/completions", {"prompt": "ab", "logprobs": 1, **SAMPLING}),
    ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1, **SAMPLING, **HINTS}),
    ("/v1/completions", {"prompt": [5, 6, 7], **SAMPLING, **UNSUPPORTED, "best_of": 1, "repetition_penalty": 1}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]], **SAMPLING, "stream": True}),
    ("/v1/chat/completions", {**CHAT, **SAMPLING, **HINTS, "max_completion_tokens": 2}),
    ("/v1/chat/completions", {**CHAT, **SAMPLING, "stream": True}),
    ("/v1/responses", {"input": "ab", "temperature": 1, "top_p": 1, "max_output_tokens": 2}),
    ("/v1/messages", {**CHAT, "temperature": 1, "top_p": 1, "max_tokens": 2, "stream": True}),
    ("/v1/hints", HINTS),
    ("/v1/workflows", {"name": "numbers", "agents": [AGENT], "turns": 1}),
    (
        "/v1/workflows",
        {"name": "drawn", "agents": [{"id": "a"}], "topology": {"kind": "chain", "turns": 1, "width": 1}},
    ),
)
"""Valid bodies; each of their numbers may be replaced."""


class Counting:
    """An application that counts calls by the status of their answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.statuses = app, Counter[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, count)


class Reference:
    """A greedy request with an answer that must not change."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._first = self._ask()
        self.problems: list[str] = []

    def look(self, when: str) -> None:
        """Record a problem if the answer is missing or differs from the first one."""
        try:
            answer = self._ask()
        except httpx.HTTPError as error:
            self.problems.append(f"{when}: the reference failed: {error!r}")
        else:
            if answer != self._first:
                self.problems.append(f"{when}: the reference is {answer!r} instead of {self._first!r}")

    def _ask(self) -> str:
        answer = httpx.post(f"{self._url}/v1/completions", json=REFERENCE, timeout=PATIENCE)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Repeat the request now and then, while something else runs."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(PAUSE):
                self.look("during Schemathesis's calls")

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()


def main() -> int:
    options = arguments()
    with engine_of(options.engine) as engine:
        app = create_app(engine, ServerSettings(default_max_tokens=LONGEST))
        counting = Counting(app)
        with serving(counting) as url:
            os.environ.update(known_names(url))
            reference = Reference(url)
            operations = sum("requestBody" in one or "parameters" in one for one in all_operations(app.openapi()))
            with reference.watched():
                failed = fuzz(url, math.ceil(SPARE * options.cases / 2 / operations), options.seed)
            reference.look("after Schemathesis's calls")
            problems = fuzz_numbers(url, options.cases // 2, options.seed, reference)
            left = leftovers(app, engine)
    print(f"{sum(counting.statuses.values())} calls by status: {dict(sorted(counting.statuses.items()))}")
    print(f"left behind: {left or 'nothing'}")
    print("\n".join(problems) or "hostile numbers: no problem")
    return int(bool(failed or left or problems or any(status >= 500 for status in counting.statuses)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="at least so many, half of either kind")
    parser.add_argument("--engine", choices=("echo", "nano"), default="echo", help="nano: the bundled model")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def engine_of(name: str) -> Any:
    """Return a small engine of that name."""
    if name == "echo":
        return EchoEngine(capacity=2048)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for an operation: the model is tiny, the machine busy
    from kedge.engine.local.engine import LocalEngine
    from kedge.settings import EngineSettings

    return LocalEngine(config=EngineSettings(block_size=16, kv_memory=f"{CAPACITY // 16} blocks"))


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True


def known_names(url: str) -> dict[str, str]:
    """Register a workflow and run it. Returns their names under the variables that the hooks read."""
    yaml = {"Content-Type": "application/yaml"}
    httpx.post(f"{url}/v1/workflows", content=FLOW, headers=yaml).raise_for_status()
    run = httpx.post(f"{url}/v1/workflows/pair/runs", json={"inputs": {"user_question": "Who?"}}).json()["id"]
    return {"KEDGE_FUZZ_WORKFLOW": "pair", "KEDGE_FUZZ_RUN": run}


def all_operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for operations in document["paths"].values() for one in operations.values()]


def fuzz(url: str, cases: int, seed: int) -> int:
    """Run Schemathesis's own command. Returns its exit status."""
    place = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", CHECKS, "--max-examples", str(cases), "--seed", str(seed), "--phases", "coverage,fuzzing"),
        *("--max-response-time", str(PATIENCE), "--request-timeout", str(PATIENCE), "--suppress-health-check", "all"),
    ]
    environment = {**os.environ, "PYTHONPATH": path, "SCHEMATHESIS_HOOKS": "fuzz_hooks"}
    return subprocess.run(command, env=environment, check=False).returncode


# hostile numbers ------------------------------------------------------------------------------------------------------


def fuzz_numbers(url: str, cases: int, seed: int, reference: Reference) -> list[str]:
    """Send bodies with hostile numbers. Returns what went wrong."""
    problems: list[str] = []
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        for case, (path, body) in enumerate(hostile_bodies(cases, seed), 1):
            problems += [f"{path} {body[:500]}: {problem}" for problem in send(client, path, body)]
            if case % EVERY == 0:
                reference.look(f"after {case} hostile numbers, the last one {path} {body[:500]}")
    reference.look("at the end")
    return problems + reference.problems


def send(client: httpx.Client, path: str, body: str) -> Iterator[str]:
    """Yield the problems of the answer to one call. A workflow that was accepted is run, too."""
    began = time.monotonic()
    try:
        answer = client.post(path, content=body, headers=JSON)
    except httpx.HTTPError as error:
        yield repr(error)
        return
    spent = time.monotonic() - began
    if answer.status_code >= 500 or "server_error" in answer.text:
        yield f"{answer.status_code} {answer.text[:500]}"
    if spent > PATIENCE:
        yield f"answered after {spent:.1f} s"
    if path == "/v1/workflows" and answer.is_success:
        name = "drawn" if '"topology"' in body else "numbers"
        yield from send(client, f"{path}/{name}/runs", json.dumps(RUN))


def hostile_bodies(cases: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield paths and bodies with one to three hostile numbers."""
    rng = random.Random(seed)
    for case in range(cases):
        path, template = TEMPLATES[case % len(TEMPLATES)]
        places = list(numbers_in(template))
        chosen = rng.sample(places, min(len(places), rng.choice((1, 1, 2, 3))))
        yield path, written(template, {place: hostile_number(rng) for place in chosen})


def hostile_number(rng: random.Random) -> str:
    """Return one of `NUMBERS` or, now and then, a random 64-bit float."""
    if rng.random() < 0.8:
        return rng.choice(NUMBERS)
    bits = rng.getrandbits(64)
    return json.dumps(struct.unpack("d", struct.pack("Q", bits))[0]) if bits % 2 else str(bits - 2**63)


def numbers_in(data: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of all numbers in nested data."""
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from numbers_in(value, (*place, key))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield place


def written(data: Any, literals: dict[tuple[str | int, ...], str], place: tuple[str | int, ...] = ()) -> str:
    """Return nested data as JSON, with `literals` in their places."""
    if place in literals:
        return literals[place]
    if isinstance(data, dict):
        pairs = (f"{json.dumps(key)}: {written(value, literals, (*place, key))}" for key, value in data.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(data, list):
        return f"[{', '.join(written(value, literals, (*place, at)) for at, value in enumerate(data))}]"
    return json.dumps(data)


# the end --------------------------------------------------------------------------------------------------------------


def leftovers(app: Any, engine: Engine) -> str:
    """Return what is still held after everything has ended; empty if nothing is."""
    service, deadline = app.state.service, time.monotonic() + PATIENCE
    held = ""
    while time.monotonic() < deadline:
        leased, jobs = held_by(engine)
        in_flight = service.in_flight
        held = f"{leased} blocks, {jobs} jobs, {in_flight} in flight" if leased or jobs or in_flight else ""
        if not held:
            break
        time.sleep(0.1)
    return held


def held_by(engine: Any) -> tuple[int, int]:
    """Return the numbers of blocks and jobs that an engine holds, without those of prepared prompts."""
    if isinstance(engine, EchoEngine):
        engine.cache.check_integrity()
        return engine.cache.stats().leased_blocks, len(engine._jobs)
    engine.clear()
    engine.wait_idle(PATIENCE)
    return engine.inspect()["cache"]["leased_blocks"], 0


if __name__ == "__main__":
    raise SystemExit(main())
