"""Conformance tests for every `Engine`. Subclass `EngineConformance` and provide an engine:

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def engine(self):
            with MyEngine() as engine:
                yield engine

The engine may be shared by the tests of the class, as those that close it come last. It should take at least 1,024
tokens a request, and be greedy at temperature 0. Override `small_engine` to have overload tested, and `check_at_rest`
to look for what is left of requests that have ended. Nothing here imports pytest, so the methods can also be called by
hand. To see what an assertion compared, call `pytest.register_assert_rewrite("tests.engine.conformance")` first.
"""

from __future__ import annotations

from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.types import FinishReason
from tests.engine.conformance.aborts import AbortTests
from tests.engine.conformance.answers import AnswerTests
from tests.engine.conformance.harness import expect as expect
from tests.engine.conformance.harness import fresh_text as fresh_text
from tests.engine.conformance.hints import HintTests
from tests.engine.conformance.identity import IdentityTests
from tests.engine.conformance.logprobs import LogprobTests
from tests.engine.conformance.overload import OverloadTests
from tests.engine.conformance.reuse import ReuseTests
from tests.engine.conformance.texts import TokenizerTests
from tests.engine.conformance.values import ValueTests


class EngineConformance(
    OverloadTests,
    AbortTests,
    IdentityTests,
    ValueTests,
    HintTests,
    ReuseTests,
    LogprobTests,
    AnswerTests,
    TokenizerTests,
):
    """The conformance suite. `engine` comes from the subclass, which may also set the numbers to fit it."""

    def test_close_cancels_refuses_and_is_idempotent(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("closing"), max_tokens=self.long_tokens)
        stream = engine.submit(request)
        next(iter(stream))
        engine.close()
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        engine.close()
        engine.forecast({})
        engine.prepare(request)
        late = self.request(engine, fresh_text("closing"))
        expect(EngineClosed, lambda: engine.submit(late))
