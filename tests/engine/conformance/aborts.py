"""Tests that an abort ends the request that it names, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kedge.engine.base import Engine
from kedge.types import FinishReason, RequestId, ReuseMode
from tests.engine.conformance.harness import Harness, fresh_text


class AbortTests(Harness):
    """Aborts at every stage of a request."""

    def test_a_request_can_be_aborted_at_once(self, engine: Engine) -> None:
        for reuse in ReuseMode:
            text = fresh_text("aborts")
            stream = engine.submit(self.request(engine, text, reuse=reuse, max_tokens=self.long_tokens))
            assert engine.cancel(stream.request_id)
            deltas = list(stream)
            done = stream.result(self.timeout_s)
            assert done.finish_reason is FinishReason.CANCELLED
            assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [done]
            assert "".join(delta.text for delta in deltas) == done.text
        self.serves(engine)

    def test_aborts_at_any_stage_leave_a_neighbour_alone(self, engine: Engine) -> None:
        """Abort a request at every stage. The neighbour's tokens are the clock: some aborts hit the prefill, others the
        answer.
        """
        text = fresh_text("neighbours")
        alone = self.run(engine, self.request(engine, text)).tokens
        for stage in range(self.max_tokens):
            neighbour = engine.submit(self.request(engine, text))
            long = " ".join(fresh_text("aborts") for _ in range(4))
            stream = engine.submit(self.request(engine, long, max_tokens=self.long_tokens))
            deltas = iter(neighbour)
            for _ in range(stage):
                next(deltas, None)
            engine.cancel(stream.request_id)
            assert neighbour.result(self.timeout_s).tokens == alone
            assert stream.result(self.timeout_s).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        self.check_at_rest(engine)

    def test_an_abort_may_come_twice_and_after_the_end(self, engine: Engine) -> None:
        stream = engine.submit(self.request(engine, fresh_text("aborts"), max_tokens=self.long_tokens))
        next(iter(stream))
        assert engine.cancel(stream.request_id)
        engine.cancel(stream.request_id)
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        ended = self.run(engine, self.request(engine, fresh_text("aborts")))
        for request_id in (stream.request_id, ended.request_id, RequestId("unknown")):
            assert not engine.cancel(request_id), "a request that has ended is no longer known"
        assert ended.finish_reason is FinishReason.LENGTH
        self.serves(engine)

    def test_many_aborts_at_once(self, engine: Engine) -> None:
        """Abort many requests from several threads; every stream ends with exactly one completion."""
        texts = [fresh_text("aborts") for _ in range(8)]
        streams = [engine.submit(self.request(engine, text, max_tokens=self.long_tokens)) for text in texts]
        with ThreadPoolExecutor(16) as threads:  # half of them only read
            ended = [threads.submit(list, stream) for stream in streams]
            list(threads.map(engine.cancel, [stream.request_id for stream in streams] * 2))
        for future in ended:
            completions = [delta.completion for delta in future.result() if delta.completion]
            assert [done.finish_reason for done in completions] == [FinishReason.CANCELLED]
        self.check_at_rest(engine)
        self.serves(engine)

    def test_a_request_that_waits_in_a_full_queue_can_be_aborted(self, engine: Engine) -> None:
        with self.small_engine(engine) as small:
            room = self.small_capacity - self.request(small, "").prompt_tokens
            first = small.submit(self.request(small, "", max_tokens=room * 3 // 4))
            text = fresh_text("queues")
            waiting = [small.submit(self.request(small, text, max_tokens=self.max_tokens)) for _ in range(6)]
            next(iter(first))
            for stream in waiting[::2]:
                small.cancel(stream.request_id)
            reasons = [stream.result(self.timeout_s).finish_reason for stream in waiting]
            assert reasons[1::2] == [FinishReason.LENGTH] * 3
            assert first.result(self.timeout_s).finish_reason is FinishReason.LENGTH
            assert set(reasons[::2]) <= {FinishReason.CANCELLED, FinishReason.LENGTH}
            self.check_at_rest(small)
