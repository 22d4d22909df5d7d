"""Tests of an engine that gets more requests than it has room for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kedge.engine.base import Engine
from kedge.errors import RequestError
from kedge.types import (
    AgentId,
    FinishReason,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    ValueKind,
    WorkflowId,
)
from tests.engine.conformance.harness import Harness, expect, fresh_id, fresh_text, sampled

ANSWER = 4
"""Tokens of an answer on the small engine."""
KINDS = 6
"""Number of different prompts among the concurrent requests."""


class OverloadTests(Harness):
    """Tests of a full cache, and of many clients."""

    crowd = 24
    """Number of concurrent requests to the small engine."""

    def test_overload_on_a_small_pool_ends_every_request(self, engine: Engine) -> None:
        """Overload the small engine in every reuse mode; afterwards it answers as before."""
        with self.small_engine(engine) as small:
            alone = [self.run(small, self.large(small, kind, ReuseMode.OFF)).tokens for kind in range(KINDS)]
            for reuse in ReuseMode:
                streams = [small.submit(self.large(small, number, reuse)) for number in range(self.crowd)]
                for number, stream in enumerate(streams):
                    done = stream.result(self.timeout_s)
                    assert done.finish_reason is FinishReason.LENGTH
                    assert done.tokens == alone[number % KINDS] or reuse is ReuseMode.TRANSLATE
                assert self.run(small, self.large(small, 0, ReuseMode.OFF)).tokens == alone[0]
                self.check_at_rest(small)

    def test_aborts_under_overload_end_what_they_name(self, engine: Engine) -> None:
        with self.small_engine(engine) as small:
            for reuse in ReuseMode:
                streams = [small.submit(self.large(small, number, reuse)) for number in range(self.crowd)]
                for stream in streams[::2]:
                    small.cancel(stream.request_id)
                reasons = [stream.result(self.timeout_s).finish_reason for stream in streams]
                assert reasons[1::2] == [FinishReason.LENGTH] * (self.crowd // 2)
                self.check_at_rest(small)

    def test_many_clients_at_once_are_answered_as_one_by_one(self, engine: Engine) -> None:
        """Compare concurrent with sequential answers, while some clients send invalid requests and others cancel."""
        requests = [self.request(engine, fresh_text("clients"), reuse=ReuseMode.EXACT) for _ in range(4)]
        alone = [self.run(engine, request).tokens for request in requests]

        def client(number: int) -> None:
            request = requests[number % 4]
            expect(RequestError, partial(engine.submit, sampled(request, top_p=0.0)))
            given_up = engine.submit(sampled(request, max_tokens=self.long_tokens))
            engine.cancel(given_up.request_id)
            assert self.again(engine, request).tokens == alone[number % 4]
            assert given_up.result(self.timeout_s).finish_reason is FinishReason.CANCELLED

        with ThreadPoolExecutor(self.clients) as threads:
            list(threads.map(client, range(self.clients)))
        self.check_at_rest(engine)
        self.serves(engine)

    def large(self, engine: Engine, number: int, reuse: ReuseMode) -> GenerateRequest:
        """Return one of `KINDS` calls of agents whose prompts take from a third of the small engine to nearly all."""
        kind = number % KINDS
        size = self.small_capacity * (KINDS + 1 + 2 * kind) // (3 * KINDS) - ANSWER
        text = engine.tokenizer.encode(f"{kind} sheep count the {kind} ships at anchor. " * size)
        return GenerateRequest(
            segments=(
                Segment(text[: size // 3], "p0"),
                Segment(text[size // 3 : size - 3], "user_question", SampleId(ValueKind.INPUT, "user_question", kind)),
                Segment(text[size - 3 : size], "p1"),
            ),
            sampling=SamplingParams(ANSWER, ignore_eos=True),
            reuse=reuse,
            request_id=fresh_id(),
            tenant=TenantId(f"crowd-{number % 2}"),
            workflow=WorkflowId("crowd"),
            run=RunId(f"run-{number // KINDS}"),
            agent=AgentId(f"agent-{kind}"),
            produces=SampleId(ValueKind.AGENT, str(kind)),
        )
