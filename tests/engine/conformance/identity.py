"""Tests that a request id names one request at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

from kedge.engine.base import Engine, Stream
from kedge.errors import RequestError
from kedge.types import AgentId, FinishReason, GenerateRequest, ReuseMode, RunId, SampleId, ValueKind, WorkflowId
from tests.engine.conformance.harness import Harness, expect, fresh_id, fresh_text


class IdentityTests(Harness):
    """Tests of requests that repeat an earlier id."""

    def test_a_duplicate_of_a_request_in_flight_is_refused(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("duplicates"), max_tokens=self.long_tokens)
        stream = engine.submit(request)
        other = replace(self.request(engine, fresh_text("duplicates")), request_id=request.request_id)
        for duplicate in (request, other, request):
            refusal = expect(RequestError, partial(engine.submit, duplicate))
            assert refusal.key == "request_id" and "duplicate" in str(refusal)
        next(iter(stream))
        expect(RequestError, partial(engine.submit, request))
        assert engine.cancel(request.request_id), "the request had ended before it could be cancelled"
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        self.serves(engine)

    def test_one_of_many_duplicates_at_once_is_accepted(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("races"), max_tokens=self.long_tokens)
        start = Barrier(8)

        def submit(_: int) -> Stream | None:
            start.wait(self.timeout_s)
            try:
                return engine.submit(request)
            except RequestError:
                return None

        with ThreadPoolExecutor(8) as threads:
            accepted = [stream for stream in threads.map(submit, range(8)) if stream]
        engine.cancel(request.request_id)
        assert len(accepted) == 1
        assert accepted[0].result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        self.serves(engine)

    def test_an_id_may_come_again_once_its_request_has_ended(self, engine: Engine) -> None:
        """Submit an id again after its request has ended, also while the engine still learns from the earlier
        request.
        """
        for reuse in ReuseMode:
            request = self.call(engine, fresh_text("repetitions"), reuse)
            plain = self.again(engine, request, reuse=ReuseMode.OFF).tokens
            for _ in range(3):
                done = self.run(engine, request)
                assert (done.request_id, done.finish_reason) == (request.request_id, FinishReason.LENGTH)
                assert done.tokens == plain or reuse is ReuseMode.TRANSLATE

    def test_an_id_may_come_again_after_an_abort_and_after_a_refusal(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("repetitions"))
        for _ in range(3):
            stream = engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=self.long_tokens)))
            engine.cancel(request.request_id)
            assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
            expect(RequestError, partial(engine.submit, replace(request, segments=())))
            assert self.run(engine, request).finish_reason is FinishReason.LENGTH

    def call(self, engine: Engine, text: str, reuse: ReuseMode) -> GenerateRequest:
        """Return an agent's call with an answer that other agents are going to read."""
        return replace(
            self.request(engine, text, reuse=reuse),
            request_id=fresh_id(),
            workflow=WorkflowId("flow"),
            run=RunId("run"),
            agent=AgentId("speaker"),
            produces=SampleId(ValueKind.AGENT, "speaker"),
        )
