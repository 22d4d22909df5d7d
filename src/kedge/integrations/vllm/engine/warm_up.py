"""What vLLM compiles at first use, used once at the start, so that no request waits for it."""

from __future__ import annotations

from collections.abc import Callable

from kedge.engine.base import Stream
from kedge.reuse.guard.comparison import TOP
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment


def warm_up_checks(submit: Callable[[GenerateRequest], Stream]) -> None:
    """Draw tokens with log-probabilities, for one request and for two at once.

    vLLM compiles what these need for one row and for several, which takes seconds, and the quality guard asks for them
    beside any request.
    """
    for count in (1, 2):
        for stream in [submit(_request()) for _ in range(count)]:
            stream.result()


def _request() -> GenerateRequest:
    return GenerateRequest((Segment((0,), "p0"),), SamplingParams(max_tokens=1), ReuseMode.OFF, logprobs=TOP)
