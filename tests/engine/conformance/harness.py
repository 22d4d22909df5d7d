"""The helpers that the tests of the suite are built from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import SkipTest

from kedge.engine.base import Engine
from kedge.errors import KedgeError
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    RequestId,
    ReuseMode,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    TokenLogprob,
    Tokens,
    ValueKind,
)

E = TypeVar("E", bound=Exception)
fresh = itertools.count()


def fresh_text(topic: str) -> str:
    """Return a text that no other test has prompted with."""
    return f"Note {next(fresh)} about {topic}: seven ships lie at anchor, and the tide turns at nine. Go on."


class Harness:
    """The base class of the tests: sizes that fit the engine, and helpers that make and run requests. Subclasses may
    set and override all of it.
    """

    timeout_s = 60.0
    max_tokens = 12
    """Length of a usual answer."""
    long_tokens = 900
    """Length of an answer that is still running when it is cancelled."""
    too_long = 1_000_000
    """Tokens of a prompt that the engine refuses."""
    small_capacity = 256
    """Tokens that the cache of `small_engine` holds."""
    clients = 32
    """Threads that use the engine at once."""

    def small_engine(self, engine: Engine) -> AbstractContextManager[Engine]:
        """Return an engine that holds few requests at once (`small_capacity`): one of its own, or `engine` itself.

        Overload is not tested where a subclass provides none.
        """
        raise SkipTest(f"no small engine is provided beside {type(engine).__name__}")

    def check_at_rest(self, engine: Engine) -> None:
        """Raise if anything is left of requests that have ended. Does nothing here; engines that can check
        override it.
        """

    # building and running ---------------------------------------------------------------------------------------------

    def request(
        self,
        engine: Engine,
        text: str,
        *,
        reuse: ReuseMode = ReuseMode.OFF,
        tenant: str = "conformance",
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> GenerateRequest:
        """Return a greedy request of three segments, the middle one a placeholder, which only a stop string
        ends early.
        """
        before, _, after = engine.tokenizer.chat("You answer in short words.", "\0").partition("\0")
        encode = engine.tokenizer.encode
        segments = (
            Segment(encode(before), "p0"),
            Segment(encode(text), "user_question", SampleId(ValueKind.INPUT, text)),
            Segment(encode(after), "p1"),
        )
        sampling = SamplingParams(max_tokens=max_tokens or self.max_tokens, stop=stop, ignore_eos=True)
        return GenerateRequest(segments, sampling, reuse, tenant=TenantId(tenant))

    def run(self, engine: Engine, request: GenerateRequest) -> Completion:
        """Submit a request and wait for its end."""
        return engine.submit(request).result(self.timeout_s)

    def again(self, engine: Engine, request: GenerateRequest, **changes: Any) -> Completion:
        """Run the same request under an id of its own, with these changes to its fields."""
        return self.run(engine, replace(request, request_id=fresh_id(), **changes))

    def serves(self, engine: Engine) -> None:
        """Assert that the engine still answers."""
        done = self.run(engine, self.request(engine, fresh_text("health")))
        assert done.finish_reason is FinishReason.LENGTH

    def refuses(self, engine: Engine, tokens: Tokens, error: type[KedgeError]) -> None:
        """Assert that a prompt of `tokens` is refused with `error`, and the engine goes on."""
        request = GenerateRequest((Segment(tokens, "p0"),), SamplingParams(max_tokens=1))
        expect(error, lambda: engine.submit(request))
        self.serves(engine)


def fresh_id() -> RequestId:
    """Return a request id that no other test has used."""
    return RequestId(f"conformance-{next(fresh)}")


def sampled(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    """Return the request under an id of its own, with these changes to how it is sampled."""
    return replace(request, request_id=fresh_id(), sampling=replace(request.sampling, **changes))


def expect(error: type[E], call: Callable[[], object]) -> E:
    """Return the `error` that `call` raises. Raises `AssertionError` where it raises none."""
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


def are_chances(entries: Sequence[TokenLogprob], top: int) -> None:
    """Assert that `entries` are valid distributions: the likeliest token first, and probabilities of at most 1."""
    for entry in entries:
        logprobs = [logprob for _, logprob in entry.top]
        assert len(entry.top) == len({token for token, _ in entry.top}) == top
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= logprobs[0], "a token is likelier than the likeliest"
        assert all(logprob == entry.logprob for token, logprob in entry.top if token == entry.token)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-6


def middle(text: str) -> str:
    """Return two clean characters from the middle of a text, or one where no two stand together."""
    pieces = [text[at : at + size] for size in (2, 1) for at in range(1, len(text) - size + 1)]
    clean = [piece for piece in pieces if "\ufffd" not in piece]
    assert clean, f"the answer {text!r} is too short to be stopped"
    pairs = [piece for piece in clean if len(piece) == 2] or clean
    return pairs[len(pairs) // 2]
