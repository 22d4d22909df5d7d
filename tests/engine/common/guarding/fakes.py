"""An engine of the guard's tests: it answers by what would be translated, on the caller's thread or when it is let."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.stream import TokenStream
from kedge.guard import GuardOrders
from kedge.settings import GuardSettings
from kedge.types import (
    AgentId,
    Completion,
    FinishReason,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
    WorkflowId,
)
from tests.reuse.guard.answers import answer, position

GOOD = position({1: 0.9, 2: 0.1})
BAD = position({2: 0.9, 1: 0.1})
EAGER = GuardSettings(share=1.0)
"""Checks every call."""
AS_SET = GuardOrders()


def request(
    *names: str,
    run: str = "run",
    agent: str = "solver",
    guard: GuardOrders = AS_SET,
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    logprobs: int | None = None,
    **sampling: object,
) -> GenerateRequest:
    """A request with these placeholders, of ten tokens each."""
    values = [Segment(tuple(range(10)), name, SampleId.parse(f"input_{name}@0")) for name in names or ("a",)]
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return GenerateRequest(
        (Segment((0,), "p0"), *values, Segment((3,), "p1")), params, reuse, guard=guard, logprobs=logprobs,
        workflow=WorkflowId("team"), agent=AgentId(agent), run=RunId(run),
    )  # fmt: skip


def spans_of(request: GenerateRequest, translated: frozenset[str]) -> list[Span]:
    """The spans of a receipt with these placeholders translated, as far as the guard does not withhold them."""
    spans, start = [], 0
    for segment in request.segments:
        stop = start + len(segment.tokens)
        moved = segment.name in translated and not request.guard.withholds(segment.name)
        moved &= request.reuse is ReuseMode.TRANSLATE
        spans.append(Span(start, stop, Source.TRANSLATED if moved else Source.COMPUTED))
        start = stop
    return spans


@dataclass
class FakeEngine:
    """Translates what it can unless withheld; with a faulty placeholder among it, the answer begins otherwise."""

    settings: GuardSettings = EAGER
    translatable: frozenset[str] = frozenset("ab")
    faulty: frozenset[str] = frozenset()
    wrong: TokenLogprob = BAD
    holds_checks: bool = False
    """Whether checks are answered only by `let_go`"""
    refuse: Callable[[GenerateRequest], None] = lambda _: None
    asked: list[GenerateRequest] = field(default_factory=list)
    """What was served to clients, as it arrived in the engine"""
    checks: list[GenerateRequest] = field(default_factory=list)
    held: list[tuple[TokenStream, GenerateRequest]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = GuardedCalls(self.submit, self.settings)
        self.arrived = threading.Semaphore(0)

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Serve a request at once; as `LocalEngine.submit` does."""
        self.refuse(request)
        self.calls.arriving(request)
        self.events.append(f"submit {request.run}")
        served, tap = self.calls.begin(request)
        stream = TokenStream(request.request_id)
        stream.tap = tap
        (self.asked if tap else self.checks).append(served)
        if tap is None and self.holds_checks:
            self.held.append((stream, served))
            self.arrived.release()
        else:
            self.put(stream, served)
        return stream

    def put(self, stream: TokenStream, served: GenerateRequest, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Answer a request."""
        done = self.completion(served, reason)
        if done.logprobs:
            stream.put(TokenDelta("x", done.tokens[:1], logprobs=done.logprobs[:1]))
        stream.put(TokenDelta("x", done.tokens[1:], done, done.logprobs[1:]))

    def completion(self, served: GenerateRequest, reason: FinishReason) -> Completion:
        """The answer to a request."""
        spans = spans_of(served, self.translatable)
        moved = {s.name for s, span in zip(served.segments, spans, strict=True) if span.source is Source.TRANSLATED}
        first = self.wrong if moved & self.faulty else GOOD
        size = served.sampling.max_tokens
        made = answer(*[first, *[GOOD] * (size - 1)][:size], spans=spans, finish_reason=reason)
        if served.logprobs is None:
            return replace(made, logprobs=())
        return replace(made, logprobs=tuple(replace(one, top=one.top[: served.logprobs]) for one in made.logprobs))

    def let_go(self) -> None:
        """Answer the check that is held."""
        assert self.arrived.acquire(timeout=10)
        self.put(*self.held.pop())

    def ask(self, request: GenerateRequest) -> Completion:
        """Serve a request and carry out its checks."""
        done = self.submit(request).result(10)
        if not self.holds_checks:
            assert self.calls.checks.drain(10)
        return done

    def end_run(self, run: str) -> None:
        """End a run, as `LocalEngine.end_run` does."""
        self.calls.checks.end_run(request(run=run).run_key, lambda: self.events.append(f"end {run}"))

    def state(self, placeholder: str = "a") -> dict[str, object]:
        """The record of a placeholder."""
        (entry,) = [one for one in self.calls.stats()["agents"] if one["placeholder"] == placeholder]  # type: ignore[attr-defined]
        return entry

    def close(self) -> None:
        """Close as `LocalEngine` does."""
        self.calls.checks.stop()
        while self.held:
            stream, served = self.held.pop()
            self.put(stream, served, FinishReason.CANCELLED)
        self.calls.checks.join()
