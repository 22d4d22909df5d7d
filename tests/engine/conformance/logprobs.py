"""Tests of requests that ask for log-probabilities."""

from __future__ import annotations

import itertools
from dataclasses import replace

from kedge.engine.base import Engine
from kedge.types import FinishReason, ReuseMode
from tests.engine.conformance.harness import Harness, are_chances, fresh_text


class LogprobTests(Harness):
    """Tests of log-probabilities of answers and prompts, and of prompts without an answer."""

    def test_an_answer_is_told_with_its_log_probabilities(self, engine: Engine) -> None:
        request = replace(self.request(engine, fresh_text("chances")), logprobs=3)
        stream = engine.submit(request)
        deltas = list(stream)
        done = stream.result(self.timeout_s)
        assert tuple(entry.token for entry in done.logprobs) == done.tokens
        assert tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)) == done.logprobs
        assert all(bool(delta.logprobs) == bool(delta.tokens) for delta in deltas), "each comes with its token"
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in done.logprobs), "it was greedy"
        are_chances(done.logprobs, 3)
        assert done.prompt_logprobs == ()

    def test_the_token_that_ends_an_answer_has_one_too(self, engine: Engine) -> None:
        text = fresh_text("ends")
        request = self.request(engine, text, max_tokens=256)
        request = replace(request, sampling=replace(request.sampling, ignore_eos=False), logprobs=0)
        done = self.run(engine, request)
        drawn = len(done.tokens) + (done.finish_reason is FinishReason.STOP)
        assert len(done.logprobs) == drawn
        assert tuple(entry.token for entry in done.logprobs)[: len(done.tokens)] == done.tokens

    def test_a_prompt_is_told_with_its_log_probabilities(self, engine: Engine) -> None:
        """Check that the whole prompt is computed, whatever is cached, and that its logprobs do not depend on reuse."""
        text = " ".join(fresh_text("scores") for _ in range(3))
        for _ in range(2):
            self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        reported = []
        for reuse in ReuseMode:
            request = replace(self.request(engine, text, reuse=reuse), prompt_logprobs=2)
            stream = engine.submit(request)
            deltas = list(stream)
            done = stream.result(self.timeout_s)
            first, others = done.prompt_logprobs[:1], done.prompt_logprobs[1:]
            assert first == (None,) and all(others)
            assert tuple(entry.token for entry in others if entry) == request.tokens[1:]
            are_chances([entry for entry in others if entry], 2)
            assert [bool(delta.prompt_logprobs) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
            assert deltas[0].prompt_logprobs == done.prompt_logprobs
            assert done.receipt.computed == request.prompt_tokens
            assert bool(done.receipt.misses) or reuse is ReuseMode.OFF, "the receipt gives no reason"
            assert done.logprobs == ()
            reported.append([round(entry.logprob, 3) for entry in others if entry])
        assert reported[0] == reported[1] == reported[2]

    def test_nobody_asked_nobody_is_told(self, engine: Engine) -> None:
        done = self.run(engine, self.request(engine, fresh_text("silence")))
        assert done.logprobs == done.prompt_logprobs == ()

    def test_a_prompt_can_be_computed_without_an_answer(self, engine: Engine) -> None:
        """Run a prompt with `max_tokens=0`; later requests reuse its KV."""
        text = " ".join(fresh_text("warming") for _ in range(3))
        request = self.request(engine, text, reuse=ReuseMode.EXACT)
        request = replace(request, sampling=replace(request.sampling, max_tokens=0))
        done = self.run(engine, request)
        assert (done.text, done.tokens, done.finish_reason) == ("", (), FinishReason.LENGTH)
        assert done.receipt.prompt_tokens == request.prompt_tokens
        assert self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT)).receipt.exact > 0
