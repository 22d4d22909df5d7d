"""Tests of the values that requests may hold, and of those that must be refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kedge.checks import MAX_COUNT, MAX_STOP_LENGTH, MAX_STOPS
from kedge.engine.base import Engine
from kedge.errors import EmptyPrompt, InvalidToken, PromptTooLong, RequestError
from kedge.types import FinishReason, GenerateRequest, ReuseMode, SampleId, Segment, ValueKind
from tests.engine.conformance.harness import Harness, expect, fresh_id, fresh_text, sampled

HUGE = 10**5000
"""An integer that Python refuses to print."""
SMALLEST = 5e-324
NO_TEXT: tuple[Any, ...] = (None, 5, b"x", "\ud800")
NO_COUNT: tuple[Any, ...] = (-1, 1.0, math.nan, True, "1", MAX_COUNT + 1, 2**63, HUGE)
IMPOSSIBLE_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (*NO_COUNT, None),
    "temperature": (math.nan, math.inf, -math.inf, -SMALLEST, -1.0, -1e-40, 1e308, HUGE, True, "1", None),
    "top_p": (0, 0.0, -0.0, -1e-46, 1.0000001, 2, math.nan, math.inf, HUGE, True, "1", None),
    "seed": (-(2**63) - 1, 2**63, HUGE, 1.0, math.nan, True, "1"),
    "stop": (".", "", None, 5, (5,), (None,), (b".",), ("",), ("\ud800",), ("x",) * 17, ("x" * 1025,)),
    "ignore_eos": (None, 1, "yes"),
}
IMPOSSIBLE_SAMPLES: tuple[Any, ...] = (
    *(5, b"x", "agent_x@0", ("agent", "x", 0, "")),
    *(SampleId(kind, "x") for kind in ("agent", None)),  # type: ignore[arg-type]
    *(SampleId(ValueKind.AGENT, of) for of in NO_TEXT),
    *(SampleId(ValueKind.AGENT, "x", turn) for turn in (-1, 1.0, True, None, HUGE)),  # type: ignore[arg-type]
    *(SampleId(ValueKind.AGENT, "x", 0, digest) for digest in (*NO_TEXT, "0g", "#")),
)
IMPOSSIBLE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "logprobs": NO_COUNT,
    "prompt_logprobs": NO_COUNT,
    "fixed": (1.0, True, "1"),
    "reuse": ("often", None, 5),
    "request_id": (*NO_TEXT, ""),
    "tenant": (*NO_TEXT, "", "a/b"),
    **dict.fromkeys(("partition", "client", "workflow", "run", "agent"), NO_TEXT),
    "produces": IMPOSSIBLE_SAMPLES,
}
MISSHAPEN_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "sampling": (None, {}, 5),
    "segments": (None, 5, [], "text", ((1, 2),), (None,)),
}
MISSHAPEN_SEGMENTS: Mapping[str, tuple[Any, ...]] = {
    "name": (*NO_TEXT, ""),
    "sample": IMPOSSIBLE_SAMPLES,
    **dict.fromkeys(("tokens", "base_context", "placeholder_text"), (None, 5, [1], "text", b"x")),
    "in_context": (None, 1, "yes"),
}
NO_TOKENS: tuple[Any, ...] = (1.5, math.nan, True, None, "a", (1,), -1, MAX_COUNT, MAX_COUNT + 1, 2**63, HUGE)


class ValueTests(Harness):
    """Tests of prompts and parameters, valid and invalid."""

    def test_an_empty_prompt_is_refused(self, engine: Engine) -> None:
        self.refuses(engine, (), EmptyPrompt)

    def test_a_prompt_that_is_too_long_is_refused(self, engine: Engine) -> None:
        self.refuses(engine, engine.tokenizer.encode("a")[:1] * self.too_long, PromptTooLong)

    def test_tokens_outside_the_vocabulary_are_refused(self, engine: Engine) -> None:
        valid = engine.tokenizer.encode("a")
        for token in (-1, 2**31 - 1, 2**63):
            self.refuses(engine, (*valid, token), InvalidToken)

    def test_numbers_and_stop_strings_that_cannot_be_are_refused(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("nonsense"))
        for key, value in _pairs(IMPOSSIBLE_SAMPLING):
            self.names(engine, key, partial(sampled, good, **{key: value}))
        self.serves(engine)

    def test_fields_that_cannot_be_are_refused(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("nonsense"))
        for key, value in _pairs(IMPOSSIBLE_FIELDS):
            self.names(engine, key, partial(replace, good, **{key: value}))
        self.serves(engine)

    def test_misshapen_prompts_are_refused(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("nonsense"))
        for key, value in _pairs(MISSHAPEN_FIELDS):
            self.names(engine, key, partial(replace, good, **{key: value}))
        for key, value in _pairs(MISSHAPEN_SEGMENTS):
            self.names(engine, f"segments[1].{key}", partial(_with_segment, good, **{key: value}))
        self.serves(engine)

    def test_what_is_no_token_is_refused_wherever_it_stands(self, engine: Engine) -> None:
        """Check invalid token ids in every segment, also in one that is only a hint: it runs through the model like a
        prompt.
        """
        good = self.request(engine, fresh_text("nonsense"))
        valid = good.segments[1].tokens
        for token in NO_TOKENS:
            for part in ("tokens", "base_context", "placeholder_text"):
                bad = _with_segment(good, **{part: (*valid, token)})
                error = expect(InvalidToken, partial(engine.submit, bad))
                assert error.key == f"segments[1].{part}"
                assert "vocabulary of" in str(error), "the error does not say how large the vocabulary is"
        self.serves(engine)

    def test_tiny_temperatures_and_nuclei_are_greedy(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("tiny numbers"))
        plain = self.run(engine, request)
        for temperature in (0, -0.0, SMALLEST, 1e-320, 1e-46, 1e-40, 1e-9):
            assert self.run(engine, sampled(request, temperature=temperature)).tokens == plain.tokens, temperature
        for top_p in (SMALLEST, 1e-320, 1e-46, 1e-40, 1e-9):
            assert self.run(engine, sampled(request, temperature=1.0, top_p=top_p)).tokens == plain.tokens, top_p

    def test_extreme_values_that_are_accepted_are_answered(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("extremes"))
        for request in _extremes(good):
            done = self.run(engine, replace(request, request_id=fresh_id()))
            assert done.finish_reason is FinishReason.LENGTH
            assert len(done.tokens) == self.max_tokens
        self.serves(engine)

    def test_any_seed_repeats(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("seeds"))
        for seed in (-(2**63), -1, 0, 2**63 - 1):
            seeded = [self.run(engine, sampled(request, temperature=1.0, seed=seed)).tokens for _ in range(2)]
            assert seeded[0] == seeded[1], seed

    def test_an_answer_without_end_is_refused_or_can_be_ended(self, engine: Engine) -> None:
        request = sampled(self.request(engine, fresh_text("endless")), max_tokens=MAX_COUNT)
        try:
            stream = engine.submit(request)
        except PromptTooLong:
            return self.serves(engine)
        next(iter(stream))
        engine.cancel(request.request_id)
        assert stream.result(self.timeout_s).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        return self.serves(engine)

    def names(self, engine: Engine, key: str, build: partial[GenerateRequest]) -> None:
        """Assert that a request is refused with an error that names the key."""
        refusal = expect(RequestError, lambda: engine.submit(build()))
        assert refusal.key.startswith(key), f"{build.keywords}: {refusal}"
        assert len(str(refusal)) < 500


def _pairs(table: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, values in table.items() for value in values)


def _with_segment(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    """Change the request's placeholder."""
    first, placeholder, last = request.segments
    return replace(request, segments=(first, replace(placeholder, **changes), last))


def _extremes(good: GenerateRequest) -> Iterator[GenerateRequest]:
    for temperature in (1e-5, 1e-3, 1, 2.0):
        yield sampled(good, temperature=temperature, top_p=1, seed=1)
    for top_p in (1e-6, 0.5, 1 - 1e-16):
        yield sampled(good, temperature=2.0, top_p=top_p)
    yield sampled(good, stop=tuple(f"\0{n}" + "x" * (MAX_STOP_LENGTH - 4) for n in range(MAX_STOPS)))
    for fixed in (-1, 0, 2**63, HUGE):
        yield replace(good, fixed=fixed, reuse=ReuseMode.EXACT)
    name: Any = "naïve 🚢\n\0" * 500
    yield replace(good, client=name, workflow=name, run=name, agent=name, produces=SampleId(ValueKind.AGENT, name))
    yield replace(good, segments=(*good.segments, Segment((), "p2"), *good.segments[1:]))
