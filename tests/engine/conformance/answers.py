"""Tests of the answer to a single request."""

from __future__ import annotations

import itertools

from kedge.engine.base import Engine
from kedge.types import FinishReason, ReuseMode
from tests.engine.conformance.harness import Harness, fresh_text, middle


class AnswerTests(Harness):
    """Tests of one request at a time."""

    def test_max_tokens_is_honoured(self, engine: Engine) -> None:
        for max_tokens in (1, self.max_tokens):
            done = self.run(engine, self.request(engine, fresh_text("length"), max_tokens=max_tokens))
            assert len(done.tokens) == max_tokens
            assert done.finish_reason is FinishReason.LENGTH
            assert engine.tokenizer.decode(done.tokens).startswith(done.text)

    def test_receipt_accounts_for_every_prompt_token(self, engine: Engine) -> None:
        text = fresh_text("receipts")
        for reuse in (*ReuseMode, *ReuseMode):
            request = self.request(engine, text, reuse=reuse)
            receipt = self.run(engine, request).receipt
            assert (receipt.request_id, receipt.mode) == (request.request_id, reuse)
            edges = [0, *(span.stop for span in receipt.spans)]
            assert [span.start for span in receipt.spans] == edges[:-1], "spans leave a gap or overlap"
            assert all(len(span) > 0 for span in receipt.spans)
            assert edges[-1] == receipt.prompt_tokens == request.prompt_tokens

    def test_times_are_in_order(self, engine: Engine) -> None:
        done = self.run(engine, self.request(engine, fresh_text("time")))
        assert 0 < done.ttft_ms <= done.total_ms
        assert all(part >= 0 for part in done.receipt.parts_ms.values())

    def test_deltas_concatenate_to_the_completion(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("streams"))
        stream = engine.submit(request)
        deltas = list(stream)
        done = stream.result(self.timeout_s)
        assert stream.request_id == done.request_id == request.request_id
        assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [done]
        assert "".join(delta.text for delta in deltas) == done.text
        assert tuple(itertools.chain.from_iterable(delta.tokens for delta in deltas)) == done.tokens

    def test_a_stop_string_ends_the_text_before_it(self, engine: Engine) -> None:
        text = fresh_text("stops")
        free = self.run(engine, self.request(engine, text)).text
        stop = middle(free)
        stream = engine.submit(self.request(engine, text, stop=("\0never\0", stop)))
        streamed = "".join(delta.text for delta in stream)
        done = stream.result(self.timeout_s)
        assert done.finish_reason is FinishReason.STOP
        assert done.text == streamed == free[: free.find(stop)]
