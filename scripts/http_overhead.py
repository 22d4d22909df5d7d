"""Measure what HTTP adds to the time to first token: the client's time less the engine's for the same request.

    python scripts/http_overhead.py --requests 200 --json http-overhead.json

One client, one stream after the other over one connection, on the bundled model in a process of its own; every prompt
ends in a new number. The engine's time begins when the server has rendered the prompt, so tokenizing counts as HTTP's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from soak import server

SYSTEM = "You are a patient assistant who answers in a few words. " * 4
WARMUP = 10
"""Streams before the measurement"""


def streamed(client: httpx.Client, number: int) -> tuple[float, float]:
    """Return the milliseconds to the first text, as seen by this client and by the engine."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Say {number}."}]
    body = {"messages": messages, "max_tokens": 4, "stream": True, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.perf_counter()
    return 1e3 * (first - began), chunk["kedge"]["receipts"][0]["ttft_ms"]


def measured(port: int, requests: int) -> dict[str, Any]:
    """Return medians and 90th percentiles in milliseconds."""
    with server("nano", port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        seen = [streamed(client, number) for number in range(WARMUP + requests)][WARMUP:]
    columns = {
        "client_ms": [theirs for theirs, _ in seen],
        "engine_ms": [ours for _, ours in seen],
        "added_ms": [theirs - ours for theirs, ours in seen],
    }
    return {name: _spread(values) for name, values in columns.items()}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "p90": round(statistics.quantiles(values, n=10)[-1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--port", type=int, default=8714)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = measured(given.port, given.requests)
    for name, one in result.items():
        print(f"{name}: median {one['median']}, 90 % below {one['p90']}")
    if given.json:
        given.json.write_text(json.dumps({"requests": given.requests, **result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
