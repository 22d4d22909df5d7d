"""Clients for `locust`: each streams chats to its end, one after the other, with a system prompt that it shares.

    locust -f scripts/locustfile.py --headless --users 64 --spawn-rate 16 --run-time 5m --host http://127.0.0.1:8000

`KEDGE_LOAD_TOKENS` is the length of an answer (32). A stream that lacks its last chunk, or reports an error, is a
failure; "first token" is listed as a request of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import time

from locust import FastHttpUser, events, task

TOKENS = int(os.environ.get("KEDGE_LOAD_TOKENS", "32"))
SYSTEM = "You are a patient assistant who answers in a few words. " * 4
numbers = itertools.count()


class Streaming(FastHttpUser):
    """A client that sends the next request as soon as one has ended."""

    @task
    def chat(self) -> None:
        body = {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Say {next(numbers)}."}],
            "max_tokens": TOKENS,
            "stream": True,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")
                return
            last = b""
            while event := bytes(answer.stream.readline(b"\n\n")):
                if not last:
                    _first_token(time.perf_counter() - began)
                if b"[DONE]" not in event:
                    last = event
            wrong = _wrong(last)
            if wrong:
                answer.failure(wrong)
            else:
                answer.success()


def _first_token(seconds: float) -> None:
    timing = {"request_type": "SSE", "name": "first token", "response_time": seconds * 1e3, "response_length": 0}
    events.request.fire(**timing, exception=None, context={})


def _wrong(last: bytes) -> str:
    """Return what is wrong with a stream that ended with this event; empty if nothing is."""
    if not last:
        return "an empty stream"
    data = json.loads(last.removeprefix(b"data: "))
    if "error" in data:
        return str(data["error"]["message"])
    return "" if data["choices"][0]["finish_reason"] == "length" else "the last chunk is missing"
