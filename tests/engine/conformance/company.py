"""Tests that concurrent requests do not affect each other."""

from __future__ import annotations

from kedge.engine.base import Engine
from kedge.types import FinishReason, RequestId, ReuseMode
from tests.engine.conformance.harness import Harness, fresh_text


class CompanyTests(Harness):
    """Tests of a few concurrent requests."""

    def test_requests_at_once_answer_as_one_by_one(self, engine: Engine) -> None:
        texts = [fresh_text("company") * (1 + n) for n in range(4)]
        alone = [self.run(engine, self.request(engine, text)).tokens for text in texts]
        for reuse in (ReuseMode.OFF, ReuseMode.EXACT):
            streams = [engine.submit(self.request(engine, text, reuse=reuse)) for text in texts]
            assert [stream.result(self.timeout_s).tokens for stream in streams] == alone

    def test_ids_are_unique_and_kept(self, engine: Engine) -> None:
        requests = [self.request(engine, fresh_text("ids")) for _ in range(3)]
        streams = [engine.submit(request) for request in requests]
        ids = [stream.result(self.timeout_s).request_id for stream in streams]
        assert ids == [stream.request_id for stream in streams] == [request.request_id for request in requests]
        assert len(set(ids)) == len(ids)

    def test_cancel_ends_one_request_only(self, engine: Engine) -> None:
        long = engine.submit(self.request(engine, fresh_text("cancelling"), max_tokens=self.long_tokens))
        other_request = self.request(engine, fresh_text("staying"))
        other = engine.submit(other_request)
        deltas = iter(long)
        first = next(deltas)
        assert engine.cancel(long.request_id), "the request had ended before it could be cancelled"
        streamed = first.text + "".join(delta.text for delta in deltas)
        done = long.result(self.timeout_s)
        assert done.finish_reason is FinishReason.CANCELLED
        assert done.text == streamed
        assert len(done.tokens) < self.long_tokens
        assert len(other.result(self.timeout_s).tokens) == self.max_tokens
        assert not engine.cancel(long.request_id), "a request that has ended is no longer known"
        self.serves(engine)

    def test_cancel_of_an_unknown_request(self, engine: Engine) -> None:
        assert engine.cancel(RequestId("unknown")) is False
